"""Hooks around a model's forward pass: in front of code that touches parameters without torch being asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from torchext.ddp.under_way import Arrivals

__all__ = ["Hook", "OutputHook", "is_compiled", "tensors_in", "wait_in_front"]


class _Nothing:
    """What the hooks of a model become in its copies and pickles, which nothing is on its way to."""

    def __call__(self, *_: Any, **__: Any) -> None:
        pass


class Hook:
    """Calls a function as a hook, without its arguments; does nothing in a copy of the model."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __call__(self, *_: Any) -> None:
        """Calls it."""
        self._function()

    def __reduce__(self) -> Any:
        return _Nothing, ()


class OutputHook(Hook):
    """As a forward hook: calls a function with the output."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._with_output = function

    def __call__(self, *arguments: Any) -> None:
        """Calls it."""
        self._with_output(arguments[-1])


def wait_in_front(ddp: DistributedDataParallel, arrivals: Arrivals) -> list[RemovableHandle]:
    """Has forward passes wait for tensors that code reads without asking torch.

    A module waits for what it owns: its forward pass may hand it to an extension in C++. Graphs of torch.compile look
    at the classes of parameters when they are entered, and scripted modules hold them in C++: there the model waits.

    Returns:
        The hooks.
    """
    compiled = any(is_compiled(module) for module in ddp.modules())
    scripted = [module for module in ddp.modules() if isinstance(module, torch.jit.ScriptModule)]
    handles = []
    if compiled or scripted:
        roots: list[nn.Module] = [ddp]
        if not (_is_graph(ddp) or _is_graph(ddp.module) or isinstance(ddp.module, torch.jit.ScriptModule)):
            roots.append(ddp.module)
        parts: list[nn.Module] = [ddp] if compiled else [*scripted]
        read = arrivals.positions_of(tensor for part in parts for tensor in _tensors_of(part, recurse=True))
        hook = Hook(lambda: arrivals.enter_graph(read))
        handles += [root.register_forward_pre_hook(hook, prepend=True) for root in roots]
    for module in [] if compiled else ddp.module.modules():
        owned = arrivals.positions_of(_tensors_of(module, recurse=False))
        if owned and not isinstance(module, torch.jit.ScriptModule):
            hook = Hook(lambda owned=owned: arrivals.enter_module(owned))  # type: ignore[misc]
            handles.append(module.register_forward_pre_hook(hook, prepend=True))
    return handles


def _tensors_of(module: nn.Module, recurse: bool) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


def _is_graph(module: nn.Module) -> bool:
    """Whether the module's own hooks are compiled with it (``module.compile()``)."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether the module runs as a graph of torch.compile."""
    # By name: importing torch._dynamo to ask takes seconds.
    return type(module).__name__ == "OptimizedModule" or _is_graph(module)


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors in what a forward pass has returned: in containers, objects, and variables of closures."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    left = [output]
    while left and len(seen) < _MOST:
        value = left.pop()
        if id(value) in seen or isinstance(value, (str, bytes, int, float, type, nn.Module)):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            left.extend(value)
        else:
            left.extend(cell.cell_contents for cell in getattr(value, "__closure__", None) or () if _is_set(cell))
            left.append(getattr(value, "__self__", None))  # of a bound method
            left.extend(vars(value).values() if hasattr(value, "__dict__") else ())
            slots = (name for kind in type(value).__mro__ for name in _slots_of(kind))
            left.extend(getattr(value, name, None) for name in slots)
    return found


_MOST = 10_000  # objects that are looked at


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
