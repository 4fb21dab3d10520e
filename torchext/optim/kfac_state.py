"""A state of K-FAC is checked whole before any of it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchext.base.plain import plain
from torchext.errors import KFACStateError

__all__ = ["VERSION", "check_sgd", "check_state"]

VERSION = 1
_KEYS = ("version", "method", "layers", "steps", "factor_updates", "factors")
_MOST = 2**63 - 1  # what the engine counts to


def check_state(
    state: Any,
    *,
    method: str,
    scaling: str,
    layers: Sequence[tuple[str, list[int], bool]],
    factors: Sequence[Mapping[str, Any]],
) -> None:
    """Raises KFACStateError if a state is none, or not one of this model and these options. Local.

    Args:
        state: what was given.
        method: of the inverses.
        scaling: of the factors.
        layers: names, shapes of the weights, whether there is a bias.
        factors: what the engine's plan says of them, which is the same at any world size but for who does what.
    """
    if not isinstance(state, Mapping):
        raise KFACStateError(f"the state is {_kind(state)}: allowed the mapping that state_dict() gives; pass that")
    if state.get("version") != VERSION:
        raise KFACStateError(f"version = {state.get('version')!r}: this release reads {VERSION}")
    for key in _KEYS:
        if key not in state:
            raise KFACStateError(
                f'the state has no "{key}": allowed all of {", ".join(_KEYS)}; save state_dict() whole'
            )
    if state["method"] != method:
        raise KFACStateError(f'the state was made with method="{state["method"]}", this one has "{method}"')
    theirs = state.get("factor_scaling", scaling)  # the first states did not say
    if theirs != scaling:
        raise KFACStateError(f'the state was made with factor_scaling="{theirs}", this one has "{scaling}"')
    for key, allowed in (("damping", "above 0, finite"), ("kl_clip", "above 0, finite; None for no clip")):
        value = plain(state.get(key, 1.0))  # the first states did not say
        if value is None and key == "kl_clip":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise KFACStateError(f"{key} = {value!r}: allowed {allowed}; pass what state_dict() gave")
    for key in ("steps", "factor_updates"):
        value = plain(state[key])
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
            raise KFACStateError(f"{key} = {value!r}: allowed an int, 0 or more; pass what state_dict() gave")
    _check_layers(state["layers"], layers)
    _check_factors(state["factors"], factors, method)


def check_sgd(
    state: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    options: Iterable[str],
    check_options: Callable[..., None],
) -> None:
    """Raises KFACStateError if parameter groups or momentum are not those of this optimizer. Local.

    Args:
        state: what was given.
        groups: the optimizer's.
        options: what a group has beside its parameters.
        check_options: raises for values of them that are not allowed.
    """
    for key in ("state", "param_groups"):
        if key not in state:
            raise KFACStateError(f'the state has no "{key}": allowed all that state_dict() gives; save it whole')
    saved, momenta = state["param_groups"], state["state"]
    if not isinstance(saved, Sequence) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in saved
    ):
        raise KFACStateError("param_groups is no list of groups with params: pass what state_dict() gave")
    sizes, own = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if sizes != own:
        raise KFACStateError(
            f"the state has groups of {sizes} parameters, the optimizer of {own}; make the same groups"
        )
    for number, group in enumerate(saved):
        try:
            check_options(**{name: group[name] for name in options})
        except KeyError as error:
            raise KFACStateError(f"param_groups[{number}] has no {error}: pass what state_dict() gave") from None
        except (TypeError, ValueError) as error:
            raise KFACStateError(f"param_groups[{number}]: {error}; pass what state_dict() gave") from error
    if not isinstance(momenta, Mapping):
        raise KFACStateError(f"the momenta are {_kind(momenta)}: allowed a mapping; pass what state_dict() gave")
    numbers = [number for group in saved for number in group["params"]]
    shapes = dict(zip(numbers, [list(p.shape) for group in groups for p in group["params"]], strict=True))
    for number, values in momenta.items():
        if number not in shapes:
            raise KFACStateError(f"the state of parameter {number!r}: allowed those numbered in param_groups")
        if not isinstance(values, Mapping) or list(values) != ["momentum_buffer"]:
            names = ", ".join(map(str, values)) or "nothing" if isinstance(values, Mapping) else ""
            has = f"has {names}" if names else f"is {_kind(values)}"
            raise KFACStateError(f"the state of parameter {number} {has}: allowed momentum_buffer")
        _check_tensor(f"the momentum of parameter {number}", values["momentum_buffer"], shapes[number])


def _check_layers(given: Any, own: Sequence[tuple[str, list[int], bool]]) -> None:
    try:
        saved = [(name, list(shape), bias) for name, shape, bias in given]
    except (TypeError, ValueError):
        raise KFACStateError(
            f"layers = {given!r}: allowed a list of (name, shape, has a bias); pass what state_dict() gave"
        ) from None
    for mine, theirs in zip(own, saved, strict=False):
        if mine != theirs:
            raise KFACStateError(f"the state is of another model: it has layer {theirs}, the model {mine}")
    if len(own) != len(saved):
        raise KFACStateError(f"the state is of another model: {len(saved)} layers, the model has {len(own)}")


def _check_factors(given: Any, own: Sequence[Mapping[str, Any]], method: str) -> None:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise KFACStateError(f"factors is {_kind(given)}: allowed a list of {len(own)}; pass what state_dict() gave")
    if len(given) != len(own):
        raise KFACStateError(f"the state has {len(given)} factors, the model {len(own)}; pass what state_dict() gave")
    for entry, factor in zip(given, own, strict=True):
        name = f"factor {factor['side']} of {factor['layer'] or 'the model'}"
        if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != 3:
            raise KFACStateError(
                f"{name} is {_kind(entry)}: allowed (factor, inverse or None, eigenvalues or None); pass what "
                "state_dict() gave"
            )
        dim, count, diagonal = factor["dim"], factor["count"], factor["diagonal"]
        matrix, values = entry[1], entry[2]
        _check_tensor(name, entry[0], [dim] if diagonal else [count * dim * (dim + 1) // 2])
        if matrix is not None:
            _check_tensor(f"the inverse of {name}", matrix, [dim] if diagonal else [count, dim, dim])
        # Eigenvectors and eigenvalues are used together.
        if matrix is not None and method == "eigen" and not diagonal:
            _check_tensor(f"the eigenvalues of {name}", values, [count, dim])
        elif values is not None:
            raise KFACStateError(f"the eigenvalues of {name} are {_kind(values)}: allowed None here")


def _check_tensor(name: str, value: Any, shape: list[int]) -> None:
    allowed = f"allowed a finite, dense floating-point tensor of shape {shape}; load another checkpoint"
    if not isinstance(value, Tensor):
        raise KFACStateError(f"{name} is {_kind(value)}: {allowed}")
    if list(value.shape) != shape:
        raise KFACStateError(f"{name} has shape {list(value.shape)}: {allowed}")
    if not value.is_floating_point() or value.layout is not torch.strided or value.is_meta:
        raise KFACStateError(f"{name} is {value.dtype}, {value.layout} on {value.device}: {allowed}")
    if not bool(torch.isfinite(value).all()):
        raise KFACStateError(f"{name} has values that are NaN or infinite: {allowed}")


def _kind(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
