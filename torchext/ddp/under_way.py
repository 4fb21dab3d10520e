"""Tensors of a model that others still write: whatever operation touches one waits for it first.

A tensor under way has a class of its own, :class:`UnderWay` and what it was before, until it has arrived. Torch asks
that class about every operation with the tensor, whoever calls it: a module of the model, a part of it called alone, a
script that kept a list of parameters. So nobody has to know who reads what, and nothing is slower once it is there.

What is no such operation: code in C++ that is given the tensor (an extension's kernel, a scripted module), and graphs
of torch.compile, which look at classes when they are entered. For these there are hooks in front of forward passes
(``forward_hooks.py``).
"""

from __future__ import annotations

import abc
import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from torchext.base.eager_only import eager_only

__all__ = ["Arrivals", "UnderWay", "own_gradient", "set_own_gradient"]


class Arrivals(abc.ABC):
    """Marks tensors as being under way, and waits for those that somebody touches.

    Args:
        tensors: Those that may be under way; a tensor's position is its place here.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._positions = {id(tensor): position for position, tensor in enumerate(tensors)}
        self._one_at_a_time = threading.RLock()  # a script's threads may touch tensors at once
        weakref.finalize(self, _forget, [id(tensor) for tensor in tensors], weakref.ref(self)).atexit = False

    def expect(self, positions: Iterable[int]) -> None:
        """From now on the tensors at these positions are under way."""
        reference = weakref.ref(self)
        for position in positions:
            tensor = self._tensors[position]
            _expected[id(tensor)] = reference, position
            _mark_again(tensor)

    def settle(self, positions: Iterable[int]) -> None:
        """From now on they are not; nothing is waited for."""
        for position in positions:
            tensor = self._tensors[position]
            found = _expected.get(id(tensor))
            if found is not None and found[0]() is self:
                del _expected[id(tensor)]
                _make_plain(tensor)

    def settle_all(self) -> None:
        """From now on none is under way."""
        self.settle(range(len(self._tensors)))

    def expect_all(self) -> None:
        """From now on all are under way."""
        self.expect(range(len(self._tensors)))

    def positions_of(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """Those of the given tensors that are among these."""
        return sorted({self._positions[id(tensor)] for tensor in tensors if id(tensor) in self._positions})

    @abc.abstractmethod
    def arrive_all(self, positions: Sequence[int]) -> None:
        """Waits for tensors whose values are about to be used, and settles them but for other reasons not to."""

    def enter_module(self, positions: Sequence[int]) -> None:
        """Waits for those of a module's own tensors that are under way."""
        expected = [position for position in positions if isinstance(self._tensors[position], UnderWay)]
        if expected:
            self.arrive(expected)

    def arrive(self, positions: Sequence[int]) -> None:
        """As :meth:`arrive_all`, in any thread."""
        with self._one_at_a_time:
            self.arrive_all(positions)

    def enter_graph(self, positions: Sequence[int]) -> None:
        """Waits for tensors that code outside of torch's dispatch reads, and settles them if it can."""
        self.arrive_all(positions)

    def gradient(self, position: int) -> torch.Tensor | None:
        """What ``tensor.grad`` is to give."""
        return own_gradient(self._tensors[position])

    def set_gradient(self, position: int, value: torch.Tensor | None) -> None:
        """What ``tensor.grad = value`` is to do."""
        set_own_gradient(self._tensors[position], value)

    def __reduce__(self) -> Any:
        # Of a synchronizer, which copies and pickles of a model are made without.
        return type(None), ()


# By the id of a tensor under way: who waits for it, and its position there.
_expected: dict[int, tuple[weakref.ref[Arrivals], int]] = {}


def _forget(ids: Iterable[int], arrivals: weakref.ref[Arrivals]) -> None:
    for key in ids:
        if key in _expected and _expected[key][0] is arrivals:
            del _expected[key]


class UnderWay:
    """Mixed into the class of a tensor that is under way."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Waits for the tensors under way among the arguments, then does it."""
        kwargs = kwargs or {}
        if function in _OF_GRADIENTS:
            return _OF_GRADIENTS[function](*args)
        if function in _WITHOUT_VALUES:
            with DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        found = list(_in((args, *kwargs.values())))
        if not found:  # in some container that nobody here looks into
            with DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        for tensor in found:
            _arrive(tensor)
        still = [tensor for tensor in found if isinstance(tensor, UnderWay)]  # for their gradients' sake
        for tensor in still:
            _make_plain(tensor)
        try:
            return function(*args, **kwargs)
        finally:
            for tensor in still:
                _mark_again(tensor)

    def __deepcopy__(self, memo: Any) -> Any:
        """A copy of it once it is there."""
        _arrive(self)
        return _as_plain(self, lambda tensor: copy.deepcopy(tensor, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What it is pickled by, once it is there."""
        _arrive(self)
        return _as_plain(self, lambda tensor: tensor.__reduce_ex__(protocol))


@eager_only("torchext: a parameter is waited for")
def _arrive(tensor: Any) -> None:
    entry = _expected.get(id(tensor))
    arrivals = entry[0]() if entry is not None else None
    if entry is None or arrivals is None:
        _expected.pop(id(tensor), None)
        _make_plain(tensor)
    else:
        arrivals.arrive([entry[1]])


def _as_plain(tensor: Any, action: Callable[[Any], Any]) -> Any:
    _make_plain(tensor)
    try:
        return action(tensor)
    finally:
        _mark_again(tensor)


def _in(values: Iterable[Any]) -> Iterator[Any]:
    """The tensors under way among values and in lists and tuples of them, each once for each time."""
    for value in values:
        if isinstance(value, UnderWay):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _in(value)
        elif isinstance(value, dict):
            yield from _in(value.values())


_classes: dict[Any, Any] = {}  # by what a tensor is otherwise


def _class_under_way(kind: Any) -> Any:
    if kind not in _classes:
        own = {"__module__": kind.__module__, "_torchext_plain": kind}
        _classes[kind] = type(kind)(kind.__name__, (UnderWay, kind), own)
    return _classes[kind]


def _mark_again(tensor: Any) -> None:
    if id(tensor) in _expected and not isinstance(tensor, UnderWay):
        tensor.__class__ = _class_under_way(type(tensor))


def _make_plain(tensor: Any) -> None:
    if isinstance(tensor, UnderWay):
        tensor.__class__ = type(tensor)._torchext_plain  # type: ignore[attr-defined]


def own_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient that autograd adds to, whatever ``tensor.grad`` gives."""
    with DisableTorchFunctionSubclass():
        return tensor.grad


def set_own_gradient(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
    """Sets it."""
    with DisableTorchFunctionSubclass():
        tensor.grad = value


def _get_gradient(tensor: Any) -> torch.Tensor | None:
    entry = _expected.get(id(tensor))
    arrivals = entry[0]() if entry is not None else None
    return own_gradient(tensor) if entry is None or arrivals is None else arrivals.gradient(entry[1])


def _set_gradient(tensor: Any, value: torch.Tensor | None = None) -> None:
    entry = _expected.get(id(tensor))
    arrivals = entry[0]() if entry is not None else None
    if entry is None or arrivals is None:
        set_own_gradient(tensor, value)
    else:
        arrivals.set_gradient(entry[1], value)


# What torch calls for an attribute of a tensor of a class of its own.
_GRADIENT: Any = torch.Tensor.grad
_OF_GRADIENTS: dict[Any, Callable[..., Any]] = {
    _GRADIENT.__get__: _get_gradient,
    _GRADIENT.__set__: _set_gradient,
    _GRADIENT.__delete__: _set_gradient,
}

# Neither is_complex nor is_sparse is among these: torch.distributed asks for them before it hands a tensor to C++.
_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "requires_grad", "retains_grad"),
    *("is_cpu", "is_cuda", "is_meta", "is_quantized", "itemsize", "nbytes", "_version", "output_nr"),
    *("_backward_hooks", "_post_accumulate_grad_hooks", "is_nested", "is_mkldnn", "is_xpu", "is_mps"),
)
_METHODS = (
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "is_contiguous", "get_device"),
    *("storage_offset", "is_floating_point", "is_signed", "is_inference", "__len__", "requires_grad_"),
    *("register_hook", "register_post_accumulate_grad_hook", "new_zeros", "new_ones", "new_empty", "new_full"),
)
_FUNCTIONS = (
    *("is_floating_point", "is_inference", "numel", "empty_like", "zeros_like", "ones_like"),
    *("full_like", "rand_like", "randn_like"),
)
# What tells or makes something without the tensor's values.
_WITHOUT_VALUES = {
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(torch.Tensor, name)),
    *(getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "_backward_hooks")),
    *(getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)),
    *(getattr(torch, name) for name in _FUNCTIONS),
}
