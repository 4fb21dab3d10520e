"""``ComputedWeight`` refuses whatever would have to reach a table through ``weight`` and cannot.

Where ``weight`` is no parameter (see ``table_weight.py``) it is made for reading. A script that freezes, trains, ties
or initializes ``nn.EmbeddingBag.weight`` would do so to a tensor that the table never sees. Each such call raises here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["ComputedWeight", "refusal"]

# What is asked of a weight, and the way out.
_WAYS_OUT = {
    "is set": "give values by load_state_dict({'weight': values}) or from_pretrained, initial ones by init_std",
    "is frozen, thawed or made a parameter": "call the table's requires_grad_, or copy it by weight.detach().clone()",
    "is replaced by a parameter": "take its values by load_state_dict({'weight': values}), as nothing is tied to it",
    "is given to an optimizer": "give it the table's parameters(), or param_group() where the update is fused",
    "is asked for a gradient": "take the gradient of pool, of the vectors looked up, or of what weight_decay adds",
}
_ANY: Any = Tensor  # its attributes are descriptors, which stubs do not know
_GRADIENTS = {
    torch.autograd.grad,
    Tensor.backward,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.retain_grad,
    _ANY.grad.__get__,
    _ANY.grad.__set__,
}
_FREEZES = {Tensor.requires_grad_, _ANY.requires_grad.__set__}
_SETS_DATA = _ANY.data.__set__
_DETACHES = {Tensor.detach, torch.detach, _ANY.data.__get__}
# An optimizer asks for these, one after the other.
_IS_LEAF, _RETAINS = _ANY.is_leaf.__get__, _ANY.retains_grad.__get__
_COPIES = {Tensor.__reduce_ex__, Tensor.__deepcopy__, Tensor.__repr__}  # of these a plain tensor is wanted
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITING_OPERATORS = {"__setitem__", *(f"__i{name}__" for name in _ARITHMETIC)}


def refusal(asked: str, instead: str) -> RuntimeError:
    """The error for what is asked of a weight; ``instead`` says which tables can."""
    return RuntimeError(f"weight of this table {asked}, but it is made for reading: {_WAYS_OUT[asked]}; or {instead}")


def _found(given: Any) -> Iterable[Tensor]:
    for value in given:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _found(value)


def _writes(func: Callable[..., Any]) -> bool:
    """Whether a function writes into its first argument."""
    name = getattr(func, "__name__", "")
    return name in _WRITING_OPERATORS or (name.endswith("_") and not name.endswith("__"))


class ComputedWeight(Tensor):
    """Values of a table, and what is computed from them as long as it could be part of a loss.

    ``detach()`` gives a tensor of which gradients may be forgotten. Nothing of it requires a gradient.
    """

    _lent: bool  # its memory is a copy: what is written there is lost
    _graded: bool  # a loss of it would need a gradient that the table does not get
    _instead: str

    @classmethod
    def of(cls, values: Tensor, instead: str, *, lent: bool, graded: bool = True) -> Tensor:
        """The values, marked."""
        if not (lent or graded):
            return values
        made = values.as_subclass(cls)
        made._lent, made._graded, made._instead = lent, graded, instead
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuses what cannot reach the table, else computes, and marks what is of the weight."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            given = [*args, *kwargs.values()]
            own = [value for value in _found(given) if isinstance(value, ComputedWeight)]
            instead = own[0]._instead if own else ""
            if func in _COPIES:
                return func(args[0].as_subclass(Tensor), *args[1:], **kwargs)
            if func == _IS_LEAF:
                return False
            if func == _RETAINS:
                raise refusal("is given to an optimizer", instead)
            if func in _FREEZES:
                raise refusal("is frozen, thawed or made a parameter", instead)
            if func in _GRADIENTS:
                raise refusal("is asked for a gradient", instead)
            target = kwargs.get("out", given[0] if given and _writes(func) else None)
            if func == _SETS_DATA or any(isinstance(to, ComputedWeight) and to._lent for to in _found([target])):
                raise refusal("is set", instead)
            result = func(*args, **kwargs)
            graded = func not in _DETACHES and torch.is_grad_enabled() and any(value._graded for value in own)
            if isinstance(result, Tensor):
                return cls._marked(result, own, graded, instead)
            if type(result) in (tuple, list):
                parts = (cls._marked(part, own, graded, instead) for part in result)
                return type(result)(parts)
            return result

    @classmethod
    def _marked(cls, result: Any, own: list[ComputedWeight], graded: bool, instead: str) -> Any:
        if not isinstance(result, Tensor) or not result.is_floating_point() or isinstance(result, ComputedWeight):
            return result
        if graded and result.requires_grad:
            raise refusal("is asked for a gradient", instead)
        lent = [value.untyped_storage()._cdata for value in own if value._lent]
        shared = bool(lent) and result.layout == torch.strided and result.untyped_storage()._cdata in lent
        return cls.of(result, instead, lent=shared, graded=graded)
