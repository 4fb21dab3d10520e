"""Types of torchext._C; tests/packaging/test_stub.py compares them with the module."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Backend, ProcessGroup, Work

class InnerBackends:
    def __init__(self, *, cpu: Backend, cuda: Backend | None, control: Backend | None) -> None: ...

class DelegatingBackend(Backend):
    def __init__(self, rank: int, size: int, name: str, inner: InnerBackends, options: Backend.Options) -> None: ...
    def abort_with_reason(self, reason: str) -> None: ...
    @property
    def failure(self) -> tuple[int, str]: ...

class GroupOptions(Backend.Options):
    @property
    def heartbeat_timeout(self) -> timedelta: ...
    @property
    def call_check(self) -> str: ...

class PragueOptions(GroupOptions):
    def __init__(
        self,
        *,
        group_size: int = 0,
        generator: str = "smart",
        order: str = "cta",
        slowdown_threshold: int = -1,
        sync_period: int = 1,
        sync_every: int = -1,
        seed: int = 0,
        heartbeat_timeout: timedelta = ...,
        call_check: str = "new",
        timeout: timedelta = ...,
    ) -> None: ...
    def __copy__(self) -> PragueOptions: ...
    @property
    def group_size(self) -> int: ...
    @property
    def generator(self) -> str: ...
    @property
    def order(self) -> str: ...
    @property
    def slowdown_threshold(self) -> int: ...
    @property
    def sync_period(self) -> int: ...
    @property
    def sync_every(self) -> int: ...
    @property
    def seed(self) -> int: ...

class AttachableBackend(DelegatingBackend): ...

class ProcessGroupPrague(AttachableBackend):
    def __init__(self, rank: int, size: int, inner: InnerBackends, options: PragueOptions) -> None: ...
    def partial_all_reduce(self, tensor: Tensor, members: Sequence[int]) -> Work: ...

class DeAROptions(GroupOptions):
    def __init__(
        self,
        *,
        form: str = "sharded",
        bucket_mb: float | str = "auto",
        allreduce_fallback: bool = True,
        transport: str = "auto",
        heartbeat_timeout: timedelta = ...,
        call_check: str = "new",
        timeout: timedelta = ...,
    ) -> None: ...
    def __copy__(self) -> DeAROptions: ...
    @property
    def form(self) -> str: ...
    @property
    def bucket_mb(self) -> float | str: ...
    @property
    def allreduce_fallback(self) -> bool: ...
    @property
    def transport(self) -> str: ...

class ProcessGroupDear(AttachableBackend):
    def __init__(self, rank: int, size: int, inner: InnerBackends, options: DeAROptions) -> None: ...

class DSSyncOptions(GroupOptions):
    def __init__(
        self,
        *,
        group_size: int = 0,
        schedule: str = "grid",
        order: str = "cta",
        sync_period: int = 1,
        seed: int = 0,
        racks: Sequence[int] = ...,
        host_bandwidth: float = 0.0,
        uplink_bandwidth: float = 0.0,
        heartbeat_timeout: timedelta = ...,
        call_check: str = "new",
        timeout: timedelta = ...,
    ) -> None: ...
    def __copy__(self) -> DSSyncOptions: ...
    @property
    def group_size(self) -> int: ...
    @property
    def schedule(self) -> str: ...
    @property
    def order(self) -> str: ...
    @property
    def sync_period(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def racks(self) -> list[int]: ...
    @property
    def host_bandwidth(self) -> float: ...
    @property
    def uplink_bandwidth(self) -> float: ...

class ProcessGroupDSSync(AttachableBackend):
    def __init__(self, rank: int, size: int, inner: InnerBackends, options: DSSyncOptions) -> None: ...
    @property
    def topology(self) -> dict[str, Any] | None: ...

class HopOptions(GroupOptions):
    def __init__(
        self,
        *,
        graph: str = "ring-based",
        neighbours: Sequence[Sequence[int]] | None = None,
        weights: Sequence[Sequence[float]] | None = None,
        order: str = "parallel",
        notify_ack: bool = False,
        max_iteration_gap: int = 0,
        backup_workers: int = 0,
        staleness: int = 0,
        max_jump: int = 0,
        jump_trigger: int = 1,
        heartbeat_timeout: timedelta = ...,
        call_check: str = "new",
        timeout: timedelta = ...,
    ) -> None: ...
    def __copy__(self) -> HopOptions: ...
    @property
    def graph(self) -> str: ...
    @property
    def neighbours(self) -> list[list[int]] | None: ...
    @property
    def weights(self) -> list[list[float]] | None: ...
    @property
    def order(self) -> str: ...
    @property
    def notify_ack(self) -> bool: ...
    @property
    def max_iteration_gap(self) -> int: ...
    @property
    def backup_workers(self) -> int: ...
    @property
    def staleness(self) -> int: ...
    @property
    def max_jump(self) -> int: ...
    @property
    def jump_trigger(self) -> int: ...

class ProcessGroupHop(AttachableBackend):
    def __init__(self, rank: int, size: int, inner: InnerBackends, options: HopOptions) -> None: ...

class Synchronizer:
    def before_step(self) -> None: ...
    def after_step(self) -> None: ...
    def wait_tensors(self, tensors: Sequence[int]) -> None: ...
    def wait_all(self) -> None: ...
    def synchronize(self) -> None: ...
    def detach(self) -> None: ...
    def leave(self, limit: timedelta) -> None: ...
    @property
    def steps(self) -> int: ...
    @steps.setter
    def steps(self, arg1: int) -> None: ...

class AveragingSynchronizer(Synchronizer):
    def enter_average(self) -> None: ...
    def leave_average(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...

class DearSynchronizer(Synchronizer):
    def expect_backward(self, exchanges: bool) -> None: ...
    @property
    def allreduce(self) -> bool: ...
    @property
    def replicated(self) -> bool: ...
    @property
    def gathered(self) -> bool: ...
    def stepped(self, parameter: int) -> Tensor: ...
    def own_gradient(self, parameter: int) -> Tensor | None: ...
    def gradient(self, parameter: int) -> Tensor | None: ...
    def clear_gradients(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...

class HopSynchronizer(AveragingSynchronizer):
    def stats(self) -> dict[str, Any]: ...

def leave_all(reason: str) -> None: ...
def attach_prague(
    group: ProcessGroupPrague,
    reducer: Any,
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    bucket_bytes: int,
) -> AveragingSynchronizer: ...
def attach_hop(
    group: ProcessGroupHop,
    reducer: Any,
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor],
) -> HopSynchronizer: ...
def attach_dear(
    group: ProcessGroupDear,
    parameters: Sequence[Tensor],
    names: Sequence[str],
    unused_allowed: bool,
    bucket_mb: float | None = None,
    make_lane: Callable[[], ProcessGroupDear] | None = None,
) -> DearSynchronizer: ...
def attach_dssync(
    group: ProcessGroupDSSync,
    reducer: Any,
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    bucket_bytes: int,
) -> AveragingSynchronizer: ...

class KfacOptions:
    def __init__(
        self,
        *,
        damping: float,
        factor_decay: float,
        martens_decay: bool,
        kl_clip: float | None,
        factor_update_steps: int,
        inverse_update_steps: int,
        method: str,
        factor_scaling: str,
        strategy: str,
        worker_fraction: float,
        exchange_always: bool,
        max_run_mb: float,
        split_directions: bool | None,
    ) -> None: ...

class KfacLayer:
    def __init__(
        self,
        *,
        name: str,
        kind: str,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        dilation: Sequence[int],
        pad_before: Sequence[int],
        pad_after: Sequence[int],
        padding_mode: str,
        groups: int,
        reduce_sequence: bool,
        padding_idx: int,
    ) -> None: ...

class KfacEngine:
    def __init__(self, layers: Sequence[KfacLayer], options: KfacOptions, group: ProcessGroup | None) -> None: ...
    def forward(self, layer: int, input: Tensor, output: Tensor) -> None: ...
    def step(
        self,
        rates: Sequence[float],
        others: Sequence[Tensor],
        loss_scale: float,
        gradient_scale: float,
        found_inf: bool,
    ) -> bool: ...
    def discard(self) -> None: ...
    damping: float
    kl_clip: float | None
    def plan(self) -> dict[str, Any]: ...
    def stats(self) -> dict[str, Any]: ...
    def state(self) -> list[tuple[Tensor, Tensor | None, Tensor | None]]: ...
    def load(
        self,
        factors: Sequence[tuple[Tensor, Tensor | None, Tensor | None]],
        steps: int,
        factor_updates: int,
    ) -> None: ...
