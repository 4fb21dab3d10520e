"""SPDKFAC and PADKFAC: SGD with momentum along K-FAC's directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack, overload

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from torchext.base.plain import plain
from torchext.errors import KFACStateError
from torchext.optim.before_step import step_before
from torchext.optim.kfac_options import KFACOptions, PreconditionerOptions, no_copies, no_such
from torchext.optim.kfac_plan import KFACPlan
from torchext.optim.kfac_state import check_sgd
from torchext.optim.preconditioner import KEYWORDS, KFACPreconditioner

__all__ = ["KFAC", "PADKFAC", "SPDKFAC"]


class KFAC(torch.optim.Optimizer):
    """SGD with momentum along K-FAC's directions; a drop-in for :class:`torch.optim.SGD`.

    Closures, parameter groups, schedulers and ``torch.amp.GradScaler`` work as with SGD. A batch with NaN or Inf
    changes nothing, on all ranks alike, and is counted in ``stats()["skipped"]``. After
    ``step()`` gradients hold directions.

    Args:
        model: the module, or DDP around it.
        params: parameters or groups to step; default: all of the model. Gradients of others are left alone, as those of
            frozen ones; so are those of layers that ``add_param_group`` brings later, which are stepped plainly.
        lr: the learning rate, 0 or more.
        momentum: in [0, 1).
        weight_decay: added to the direction times the parameter, 0 or more.
        nesterov: Nesterov's momentum; needs ``momentum``.
        strategy: as for :class:`~torchext.optim.KFACPreconditioner`, which takes all other arguments.
        **kfac: see there; their types are in :class:`~torchext.optim.KFACOptions`.

    Raises:
        ValueError: a value out of its range, with name, value and range.
        TypeError: an argument that is not known here, with those that are.
    """

    # GradScaler then hands over its scale (as grad_scale) and what it found (as found_inf) and leaves gradients alone.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        lr: float = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        strategy: str = "auto",
        **kfac: Unpack[PreconditionerOptions],
    ) -> None:
        defaults = _plain({"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov})
        failure: Exception | None = None
        try:
            if isinstance(params, float | int):
                raise TypeError(
                    f"params must be parameters or groups, got {params!r}; the learning rate is lr={params!r}"
                )
            if params is None:  # what is no model is refused below; torch wants something to begin with
                params = (
                    model.parameters() if isinstance(model, nn.Module) else [nn.Parameter(torch.empty(0, device="cpu"))]
                )
            super().__init__(params, defaults)
        except Exception as error:  # the other ranks wait to be told
            failure = error
        # Python's own refusal would come before they are: they would wait for this rank inside new_group().
        refusal = _refusal(kfac, strategy)
        if refusal:
            failure = TypeError(f"{type(self).__name__}: {refusal}")
        passed: dict[str, Any] = {name: value for name, value in kfac.items() if name in _PASSED_ON}
        self.kfac = KFACPreconditioner(model, strategy=strategy, _failure=failure, _inside=self, **passed)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the group's own values are checked."""
        if isinstance(param_group, dict):
            param_group = _plain(param_group)
        _check(**{name: param_group.get(name, self.defaults[name]) for name in _OPTIONS})
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step. Collective where there is more than one rank.

        Args:
            closure: computes the loss and its gradients, once.

        Raises:
            RuntimeError: a gradient scaler has unscaled the gradients already and was not given as ``grad_scaler``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if step_before(self, self.kfac):
            for group in self.param_groups:
                self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        # What the kernel takes in one call; under None what it does not take.
        kinds: dict[tuple[torch.device, torch.dtype] | None, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}
        momentum = group["momentum"]
        for p in group["params"]:
            if p.grad is None:
                continue
            of_p: tuple[Tensor, ...] = (p, p.grad)
            if momentum != 0:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                of_p += (state["momentum_buffer"],)
            kind = (p.device, p.dtype) if _has_kernel(p) and _lie_alike(of_p) else None
            for members, tensor in zip(kinds.setdefault(kind, ([], [], [])), of_p, strict=False):
                members.append(tensor)
        # The keys are those of torch.optim.SGD, whose kernel and whose loop these are.
        values = {
            "weight_decay": group["weight_decay"],
            "momentum": momentum,
            "lr": float(group["lr"]),
            "dampening": 0.0,
            "nesterov": group["nesterov"],
            "maximize": False,
        }
        for kind, (params, grads, buffers) in kinds.items():
            if kind is not None:
                torch._fused_sgd_(params, grads, buffers, is_first_step=False, **values)
            else:
                kept: list[Tensor | None] = [*buffers] if buffers else [None] * len(params)
                sgd(params, grads, kept, foreach=False, fused=False, **values)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; and what a step that never came has left of its factors is forgotten."""
        self.kfac.discard()
        super().zero_grad(set_to_none)

    def plan(self) -> KFACPlan:
        """See :meth:`KFACPreconditioner.plan`."""
        return self.kfac.plan()

    def stats(self) -> dict[str, Any]:
        """See :meth:`KFACPreconditioner.stats`."""
        return self.kfac.stats()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles would have nothing that sees their model: there are none.

        Raises:
            TypeError: always.
        """
        raise no_copies(self)

    def state_dict(self) -> dict[str, Any]:
        """SGD's state, and under ``"kfac"`` factors and inverses. Collective where there is more than one rank."""
        return {**super().state_dict(), "kfac": self.kfac.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` gave, at any world size.

        Raises:
            KFACStateError: it is no K-FAC state, or one of another model or method; nothing was loaded.
        """
        if not isinstance(state_dict, Mapping):
            raise KFACStateError(
                f"the state is of type {type(state_dict).__name__}: allowed the mapping that state_dict() gives; pass "
                "that"
            )
        state = dict(state_dict)
        kfac = state.pop("kfac", None)
        if kfac is None:
            raise KFACStateError(
                'the state has no "kfac": it is that of another optimizer, or of a tool that keeps "state" and '
                '"param_groups" only (torch.distributed.checkpoint.state_dict); save optimizer.state_dict() itself'
            )
        self.kfac.check_state(kfac)
        check_sgd(state, self.param_groups, _OPTIONS, _check)
        super().load_state_dict(state)
        self.kfac.load_state_dict(kfac)


# Of a group. Not Optimizer.defaults, which torch adds to when a state is loaded.
_OPTIONS = ("lr", "momentum", "weight_decay", "nesterov")
# What KFAC passes on to its preconditioner as it is; one that stands for itself needs no optimizer.
_PASSED_ON = [name for name in KEYWORDS if name != "strategy"]
_GIVEN = "strategy="  # no name that a caller can have passed by


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """With Python's numbers, but for a learning rate that is a tensor, which schedulers write into."""
    return {
        name: plain(value) if name in _OPTIONS and not (name == "lr" and isinstance(value, Tensor)) else value
        for name, value in group.items()
    }


def _with_strategy(strategy: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for KFAC, under this strategy; one that was given, too, is left for it to refuse."""
    return {_GIVEN if name == "strategy" else name: value for name, value in options.items()} | {"strategy": strategy}


def _refusal(options: Iterable[str], strategy: str) -> str:
    unknown = [name for name in options if name not in _PASSED_ON]
    if _GIVEN in unknown:
        return f'strategy is always "{strategy}" here; leave it out, or use KFAC, which takes it'
    return no_such(unknown, [*_OPTIONS, *_PASSED_ON]) if unknown else ""


def _has_kernel(p: Tensor) -> bool:
    """Whether torch's fused kernel steps it: on the CPU that of 16 bits does not (torch 2.13), and none is complex."""
    return p.dtype in (torch.float32, torch.float64) or (p.is_cuda and p.dtype in (torch.float16, torch.bfloat16))


def _lie_alike(tensors: tuple[Tensor, ...]) -> bool:
    """Whether element i in the memory of each of them is the same element."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.dtype != first.dtype:
            return False
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    # No gaps and no overlaps: 0 says so of certain.
    return (
        all(tensor.stride() == first.stride() for tensor in tensors) and torch._debug_has_internal_overlap(first) == 0
    )


def _check(*, lr: float, momentum: float, weight_decay: float, nesterov: bool) -> None:
    rate = float(lr)
    if not 0 <= rate < float("inf"):
        raise ValueError(f"lr = {rate}: allowed 0 or more, finite")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum = {momentum}: allowed [0, 1)")
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"weight_decay = {weight_decay}: allowed 0 or more, finite")
    if nesterov and momentum == 0:
        raise ValueError("nesterov = True: allowed with momentum above 0 only")


class SPDKFAC(KFAC):
    """SPD-KFAC (Shi et al., ICDCS 2021): :class:`KFAC` with all-reduced factors and load-balanced inverses.

    Factors are all-reduced under the backward pass in buckets fused by measured costs. Each is inverted by all ranks
    where that is cheaper than a broadcast, else by the rank with the least to do.
    """

    def __init__(self, model: nn.Module, params: Iterable[Any] | None = None, **options: Unpack[KFACOptions]) -> None:
        super().__init__(model, params, **_with_strategy("spd", options))


class PADKFAC(KFAC):
    """PAD-KFAC (Zhang et al., INFOCOM 2023): :class:`KFAC` with factors reduced to the rank that inverts them.

    Factors are split in order into blocks of equal inversion cost, one a rank, and fused inside a block. The owner
    broadcasts inverses, or preconditioned gradients where those cost less.
    """

    def __init__(self, model: nn.Module, params: Iterable[Any] | None = None, **options: Unpack[KFACOptions]) -> None:
        super().__init__(model, params, **_with_strategy("pad", options))
