"""A link model says how long each operation of a process group takes, as measured at a few sizes."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchext import _C
from torchext.auto import json_file
from torchext.auto.all_ranks import check_same, checked_group, device_of, errors_on_all, own_backend
from torchext.base.plain import plain

__all__ = [
    "FORMULA",
    "NOISY",
    "LinkModel",
    "OperationTable",
    "calibrate",
    "check_number",
    "search_tables",
    "shown_bytes",
]

FORMULA = "formula"  # the backend of networks that were not measured
NOISY = 0.3  # share by which two calibrations of a link may differ before there is a warning
_CALLER = "torchext.auto.calibrate"
# Of each transport of dear's, what its two halves are called.
_HALVES = {
    "ring": ("reduce_scatter", "all_gather"),
    "hierarchical": ("reduce_scatter_hierarchical", "all_gather_hierarchical"),
}
# Of networks that were not measured: sizes of their tables, and what a core does.
_FORMULA_SIZES = tuple(4096 * 4**power for power in range(10))
_FORMULA_COPIES = 5e9  # bytes a second
_FORMULA_OPERATIONS = 5e10  # a second


@dataclass(frozen=True)
class OperationTable:
    """How long one operation takes, by the bytes of its buffer.

    Args:
        points: (bytes, seconds), sizes ascending. Of ``rows`` bytes are those of one rank's rows; of everything else
            those of the whole buffer.
        spread: By how much the two interleaved halves of the repeats differ, as a share: 0.04 is 4 %.
        measured: False where the times were derived from those of another network by formula.

    Raises:
        ValueError: No points, sizes that do not ascend, or a time that is negative or not finite.
    """

    points: tuple[tuple[int, float], ...]
    spread: float = 0.0
    measured: bool = True

    def __post_init__(self) -> None:
        self._table()

    def _table(self) -> _C.CostTable:
        return _C.CostTable(self.points)

    def seconds(self, nbytes: int) -> float:
        """How long the operation takes at any size: linear between the points, and never less than a smaller size."""
        return self._table().seconds(nbytes)

    @property
    def line(self) -> tuple[float, float]:
        """(seconds at no bytes, seconds a byte) of the straight line with the least relative error.

        It is for show, and for other networks: times are predicted by the table.
        """
        if len(self.points) < 2:
            return self.points[0][1], 0.0
        return _C.fit_line(self.points)

    @property
    def line_error(self) -> float:
        """How far the line is from a point at most, as a share of the point's time."""
        alpha, beta = self.line
        return max(abs(alpha + beta * nbytes - seconds) / seconds for nbytes, seconds in self.points if seconds > 0)


@dataclass(frozen=True)
class LinkModel:
    """What :func:`calibrate` measures of a process group's network.

    Args:
        backend: Name of the group's backend.
        device: Kind of the device whose tensors were sent: ``"cpu"`` or ``"cuda"``.
        host_of: Of each rank, a number for its host.
        tables: Operation -> table. ``all_reduce`` is the group's own; ``reduce_scatter`` and ``all_gather`` are made as
            ``dear`` makes them, and where there are rooms (see :func:`calibrate`) those with ``_hierarchical`` as it
            makes them with that transport; ``p2p`` sends to the next rank while one comes from the rank before (CPU
            only); ``rows`` gathers equal rows of all ranks.
        latency_seconds: Of one hop of a link; from ``p2p``, or from ``all_reduce`` by the terms of a ring.
        bytes_per_second: Of a link, likewise.
        copy_bytes_per_second: Of a copy in memory, on the slowest rank while all copy.
        operations_per_second: Of a small matrix product (2 M N K operations), likewise.
        elapsed_seconds: How long calibrating took.

    Raises:
        ValueError: No table of ``all_reduce``, fewer than two ranks, or a link without a rate.
    """

    backend: str
    device: str
    host_of: tuple[int, ...]
    tables: dict[str, OperationTable]
    latency_seconds: float
    bytes_per_second: float
    copy_bytes_per_second: float
    operations_per_second: float
    elapsed_seconds: float = 0.0

    def __post_init__(self) -> None:
        if "all_reduce" not in self.tables:
            raise ValueError(f"tables must have 'all_reduce', got {', '.join(self.tables) or 'none'}; calibrate anew")
        if len(self.host_of) < 2:
            raise ValueError(f"host_of must have an entry for each of 2 or more ranks, got {len(self.host_of)}")
        if not self.bytes_per_second > 0:
            raise ValueError(f"bytes_per_second must be above 0, got {self.bytes_per_second}")

    @classmethod
    def of(cls, *, latency: float, bandwidth: float, world_size: int = 2) -> LinkModel:
        """A network that was not measured, by formula; each rank has a link of its own.

        Args:
            latency: Seconds of a hop.
            bandwidth: Bytes a second of a link.
            world_size: Ranks.

        Raises:
            ValueError: A number out of range.
        """
        latency, bandwidth = check_number("latency", latency), check_number("bandwidth", bandwidth)
        if bandwidth == 0:
            raise ValueError("bandwidth must be above 0 bytes a second, got 0; 10 Gb/s are bandwidth=1.25e9")
        world_size = _checked_ranks(world_size)
        network = _C.Network(ranks=world_size, latency_seconds=latency, bytes_per_second=bandwidth)
        reduced = tuple((size, _C.collective_seconds("ring", network, size)) for size in _FORMULA_SIZES)
        sent = tuple((size, latency + size / bandwidth) for size in _FORMULA_SIZES)
        return cls(
            backend=FORMULA,
            device="cpu",
            host_of=tuple(range(world_size)),
            tables={
                "all_reduce": OperationTable(reduced, measured=False),
                "p2p": OperationTable(sent, measured=False),
            },
            latency_seconds=latency,
            bytes_per_second=bandwidth,
            copy_bytes_per_second=_FORMULA_COPIES,
            operations_per_second=_FORMULA_OPERATIONS,
        )

    @property
    def world_size(self) -> int:
        """How many ranks were measured."""
        return len(self.host_of)

    @property
    def hosts(self) -> int:
        """On how many hosts they were."""
        return len(set(self.host_of))

    @property
    def spread(self) -> float:
        """By what share two calibrations differ, of the operation where that is most."""
        return max((table.spread for table in self.tables.values()), default=0.0)

    def seconds(self, operation: str, nbytes: int) -> float:
        """How long an operation takes.

        Args:
            operation: One of ``tables``.
            nbytes: Of the buffer; of ``rows`` those of one rank.

        Raises:
            ValueError: The operation is not in the tables.
        """
        if operation not in self.tables:
            raise ValueError(f"operation must be one of {', '.join(self.tables)}, got {operation!r}")
        return self.tables[operation].seconds(nbytes)

    def scaled(self, *, rate: float | None = None, latency: float | None = None) -> LinkModel:
        """The same network with other links, by formula: what if it had 10 Gb/s?

        Each time keeps its ratio to the formula's (ring all-reduce, and its halves). What was measured of the
        hierarchical transport is left out.

        Args:
            rate: Bytes a second of a link; None: as measured.
            latency: Seconds of a hop; None: as measured.

        Raises:
            ValueError: A rate that is not above 0, a latency below 0.
        """
        if rate is not None and not check_number("rate", rate) > 0:
            raise ValueError(f"rate must be above 0 bytes a second, got {rate}; 10 Gb/s are rate=1.25e9")
        if latency is not None:
            check_number("latency", latency)
        network = _C.Network(
            ranks=self.world_size,
            latency_seconds=self.latency_seconds if latency is None else latency,
            bytes_per_second=self.bytes_per_second if rate is None else rate,
        )
        return self._on(network, self.host_of)

    def with_ranks(self, world_size: int) -> LinkModel:
        """The same links with another number of ranks, by formula, each rank with a link of its own.

        Raises:
            ValueError: Fewer than 2 ranks.
        """
        world_size = _checked_ranks(world_size)
        network = _C.Network(
            ranks=world_size, latency_seconds=self.latency_seconds, bytes_per_second=self.bytes_per_second
        )
        return self._on(network, tuple(range(world_size)))

    def _on(self, network: _C.Network, host_of: tuple[int, ...]) -> LinkModel:
        tables = search_tables(self).on(network)
        derived = {"all_reduce": tables.all_reduce}
        for transport in tables.transports:
            halves = transport.reduce_scatter, transport.all_gather
            derived |= dict(zip(_HALVES[transport.algorithm], halves, strict=True))
        if tables.rows is not None:
            derived["rows"] = tables.rows
        return dataclasses.replace(
            self,
            host_of=host_of,
            tables={
                name: OperationTable(_points(table.points), self.tables[name].spread, measured=False)
                for name, table in derived.items()
            },
            latency_seconds=network.latency_seconds,
            bytes_per_second=network.bytes_per_second,
        )

    def report(self) -> str:
        """The tables as text: a line an operation, a column a size."""
        lines = [
            f"{self.world_size} ranks on {self.hosts} host{'s' * (self.hosts > 1)}, backend {self.backend}, "
            f"{self.device}: a link has {self.latency_seconds * 1e3:.3g} ms a hop and "
            f"{self.bytes_per_second / 1e6:.4g} MB/s",
            f"copies {self.copy_bytes_per_second / 1e9:.3g} GB/s, products {self.operations_per_second / 1e9:.3g} "
            f"Gflop/s; calibration took {self.elapsed_seconds:.1f} s and repeats within {100 * self.spread:.0f} %",
        ]
        for name, table in self.tables.items():
            alpha, beta = table.line
            rate = f"{1e-6 / beta:.4g} MB/s" if beta > 0 else "-"
            lines.append(
                f"\n{name}{'' if table.measured else ' (derived)'}: line {alpha * 1e3:.3g} ms + bytes / {rate}, "
                f"at most {100 * table.line_error:.0f} % from the table; repeats within {100 * table.spread:.0f} %"
            )
            lines += [f"  {shown_bytes(nbytes):>9}  {seconds * 1e3:10.3f} ms" for nbytes, seconds in table.points]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model as JSON."""
        json_file.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LinkModel:
        """Reads what :meth:`save` wrote.

        Raises:
            ValueError: An unknown key or version, or a value out of range; the message has the key.
        """
        return json_file.load(cls, path)


def calibrate(
    group: dist.ProcessGroup | None = None, *, max_seconds: float = 5.0, device: torch.device | str | None = None
) -> LinkModel:
    """Measures the links of a process group, in seconds. Collective.

    Times the group's all-reduce, the halves of ``dear``'s, messages to the next rank and a gather of rows, at sizes
    from 4 KiB on that grow fourfold, up to 16 MiB or to a call of a quarter of a second. Each size is timed at least
    five times, in turn with all others. A time is the maximum over ranks of a rank's median. The group may be on any
    backend; nothing else should be sent meanwhile.

    On the CPU it first finds which ranks are near each other: hosts of several ranks, else racks of hosts, by the
    bandwidth between 3 to 64 hosts, in some 0.3 s a host. Where there are several such rooms of equal size, ``dear``'s
    hierarchical transport is timed, too.

    Args:
        group: A process group; None: the default one.
        max_seconds: The time that this may take, more than 0 and at most 600. The largest sizes are left out where
            they would not fit; two sizes are always measured.
        device: Where tensors lie; None: the CPU if the group carries such tensors, else the current device.

    Returns:
        The tables, the same on all ranks.

    Raises:
        RuntimeError: Before ``init_process_group``.
        TypeError: ``group`` is no process group, or does not carry tensors of ``device``.
        ValueError: ``max_seconds`` is out of range, a group of one rank, or arguments that differ between ranks.
        torch.distributed.DistBackendError: A rank was lost; plain Gloo raises its own RuntimeError.
    """
    group = checked_group(_CALLER, group)
    if group.size() < 2:
        raise ValueError(f"{_CALLER}: the group has one rank, and no links; start two or more ranks with torchrun")
    with errors_on_all(_CALLER, group):
        device = device_of(_CALLER, group, device)
        max_seconds = check_number("max_seconds", max_seconds, most=600.0)
        if max_seconds == 0:
            raise ValueError(f"{_CALLER}: max_seconds must be more than 0 and at most 600, got 0")
    check_same(_CALLER, group, {"max_seconds": max_seconds, "device": device.type})
    _C.drain_averages()  # others may wait for an average with this rank
    found = _C.calibrate_links(group, own_backend(group), device, max_seconds)
    tables = {
        table.operation: OperationTable(_points(zip(table.bytes, table.seconds, strict=True)), table.spread)
        for table in found.tables
    }
    latency, rate = _link_of(tables, group.size())
    link = LinkModel(
        backend=dist.get_backend(group),
        device=device.type,
        host_of=tuple(found.host_of),
        tables=tables,
        latency_seconds=latency,
        bytes_per_second=rate,
        copy_bytes_per_second=found.copy_bytes_per_second,
        operations_per_second=found.operations_per_second,
        elapsed_seconds=found.elapsed_seconds,
    )
    if link.spread > NOISY and group.rank() == 0:
        warnings.warn(
            f"{_CALLER}: two halves of the calibration differ by {100 * link.spread:.0f} %, more than "
            f"{100 * NOISY:.0f} %; something else uses the network or the machine. Plans need a gain above that",
            stacklevel=2,
        )
    return link


def check_number(name: str, value: float, *, most: float = math.inf) -> float:
    """A number of Python's from any that is finite, 0 or more and at most ``most``.

    Raises:
        TypeError: It is no number.
        ValueError: It is out of range.
    """
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 <= value <= most or not math.isfinite(value):
        allowed = "0 or more" if most == math.inf else f"from 0 to {most:g}"
        raise ValueError(f"{name} must be finite and {allowed}, got {value}")
    return float(value)


def _checked_ranks(world_size: int) -> int:
    world_size = plain(world_size)
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 2:
        raise ValueError(f"world_size must be a whole number from 2 on, got {world_size!r}")
    return world_size


def search_tables(link: LinkModel) -> _C.LinkTables:
    """The model as the search takes it."""
    tables = {name: table._table() for name, table in link.tables.items()}
    transports = [
        _C.Transport(algorithm=algorithm, reduce_scatter=tables[scatter], all_gather=tables[gather])
        for algorithm, (scatter, gather) in _HALVES.items()
        if scatter in tables and gather in tables
    ]
    return _C.LinkTables(
        network=_C.Network(
            ranks=link.world_size, latency_seconds=link.latency_seconds, bytes_per_second=link.bytes_per_second
        ),
        all_reduce=tables["all_reduce"],
        transports=transports,
        rows=tables.get("rows"),
        copy_bytes_per_second=link.copy_bytes_per_second,
        operations_per_second=link.operations_per_second,
    )


def shown_bytes(nbytes: float) -> str:
    """A number of bytes for a reader."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    raise AssertionError


def _points(pairs: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    return tuple((nbytes, seconds) for nbytes, seconds in pairs)


def _link_of(tables: dict[str, OperationTable], ranks: int) -> tuple[float, float]:
    """Seconds of a hop, and bytes a second."""
    if "p2p" in tables:
        alpha, beta = tables["p2p"].line
    else:  # a ring all-reduce: 2 (n - 1) hops, and 2 (n - 1) / n of the bytes over each link
        alpha, beta = tables["all_reduce"].line
        alpha, beta = alpha / (2 * (ranks - 1)), beta * ranks / (2 * (ranks - 1))
    return alpha, 1 / max(beta, 1e-15)  # no link is faster than a petabyte a second
