"""plan() gives the same plan on all ranks; what is wrong on one rank is raised on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, run_ranks
from rows import row, values_in_turn
from torch import nn

from torchext import auto
from torchext.auto import json_file


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1))


def step(model: Any) -> None:
    model(torch.ones(4, 64)).mean().backward()


def body_plan(rank: Rank, backend: str) -> Any:
    rank.init(backend)
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    link = auto.calibrate(max_seconds=0.1) if backend != "gloo" else None
    plan = auto.plan(model, step, link=link, allow=["prague"])
    assert plan.link is not None
    assert plan.link.backend == backend
    assert plan.link == (link or plan.link)
    link = plan.link
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    again = auto.plan(model, step, link=link, profile=plan.profile)
    assert (again.link, again.profile) == (link, plan.profile)
    named = auto.plan(model, step, link=link, profile=plan.profile, allow=["prague"], choose="prague")
    replicated = auto.plan(model, step, link=link, profile=plan.profile, form="replicated")
    dist.destroy_process_group()
    assert named.chosen is not None
    reasons = {f"{c.way} {c.form}": c.reason for c in replicated.candidates}
    return json_file.dumps(plan), plan.explain(), named.chosen.way, reasons["dear sharded"]


def test_all_ranks_have_the_same_plan() -> None:
    for backend, results in values_in_turn(
        {backend: (body_plan, backend) for backend in ("gloo", "prague")}, 3
    ).items():
        with row(backend):
            assert all(result == results[0] for result in results)
            _, text, chosen, reason = results[0]
            assert text.startswith("3 ranks on 1 host, links of ")
            assert "of gradients in 6 tensors" in text
            assert sum(line.endswith(" chosen") for line in text.splitlines()) == 1
            assert chosen == "prague"
            assert reason == "not possible: form is 'replicated'"


def raising(model: Any) -> None:
    raise LookupError("no data")


def half(model: Any) -> None:
    model[:3](torch.ones(4, 64)).mean().backward()


def reducing(model: Any) -> None:
    step(model)
    dist.barrier()


def nothing(model: Any) -> None:
    pass


def body_errors(rank: Rank) -> Any:
    rank.init("gloo")
    calls = [(raising, LookupError), (half, ValueError), (reducing, ValueError), (nothing, ValueError)]
    texts = []
    for other, kind in calls:
        with pytest.raises((kind, RuntimeError)) as error:
            auto.profile(network(), other if rank.rank == 1 else step, steps=1)
        texts.append(f"{type(error.value).__name__}: {error.value}")
    wrong = auto.plan(network(), step, link=auto.calibrate(max_seconds=0.01))
    assert wrong.link is not None
    for arguments, kind in (
        ({"choose": "prague" if rank.rank else "auto", "allow": ["prague"]}, ValueError),
        ({"link": wrong.link.with_ranks(3)}, ValueError),
        ({"memory": 1.0}, ValueError),
    ):
        with pytest.raises(kind) as error:
            auto.plan(network(), step, **arguments)  # type: ignore[arg-type]
        texts.append(str(error.value))
    dist.destroy_process_group()
    return texts


def test_errors_are_raised_on_all_ranks() -> None:
    first, second = run_ranks(body_errors, 2)
    assert first[0] == "RuntimeError: torchext.auto.profile: rank 1 raised LookupError: no data"
    assert second[0] == "LookupError: no data"
    assert first[1] == second[1]
    assert "step reaches other parameters on different ranks: '4." in first[1]
    assert "on rank 0 and none on rank 1" in first[1]
    assert "rank 1 raised ValueError" in first[2]
    assert "step makes a collective (barrier)" in first[2]
    assert "step makes a collective (barrier)" in second[2]
    assert "step leaves no gradients" in first[3]
    assert "step leaves no gradients" in second[3]
    assert "choose is 'auto' on rank 0 and 'prague' on rank 1" in first[4]
    assert first[4] == second[4]
    assert "link was measured with 3 ranks, and the group has 2" in first[5]
    assert "memory is 1 bytes, and parameters take" in second[6]
