"""``attach``: what turns a DDP model and its optimizer over to the algorithm of the group's backend."""

from __future__ import annotations

import atexit
import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext.backends import backend_of

__all__ = ["Synchronizer", "attach"]

_MEBIBYTE = 1 << 20


class Synchronizer:
    """Keeps an attached model in step with the other workers; made by :func:`attach`.

    ``synchronize``, ``averaged`` and ``detach`` are collective: every rank calls them, in the same order.
    """

    def __init__(self, core: _C.Synchronizer, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        self._core = core
        self._ddp = ddp
        self._handles: list[Any] = []
        self._averaging = False
        self._detached = False
        self._install(optimizer)

    def synchronize(self) -> None:
        """Makes parameters and floating-point buffers the exact average of all workers, now and for good."""
        self._check_attached("synchronize")
        self._core.synchronize()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Inside, the model holds the exact average of all replicas (evaluation, checkpoints); afterwards its own.

        Holds a copy of the local parameters meanwhile. The optimizer must not step inside.
        """
        self._check_attached("averaged")
        self._core.enter_average()
        self._averaging = True
        try:
            yield self._ddp.module
        finally:
            self._averaging = False
            self._core.leave_average()

    def wait(self) -> None:
        """Blocks until no average is under way: for code that reads parameters between a step and the next forward."""
        self._core.wait_all()

    def stats(self) -> dict[str, Any]:
        """Counters and milliseconds since attach.

        ``exposed_ms`` is what training waited; ``generator_wait_ms``, ``peer_wait_ms``, ``transfer_ms`` and ``copy_ms``
        are the averaging thread's, most of it under compute. ``group_sizes`` maps members to averages,
        ``iteration_gap`` is how many averages this worker was behind the fastest, ``consensus_distance`` is
        ``||x - mean|| / ||mean||`` at the last exact average, ``bytes_sent`` and ``bucket_bytes`` are bytes.
        """
        return self._core.stats()

    def state_dict(self) -> dict[str, Any]:
        """The schedule's position, for checkpoints."""
        return {"version": 1, "steps": self._core.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`; the same on all ranks."""
        if state.get("version") != 1:
            raise ValueError(f"Synchronizer.load_state_dict: version must be 1, got {state.get('version')!r}")
        self._core.steps = int(state["steps"])

    def detach(self) -> None:
        """Ends taking part: gradients stay local and nothing is averaged any more. Safe twice."""
        if self._detached:
            return
        self._detached = True
        self._remove_hooks()
        self._core.detach()

    def _check_attached(self, what: str) -> None:
        if self._detached:
            raise RuntimeError(f"Synchronizer.{what} after detach(); wrap the module in a new DistributedDataParallel")
        if self._averaging:
            raise RuntimeError(f"Synchronizer.{what} inside averaged(); leave the with block first")

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_step(self, *_: Any) -> None:
        if self._averaging:
            raise RuntimeError("optimizer.step() inside averaged(): the step would be lost when the block ends")
        self._core.before_step()

    def _after_step(self, *_: Any) -> None:
        self._core.after_step()

    def _install(self, optimizer: torch.optim.Optimizer) -> None:
        core = self._core
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))
        index = {id(tensor): i for i, tensor in enumerate(_averaged_tensors(self._ddp.module))}
        bucket_of = core.bucket_of
        if any(_is_compiled(module) for module in self._ddp.modules()):
            # A hook inside a compiled graph would break it: wait once, before the graph.
            self._handles.append(self._ddp.register_forward_pre_hook(lambda *_: core.wait_all(), prepend=True))
            return
        for module in self._ddp.module.modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            buckets = sorted({bucket_of[index[id(t)]] for t in own if id(t) in index})
            if buckets:
                self._handles.append(module.register_forward_pre_hook(_waiter(core, buckets), prepend=True))
            self._handles.append(module.register_state_dict_pre_hook(lambda *_: core.wait_all()))


def _waiter(core: _C.Synchronizer, buckets: list[int]) -> Callable[..., None]:
    def wait(*_: Any) -> None:
        for bucket in buckets:
            core.wait_bucket(bucket)

    return wait


def _is_compiled(module: nn.Module) -> bool:
    # By name: importing torch._dynamo to ask takes seconds.
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _averaged_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Parameters, then floating-point buffers; each once, in registration order."""
    buffers = [b for b in module.buffers() if b.is_floating_point()]
    return [*module.parameters(), *buffers]


def _check(ddp: Any, optimizer: Any) -> None:
    if not dist.is_initialized():
        raise RuntimeError("torchext.attach before torch.distributed.init_process_group; initialize it first")
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"torchext.attach takes a DistributedDataParallel model, got {type(ddp).__name__}; wrap the model first"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"torchext.attach takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if getattr(ddp, "_torchext_synchronizer", None) is not None:
        raise RuntimeError(
            "torchext.attach: this model has been attached already, and DDP takes one communication hook "
            "in its life; keep the first Synchronizer, or wrap the module in a new DistributedDataParallel"
        )
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = [name for name, p in ddp.module.named_parameters() if p.requires_grad and id(p) not in owned]
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise ValueError(
            f"torchext.attach: the optimizer does not own {len(names)} of the model's trainable parameters ({shown}); "
            "pass the optimizer that steps them all"
        )
    for name, module in ddp.module.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"torchext.attach: {name!r} is a SyncBatchNorm, which needs all workers in every forward pass; "
                "decentralized workers run at their own pace. Use BatchNorm: its statistics are averaged"
            )
    for name, tensor in ddp.module.named_parameters():
        if not tensor.is_floating_point():
            raise TypeError(f"torchext.attach: parameter {name!r} is {tensor.dtype}; only floating point is averaged")


def attach(
    ddp_model: DistributedDataParallel, optimizer: torch.optim.Optimizer, *, bucket_mb: float = 4.0
) -> Synchronizer:
    """Attaches a DDP model to the algorithm of its process group's backend. Collective.

    Installs a C++ communication hook in DDP's reducer (gradients stay local), hooks around ``optimizer.step`` and in
    front of the modules that wait for their parameters, and turns ``broadcast_buffers`` off: floating-point buffers are
    averaged with the parameters instead.

    Args:
        ddp_model: The model; its ``process_group`` was made with a torchext backend.
        optimizer: Steps all of the model's trainable parameters. Its state stays local.
        bucket_mb: Size of an averaging bucket in MiB; a bucket ends with the parameter that reaches it. With smaller
            ones the next forward can start earlier, but short messages cost more than few long ones.

    Raises:
        RuntimeError: Before ``init_process_group``, or attached twice.
        TypeError, ValueError: A model, optimizer, group or option that cannot work, named with the way out.
        torch.distributed.DistBackendError: Ranks attach different models or options (on every rank).
    """
    _check(ddp_model, optimizer)
    if not 0.001 <= bucket_mb <= 4096:
        raise ValueError(f"torchext.attach: bucket_mb must be in [0.001, 4096], got {bucket_mb}")
    backend = backend_of(ddp_model.process_group)
    if not isinstance(backend, _C.ProcessGroupPrague):
        raise ValueError(
            f"torchext.attach: the model's process group uses backend {backend.name()!r}, which trains as plain DDP; "
            "initialize with init_process_group('prague')"
        )
    parameters = list(ddp_model.module.parameters())
    buffers = _averaged_tensors(ddp_model.module)[len(parameters) :]
    core = _C.attach_prague(backend, ddp_model.reducer, parameters, buffers, int(bucket_mb * _MEBIBYTE))
    ddp_model.broadcast_buffers = False
    synchronizer = Synchronizer(core, ddp_model, optimizer)
    ddp_model._torchext_synchronizer = synchronizer  # type: ignore[assignment]  # typed as a submodule
    _leave_at_exit(core)
    return synchronizer


def _leave_at_exit(core: _C.Synchronizer) -> None:
    """A script that ends without detach() or destroy_process_group() still keeps its promises, for two seconds."""
    reference = weakref.ref(core)

    def leave() -> None:
        alive = reference()
        # After an uncaught exception there is nothing to keep: the peers are told the reason instead.
        if alive is not None and getattr(sys, "last_value", None) is None:
            alive.leave(timedelta(seconds=2))

    atexit.register(leave)
