"""Several models of one process that train on: each goes on by what became of its own group."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere, mlp, new_group
from case_choice import slow_on
from harness import Rank, elapsed_error, launch, run_ranks
from rows import values_in_one_group
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize


class Model:
    """One of several, with a group of its own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ddp = DistributedDataParallel(mlp(), process_group=group)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.02)
        self.sync = torchext.attach(self.ddp, self.optimizer, on_peer_failure="continue")

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.ddp(torch.ones(4, 8)).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def meet(self) -> None:
        self.sync.synchronize()
        equal_everywhere(self.ddp.module, self.ddp.process_group)

    def roster(self) -> tuple[int, list[int]]:
        """How many workers train it, and who has been lost."""
        stats = self.sync.stats()
        return stats["workers"], stats["lost_ranks"]


def body_in_the_other(rank: Rank) -> list[tuple[int, list[int]] | None]:
    """Ranks 1 and 2 wait for rank 3, to which the second model owes an average, in the first one's meeting."""
    rank.init("gloo", timeout=60)
    groups = [new_group("prague", [0, 1, 2]), new_group("prague", [1, 2, 3], order="atc", group_size=3)]
    first = Model(groups[0]) if rank.rank != 3 else None
    second = Model(groups[1]) if rank.rank != 0 else None
    for model in (first, second):
        if model is not None:
            for _ in range(3):
                model.step()
            model.meet()
    if second is not None:
        second.backward()  # asks for a group
    rank.report("asked")
    if first is None:
        rank.pause()
    assert first is not None
    first.meet()
    if second is not None:
        second.optimizer.step()
        while second.roster()[0] == 3:
            second.step()
        second.meet()
    for _ in range(5):
        first.step()
    first.meet()
    return [model and model.roster() for model in (first, second)]


def test_a_death_in_another_model_is_not_this_ones() -> None:
    """Rank 2 of the dead one's group is another in this one: the first model must not take that one for dead."""
    with launch(body_in_the_other, 4) as ranks:
        ranks.expect("asked")
        time.sleep(0.5)  # until they wait for it
        ranks.kill(3)
        outcomes = ranks.outcomes(deadline=60)
    assert [outcome.value for outcome in outcomes] == [
        [(3, []), None],
        [(3, []), (2, [2])],
        [(3, []), (2, [2])],
    ], outcomes


def body_no_death(rank: Rank, backend: str) -> tuple[str, tuple[str, str, float], list[tuple[int, list[int]]]]:
    first, second = Model(new_group(backend)), Model(new_group(backend))
    error = ""
    for step in range(30):
        if step == 10 and rank.rank == 1:
            torchext.backend_of(second.ddp.process_group).abort_with_reason("rank 1 died of boredom")
        first.step()
        if not error:
            try:
                second.step()
            except dist.DistBackendError as caught:
                error = str(caught)
    first.meet()

    def train_on() -> None:
        for _ in range(5):  # an average that fails in one step shows in the next
            second.step()

    later = elapsed_error(train_on)
    for _ in range(5):
        first.step()
    first.meet()
    rosters = [first.roster(), second.roster()]
    first.sync.detach()
    return error, later, rosters


def test_a_failure_of_another_kind_ends_only_its_model() -> None:
    """Nor is anybody dead because a text says so."""
    cases = {backend: (body_no_death, backend) for backend in ("prague", "dssync", "hop")}
    for backend, values in values_in_one_group(cases, 3, timeout=60).items():
        for error, (kind, text, _), rolls in values:
            assert not error or "died of boredom" in error, (backend, error)
            assert kind == "DistBackendError" and "died of boredom" in text, (backend, kind, text)
            assert rolls == [(3, []), (3, [])], backend


def body_leaves_one(rank: Rank) -> list[tuple[int, list[int]]]:
    rank.init("gloo", timeout=60)
    first, second = Model(new_group("hop")), Model(new_group("hop"))
    leaves = rank.rank == 1
    for step in range(30):
        if step == 10 and leaves:
            second.sync._leave_at_exit()
        first.step()
        if step < 10 or not leaves:
            second.step()
    first.meet()
    if not leaves:
        second.meet()
    for _ in range(5):
        first.step()
    first.meet()
    return [first.roster(), second.roster()]


def test_who_leaves_one_model_trains_on_with_the_other() -> None:
    """With hop the others wait for it in the steps of the model that it has left, and so do not meet before."""
    values = run_ranks(body_leaves_one, 3, deadline=90)
    assert [values[0], values[2]] == [[(3, []), (2, [1])]] * 2
    assert values[1][0] == (3, [])


def body_parts(rank: Rank, backend: str) -> list[tuple[int, list[int]] | None]:
    """The models' workers are not the same, and rank 3, which both lose, has another rank in each."""
    rank.init("gloo", timeout=60)
    groups = [new_group(backend), new_group(backend, [1, 2, 3])]
    models = [Model(group) for group in (groups if rank.rank != 0 else groups[:1])]
    for step in range(40):
        if step == 15 and rank.rank == 3:
            rank.report("dies")
            rank.pause()
        for model in models:
            model.step()
    for model in models:
        model.meet()
    return [model.roster() for model in models]


# Who lost whom is told by the classes that all three share.
@pytest.mark.parametrize("backend", slow_on(["prague", "dssync", "hop"], "dssync", "hop"))
def test_models_of_other_workers_lose_the_same_one(backend: str) -> None:
    with launch(body_parts, 4, backend) as ranks:
        ranks.expect("dies", [3])
        ranks.kill(3)
        outcomes = ranks.outcomes(deadline=90)
    both = [(3, [3]), (2, [2])]
    assert [outcome.value for outcome in outcomes] == [both[:1], both, both], outcomes


def body_cannot_go_on(rank: Rank) -> tuple[tuple[int, list[int]], tuple[str, str, float] | None]:
    """The workers of the second model cannot agree any more: its error is its own, and the first goes on."""
    rank.init("gloo", timeout=60)
    groups = [new_group("prague", [1, 2]), new_group("prague")]
    second = Model(groups[0]) if rank.rank in (1, 2) else None  # attached before: its turn comes first
    first = Model(groups[1])
    for _ in range(5):
        for model in (second, first):
            if model is not None:
                model.step()
    first.meet()
    if second is not None:
        membership = second.sync._recovery.membership  # type: ignore[attr-defined]

        def renew(*_: object) -> None:
            raise dist.DistBackendError("nobody knows who is left")

        membership.renew = renew
    rank.report("ready")
    if rank.rank == 2:
        rank.pause()
    while first.roster()[0] == 4:
        first.step()
    first.meet()
    return first.roster(), elapsed_error(second.step) if second is not None else None


def test_what_keeps_one_model_from_going_on_does_not_keep_another() -> None:
    with launch(body_cannot_go_on, 4) as ranks:
        ranks.expect("ready")
        ranks.kill(2)
        outcomes = ranks.outcomes(deadline=60)
    for outcome in outcomes:
        assert outcome.ok, outcome.trace
        roster, error = outcome.value
        assert roster == (3, [2]), outcome
        assert (error is None) == (outcome.rank != 1), outcome
        if error is not None:
            assert error[:2] == ("DistBackendError", "nobody knows who is left") and error[2] < 1, error
