"""Layers that K-FAC takes: what the engine must know of them, the memory they may take, and their hooks."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import resource
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree

from torchext import _C
from torchext.base.eager_only import eager_only
from torchext.errors import NoSupportedLayerError

__all__ = ["Layer", "check_devices", "factor_bytes", "find_layers", "install_hooks", "memory_here"]

# Of the memory of a rank, for the factors and inverses of one layer.
_SHARE = 1 / 8
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True)
class Layer:
    """A weight that is preconditioned, and the modules that use it (several where weights are tied)."""

    name: str
    modules: list[nn.Module]
    spec: _C.KfacLayer
    weight: nn.Parameter
    bias: nn.Parameter | None


def find_layers(
    model: nn.Module,
    *,
    skip: Sequence[str],
    sequences: str,
    stepped: Collection[int] | None = None,
    memory: int | None = None,
) -> list[Layer]:
    """The layers of ``model`` in the order of ``named_modules()``.

    Args:
        model: not wrapped by DDP.
        skip: regular expressions; modules whose full name one of them matches are left to the plain gradient.
        sequences: ``"expand"`` or ``"reduce"``.
        stepped: ids of the parameters that are; others are left alone as frozen ones are. None: all.
        memory: bytes of it, the same on all ranks; a layer that would take more than an eighth of them is left alone,
            with a warning. None: no such limit.

    Raises:
        TypeError: ``skip`` is no list of patterns.
        ValueError: a lazy module has not seen its first input; a pattern of ``skip`` is none, or matches nothing.
        NoSupportedLayerError: nothing is left.
    """
    patterns = _patterns(model, skip)
    inside = [
        name and name + "." for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)
    ]
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        if any(nn.parameter.is_lazy(parameter) for parameter in module._parameters.values()):
            raise ValueError(f"{name or 'the model'} is a lazy module without parameters; run one forward pass first")
        weight = module._parameters.get("weight")
        if weight is None or any(name.startswith(prefix) for prefix in inside):  # "": the model is one itself
            continue  # MultiheadAttention reads its projections itself, without a call that could be seen
        users.setdefault(id(weight), []).append((name, module))
    found: list[Layer] = []
    huge: list[Layer] = []
    for tied in users.values():
        name, module = tied[0]
        if all(_same_kind(module, other) for _, other in tied) and not any(
            pattern.fullmatch(n) for pattern in patterns for n, _ in tied
        ):
            layer = _layer(name, [user for _, user in tied], sequences, stepped)
            if layer is not None:
                (found if _fits(layer, memory) else huge).append(layer)
    if not found:
        raise NoSupportedLayerError(
            "the model has no Linear, Conv1d/2d/3d or Embedding layer with a trained weight of its own"
            + ("" if stepped is None else " that the optimizer steps")
            + (f" that skip_layers={list(skip)} leaves" if skip else "")
            + (f", and whose factors fit into an eighth of {_gb(memory)}" if huge and memory is not None else "")
            + _complex(users)
        )
    return found


def _complex(users: Mapping[int, list[tuple[str, nn.Module]]]) -> str:
    """The layers that would be taken if their weights were real."""
    named = [
        f"{name or 'the model itself'} is {weight.dtype}"
        for (name, module), *_ in users.values()
        if isinstance(module, (nn.Linear, Convolution)) and (weight := module.weight).is_complex()
    ]
    return (
        f"; K-FAC takes real weights, and {', '.join(named[:3])}" + (", ..." if len(named) > 3 else "") if named else ""
    )


def _fits(layer: Layer, memory: int | None) -> bool:
    takes = factor_bytes(layer.modules[0], layer.bias is not None)
    if memory is None or takes <= _SHARE * memory:
        return True
    name = layer.name or "the model itself"
    warnings.warn(
        f"K-FAC leaves {name} to the plain gradient: the factors of its weight of {list(layer.weight.shape)} and their "
        f"inverses would take {_gb(takes)}, and one layer may take an eighth of the {_gb(memory)} of memory here; "
        f"skip_layers=[{re.escape(layer.name)!r}] does the same without this warning",
        stacklevel=4,
    )
    return False


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"


def _patterns(model: nn.Module, skip: Sequence[str]) -> list[re.Pattern[str]]:
    if isinstance(skip, str | re.Pattern):
        raise TypeError(f"skip_layers = {skip!r}: allowed a list of regular expressions; pass [{skip!r}]")
    # Those that only hold others have nothing to leave alone: who names one means what is inside.
    names = [
        name for name, module in model.named_modules() if module._parameters or next(module.children(), None) is None
    ]
    patterns = []
    for given in skip:
        if not isinstance(given, str | re.Pattern):
            raise TypeError(f"skip_layers has {given!r}: allowed regular expressions for full names of modules, as str")
        try:
            pattern = re.compile(given)
        except re.error as error:
            raise ValueError(f"skip_layers has {given!r}: not a regular expression ({error})") from error
        if not any(pattern.fullmatch(name) for name in names):
            raise ValueError(
                f"skip_layers has {given!r}: matches the full name of no layer; allowed what matches one of "
                "model.named_modules(), r'encoder\\..*' for those inside encoder"
            )
        patterns.append(pattern)
    return patterns


def _same_kind(module: nn.Module, other: nn.Module) -> bool:
    """Whether two users of one weight do the same with it."""
    if type(module) is not type(other) or module._parameters.get("bias") is not other._parameters.get("bias"):
        return False
    return not isinstance(module, Convolution) or all(
        getattr(module, name) == getattr(other, name)
        for name in ("stride", "padding", "dilation", "groups", "padding_mode")
    )


def _layer(name: str, modules: list[nn.Module], sequences: str, stepped: Collection[int] | None) -> Layer | None:
    module = modules[0]
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    if not _is_trained(weight, stepped) or not weight.is_floating_point() or weight.numel() == 0:
        return None
    if not _is_trained(bias, stepped):
        bias = None
    what: dict[str, Any] = {
        "kind": "linear",
        "stride": [],
        "dilation": [],
        "pad_before": [],
        "pad_after": [],
        "padding_mode": "constant",
        "groups": 1,
        "reduce_sequence": sequences == "reduce" and isinstance(module, nn.Linear),
        "padding_idx": -1,
    }
    if isinstance(module, Convolution):
        before, after = _padding(module)
        what |= {
            "kind": "convolution",
            "stride": list(module.stride),
            "dilation": list(module.dilation),
            "pad_before": before,
            "pad_after": after,
            "padding_mode": {"zeros": "constant"}.get(module.padding_mode, module.padding_mode),
            "groups": module.groups,
        }
    elif isinstance(module, nn.Embedding):
        if module.sparse or module.max_norm is not None or module.scale_grad_by_freq:
            return None
        if type(module).forward is not nn.Embedding.forward:
            return None  # what it is called with need not be the rows that it reads
        what |= {"kind": "embedding", "padding_idx": -1 if module.padding_idx is None else module.padding_idx}
    elif not isinstance(module, nn.Linear):
        return None
    spec = _C.KfacLayer(name=name, weight=weight, bias=bias, **what)
    return Layer(name, modules, spec, weight, bias)


def _is_trained(parameter: nn.Parameter | None, stepped: Collection[int] | None) -> TypeGuard[nn.Parameter]:
    return parameter is not None and parameter.requires_grad and (stepped is None or id(parameter) in stepped)


def _padding(module: Convolution) -> tuple[list[int], list[int]]:
    """Zeros before and after each dimension, as torch places them (an odd total of "same" has one more behind)."""
    if module.padding == "valid":
        return [0] * len(module.kernel_size), [0] * len(module.kernel_size)
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [total // 2 for total in totals], [total - total // 2 for total in totals]
    both = [int(p) for p in module.padding]
    return both, both


class _NoHook:
    """What a copy of a model has in place of our hook."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        pass


class _ForwardHook:
    """Tells the engine of the calls of its module; of no other module, and not of copies of it."""

    def __init__(self, engine: _C.KfacEngine, index: int, layer: Layer, module: nn.Module, unseen: set[int]) -> None:
        self._forward = engine.forward
        self._index = index
        self._layer = layer
        self._module = weakref.ref(module)
        self._unseen = unseen

    def __reduce__(self) -> tuple[type[_NoHook], tuple[()]]:
        return _NoHook, ()

    @eager_only("K-FAC's engine reads a layer's input and output")
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if module is not self._module():
            return
        # Other hooks may have put anything in the place of the layer's own output.
        found = [output] if isinstance(output, Tensor) else _pytree.tree_leaves(output)
        outputs = [one for one in found if isinstance(one, Tensor) and one.requires_grad]
        if not outputs or any(torch._C._functorch.is_functorch_wrapped_tensor(one) for one in outputs):
            return  # of torch.func: its gradients are values, and reach no .grad
        if not self._uses_its_parameters(module):
            return
        if self._forward(self._index, args[0] if args else _named_input(module, kwargs), outputs):
            self._unseen.discard(self._index)

    def _uses_its_parameters(self, module: nn.Module) -> bool:
        """Whether the module holds the parameters that it had; torch.func.functional_call has it use others.

        Raises:
            ValueError: it makes them of others, so that their gradients are not those of its calls; or they are on
                another device.
        """
        for name, own in (("weight", self._layer.weight), ("bias", self._layer.bias)):
            now = module._parameters.get(name)
            if own is None or now is own:
                continue
            if isinstance(now, nn.Parameter) and now.device != own.device:
                raise ValueError(
                    f"torchext.optim: {self._layer.name or 'the model itself'} was on {own.device} when the optimizer "
                    f"was made, and computes on {now.device} now; move the model first"
                )
            if parametrize.is_parametrized(module, name):
                raise ValueError(
                    f"{self._layer.name or 'the model itself'}: its {name} has been parametrized since the optimizer "
                    "was made, and K-FAC has no factors for that; parametrize first, which leaves the layer to the "
                    "plain gradient, or name it in skip_layers"
                )
            return False
        return True


def _named_input(module: nn.Module, kwargs: Mapping[str, Any]) -> Any:
    """The first argument of a module that was called with keywords only; a subclass may name it otherwise."""
    return kwargs["input"] if "input" in kwargs else kwargs[next(iter(inspect.signature(module.forward).parameters))]


def install_hooks(
    engine: _C.KfacEngine, layers: Sequence[Layer], unseen: set[int]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Returns the handles that take the hooks away. ``unseen`` loses the numbers of layers whose calls are seen."""
    return [
        module.register_forward_hook(_ForwardHook(engine, index, layer, module, unseen), prepend=True, with_kwargs=True)
        for index, layer in enumerate(layers)
        for module in layer.modules
    ]


def check_devices(layers: Sequence[Layer]) -> None:
    """Raises unless all layers are on one device, and that is one where K-FAC runs."""
    first = layers[0]
    for layer in layers:
        if layer.weight.device != first.weight.device:
            raise ValueError(
                f"{first.name} is on {first.weight.device}, {layer.name} on {layer.weight.device}; all layers must be "
                "on one device (skip_layers leaves some to the plain gradient)"
            )
    if first.weight.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{first.name} is on {first.weight.device}; K-FAC runs on the CPU and on CUDA")


def memory_here(model: nn.Module) -> int:
    """Bytes of memory where the model's layers lie: of the GPU, or what this process may take of the host's."""
    on_cuda = next((parameter.device for parameter in model.parameters() if parameter.is_cuda), None)
    if on_cuda is not None:
        return int(torch.cuda.get_device_properties(on_cuda).total_memory)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limits.append(int(Path(path).read_text()))
    limits += [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
    return min(limits)


def factor_bytes(module: nn.Module, bias: bool) -> int:
    """Bytes of a layer's factors: running averages and sums of a step as triangles, and the inverses."""
    weight = module._parameters["weight"]
    assert weight is not None
    groups = int(getattr(module, "groups", 1))
    if isinstance(module, nn.Embedding):
        dims = [weight.shape[1]]  # the other factor is a diagonal
    else:
        dims = [weight.shape[0] // groups, weight[0].numel() + int(bias)]
    return 2 * groups * sum(dim * dim for dim in dims) * (8 if weight.dtype == torch.float64 else 4)
