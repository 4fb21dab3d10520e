"""The keyword arguments of K-FAC's optimizers: their types, and the errors of those that do not go together.

What each means in full, and which go together: :class:`~torchext.optim.KFACPreconditioner`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TypedDict

import torch
import torch.distributed as dist

__all__ = ["KFACOptions", "PreconditionerOptions", "check_together", "no_copies", "no_such"]


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


def check_together(
    optimizer: torch.optim.Optimizer | None,
    *,
    sequences: str,
    strategy: str,
    method: str,
    worker_fraction: float | None,
    bucket_cap_mb: float | None,
    split_directions: bool | None,
) -> None:
    """Raises for what would be ignored, or cannot be used.

    The engine's options have checked by then that ``strategy`` and ``method`` are ones that there are, and the ranges.

    Raises:
        ValueError: with name, value and the way out.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("optimizer = LBFGS: allowed those that take one gradient a step")
    if sequences not in ("expand", "reduce"):
        raise ValueError(f'sequences = "{sequences}": allowed expand, reduce')
    if worker_fraction is not None and strategy not in ("hybrid", "auto"):
        raise ValueError(
            f'worker_fraction = {worker_fraction}: allowed with strategy="hybrid" or "auto" only, this is '
            f'"{strategy}"; leave it out'
        )
    if split_directions and method != "inverse":
        raise ValueError(
            f'split_directions = True: allowed with method="inverse" only, this is "{method}"; leave it out'
        )
    if split_directions and strategy in ("mem-opt", "dp"):
        raise ValueError(
            "split_directions = True: allowed where all ranks would compute the same directions, and "
            f'strategy="{strategy}" has one rank compute each; leave it out'
        )
    if bucket_cap_mb is not None and strategy in ("d-kfac", "dp"):
        does = "sends every factor alone" if strategy == "d-kfac" else "sends none"
        raise ValueError(
            f'bucket_cap_mb = {bucket_cap_mb}: allowed where factors travel together, and strategy="{strategy}" '
            f"{does}; "
            "leave it out"
        )


def no_such(unknown: Iterable[str], allowed: Sequence[str]) -> str:
    """What is said of arguments that there are not: those that there are, and which may have been meant."""
    names = list(unknown)
    near = [found for name in names for found in difflib.get_close_matches(name, allowed, n=1)]
    meant = f"; did you mean {', '.join(near)}?" if near else ""
    return f"no argument {', '.join(names)}: allowed {', '.join(allowed)}{meant}"


def no_copies(of: object) -> TypeError:
    """What copying or pickling an optimizer or preconditioner raises."""
    return TypeError(
        f"{type(of).__name__} cannot be copied or pickled: it belongs to its model by hooks, and to a group of "
        "ranks. Make a new one for the copied model, and give it this one's state: "
        "new.load_state_dict(copy.deepcopy(old.state_dict()))"
    )
