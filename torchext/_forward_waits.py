"""Waits in front of whoever reads parameters that are still on their way."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["FlushedCopies", "FlushedMethod", "ForwardWaits"]


class _Nothing:
    """What the hooks of a model become in its copies and pickles, which nothing is on its way to."""

    def __call__(self, *_: Any, **__: Any) -> None:
        pass


class _Hook:
    """Calls a function as a hook, without its arguments; does nothing in a copy of the model."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __call__(self, *_: Any) -> None:
        self._function()

    def __reduce__(self) -> Any:
        return _Nothing, ()


class _OutputHook(_Hook):
    """As a forward hook: calls a function with the output."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._with_output = function

    def __call__(self, *arguments: Any) -> None:
        self._with_output(arguments[-1])


class FlushedMethod:
    """Takes the place of a module's method on that one module, while it lives: waits, then calls it.

    Copies of the module do not wait.

    Args:
        module: Whose method it is.
        name: Of the method.
        wait_all: What to call first.
    """

    def __init__(self, module: nn.Module, name: str, wait_all: Callable[[], None]) -> None:
        self._module = weakref.ref(module)
        self._name, self._wait_all = name, wait_all
        own, cls, flushed = getattr(type(module), name), type(self), weakref.ref(self)

        @functools.wraps(own)  # the name is what it is pickled by
        def wait_then_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            method = flushed()
            if method is not None and method._module() is module:
                method._wait_all()
            return cls._returned(own(module, *args, **kwargs))

        # A real method: torch.compile looks at its function, and copies of the module at nothing else.
        module.__dict__[name] = types.MethodType(wait_then_call, module)

    def remove(self) -> None:
        """Gives the module its own method back."""
        module = self._module()
        if module is not None:
            module.__dict__.pop(self._name, None)

    @staticmethod
    def _returned(value: Any) -> Any:
        return value


class FlushedCopies(FlushedMethod):
    """The same of what deep copies and pickles of a module are made by, which is a method, too.

    Args:
        module: Which is copied.
        wait_all: What to call first.
    """

    def __init__(self, module: nn.Module, wait_all: Callable[[], None]) -> None:
        super().__init__(module, _REDUCE, wait_all)

    @staticmethod
    def _returned(value: Any) -> Any:
        # Copies have their class's: what is pickled of this one would be a method of the first copy in all later ones.
        if not isinstance(value, tuple) or len(value) < 3 or not isinstance(value[2], dict):
            return value
        return (*value[:2], {name: kept for name, kept in value[2].items() if name != _REDUCE}, *value[3:])


_REDUCE = "__reduce_ex__"


class ForwardWaits:
    """Has a DDP model's forward wait, module by module, for the tensors that each module reads.

    Which module reads what is observed: some read the weights of a child that they never call (MultiheadAttention its
    ``out_proj``). The first training forward waits for everything and notes which modules it calls; from then on a
    tensor is waited for by its own module if that is called, else by the nearest caller around it. Forwards in
    evaluation mode or without gradients wait for everything (they may take other paths), also those of a part of the
    model that training does not call, and so does state_dict.

    Args:
        ddp: The model.
        tensors: Those that may be on their way.
        wait_tensors: Called with positions in ``tensors``; blocks until they are there.
        wait_all: The same for all.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        tensors: Sequence[torch.Tensor],
        wait_tensors: Callable[[list[int]], None],
        wait_all: Callable[[], None],
    ) -> None:
        self._module: nn.Module = ddp.module
        self._position = {id(tensor): position for position, tensor in enumerate(tensors)}
        self._wait_tensors, self._wait_all = wait_tensors, wait_all
        self._called: set[nn.Module] | None = set()  # by a training forward; None once it is known who waits
        self._handles: list[Any] = []
        self._forward: list[Any] = []  # the handles of hooks on forward passes
        for module in self._module.modules():
            self._handles.append(module.register_state_dict_pre_hook(_Hook(wait_all)))
        if any(_is_compiled(module) for module in ddp.modules()):
            # A hook inside a compiled graph would break it: such a model waits once, before the graph.
            outside = [ddp] if _is_graph(ddp) or _is_graph(self._module) else [ddp, self._module]
            self._forward += [m.register_forward_pre_hook(_Hook(wait_all), prepend=True) for m in outside]
            return
        self._learning = [
            module.register_forward_pre_hook(self._note, prepend=True) for module in self._module.modules()
        ]
        self._learning.append(self._module.register_forward_hook(self._learn))
        self._forward += self._learning
        # On the module, which evaluation may call without its wrapper.
        self._forward.append(self._module.register_forward_pre_hook(self._enter, prepend=True))

    def remove(self) -> None:
        """Takes all hooks off."""
        self.end_forward()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end_forward(self) -> None:
        """Takes those off that forward passes call: nothing will be on its way any more. Safe twice."""
        for handle in self._forward:
            handle.remove()
        self._forward.clear()

    def __reduce__(self) -> Any:
        return _NoWaits, ()

    def _enter(self, *_: Any) -> None:
        if not self._in_training():
            self._wait_all()

    def _note(self, module: nn.Module, *_: Any) -> None:
        if self._called is None:
            return
        self._wait_all()
        if module is self._module:
            # What evaluation, or code outside the model's forward, called before says nothing about training.
            self._called = {module} if self._in_training() else set()
        elif self._called:
            self._called.add(module)

    def _learn(self, *_: Any) -> None:
        if self._called and self._in_training():
            called, self._called = self._called, None
            for module, tensors in self._readers(called).items():
                hook = _Hook(lambda tensors=tensors: self._wait_tensors(tensors))  # type: ignore[misc]
                self._forward.append(module.register_forward_pre_hook(hook, prepend=True))
            for module in set(self._module.modules()) - called:
                self._forward.append(module.register_forward_pre_hook(self._enter, prepend=True))
            for handle in self._learning:
                handle.remove()

    def _in_training(self) -> bool:
        return self._module.training and torch.is_grad_enabled()

    def _readers(self, called: set[nn.Module]) -> dict[nn.Module, list[int]]:
        """By module that waits: the positions of the tensors it waits for."""
        readers: dict[nn.Module, dict[int, None]] = {}

        def visit(module: nn.Module, around: nn.Module) -> None:
            reader = module if module in called else around
            for tensor in _own_tensors(module):
                if id(tensor) in self._position:
                    readers.setdefault(reader, {})[self._position[id(tensor)]] = None
            for child in module.children():
                visit(child, reader)

        visit(self._module, self._module)
        return {reader: list(positions) for reader, positions in readers.items()}


class _NoWaits:
    """What the hooks of a copied model are bound to: a ForwardWaits that never waits."""

    _called = None
    _enter = _note = _learn = _Nothing()

    def _in_training(self) -> bool:
        return True


def _own_tensors(module: nn.Module) -> Iterable[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _is_graph(module: nn.Module) -> bool:
    """Whether the module's own hooks are compiled with it (``module.compile()``)."""
    return getattr(module, "_compiled_call_impl", None) is not None


def _is_compiled(module: nn.Module) -> bool:
    # By name: importing torch._dynamo to ask takes seconds.
    return type(module).__name__ == "OptimizedModule" or _is_graph(module)
