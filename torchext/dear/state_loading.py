"""State that is loaded into "dear" is checked on all ranks before any of them takes it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["agreed_states", "split_by_owner"]

_WHOSE = "load what sync.optimizer_state_dict() gave for this model, optimizer and world size"


def agreed_states(
    state: Any,
    trained: Collection[int],
    expected: Callable[[Collection[int]], Mapping[int, Mapping[str, Any]]],
    complete: bool,
    group: dist.ProcessGroup,
) -> dict[int, dict[str, Any]]:
    """This rank's part of a state, by position and name. Collective: where one rank refuses its own, all do.

    Args:
        state: What was given.
        trained: Positions of the parameters that the optimizer holds.
        expected: The state that such parameters have or will have on this rank, by position.
        complete: Whether a parameter that ``expected`` leaves out has no state; else it is not known.
        group: Of the model.

    Raises:
        TypeError: The state is no mapping.
        ValueError: A key or a shape is not this model's, or ranks have different keys.
        RuntimeError: Another rank has refused its own.
    """
    states: dict[int, dict[str, Any]] = {}
    failure: Exception | None = None
    try:
        states = _by_position(state, trained)
        known = expected(states.keys())
        for position, values in states.items():
            if complete or position in known:
                _check(position, values, known.get(position, {}))
    except Exception as error:  # the others wait to be told
        failure = error
    keys = zlib.crc32("\n".join(sorted(state)).encode()) if failure is None else 0
    # Whoever failed, and the keys' largest and smallest hash.
    told = torch.tensor([group.rank() + 1 if failure else 0, keys, -keys], device="cpu")
    dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
    failed, most, least = told.tolist()
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError(
            f"dear: rank {failed - 1} could not take its optimizer state, and its own error says why; nothing was "
            "loaded on any rank"
        )
    if most != -least:
        raise ValueError(
            f"dear: ranks were given optimizer states with different keys, rank {group.rank()} {len(state)} of them; "
            f"nothing was loaded; {_WHOSE}"
        )
    return states


def split_by_owner(state: Any, owners: Sequence[Collection[int]]) -> list[Any]:
    """A state of several optimizers as one of each; what is nobody's is with the first, which refuses it.

    Args:
        state: What was given.
        owners: The positions of each optimizer's parameters.
    """
    if not isinstance(state, Mapping):
        return [state for _ in owners]
    parts: list[dict[Any, Any]] = [{} for _ in owners]
    for key, value in state.items():
        position = key.partition(".")[0] if isinstance(key, str) else ""
        number = int(position) if position.isascii() and position.isdecimal() else -1
        owner = next((index for index, own in enumerate(owners) if number in own), 0)
        parts[owner][key] = value
    return parts


def _by_position(state: Any, trained: Collection[int]) -> dict[int, dict[str, Any]]:
    if not isinstance(state, Mapping):
        raise TypeError(f"dear: the optimizer state is of type {type(state).__name__}, must be a mapping; {_WHOSE}")
    states: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        position, _, name = key.partition(".") if isinstance(key, str) else ("", "", "")
        if not (position.isascii() and position.isdecimal() and name):
            raise ValueError(f'dear: optimizer state has the key {key!r}, must be "<number>.<name>"; {_WHOSE}')
        if int(position) not in trained:
            numbers = ", ".join(map(str, sorted(trained)))
            raise ValueError(f"dear: optimizer state {key!r}: the parameters stepped are {numbers}; {_WHOSE}")
        states.setdefault(int(position), {})[name] = value.to_local() if hasattr(value, "to_local") else value
    return states


def _check(position: int, values: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name in expected:
        if name not in values:
            raise ValueError(f"dear: optimizer state lacks '{position}.{name}', beside others of {position}; {_WHOSE}")
    for name, value in values.items():
        key = f"{position}.{name}"
        if name not in expected:
            raise ValueError(
                f"dear: optimizer state {key!r}: this optimizer keeps {', '.join(expected) or 'nothing'} there; "
                f"{_WHOSE}"
            )
        got, wanted = _described(value), _described(expected[name])
        if isinstance(expected[name], torch.Tensor) and got != wanted:
            raise ValueError(f"dear: optimizer state {key!r} is {got} on this rank, must be {wanted}; {_WHOSE}")


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return f"of type {type(value).__name__}"
