"""Measures the network and the model, predicts every way of synchronising gradients, and says which is fastest.

``auto.plan(model, step)`` on all ranks gives a plan; ``print(plan.explain())`` shows what was measured and why.
``plan.apply(model, optimizer)`` trains by it.
"""

from torchext.auto.candidates import Candidate, simulate
from torchext.auto.factor_layers import FactorLayers
from torchext.auto.link_model import LinkModel, OperationTable, calibrate
from torchext.auto.live_choice import AutoSynchronizer
from torchext.auto.step_profile import ParameterProfile, Profile, profile
from torchext.auto.sync_plan import SyncPlan, plan
from torchext.auto.verification import Verification, verify

__all__ = [
    "AutoSynchronizer",
    "Candidate",
    "FactorLayers",
    "LinkModel",
    "OperationTable",
    "ParameterProfile",
    "Profile",
    "SyncPlan",
    "Verification",
    "calibrate",
    "plan",
    "profile",
    "simulate",
    "verify",
]
