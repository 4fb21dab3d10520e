"""What other folders have to say when a model is attached: ``attach`` asks all of them, and knows none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext.ddp.synchronizer import Synchronizer

__all__ = ["attachers", "before_averaging", "before_dear"]

# Called with the model and each of its optimizers; what must not be attached raises.
before_averaging: list[Callable[[nn.Module, torch.optim.Optimizer], None]] = []
# Also with the form, "sharded" or "replicated".
before_dear: list[Callable[[nn.Module, torch.optim.Optimizer, str], None]] = []
# By a backend's name: what attaches its models in the place of ``attach``, which has checked model and optimizers.
attachers: dict[str, Callable[[DistributedDataParallel, tuple[torch.optim.Optimizer, ...]], Synchronizer]] = {}
