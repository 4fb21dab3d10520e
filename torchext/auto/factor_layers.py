"""Layers whose gradients are made of the rows of all ranks (sufficient factors), beside DDP's all-reduce or dear."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from torchext import _C
from torchext.auto.all_ranks import checked_group, own_backend
from torchext.backends.unattached import known_as_plain
from torchext.base.eager_only import eager_only
from torchext.base.plain import plain
from torchext.ddp.averaged_apart import average_apart
from torchext.ddp.forward_hooks import Hook, OutputHook, tensors_in
from torchext.errors import FactorGradientError

__all__ = ["FactorLayers", "why_not_factors"]

_CALLER = "torchext.auto.FactorLayers"
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_IGNORED = "_ddp_params_and_buffers_to_ignore"
_WITHOUT = ("sparse", "max_norm", "scale_grad_by_freq")  # of an embedding: what makes its gradient another one


class FactorLayers:
    """Averages the gradients of some layers by the rows that they are made of (Zhang et al., USENIX ATC 2017).

    The gradient of an ``nn.Linear`` is the product of two matrices with one row for each sample: the layer's input,
    and the gradient at its output. That of an ``nn.Embedding`` is the sum of the latter by index. With few rows a rank
    these are far fewer bytes than the gradient. They leave inside the backward pass, and every rank makes the gradient
    of those of all ranks. ``.grad`` is DDP's up to rounding, with the same bits on all ranks, when ``backward()``
    returns.

    Order of calls: ``install()``, ``DistributedDataParallel(model, ...)``, ``follow(ddp)``, training, ``remove()``.
    ``state_dict`` and the names of parameters stay as they are. A copy of the model has plain layers. On a group of
    ``dear`` :func:`torchext.attach` may come behind ``follow``: every rank steps these layers whole, in both forms.

    Args:
        model: The module itself, not wrapped.
        names: Of the layers, as ``named_modules`` has them.
        rows: Of one rank in a step, all micro-batches of ``no_sync()`` together; one number or one for each name. Of
            an embedding: indices. In a step in which a rank has more, the layer's gradient goes by all-reduce on all
            ranks.
        group: Of a backend of torchext's whose collectives are exact, ``dear`` for one; None: the default group.

    Raises:
        RuntimeError: Before ``init_process_group``.
        TypeError: ``model`` is no module or is wrapped; a layer is neither a plain ``nn.Linear`` nor a plain
            ``nn.Embedding``; the group's backend is another.
        ValueError: A layer that is not there, that has no gradient of its own, or an embedding with ``sparse``,
            ``max_norm`` or ``scale_grad_by_freq``: the message has name and reason. No parameter would be left for DDP,
            which needs one.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        rows: int | Mapping[str, int],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = checked_group(_CALLER, group)
        if isinstance(model, DistributedDataParallel) or not isinstance(model, nn.Module):
            raise TypeError(f"{_CALLER} takes the module before DDP wraps it, got {type(model).__name__}")
        backend = own_backend(self._group)
        if backend is None:
            raise TypeError(
                f"{_CALLER}: the group's backend is {dist.get_backend(self._group)!r}, and rows go by one of "
                "torchext's; pass torch.distributed.new_group(backend='dear')"
            )
        self._backend: _C.AttachableBackend = backend
        self._model = model
        if not names or len(set(names)) != len(names):
            raise ValueError(f"{_CALLER}: names must be those of some layers, each once, got {list(names)}")
        for name in names:
            error = why_not_factors(model, name)
            if error is not None:
                raise type(error)(f"{_CALLER}: {error}")
        # Messages leave in the order of the backward pass, which is mostly that of registration turned around.
        self._layers: list[tuple[str, Any]] = [(n, module) for n, module in model.named_modules() if n in names][::-1]
        self._rows = {name: _checked_rows(name, rows) for name, _ in self._layers}
        ignored = {parameter for _, module in self._layers for parameter in _trained(module)}
        if not any(p.requires_grad and p not in ignored for p in model.parameters()):
            raise ValueError(
                f"{_CALLER}: names leave no trained parameter for DistributedDataParallel, which needs one; leave out "
                f"{self._layers[0][0]!r}"
            )
        self._core: _C.SufficientFactors | None = None
        self._handles: list[RemovableHandle] = []
        self._was_ignored: list[str] | None = None
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self.followed = False

    def install(self) -> None:
        """Replaces the layers' forward passes, and has DDP leave out their parameters. Collective.

        All ranks get rank 0's values of these, as DDP does it with the others.

        Raises:
            RuntimeError: Called twice.
            torch.distributed.DistBackendError: Ranks have other layers or rows, or a rank was lost.
        """
        if self._core is not None:
            raise RuntimeError(f"{_CALLER}: install() was called already")
        layers = [_core_layer(name, module, self._rows[name]) for name, module in self._layers]
        self._core = _C.SufficientFactors(self._backend, layers)
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        ignored = []
        for number, (name, module) in enumerate(self._layers):
            for parameter in _trained(module):
                dist.broadcast(parameter.detach(), group=self._group, group_src=0)
                ignored.append(names[id(parameter)])
                self._handles.append(parameter.register_hook(_Guard(name)))  # type: ignore[no-untyped-call]
            module.forward = _FactorForward(module, self, number)
        self._was_ignored = getattr(self._model, _IGNORED, None)
        ignored += self._was_ignored or ()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._model, ignored)  # type: ignore[no-untyped-call]

    def follow(self, ddp: DistributedDataParallel) -> None:
        """Learns from the DDP model which backward passes average (``no_sync()``).

        Raises:
            RuntimeError: Before ``install()``, or called twice.
            TypeError, ValueError: ``ddp`` is something else, or wraps another model.
        """
        if self._core is None or self.followed:
            raise RuntimeError(f"{_CALLER}: call install(), wrap the model, then follow(ddp) once")
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(f"{_CALLER}: follow takes the DistributedDataParallel model, got {type(ddp).__name__}")
        if ddp.module is not self._model:
            raise ValueError(f"{_CALLER}: follow was given a DistributedDataParallel of another model")
        self.followed = True
        self._restore_ignored()  # DDP has read it; it would leave the parameters out of a copy's averages, too
        known_as_plain(ddp)
        average_apart(ddp, [parameter for _, module in self._layers for parameter in _trained(module)])
        self._ddp = model = weakref.ref(ddp)
        core = self._core

        @eager_only("torchext.auto: rows of layers are sent in the backward pass")
        def begin() -> None:
            followed = model()
            if followed is not None and torch.is_grad_enabled():
                core.expect(followed.require_backward_grad_sync)

        @eager_only("torchext.auto: rows of layers are sent in the backward pass")
        def watch(output: Any) -> None:
            tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if tensors and torch.is_grad_enabled():
                register_multi_grad_hook(tensors, lambda _: core.backward_begins(), mode="any")

        self._handles.append(ddp.register_forward_pre_hook(Hook(begin), prepend=True))
        self._handles.append(ddp.register_forward_hook(OutputHook(watch)))

    def remove(self) -> None:
        """Gives the layers their own forward passes back. The DDP model that was made does not average them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._core is None:
            return
        for _, module in self._layers:
            if isinstance(vars(module).get("forward"), _FactorForward):
                del module.forward
            for parameter in _trained(module):
                vars(parameter).pop("_ddp_ignored", None)
        if not self.followed:
            self._restore_ignored()
        ddp = None if self._ddp is None else self._ddp()
        if ddp is not None:
            average_apart(ddp, ())
        self._core, self._ddp, self.followed = None, None, False

    def stats(self) -> dict[str, Any]:
        """What was exchanged.

        Returns:
            ``steps`` that have averaged, ``early_messages`` that left before their backward pass had ended,
            ``reductions`` of a layer by all-reduce, ``row_bytes`` of memory.
        """
        if self._core is None:
            raise RuntimeError(f"{_CALLER}: install() comes first")
        return self._core.stats()

    def _restore_ignored(self) -> None:
        if self._was_ignored is None:
            vars(self._model).pop(_IGNORED, None)
        else:
            setattr(self._model, _IGNORED, self._was_ignored)

    def _forward(self, number: int, inputs: torch.Tensor, module: nn.Linear | nn.Embedding) -> torch.Tensor:
        if self._core is None:
            return _plain_forward(module, inputs)
        if not self.followed and torch.is_grad_enabled():
            raise RuntimeError(f"{_CALLER}: wrap the model in DistributedDataParallel and call follow(ddp) first")
        if isinstance(module, nn.Embedding):
            return self._core.embedding(number, inputs, module.weight)
        return self._core.linear(number, inputs, module.weight, module.bias)


def why_not_factors(model: nn.Module, name: str) -> TypeError | ValueError | None:
    """Why the gradient of a layer cannot be made of rows; None: it can."""
    modules = dict(model.named_modules())
    module = modules.get(name)
    if module is None:
        return ValueError(f"the model has no module {name!r}")
    if type(module) not in (nn.Linear, nn.Embedding):
        return TypeError(
            f"{name!r} is {type(module).__name__}, and rows are those of nn.Linear and nn.Embedding itself"
        )
    if "forward" in vars(module):
        return TypeError(f"{name!r} has a forward pass of its own")
    weight = module._parameters.get("weight")
    if weight is None:
        return ValueError(f"the weight of {name!r} is computed from others, and is no parameter")
    if not weight.requires_grad:
        return ValueError(f"the weight of {name!r} is frozen")
    for option in _WITHOUT if isinstance(module, nn.Embedding) else ():
        if getattr(module, option) not in (None, False):
            return ValueError(f"{name!r} has {option}={getattr(module, option)!r}, which rows cannot have")
    if weight.dtype not in _DTYPES:
        return TypeError(f"the weight of {name!r} is {weight.dtype}")
    if weight.device.type != "cpu":
        return ValueError(f"the weight of {name!r} is on {weight.device}, and rows are those of the CPU")
    for kind, parameter in module._parameters.items():
        if parameter is None:
            continue
        if sum(own is parameter for m in modules.values() for own in m._parameters.values()) > 1:
            return ValueError(f"the {kind} of {name!r} is shared with another layer")
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return ValueError(f"the {kind} of {name!r} has hooks, for which no gradient would come")
    return None


def _checked_rows(name: str, rows: int | Mapping[str, int]) -> int:
    if isinstance(rows, Mapping) and name not in rows:
        raise ValueError(f"{_CALLER}: rows has none for {name!r}")
    found = plain(rows[name] if isinstance(rows, Mapping) else rows)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ValueError(f"{_CALLER}: rows must be a whole number, 1 or more, got {found!r} for {name!r}")
    return found


def _core_layer(name: str, module: nn.Module, rows: int) -> _C.FactorLayer:
    if isinstance(module, nn.Embedding):
        padding = -1 if module.padding_idx is None else module.padding_idx % module.num_embeddings
        return _C.FactorLayer(name=name, kind="embedding", weight=module.weight, padding=padding, places=rows)
    assert isinstance(module, nn.Linear)
    return _C.FactorLayer(name=name, kind="linear", weight=module.weight, bias=module.bias, places=rows)


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]


def _plain_forward(module: nn.Linear | nn.Embedding, inputs: torch.Tensor) -> torch.Tensor:
    forward: Any = type(module).forward
    output: torch.Tensor = forward(module, inputs)
    return output


class _FactorForward:
    """Stands in a layer's place as its forward pass; in a copy of the layer that of any of its class."""

    def __init__(self, module: nn.Linear | nn.Embedding, layers: FactorLayers | None = None, number: int = -1) -> None:
        self._module, self._layers, self._number = module, layers, number

    @eager_only("torchext.auto: rows of this layer are sent in the backward pass")
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if self._layers is None:
            return _plain_forward(self._module, input)
        return self._layers._forward(self._number, input, self._module)

    def __reduce__(self) -> Any:
        return _FactorForward, (self._module,)


class _Guard:
    """Raises where a parameter gets a gradient that is not made of rows: DDP leaves it out, and it would stay local."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:  # of the layer itself, which leaves it to rows
            return
        raise FactorGradientError(
            f"{_CALLER}: a parameter of {self._name!r} got a gradient from outside of that layer, which no rank "
            "averages; leave the layer out of the names"
        )

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> Any:
    return lambda _: None
