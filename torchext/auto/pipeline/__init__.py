"""Plans a pipeline: where to cut the model, how deep to fill it, in which order to work, and what memory that takes.

``plan(profile(model, microbatch), link, world_size=..., microbatches=...)`` gives a plan; torch's pipelines run it.
"""

from torchext.auto.pipeline.layer_profile import Layer, LayerProfile, profile
from torchext.auto.pipeline.pipeline_plan import PipelinePlan
from torchext.auto.pipeline.placement import Placement, Stage
from torchext.auto.pipeline.planning import plan
from torchext.auto.pipeline.search import Alternative, Point
from torchext.auto.pipeline.verification import Verification, verify

__all__ = [
    "Alternative",
    "Layer",
    "LayerProfile",
    "PipelinePlan",
    "Placement",
    "Point",
    "Stage",
    "Verification",
    "plan",
    "profile",
    "verify",
]
