"""Measures the network and the model, predicts every way of synchronising gradients, and says which is fastest.

``auto.plan(model, step)`` on all ranks gives a plan; ``print(plan.explain())`` shows what was measured and why.
"""

from torchext.auto.candidates import Candidate, simulate
from torchext.auto.link_model import LinkModel, OperationTable, calibrate
from torchext.auto.step_profile import ParameterProfile, Profile, profile
from torchext.auto.sync_plan import SyncPlan, plan

__all__ = [
    "Candidate",
    "LinkModel",
    "OperationTable",
    "ParameterProfile",
    "Profile",
    "SyncPlan",
    "calibrate",
    "plan",
    "profile",
    "simulate",
]
