"""Arguments of K-FAC that there are not, or that mean nothing beside each other."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

import torch

__all__ = ["check_together", "no_copies", "no_such"]


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
