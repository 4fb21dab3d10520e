"""What other folders have to say before a model is attached: ``attach`` asks all of them, and knows none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["before_averaging", "before_dear"]

# Called with the model and each of its optimizers; what must not be attached raises.
before_averaging: list[Callable[[nn.Module, torch.optim.Optimizer], None]] = []
# Also with the form, "sharded" or "replicated".
before_dear: list[Callable[[nn.Module, torch.optim.Optimizer, str], None]] = []
