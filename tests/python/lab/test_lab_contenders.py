"""The ways to train that the lab compares: how they are named, that they count, and that they are right."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_benchmarks import contenders, launch, training
from torch import nn

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("text", "name", "way", "bucket_mb"),
    [
        ("ddp", "ddp", contenders.Training, None),
        ("ddp:4", "ddp 4", contenders.Training, 4.0),
        ("zero", "zero", contenders.ZeroTraining, None),
        ("fsdp2:0.5", "fsdp2 0.5", contenders.FSDP2Training, 0.5),
    ],
)
def test_contenders_over_gloo(text: str, name: str, way: type[contenders.Training], bucket_mb: float | None) -> None:
    got = contenders.contender(text, group_size=3)
    assert (got.name, got.way, got.bucket_mb, got.backend) == (name, way, bucket_mb, "gloo")
    assert got.lockstep
    assert not got.tunes
    assert got.pg_options() is None


def test_contenders_of_torchext() -> None:
    prague = contenders.contender("prague:smart", group_size=3)
    assert prague.options == {"group_size": 3, "generator": "smart", "order": "cta"}
    assert not prague.lockstep
    auto = contenders.contender("dear:sharded", allreduce_fallback=False)
    assert auto.options == {"form": "sharded", "bucket_mb": "auto", "allreduce_fallback": False}
    assert auto.lockstep
    assert auto.tunes
    fixed = contenders.contender("dear:replicated/2")
    assert (fixed.name, fixed.options) == ("dear replicated/2", {"form": "replicated", "bucket_mb": 2.0})
    assert fixed.tunes  # whether a plain all-reduce is faster
    assert fixed.without_fallback().options == {**fixed.options, "allreduce_fallback": False}
    assert prague.without_fallback() == prague
    shuffled = contenders.contender("dssync:topology/cta", group_size=2)
    assert shuffled.options == {"group_size": 2, "schedule": "topology", "order": "cta"}
    assert shuffled.lockstep
    assert shuffled.most_ahead > fixed.most_ahead == 2
    hop = contenders.contender("hop:backup=1,max_ig=4+max_jump=10+order=serial")
    assert hop.options == {"backup_workers": 1, "max_iteration_gap": 4, "max_jump": 10, "order": "serial"}
    assert not hop.lockstep and not hop.tunes and not hop.keeps_the_mean
    assert contenders.contender("hop").options == {} and contenders.contender("hop:max_ig=2").keeps_the_mean


@pytest.mark.parametrize("text", ["", "dpp", "ddp:big", "zero:overlap", "hop:backup", "hop:=1"])
def test_bad_contenders(text: str) -> None:
    with pytest.raises(ValueError, match="contenders"):
        contenders.contender(text)


def test_layers_are_grouped_by_size() -> None:
    layers: list[nn.Module] = [nn.Linear(256, 1024, bias=False) for _ in range(5)]  # 1 MiB each
    assert [len(group) for group in contenders.grouped(layers, None)] == [1] * 5
    assert [len(group) for group in contenders.grouped(layers, 2)] == [2, 2, 1]
    assert [len(group) for group in contenders.grouped(layers, 100)] == [5]


def test_a_window_of_other_ways_counts_and_checks() -> None:
    texts = ["zero", "fsdp2:0.01"]
    settings = {
        "contenders": texts,
        "options": {},
        "workload": {"layers": 3, "parameter_bytes": 36_000, "forward_ms": 3.0, "backward_ms": 6.0, "growth": 2.0},
        "stragglers": "none",
        "seed": 0,
        "repeats": 1,
        "warmup_s": 0.1,
        "window_s": 0.4,
        "check_steps": 2,
    }
    got = launch.launch("lab.workloads.training:ranks", ranks=2, settings=settings, deadline_s=200)
    for name in (contenders.contender(text).name for text in texts):
        assert 1 < training.gradients_per_second(got, 0.4)[name][0] <= 2 / 0.009
        assert got[0]["checks"][name]["error"] < 1e-4


# --- the right answer --------------------------------------------------------------------------------------------

REFERENCE_RANKS = """
import functools
import torch
from lab.workloads import contenders, reference

MAKE = functools.partial(torch.optim.Adam, lr=0.01)

def loss(model, rank, step):
    generator = torch.Generator().manual_seed(10 * rank + step)
    return (model.body(torch.randn(4, 6, generator=generator)) ** 2).mean()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))

    def forward(self, rank, step):
        return loss(self, rank, step)

def distances(rank):
    start = [weight.detach().clone() for weight in Model().parameters()]
    expected = reference.train_alone(Model(), MAKE, loss, world_size=rank.world_size, steps=3)
    found = {}
    for text in ("ddp", "zero", "fsdp2"):
        with rank.process_group("gloo"):
            training = contenders.contender(text).prepare(Model(), MAKE)
            for step in range(3):
                training.optimizer.zero_grad()
                training.model(rank.rank, step).backward()
                training.optimizer.step()
            found[text] = reference.distance(training, start, expected)
            with torch.no_grad():
                next(training.module.parameters()).mul_(1.5)
            found[text + " wrong"] = reference.distance(training, start, expected)
    return found
"""


def test_every_way_reaches_what_one_process_reaches(tmp_path: Path) -> None:
    (tmp_path / "reference_ranks.py").write_text(REFERENCE_RANKS)
    for found in launch.launch("reference_ranks:distances", ranks=2, deadline_s=200, folder=tmp_path):
        for text, apart in found.items():
            assert (apart > 0.1) if text.endswith("wrong") else (apart < 1e-4), (text, apart)
