"""The keyword arguments of K-FAC's optimizers as types, for editors and type checkers.

What each means in full, and which go together: :class:`~torchext.optim.KFACPreconditioner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
import torch.distributed as dist

__all__ = ["KFACOptions", "PreconditionerOptions"]


class PreconditionerOptions(TypedDict, total=False):
    """What all optimizers hand on to their preconditioner; ``strategy`` stands beside it."""

    damping: float
    """Lambda, above 0; default 0.003."""
    factor_decay: float
    """Of the running averages, in [0, 1); default 0.95."""
    martens_decay: bool
    """min(1 - 1/k, factor_decay) in the k-th update instead; default False."""
    factor_update_steps: int
    """Steps from one update of the factors to the next, 1 or more; default 1."""
    inverse_update_steps: int
    """The same of the inverses, a multiple of ``factor_update_steps``; default 10."""
    kl_clip: float | None
    """Kappa, above 0, by which directions are scaled; default 0.001. None: no clip."""
    method: str
    """``"inverse"`` (default) or ``"eigen"``."""
    worker_fraction: float | None
    """Of the ranks that precondition a layer, above 0 up to 1; with ``"hybrid"`` and ``"auto"`` only. None: 0.5."""
    sequences: str
    """Linear layers on [N, T, in]: ``"expand"`` (default) or ``"reduce"``."""
    factor_scaling: str
    """``"kfc"`` (default) or ``"kfac-pytorch"``."""
    skip_layers: Sequence[str]
    """Regular expressions for full names of modules to leave alone; default none."""
    grad_scaler: torch.amp.GradScaler | None
    """The scaler in use, where gradients are unscaled before the optimizer's step; default None."""
    bucket_cap_mb: float | None
    max_run_mb: float | None
    """MiB of factors that travel together, above 0. None: 25."""
    split_directions: bool | None
    """Each rank computes a share of every direction's columns. None: where that costs less."""
    direction_precision: str
    """``"high"`` (default): products of directions in 16 bits on CPUs with AMX. ``"highest"``: in float32."""
    gather_rows: bool | None
    """Directions of Linear layers are made of the rows of all ranks' batches. None: where that costs less."""
    shared_memory: bool
    """What ranks of one host exchange goes through memory; default True."""
    process_group: dist.ProcessGroup | None
    """Ranks to average over. None: DDP's, else the default group."""


class KFACOptions(PreconditionerOptions, total=False):
    """The options of :class:`~torchext.optim.SPDKFAC` and :class:`~torchext.optim.PADKFAC`.

    For functions that pass them on: ``def make(model, **options: Unpack[KFACOptions])``.
    """

    lr: float
    """The learning rate, 0 or more; default 0.01."""
    momentum: float
    """In [0, 1); default 0.9."""
    weight_decay: float
    """Added to the direction times the parameter, 0 or more; default 0."""
    nesterov: bool
    """Nesterov's momentum; needs ``momentum``; default False."""
