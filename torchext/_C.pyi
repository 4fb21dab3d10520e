"""Types of torchext._C; tests/packaging/test_stub.py compares them with the module."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, overload

from torch import Tensor, device
from torch._C._distributed_c10d import Backend, PrefixStore, ProcessGroup, Store, Work

class ConnectingStore(PrefixStore):
    def __init__(self, store: Store) -> None: ...
    def refuse(self, reason: str) -> None: ...

class ClosedInChildren:
    def __init__(self) -> None: ...
    def watch(self) -> None: ...

class InnerBackends:
    def __init__(
        self, *, cpu: Backend, cuda: Backend | None, control: Backend | None, sockets: ClosedInChildren | None = None
    ) -> None: ...

class DelegatingBackend(Backend):
    def __init__(self, rank: int, size: int, name: str, inner: InnerBackends, options: Backend.Options) -> None: ...
    def abort_with_reason(self, reason: str) -> None: ...
    def _abort_because_of(self, rank: int, reason: str) -> None: ...
    @property
    def _lost_ranks(self) -> set[int]: ...
    def monitored_barrier(self, timeout: timedelta = ..., wait_all_ranks: bool = False) -> None: ...
    def perform_nocolor_split(self, device: Any) -> None: ...
    def _set_inner_factory(self, factory: Callable[[list[int], int], InnerBackends]) -> None: ...
    @property
    def options(self) -> Backend.Options: ...
    @property
    def failure(self) -> tuple[int, str]: ...

class GroupOptions(Backend.Options):
    @property
    def heartbeat_timeout(self) -> timedelta: ...
    @property
    def call_check(self) -> str: ...
    @property
    def operation_timeout(self) -> timedelta: ...
    @property
    def timeout(self) -> timedelta: ...

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
        shared_memory: bool = True,
        heartbeat_timeout: timedelta = ...,
        call_check: str = "new",
        operation_timeout: timedelta = ...,
        timeout: timedelta = ...,
    ) -> None: ...
    def __copy__(self) -> PragueOptions: ...
    def __eq__(self, other: object) -> bool: ...
    def _fitted(self, members: Sequence[int]) -> PragueOptions: ...
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
    @property
    def shared_memory(self) -> bool: ...

class AttachableBackend(DelegatingBackend):
    def _abandon_meeting(self, error: str) -> None: ...
    def _announce_member(self, store: Store, number: int) -> None: ...
    def _withdraw_announcements(self) -> None: ...

class ProcessGroupPrague(AttachableBackend):
    def __init__(self, rank: int, size: int, inner: InnerBackends, options: PragueOptions) -> None: ...
    @property
    def options(self) -> PragueOptions: ...
    def partial_all_reduce(self, tensor: Tensor, members: Sequence[int]) -> Work: ...
    @property
    def shared_memory_ranks(self) -> list[int]: ...
    @property
    def topology(self) -> dict[str, Any] | None: ...

class DeAROptions(GroupOptions):
    def __init__(
        self,
        *,
        form: str = "replicated",
        bucket_mb: float | str = "auto",
        allreduce_fallback: bool = True,
        transport: str = "auto",
        heartbeat_timeout: timedelta = ...,
        call_check: str = "new",
        operation_timeout: timedelta = ...,
        timeout: timedelta = ...,
    ) -> None: ...
    def __copy__(self) -> DeAROptions: ...
    def __eq__(self, other: object) -> bool: ...
    @property
    def form(self) -> str: ...
    @property
    def bucket_mb(self) -> float | str: ...
    @property
    def allreduce_fallback(self) -> bool: ...
    @property
    def transport(self) -> str: ...

class ProcessGroupDear(AttachableBackend):
    @overload
    def __init__(self, rank: int, size: int, inner: InnerBackends, options: DeAROptions) -> None: ...
    @overload
    def __init__(self, rank: int, size: int, inner: InnerBackends, options: DeAROptions, name: str) -> None: ...
    @property
    def options(self) -> DeAROptions: ...

class DSSyncOptions(GroupOptions):
    def __init__(
        self,
        *,
        group_size: int = 0,
        schedule: str = "auto",
        order: str = "cta",
        sync_period: int = 1,
        seed: int = 0,
        racks: Sequence[int] = ...,
        host_bandwidth: float = 0.0,
        uplink_bandwidth: float = 0.0,
        shared_memory: bool = True,
        heartbeat_timeout: timedelta = ...,
        call_check: str = "new",
        operation_timeout: timedelta = ...,
        timeout: timedelta = ...,
    ) -> None: ...
    def __copy__(self) -> DSSyncOptions: ...
    def __eq__(self, other: object) -> bool: ...
    def _fitted(self, members: Sequence[int]) -> DSSyncOptions: ...
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
    @property
    def shared_memory(self) -> bool: ...

class ProcessGroupDSSync(AttachableBackend):
    def __init__(self, rank: int, size: int, inner: InnerBackends, options: DSSyncOptions) -> None: ...
    @property
    def options(self) -> DSSyncOptions: ...
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
        operation_timeout: timedelta = ...,
        timeout: timedelta = ...,
    ) -> None: ...
    def __copy__(self) -> HopOptions: ...
    def __eq__(self, other: object) -> bool: ...
    def _fitted(self, members: Sequence[int]) -> HopOptions: ...
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
    @property
    def options(self) -> HopOptions: ...

class LinkTable:
    @property
    def operation(self) -> str: ...
    @property
    def bytes(self) -> list[int]: ...
    @property
    def seconds(self) -> list[float]: ...
    @property
    def spread(self) -> float: ...

class LinkMeasurement:
    @property
    def tables(self) -> list[LinkTable]: ...
    @property
    def host_of(self) -> list[int]: ...
    @property
    def copy_bytes_per_second(self) -> float: ...
    @property
    def operations_per_second(self) -> float: ...
    @property
    def elapsed_seconds(self) -> float: ...

def calibrate_links(
    group: ProcessGroup, own: AttachableBackend | None, device: device, max_seconds: float
) -> LinkMeasurement: ...
def hosts_of(group: ProcessGroup, device: device) -> list[int]: ...
def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]: ...

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
    def resume(self, own: int, furthest: int) -> None: ...
    def stats(self) -> dict[str, Any]: ...

class GradientListener:
    synchronizer: AveragingSynchronizer | None

def keep_gradients_local(reducer: Any) -> GradientListener: ...

class DearPlan:
    def __init__(
        self,
        *,
        gradient_order: Sequence[int],
        ends: Sequence[int],
        forward_order: Sequence[int],
        hierarchical: bool = False,
    ) -> None: ...
    @property
    def gradient_order(self) -> list[int]: ...
    @property
    def ends(self) -> list[int]: ...
    @property
    def forward_order(self) -> list[int]: ...
    @property
    def hierarchical(self) -> bool: ...

class DearSynchronizer(Synchronizer):
    def expect_backward(self, exchanges: bool) -> None: ...
    def backward_begins(self) -> None: ...
    def on_reduced(self, callback: Callable[[], None]) -> None: ...
    def on_accumulating(self, callback: Callable[[], None]) -> None: ...
    def adopt_plan(self) -> bool: ...
    @property
    def allreduce(self) -> bool: ...
    @property
    def replicated(self) -> bool: ...
    def others_train_on(self) -> bool: ...
    def stepped(self, parameter: int) -> Tensor: ...
    def own_gradient(self, parameter: int) -> Tensor | None: ...
    def own_slice_of(self, parameter: int, whole: Tensor) -> Tensor: ...
    def gradient(self, parameter: int) -> Tensor | None: ...
    def settle_gradient(self, parameter: int) -> None: ...
    def take_moved(self) -> list[int]: ...
    @property
    def bucket_count(self) -> int: ...
    def bucket_of(self, parameter: int) -> int | None: ...
    def arrived_buckets(self, known: int) -> int: ...
    def clear_gradients(self) -> None: ...
    def note_lost_change(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...

class HopSynchronizer(AveragingSynchronizer):
    def begin(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...

def drain_averages() -> None: ...

FAULT_POINTS: tuple[str, ...]

def arm_fault_point(point: str, action: str, passes: int = 0) -> None: ...
def fault_point(point: str) -> None: ...
def leave_all(reason: str) -> None: ...
def attach_prague(
    group: ProcessGroupPrague,
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    frozen: Sequence[Tensor],
    bucket_bytes: int,
) -> AveragingSynchronizer: ...
def attach_hop(
    group: ProcessGroupHop,
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    frozen: Sequence[Tensor],
) -> HopSynchronizer: ...
def attach_dear(
    group: ProcessGroupDear,
    parameters: Sequence[Tensor],
    names: Sequence[str],
    unused_allowed: bool,
    bucket_mb: float | None = None,
    planned: DearPlan | None = None,
    make_dedicated_group: Callable[[], ProcessGroupDear] | None = None,
) -> DearSynchronizer: ...
def attach_dssync(
    group: ProcessGroupDSSync,
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    frozen: Sequence[Tensor],
    bucket_bytes: int,
) -> AveragingSynchronizer: ...

class FactorLayer:
    def __init__(
        self, *, name: str, kind: str, weight: Tensor, bias: Tensor | None = None, padding: int = -1, places: int
    ) -> None:
        """kind: "linear" or "embedding". padding: of an embedding, the index without a gradient; -1: none."""

class SufficientFactors:
    def __init__(self, group: AttachableBackend, layers: Sequence[FactorLayer]) -> None: ...
    def expect(self, averages: bool) -> None: ...
    def backward_begins(self) -> None: ...
    def linear(self, layer: int, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...
    def embedding(self, layer: int, indices: Tensor, weight: Tensor) -> Tensor: ...
    def stats(self) -> dict[str, Any]: ...

def has_tiles() -> bool: ...
def set_prefers_linear_products(answer: bool | None) -> None: ...

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
        bucket_cap_mb: float,
        split_directions: bool | None,
        direction_precision: str,
        gather_rows: bool | None,
        shared_memory: bool,
        queued: bool,
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
    def __init__(
        self,
        layers: Sequence[KfacLayer],
        options: KfacOptions,
        group: ProcessGroup | None,
        model: DelegatingBackend | None,
    ) -> None: ...
    def forward(self, layer: int, input: Tensor, outputs: Sequence[Tensor]) -> bool: ...
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

# torchext.auto: the costs, the simulator and the search (csrc/core/auto). Pure: equal arguments give equal results.

class CostTable:
    """What a message of any size takes: piecewise linear between measured sizes, made monotone."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """points: (nbytes, seconds), sizes strictly ascending; a bad one is a ValueError with its value."""
    def __eq__(self, other: object) -> bool: ...
    @property
    def points(self) -> list[tuple[int, float]]:
        """Monotone: each time is the least of its size and of all larger ones."""
    def seconds(self, nbytes: int) -> float: ...

class Network:
    """How many ranks there are, and the links between them."""

    def __init__(
        self,
        *,
        ranks: int,
        latency_seconds: float,
        bytes_per_second: float,
        ranks_per_host: int = 1,
        inside_latency_seconds: float = 0.0,
        inside_bytes_per_second: float = 0.0,
    ) -> None:
        """inside: between ranks of a host, needed where ranks_per_host is above 1 and a transport is hierarchical."""
    @property
    def ranks(self) -> int: ...
    @property
    def latency_seconds(self) -> float: ...
    @property
    def bytes_per_second(self) -> float: ...
    @property
    def ranks_per_host(self) -> int: ...
    @property
    def inside_latency_seconds(self) -> float: ...
    @property
    def inside_bytes_per_second(self) -> float: ...

class Transport:
    """One way of moving a bucket's two halves: "ring", "direct", "halving" or "hierarchical"."""

    def __init__(self, *, algorithm: str, reduce_scatter: CostTable, all_gather: CostTable) -> None:
        """The tables are of the whole buffer's bytes."""
    @property
    def algorithm(self) -> str: ...
    @property
    def reduce_scatter(self) -> CostTable: ...
    @property
    def all_gather(self) -> CostTable: ...

class LinkTables:
    """What calibration knows of a network."""

    def __init__(
        self,
        *,
        network: Network,
        all_reduce: CostTable,
        transports: Sequence[Transport] = ...,
        rows: CostTable | None = None,
        copy_bytes_per_second: float = 0.0,
        operations_per_second: float = 0.0,
    ) -> None:
        """network: its link is that of point-to-point. transports: none, then dear is no candidate. rows: by the bytes
        of one rank's rows; None, then there are no factor layers. Rates that are 0 were not measured: free."""
    @property
    def network(self) -> Network: ...
    @property
    def all_reduce(self) -> CostTable: ...
    @property
    def transports(self) -> list[Transport]: ...
    @property
    def rows(self) -> CostTable | None: ...
    @property
    def copy_bytes_per_second(self) -> float: ...
    @property
    def operations_per_second(self) -> float: ...
    def on(self, network: Network) -> LinkTables:
        """The same with other ranks or links, by formula: each time keeps its ratio to the formula's. Transports that
        do not fit the network are left out."""

class LayerRows:
    """A layer whose gradient can be rebuilt on every rank from the batch rows of all ranks."""

    def __init__(self, *, kind: str, rows: int, height: int, width: int, element_bytes: int = 4) -> None:
        """kind: "linear" (height outputs, width inputs) or "embedding" (height places). rows: the most of one rank and
        step; 0: unknown, and never sent."""
    @property
    def kind(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def element_bytes(self) -> int: ...
    @property
    def row_nbytes(self) -> float:
        """What one rank sends to each other."""
    def fewest_rows_to_reduce(self, ranks: int) -> float:
        """K*: with fewer rows a rank, rows are fewer bytes than an all-reduce."""

class Gradient:
    """One gradient of the model, in the order in which the backward pass finishes them."""

    def __init__(
        self, *, nbytes: int, ready_seconds: float, first_use: int = -1, kind: int = 0, layer: int = -1
    ) -> None:
        """ready_seconds: from the start of the backward pass. first_use: the forward span that reads the parameter
        first. kind: element type and device, dense numbers from 0. layer: of the profile's layers, whose rows give this
        gradient too (weight and bias name the same). -1: none."""
    @property
    def nbytes(self) -> int: ...
    @property
    def ready_seconds(self) -> float: ...
    @property
    def first_use(self) -> int: ...
    @property
    def kind(self) -> int: ...
    @property
    def layer(self) -> int: ...

class StepProfile:
    """When a model's gradients are finished, and when its parameters are needed."""

    def __init__(
        self,
        *,
        forward_seconds: Sequence[float],
        backward_seconds: float,
        gradients: Sequence[Gradient],
        optimizer_seconds: float = 0.0,
        layers: Sequence[LayerRows] = ...,
        step_samples: Sequence[Sequence[float]] = ...,
    ) -> None:
        """forward_seconds: spans in order of execution. gradients: in ready order. step_samples: by rank, forward and
        backward of its steps together; empty: all ranks are as fast."""
    @property
    def forward_seconds(self) -> list[float]: ...
    @property
    def backward_seconds(self) -> float: ...
    @property
    def optimizer_seconds(self) -> float: ...
    @property
    def gradients(self) -> list[Gradient]: ...
    @property
    def layers(self) -> list[LayerRows]: ...
    @property
    def step_samples(self) -> list[list[float]]: ...

class InexactWay:
    """An inexact way to list beside the exact ones."""

    def __init__(self, *, way: str, order: str, partners: int, rho: float = 0.0) -> None:
        """way: "prague", "dssync" or "hop". order: "cta", "atc", hop's own. partners: members of a group; for hop, the
        neighbours that a rank sends to. rho: of hop's graph (mixing_rho); that of groups is computed."""

class SearchOptions:
    def __init__(
        self,
        *,
        inexact: Sequence[InexactWay] = ...,
        choose: str = "exact",
        spread: float = 0.0,
        spare_nbytes: float = 0.0,
        gradient_as_bucket_view: bool = False,
        refused: dict[str, str] = ...,
    ) -> None:
        """choose: "exact" or the way of an inexact candidate. spread: of calibration's repeats; plain DDP stays unless
        the predicted gain is above it and above 3 %. spare_nbytes: of memory beside parameters, gradients and optimizer
        state; 0: no limit. refused: "dear", "dear sharded", "dear replicated", "ddp program", "factors" or an inexact
        way -> why it cannot be."""

class Candidate:
    """One way of synchronising gradients. Plain data: the constructor takes what the properties give."""

    def __init__(
        self,
        *,
        way: str,
        form: str,
        partners: int = 0,
        buckets: Sequence[Sequence[int]] = ...,
        algorithm: str = "",
        factor_layers: Sequence[int] = ...,
        step_seconds: float = 0.0,
        compute_seconds: float = 0.0,
        exposed_reduce_seconds: float = 0.0,
        exposed_gather_seconds: float = 0.0,
        extra_nbytes: float = 0.0,
        exact: bool = True,
        rho: float = 0.0,
        possible: bool = True,
        chosen: bool = False,
        reason: str = "",
    ) -> None: ...
    @property
    def way(self) -> str:
        """ "ddp", "dear", "prague", "dssync" or "hop"."""
    @property
    def form(self) -> str:
        """Of ddp "default" or "program" (its buckets), of dear "sharded" or "replicated", else the order."""
    @property
    def partners(self) -> int: ...
    @property
    def buckets(self) -> list[list[int]]:
        """Positions of the profile's gradients, buckets in the order in which they leave, without the gradients of
        factor layers. Where all are of one kind, the ends are the running sums of the lengths."""
    @property
    def algorithm(self) -> str:
        """Of dear: one of the link's transports."""
    @property
    def factor_layers(self) -> list[int]:
        """Positions in the profile's layers."""
    @property
    def step_seconds(self) -> float: ...
    @property
    def compute_seconds(self) -> float:
        """Of the slowest rank, with the optimizer."""
    @property
    def exposed_reduce_seconds(self) -> float: ...
    @property
    def exposed_gather_seconds(self) -> float: ...
    @property
    def extra_nbytes(self) -> float: ...
    @property
    def exact(self) -> bool: ...
    @property
    def rho(self) -> float: ...
    @property
    def possible(self) -> bool:
        """Where it is false there are no times."""
    @property
    def chosen(self) -> bool: ...
    @property
    def reason(self) -> str:
        """ "chosen", or why not."""

class TimelineSpan:
    @property
    def activity(self) -> str:
        """ "forward", "backward", "unpack", "optimizer" (compute); "reduce", "gather" (the link)."""
    @property
    def item(self) -> int:
        """The forward span, or the bucket; factor layers count on from the last bucket."""
    @property
    def begin_seconds(self) -> float: ...
    @property
    def end_seconds(self) -> float: ...

class Iteration:
    """One step in the steady state, from the end of one optimizer step to the end of the next."""

    @property
    def step_seconds(self) -> float: ...
    @property
    def exposed_reduce_seconds(self) -> float: ...
    @property
    def exposed_gather_seconds(self) -> float: ...
    @property
    def timeline(self) -> list[TimelineSpan]: ...

def search_strategies(profile: StepProfile, link: LinkTables, options: SearchOptions = ...) -> list[Candidate]:
    """All candidates: exact and possible by step time, then the impossible, then the inexact by step time. One is
    chosen. Less than a second for 1,000 gradients, without the GIL. A bad value is a ValueError naming it."""

def simulate_candidate(
    profile: StepProfile, link: LinkTables, candidate: Candidate, gradient_as_bucket_view: bool = False
) -> Iteration:
    """The step of an exact candidate with its timeline."""

def collective_seconds(algorithm: str, network: Network, nbytes: float) -> float:
    """An all-reduce by formula: twice a reduce-scatter."""

def group_rho(ranks: int, group: int) -> float:
    """The share of the variance between models that averaging in random groups leaves."""

def mixing_rho(weights: Sequence[Sequence[float]]) -> float:
    """The same of a doubly stochastic matrix: the square of its second largest singular value."""

def hop_weights(graph: str, ranks: int) -> list[list[float]]:
    """The mixing matrix of one of hop's built-in graphs, [from][to]."""

def apart_ranks(step_samples: Sequence[Sequence[float]]) -> list[int]:
    """Ranks whose median is off by more than 10 % from that of all samples."""

# torchext.auto.pipeline: tables, the simulator and the search (csrc/core/pipeline). Pure: equal arguments give equal
# results. A table is a list of ranks, each a list of actions (kind, stage, microbatch); stage j is rank j's. Kinds of
# computations: "F", "B" (the whole backward), "I" (gradients of inputs), "W" (of weights, after I).

class PipelineLayer:
    """What one layer takes for one micro-batch on one rank. Plain data."""

    def __init__(
        self,
        *,
        forward_seconds: float,
        backward_input_seconds: float,
        backward_weight_seconds: float,
        kept_nbytes: int = 0,
        output_nbytes: int = 0,
        parameter_nbytes: int = 0,
    ) -> None:
        """kept_nbytes: activations from forward to backward. Values are checked where they are used."""
    @property
    def forward_seconds(self) -> float: ...
    @property
    def backward_input_seconds(self) -> float: ...
    @property
    def backward_weight_seconds(self) -> float: ...
    @property
    def kept_nbytes(self) -> int: ...
    @property
    def output_nbytes(self) -> int: ...
    @property
    def parameter_nbytes(self) -> int: ...

class PipelineLink:
    """The network between neighbouring stages, and that of the replicas of a stage."""

    def __init__(
        self, *, transfer: CostTable, all_reduce: Mapping[int, CostTable] = ..., shared_ports: bool = False
    ) -> None:
        """all_reduce: by data width. Widths without a table, but 1, are no candidates. shared_ports: what a rank sends
        to both neighbours at a time goes over one port, and what it receives over another."""
    @staticmethod
    def straight(
        *,
        latency_seconds: float,
        bytes_per_second: float,
        all_reduce: Mapping[int, CostTable] = ...,
        shared_ports: bool = False,
    ) -> PipelineLink:
        """A transfer takes latency + nbytes / rate. A rate of infinity is allowed."""
    @property
    def transfer(self) -> CostTable: ...
    @property
    def all_reduce(self) -> dict[int, CostTable]: ...
    @property
    def shared_ports(self) -> bool: ...

class PipelineOptions:
    """What a plan may be."""

    def __init__(
        self,
        *,
        world_size: int,
        microbatches: int,
        memory_nbytes: float | None = None,
        schedules: Sequence[str] = ("1f1b",),
        stages: int | None = None,
        state_factor: float = 4.0,
        recompute: bool = False,
        overhead_seconds: float = 0.0,
        first_input_gradient: bool = False,
        split_data_parallel: bool = False,
        most_in_flight: Sequence[int] = ...,
        frontier_points: int = 12,
        most_partitions: float = 20000.0,
    ) -> None:
        """microbatches: of one step over all replicas of the pipeline; a plan of data width d runs microbatches / d in
        each. memory_nbytes: of one rank. schedules: "1f1b", "gpipe", "zero-bubble". state_factor: bytes for one of a
        parameter. recompute: not with a zero bubble. overhead_seconds: of each action. first_input_gradient: False as
        in torch, stage 0 computes no gradient of its input. split_data_parallel: zero bubbles may have a data width
        above 1, though DistributedDataParallel does not see gradients of W. most_in_flight: by stage, beside memory;
        needs stages. most_partitions: where a number of stages has so many or fewer, all are tried."""

class PlannedStage:
    """A run of layers on `data` ranks."""

    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int:
        """The last layer, which belongs to the stage."""
    @property
    def data(self) -> int: ...
    @property
    def depth(self) -> int:
        """The most micro-batches in flight."""
    @property
    def recompute(self) -> bool: ...
    @property
    def bucket_ends(self) -> list[int]:
        """One past the last layer of each bucket, counted from the stage's last layer to its first; [] if data is 1."""
    @property
    def sync_seconds(self) -> float:
        """Of the all-reduce, what comes after the stage's last backward."""
    @property
    def peak_nbytes(self) -> float: ...

class PipelineAlternative:
    @property
    def name(self) -> str:
        """ "4 stages x 2, zero-bubble" (the best of its kind) or "4 stages x 2, even 1f1b"."""
    @property
    def seconds(self) -> float:
        """Infinity: it does not fit."""
    @property
    def reason(self) -> str: ...

class PipelinePoint:
    """A plan of the frontier."""

    @property
    def memory_nbytes(self) -> float:
        """The largest peak of a stage."""
    @property
    def seconds(self) -> float: ...
    @property
    def sizes(self) -> list[int]: ...
    @property
    def depths(self) -> list[int]: ...
    @property
    def order(self) -> str: ...
    @property
    def data(self) -> int: ...
    @property
    def recompute(self) -> list[bool]: ...

class PlannedPipeline:
    @property
    def stages(self) -> list[PlannedStage]: ...
    @property
    def microbatches(self) -> int:
        """Of one replica."""
    @property
    def order(self) -> str: ...
    @property
    def table(self) -> list[list[tuple[str, int, int]]]: ...
    @property
    def seconds(self) -> float:
        """In mode "ideal"; where ports are shared, as torch runs it. So are those of alternatives and frontier."""
    @property
    def bubble(self) -> float: ...
    @property
    def exhaustive(self) -> bool:
        """All partitions were tried: the plan is the optimum of its families."""
    @property
    def alternatives(self) -> list[PipelineAlternative]:
        """Fastest first, the plan among them."""
    @property
    def frontier(self) -> list[PipelinePoint]:
        """Memory rises, time falls strictly."""

class StageTimes:
    """What the simulator knows of a stage."""

    def __init__(
        self,
        *,
        forward_seconds: float,
        backward_input_seconds: float,
        backward_weight_seconds: float,
        backward_seconds: float | None = None,
        transfer_seconds: float = 0.0,
        sync_seconds: float = 0.0,
        split_sync_seconds: float = 0.0,
        port_seconds: float = 0.0,
    ) -> None:
        """backward_seconds: None, the sum of both parts. transfer_seconds: of the output, and of its gradient back.
        sync_seconds: the all-reduce, after the last B; split_sync_seconds: after the last W. port_seconds: of
        transfer_seconds, how long the ports of both ranks are taken; 0 everywhere: links are independent."""
    @property
    def forward_seconds(self) -> float: ...
    @property
    def backward_input_seconds(self) -> float: ...
    @property
    def backward_weight_seconds(self) -> float: ...
    @property
    def backward_seconds(self) -> float: ...
    @property
    def transfer_seconds(self) -> float: ...
    @property
    def sync_seconds(self) -> float: ...
    @property
    def split_sync_seconds(self) -> float: ...
    @property
    def port_seconds(self) -> float: ...

class PipelineSpan:
    @property
    def rank(self) -> int: ...
    @property
    def kind(self) -> str:
        """ "F", "B", "I", "W"; of a transfer "SEND_F" or "SEND_B", from that rank."""
    @property
    def stage(self) -> int: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def begin_seconds(self) -> float: ...
    @property
    def end_seconds(self) -> float: ...

class PipelineRun:
    @property
    def seconds(self) -> float: ...
    @property
    def bubble(self) -> float: ...
    @property
    def end_seconds(self) -> list[float]:
        """Of each stage's last action."""
    @property
    def most_in_flight(self) -> list[int]: ...
    @property
    def spans(self) -> list[PipelineSpan]:
        """[] unless asked for; by rank, then by time."""
    @property
    def transfers(self) -> list[PipelineSpan]: ...

def plan_pipeline(layers: Sequence[PipelineLayer], link: PipelineLink, options: PipelineOptions) -> PlannedPipeline:
    """Without the GIL. A bad value is a ValueError naming it, and so is memory in which nothing fits."""

def pipeline_stage_times(
    layers: Sequence[PipelineLayer],
    link: PipelineLink,
    options: PipelineOptions,
    sizes: Sequence[int],
    recompute: Sequence[bool] = ...,
) -> list[StageTimes]:
    """Of the stages with so many layers each, for simulate_pipeline. Data width: world_size / len(sizes)."""

def simulate_pipeline(
    stages: Sequence[StageTimes],
    table: Sequence[Sequence[tuple[str, int, int]]],
    mode: str = "ideal",
    with_timeline: bool = False,
) -> PipelineRun:
    """mode: "ideal" (links are independent), "torch" (a transfer waits for its receive, where torch's runtime posts it)
    or "class" (as Schedule1F1B and ScheduleGPipe do). A deadlock is a ValueError naming rank and action."""

def pipeline_depth_table(depths: Sequence[int], microbatches: int) -> list[list[tuple[str, int, int]]]:
    """Stage j runs depths[j] forwards, then B and F in turns, then Bs. Depths never rise. All M: GPipe."""

def pipeline_zero_bubble_table(
    stages: Sequence[StageTimes], limits: Sequence[int], microbatches: int
) -> list[list[tuple[str, int, int]]]:
    """F, I and W by list scheduling, at most limits[j] in flight until W."""

def pipeline_zero_bubble_class_table(stages: int, microbatches: int) -> list[list[tuple[str, int, int]]]:
    """The order of torch's ScheduleInterleavedZeroBubble with one stage a rank."""

def lower_pipeline_table(table: Sequence[Sequence[tuple[str, int, int]]]) -> list[list[tuple[str, int, int]]]:
    """With "SEND_F", "RECV_F", "SEND_B" and "RECV_B" where torch's runtime adds them."""
