"""Transfers that share a rank's port: the simulator is a slow one whose ranks are coroutines under one clock."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from test_pipeline_tables import Table, random_table

from torchext import _C

SEEDS = 200


@dataclass
class Link:
    """One direction between two ranks."""

    source: int
    target: int
    seconds: float
    port: float
    sent: list[tuple[int, float]] = field(default_factory=list)
    posted: list[float] = field(default_factory=list)
    known: list[float] = field(default_factory=list)  # when the sender knows of a receive
    arrived: dict[int, float] = field(default_factory=dict)
    free: float = 0.0

    def ready(self) -> float:
        number = len(self.arrived)
        if number >= min(len(self.sent), len(self.known)):
            return math.inf
        return max(self.free, self.sent[number][1], self.known[number])


class Network:
    """Ranks and links under one clock; everything happens when the clock shows its time."""

    def __init__(self, stages: list[_C.StageTimes], rows: list[Any]) -> None:
        self.now = 0.0
        self.links: list[Link] = []
        for j, stage in enumerate(stages[:-1]):
            for source, target in ((j, j + 1), (j + 1, j)):
                self.links.append(Link(source, target, stage.transfer_seconds, stage.port_seconds))
        self.sends, self.receives = [0.0] * len(stages), [0.0] * len(stages)
        self.ranks = [self.rank(number, stages[number], rows[number]) for number in range(len(stages))]
        self.wakes = [0.0] * len(stages)
        self.end = 0.0

    def rank(self, number: int, stage: _C.StageTimes, row: list[tuple[str, int, int]]) -> Iterator[float]:
        """Yields when it goes on; infinity: after something has arrived."""
        before, behind = 2 * number - 2, 2 * number
        seconds = {
            "F": stage.forward_seconds,
            "B": stage.backward_seconds,
            "I": stage.backward_input_seconds,
            "W": stage.backward_weight_seconds,
        }
        for kind, _, microbatch in row:
            if kind == "SEND_F":
                self.links[behind].sent.append((microbatch, self.now))
            elif kind == "SEND_B":
                self.links[before + 1].sent.append((microbatch, self.now))
            elif kind == "RECV_F":
                self.links[before].posted.append(self.now)
            elif kind == "RECV_B":
                self.links[behind + 1].posted.append(self.now)
            else:
                source = {"F": before, "B": behind + 1, "I": behind + 1}.get(kind, -1)
                if 0 <= source < len(self.links):
                    while self.links[source].arrived.get(microbatch, math.inf) > self.now:
                        yield self.links[source].arrived.get(microbatch, math.inf)
                yield self.now + seconds[kind]
                self.end = self.now

    def run_ranks(self) -> None:
        for number, rank in enumerate(self.ranks):
            while self.wakes[number] <= self.now:
                self.wakes[number] = next(rank, math.nan)

    def transfers(self) -> list[tuple[float, float, int]]:
        return [
            (max(link.ready(), self.sends[link.source], self.receives[link.target]), link.ready(), number)
            for number, link in enumerate(self.links)
        ]

    def announcements(self) -> list[tuple[float, int]]:
        return [
            (link.posted[len(link.known)], number)
            for number, link in enumerate(self.links)
            if len(link.known) < len(link.posted)
        ]

    def happen(self) -> bool:
        """One event of this moment: a transfer, or else an announcement."""
        begin, _, number = min(self.transfers(), default=(math.inf, math.inf, 0))
        if begin <= self.now:
            link = self.links[number]
            self.sends[link.source] = self.receives[link.target] = self.now + link.port
            link.free = self.now + link.seconds
            link.arrived[link.sent[len(link.arrived)][0]] = link.free
            receiver = link.target
            if self.wakes[receiver] == math.inf:
                self.wakes[receiver] = self.now  # looks again
            return True
        for posted, number in sorted(self.announcements()):
            if posted <= self.now:
                link = self.links[number]
                link.known.append(self.now + max(0.0, self.sends[link.target] - self.now) / 2)
                return True
        return False

    def play(self) -> float:
        while True:
            self.run_ranks()
            while self.happen():
                self.run_ranks()
            times = [begin for begin, *_ in self.transfers()] + [wake for wake in self.wakes if not math.isnan(wake)]
            upcoming = min(times, default=math.inf)
            if upcoming == math.inf:
                return self.end
            self.now = upcoming


def random_stages(draw: random.Random, count: int) -> list[_C.StageTimes]:
    stages = []
    for stage in range(count):
        transfer = 0 if stage + 1 == count else draw.randint(0, 8)
        stages.append(
            _C.StageTimes(
                forward_seconds=draw.randint(1, 6),
                backward_input_seconds=draw.randint(1, 6),
                backward_weight_seconds=draw.randint(1, 6),
                transfer_seconds=transfer,
                port_seconds=draw.randint(0, transfer),
            )
        )
    return stages


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_simulator_is_the_slow_one(seed: int) -> None:
    draw = random.Random(seed)
    count, microbatches = draw.randint(2, 5), draw.randint(1, 7)
    table: Table = random_table(draw, count, microbatches, split=seed % 2 == 1)
    if seed % 3 == 0:
        depths = sorted((draw.randint(1, microbatches) for _ in range(count)), reverse=True)
        table = _C.pipeline_depth_table(depths, microbatches)
    stages = random_stages(draw, count)
    slow = Network(stages, _C.lower_pipeline_table(table)).play()
    assert _C.simulate_pipeline(stages, table, "torch").seconds == pytest.approx(slow, rel=1e-12)
