"""A placement says which layers stand on which rank, and what each rank does in which order."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchext.auto import json_file

__all__ = ["ORDERS", "Placement", "Stage", "action", "even_sizes", "parsed", "warm_up_rows"]

ORDERS = ("1f1b", "gpipe", "zero-bubble")
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True)
class Stage:
    """A run of layers, and the ranks that hold it.

    Args:
        first: Position of its first layer.
        last: Position of its last layer, which belongs to it.
        data: Ranks that hold the stage, each with data of its own.
        tensor: Ranks over which each of these divides the stage's tensors.
        depth: Micro-batches that are in flight here at once, at most.
        recompute: Whether activations are dropped after the forward pass and computed again for the backward pass.
        sync: Bytes of the buckets of gradients, in the order in which they leave; empty where ``data`` is 1.

    Raises:
        ValueError: A number that is out of range.
    """

    first: int
    last: int
    data: int = 1
    tensor: int = 1
    depth: int = 1
    recompute: bool = False
    sync: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise ValueError(f"a stage must have a layer or more, got first={self.first} and last={self.last}")
        for name in ("data", "tensor", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of a stage must be 1 or more, got {getattr(self, name)}")

    @property
    def size(self) -> int:
        """How many layers it has."""
        return self.last - self.first + 1


@dataclass(frozen=True)
class Placement:
    """Stages, micro-batches and the order of work: data, tensor and pipeline parallelism in one.

    Plain data parallelism is one stage with ``data`` = N; a plain pipeline is N stages with ``data`` = 1.

    Args:
        stages: From the model's first layers to its last.
        microbatches: Into which a batch is cut.
        order: ``"1f1b"`` (any warm-up depth), ``"gpipe"`` or ``"zero-bubble"``.
        table: Of each stage its actions, in order: stage, what, micro-batch. ``"2F0"`` is the forward pass, ``"2B0"``
            the whole backward pass, ``"2I0"`` the gradient of the input, and ``"2W0"`` that of the weights.

    Raises:
        ValueError: Stages with a gap, or a table that is not complete or cannot go on; with rank and action.
    """

    stages: tuple[Stage, ...]
    microbatches: int
    order: str
    table: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"microbatches must be 1 or more, got {self.microbatches}")
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {self.order!r}")
        next_layer = 0
        for number, stage in enumerate(self.stages):
            if stage.first != next_layer:
                raise ValueError(
                    f"stage {number} must begin with layer {next_layer}, got {stage.first}; a pipeline has each layer "
                    "once, in order"
                )
            next_layer = stage.last + 1
        if len(self.table) != len(self.stages) or not self.stages:
            raise ValueError(
                f"table must have a row for each stage, got {len(self.table)} rows and {len(self.stages)} stages"
            )
        for number, row in enumerate(self.table):
            _check_row(number, row, self.microbatches)
        _check_progress(self.table)

    @classmethod
    def by_depth(
        cls, sizes: Sequence[int], depths: Sequence[int], microbatches: int, *, data: int = 1, order: str = "1f1b"
    ) -> Placement:
        """Stages of so many layers, of which stage j starts with ``depths[j]`` forward passes and then takes turns.

        Depths of p - j are strict 1F1B, and depths of all micro-batches are GPipe. They must not rise from one stage
        to the next.
        """
        ends = list(itertools.accumulate(sizes))
        stages = tuple(
            Stage(end - size, end - 1, data=data, depth=min(depth, microbatches))
            for size, end, depth in zip(sizes, ends, depths, strict=True)
        )
        return cls(stages, microbatches, order, warm_up_rows(depths, microbatches))

    @property
    def layers(self) -> int:
        """How many layers all stages have together."""
        return self.stages[-1].last + 1

    @property
    def world_size(self) -> int:
        """Ranks of all stages together."""
        return sum(stage.data * stage.tensor for stage in self.stages)

    @property
    def data(self) -> int:
        """Ranks that hold a stage, the same for all stages; 0 where they differ."""
        widths = {stage.data for stage in self.stages}
        return widths.pop() if len(widths) == 1 else 0

    @property
    def is_gpipe(self) -> bool:
        """Whether every stage takes all forward passes first: torch's ScheduleGPipe runs such a table."""
        return self.table == warm_up_rows([self.microbatches] * len(self.stages), self.microbatches)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are actions of their own."""
        return any(entry[1] == "W" for row in self.table for entry in map(parsed, row))

    def csv(self) -> str:
        """The table as torch's pipelines read it: a row for each rank."""
        return "".join(",".join(row) + "\n" for row in self.table)

    def fingerprint(self) -> str:
        """A short text that two placements share only if they are equal."""
        return hashlib.sha256(json_file.dumps(self).encode()).hexdigest()[:16]


def even_sizes(layers: int, stages: int) -> list[int]:
    """Equal numbers of layers, the first stages with one more where they do not divide."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def action(stage: int, kind: str, microbatch: int) -> str:
    """The text of an action."""
    return f"{stage}{kind}{microbatch}"


def parsed(text: str) -> tuple[int, str, int]:
    """Stage, kind and micro-batch of an action.

    Raises:
        ValueError: The text is none.
    """
    found = _ACTION.fullmatch(text)
    if found is None:
        raise ValueError(f"an action must be stage, one of F, B, I, W, and micro-batch, as '2F0', got {text!r}")
    return int(found[1]), found[2], int(found[3])


def warm_up_rows(depths: Sequence[int], microbatches: int) -> tuple[tuple[str, ...], ...]:
    """The table in which stage j starts with ``depths[j]`` forward passes, and then takes turns.

    Depths of p - j are strict 1F1B, and depths of all micro-batches are GPipe.
    """
    rows = []
    for stage, wanted in enumerate(depths):
        depth = min(wanted, microbatches)
        kinds = [("F", number) for number in range(depth)]
        for number in range(microbatches):
            kinds.append(("B", number))
            if depth + number < microbatches:
                kinds.append(("F", depth + number))
        rows.append(tuple(action(stage, *entry) for entry in kinds))
    return tuple(rows)


def _check_row(stage: int, row: Sequence[str], microbatches: int) -> None:
    """Each micro-batch goes forward once, and then backward once."""
    done: dict[int, str] = {}
    for text in row:
        owner, kind, microbatch = parsed(text)
        if owner != stage or microbatch >= microbatches:
            raise ValueError(f"rank {stage} has the action {text!r}, which is not of its stage or its micro-batches")
        before = done.get(microbatch, "")
        if {"F": "", "B": "F", "I": "F", "W": "FI"}[kind] != before:
            raise ValueError(f"rank {stage} has the action {text!r} after {before or 'nothing'} of that micro-batch")
        done[microbatch] = before + kind
    for microbatch in range(microbatches):
        if done.get(microbatch, "") not in ("FB", "FIW"):
            raise ValueError(f"rank {stage} does not take micro-batch {microbatch} forward and backward")


def _check_progress(table: Sequence[Sequence[str]]) -> None:
    """Every rank comes to the end of its row."""
    places = [0] * len(table)
    done: set[tuple[int, str, int]] = set()
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(table):
            while places[stage] < len(row) and _can_run(parsed(row[places[stage]]), done, len(table)):
                _, kind, microbatch = parsed(row[places[stage]])
                done.add((stage, "B" if kind == "I" else kind, microbatch))
                places[stage] += 1
                moved = True
    for stage, row in enumerate(table):
        if places[stage] < len(row):
            raise ValueError(
                f"the table cannot go on: rank {stage} waits before {row[places[stage]]!r} for ever; depths must not "
                "rise from one stage to the next"
            )


def _can_run(entry: tuple[int, str, int], done: set[tuple[int, str, int]], stages: int) -> bool:
    stage, kind, microbatch = entry
    if kind == "F":
        return stage == 0 or (stage - 1, "F", microbatch) in done
    if kind in "BI":
        return stage == stages - 1 or (stage + 1, "B", microbatch) in done
    return True
