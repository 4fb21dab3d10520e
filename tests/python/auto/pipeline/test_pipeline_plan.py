"""plan() finds what the tables of the design say, explains itself, and names what is wrong with its arguments."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_examples import LINK, chain, network
from torch import nn
from torch._C._distributed_c10d import HashStore

from torchext.auto import LinkModel
from torchext.auto.__main__ import main
from torchext.auto.pipeline import (
    LayerProfile,
    PipelinePlan,
    Placement,
    Stage,
    plan,
    torch_runtime,
    verify,
)
from torchext.auto.pipeline.placement import warm_up_rows

FAST = LinkModel.of(latency=0, bandwidth=1e15)
TWO = chain(2)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def planned(**options: Any) -> PipelinePlan:
    return plan(options.pop("profile", chain()), options.pop("link", FAST), **options)


def test_a_front_loaded_plan_beats_equal_stages() -> None:
    found = planned(profile=chain(12), world_size=2, microbatches=4, stages=2)
    even = found.reference()
    assert even.sizes == (6, 6)
    assert torch_runtime.public_class(even.placement) == "Schedule1F1B"
    assert found.sizes[0] > found.sizes[1]
    assert found.seconds < even.seconds
    assert found.exhaustive
    assert found.placement.order == "1f1b"
    assert found.placement.table == warm_up_rows(found.depths, 4)
    assert found.predict(mode="ideal").seconds == pytest.approx(found.seconds)
    assert (found.peak_bytes[0] - 400 * found.sizes[0]) == 1000 * found.sizes[0] * found.depths[0]


def test_measured_networks_share_the_ports_of_ranks() -> None:
    measured = dataclasses.replace(LINK, backend="gloo")
    placement = Placement.by_depth([2, 2, 2, 2], [7, 5, 3, 1], 8)
    profile = chain(output=250_000)  # 2 ms a transfer
    shared, alone = (PipelinePlan.of(profile, link, placement) for link in (measured, LINK))
    assert shared.seconds > alone.seconds
    assert shared.predict(mode="ideal").seconds == alone.predict(mode="ideal").seconds
    found = planned(profile=profile, link=measured, world_size=4, microbatches=8, stages=4)
    assert found.seconds == pytest.approx(found.predict().seconds)
    assert found.seconds <= shared.seconds
    small = chain(output=0)
    shared, alone = (PipelinePlan.of(small, link, placement) for link in (measured, LINK))
    assert shared.seconds == pytest.approx(alone.seconds)


def test_memory_bounds_the_depths() -> None:
    free = planned(world_size=2, microbatches=4, stages=2)
    tight = planned(world_size=2, microbatches=4, stages=2, memory=max(free.peak_bytes) - 1)
    assert max(tight.peak_bytes) < max(free.peak_bytes)
    assert tight.seconds >= free.seconds
    points = free.frontier()
    assert all(a.memory < b.memory and a.seconds > b.seconds for a, b in itertools.pairwise(points))
    assert points


def test_zero_bubble_and_data_width() -> None:
    found = planned(world_size=4, microbatches=8, stages=2, schedules=("1f1b", "zero-bubble"), link=LINK)
    assert found.placement.order == "zero-bubble"
    assert found.placement.splits_backward
    assert (found.placement.data, found.placement.microbatches, found.placement.world_size) == (2, 4, 4)
    assert sum(found.placement.stages[0].sync) == 100 * found.sizes[0]


def test_tensor_width_takes_its_own_profile() -> None:
    halves = LayerProfile(
        tuple(
            dataclasses.replace(layer, forward=0.0002, backward_input=0.0002, backward_weight=0.0002)
            for layer in chain().layers
        )
    )
    found = planned(world_size=4, microbatches=4, stages=2, tensor={2: halves})
    assert {(stage.data, stage.tensor) for stage in found.placement.stages} == {(1, 2)}
    assert found.placement.world_size == 4


def test_stages_data_width_and_order_are_chosen_together() -> None:
    profile = LayerProfile(
        tuple(dataclasses.replace(layer, output_bytes=20_000, parameter_bytes=50_000) for layer in chain().layers)
    )
    options: dict[str, Any] = {"profile": profile, "link": LINK, "world_size": 4, "microbatches": 8}
    orders = ("1f1b", "gpipe", "zero-bubble")
    for memory, counts in ((None, (1, 2, 4)), (1_000_000, (2, 4))):  # one rank has no room for all layers
        free = planned(**options, memory=memory, schedules=orders)
        alone = [
            planned(**options, memory=memory, stages=stages, schedules=(order,))
            for stages in counts
            for order in orders
        ]
        assert {one.placement.data for one in alone} == {4 // stages for stages in counts}
        assert free.seconds <= 1.01 * min(one.seconds for one in alone)  # of equal times the least memory
        assert len({one.name for one in free.alternatives}) >= len(alone)


def test_what_it_says(tmp_path: Path) -> None:
    found = planned(world_size=2, microbatches=4, stages=2)
    text = found.explain()
    assert text.startswith("2 ranks: 2 stages, each on 1 rank, 4 micro-batches through each pipeline, 1F1B")
    assert "all ways to cut the layers were tried" in text
    assert "even 1f1b" in text
    assert found.module_names(0)[0] == "layer0"
    assert list(found.split_spec()) == [found.module_names(1)[0]]
    assert found.table() == [list(row) for row in found.placement.table]
    found.write_csv(tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text() == found.placement.csv()
    found.save(tmp_path / "plan.json")
    assert PipelinePlan.load(tmp_path / "plan.json") == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version must be 1, got 2"),
        ({"seconds": None}, "seconds must be a finite number, 0 or more, got None"),
        ({"bubble": -1}, "bubble must be a finite number, 0 or more, got -1"),
        ({"flops": 1}, "unknown key 'flops'"),
        ({"state_factor": ...}, "the key 'state_factor' is missing"),
    ],
)
def test_bad_files_of_plans(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "plan.json"
    planned(world_size=2, microbatches=4, stages=2).save(path)
    data = {key: value for key, value in (json.loads(path.read_text()) | change).items() if value is not ...}
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        PipelinePlan.load(path)


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from torchext.auto.pipeline.gantt import draw_frontier

    found = planned(world_size=2, microbatches=4, stages=2, schedules=("1f1b", "zero-bubble"), link=LINK)
    found.timeline(tmp_path / "plan.png")
    draw_frontier(tmp_path / "frontier.png", found)
    assert (tmp_path / "plan.png").stat().st_size > 1000
    assert (tmp_path / "frontier.png").stat().st_size > 1000


def test_a_plan_by_hand_and_its_modes() -> None:
    profile = LayerProfile(tuple(dataclasses.replace(layer, output_bytes=100_000) for layer in chain(4).layers))
    by_hand = PipelinePlan.of(profile, LINK, Placement.by_depth([1, 3], [3, 1], 4))
    ideal, torch_mode = by_hand.predict(mode="ideal"), by_hand.predict()
    assert ideal.seconds <= torch_mode.seconds
    assert by_hand.seconds == torch_mode.seconds
    assert {span.kind for span in ideal.spans} == {"F", "B"}
    assert {span.kind for span in ideal.transfers} == {"SEND_F", "SEND_B"}
    with pytest.raises(ValueError, match="mode"):
        by_hand.predict(mode="best")
    gpipe = PipelinePlan.of(profile, LINK, Placement.by_depth([1, 3], [4, 4], 4, order="gpipe"))
    assert gpipe.seconds == gpipe.predict(mode="class").seconds  # what runs it
    assert by_hand.predict(mode="torch") == torch_mode


def test_a_link_that_was_measured_for_small_messages_only() -> None:
    profile = LayerProfile(tuple(dataclasses.replace(layer, output_bytes=1 << 20) for layer in chain().layers))
    sent = dataclasses.replace(LINK.tables["p2p"], points=LINK.tables["p2p"].points[:2])
    short = dataclasses.replace(LINK, tables=LINK.tables | {"p2p": sent})
    text = planned(profile=profile, link=short, world_size=2, microbatches=2, stages=2).explain()
    assert "transfers of 1 MiB: no message above 16 KiB was measured, so calibrate longer" in text
    assert "calibrate longer" not in planned(profile=profile, link=LINK, world_size=2, microbatches=2).explain()


def test_a_model_that_torch_traces() -> None:
    from torch.distributed.pipelining import pipeline

    found = planned(profile=chain(5), world_size=2, microbatches=2, stages=2)
    names = LayerProfile(
        tuple(dataclasses.replace(layer, name=str(number)) for number, layer in enumerate(found.profile.layers))
    )
    found = dataclasses.replace(found, profile=names)
    pipe = pipeline(network().eval(), mb_args=(torch.zeros(2, 8),), split_spec=found.split_spec())
    assert pipe.num_stages == 2
    own = {name.split(".")[0] for name, _ in pipe.get_stage_module(0).named_parameters()}
    assert own == {name for name in found.module_names(0) if list(network()[int(name)].parameters())}


def test_verify_compares_steps() -> None:
    found = planned(world_size=1, microbatches=2)
    checked = verify(found, lambda: torch.zeros(1).add_(1), 3)
    assert len(checked.steps) == 3
    assert checked.error > 0
    assert str(checked).startswith("predicted ")
    with pytest.raises(ValueError, match="steps must be a whole number from 1 to 1000, got 0"):
        verify(found, lambda: None, 0)
    with pytest.raises(TypeError, match="schedule_step must be callable, got int"):
        verify(found, 3)  # type: ignore[arg-type]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain().save(tmp_path / "p.json")
    LINK.save(tmp_path / "l.json")
    words = ["pipeline", "--profile", str(tmp_path / "p.json"), "--link", str(tmp_path / "l.json"), "--world", "2"]
    words += ["--microbatches", "4", "--memory", "1MB", "--stages", "2"]
    assert main([*words, "--csv", str(tmp_path / "out.csv"), "--save", str(tmp_path / "plan.json")]) == 0
    assert "2 ranks: 2 stages" in capsys.readouterr().out
    assert (tmp_path / "out.csv").read_text().startswith("0F0,")
    assert PipelinePlan.load(tmp_path / "plan.json").memory == 1_000_000
    assert main([*words, "--memory", "1000"]) == 1
    assert "memory" in capsys.readouterr().err


# ---- Bad input ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 9, "world_size": 9}, "9 stages need a layer each, and the profile has 8; take fewer"),
        ({"stages": 3}, "stages is 3, which does not divide world_size, 4"),
        ({"microbatches": 0}, "microbatches must be a whole number from 1 to 1048576, got 0"),
        ({"microbatches": 1.5}, "microbatches must be a whole number from 1 to 1048576, got 1.5"),
        ({"world_size": 0}, "world_size must be a whole number from 1"),
        ({"memory": 100, "stages": 4}, r"memory.* 100.*or more, with .*; stage \d, layers"),
        ({"memory": "12 GiBs"}, "memory must be bytes, or a text as '12GiB' or '500MB', got '12 GiBs'"),
        ({"memory": 0}, "memory must be above 0 bytes, got 0"),
        ({"memory": -1}, "memory must be finite and 0 or more, got -1"),
        ({"schedules": ("2f2b",)}, "schedules must be of 1f1b, gpipe, zero-bubble, got '2f2b'"),
        ({"schedules": ()}, "schedules must have one or more of .*, got none"),
        ({"state_factor": 0.5}, "state_factor must be 1 or more"),
        ({"tensor": {2: chain(3)}}, "the profile of tensor width 2 is of other layers"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(**({"world_size": 4, "microbatches": 4} | options))


def test_arguments_of_another_type() -> None:
    with pytest.raises(TypeError, match=r"link must be a torchext.auto.LinkModel, got float"):
        plan(chain(), 1.0, world_size=2, microbatches=2)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"profile must be a torchext.auto.pipeline.LayerProfile or a mapping, got list"
    ):
        plan([], FAST, world_size=2, microbatches=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("memory", "expected"), [("12GiB", 12 << 30), ("500 MB", 500_000_000), ("1.5KiB", 1536), ("7", 7), (9, 9)]
)
def test_memory_as_text(memory: Any, expected: int) -> None:
    from torchext.auto.pipeline.planning import checked_memory

    assert checked_memory(memory) == expected


def test_compiled_layers_are_not_split() -> None:
    compiled = dataclasses.replace(chain(), compiled=True)
    found = planned(profile=compiled, world_size=2, microbatches=4, stages=2, schedules=("1f1b", "zero-bubble"))
    assert found.placement.order == "1f1b"
    assert found.alternatives[-1].reason == "torch does not split the backward pass of compiled layers"
    with pytest.raises(ValueError, match="torch does not split the backward pass of compiled layers"):
        planned(profile=compiled, world_size=2, microbatches=4, schedules=("zero-bubble",))


@pytest.mark.usefixtures("group")
def test_compiled_layers_are_not_run_split() -> None:
    profile = LayerProfile(tuple(dataclasses.replace(layer, name=str(place)) for place, layer in enumerate(TWO.layers)))
    split = Placement((Stage(0, 1),), 2, "zero-bubble", (("0F0", "0I0", "0W0", "0F1", "0I1", "0W1"),))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].compile()
    with pytest.raises(ValueError, match="the layer '1' is compiled, and torch does not split the backward pass"):
        PipelinePlan.of(profile, LINK, split).stage(model, dist.group.WORLD)
    PipelinePlan.of(profile, LINK, Placement.by_depth([2], [1], 2)).stage(model, dist.group.WORLD)


def test_fewer_micro_batches_than_stages() -> None:
    found = planned(world_size=4, microbatches=2, stages=4)
    assert found.placement.microbatches == 2
    assert torch_runtime.public_class(found.placement) != "Schedule1F1B"


@pytest.mark.usefixtures("group")
def test_a_plan_for_another_model_or_world() -> None:
    world = dist.group.WORLD
    names = {str(number): nn.Linear(8, 8) for number in range(5)}
    profile = LayerProfile(
        tuple(dataclasses.replace(layer, name=str(number)) for number, layer in enumerate(chain(5).layers))
    )
    two = PipelinePlan.of(profile, LINK, Placement.by_depth([2, 3], [2, 1], 2))
    with pytest.raises(
        ValueError, match="the plan has 2 stages, and the pipeline's group 1 ranks; plan for this world"
    ):
        two.stage(network(), world)
    one = PipelinePlan.of(profile, LINK, Placement.by_depth([5], [1], 2))
    with pytest.raises(ValueError, match="layer 1 is '1' in the plan and 'relu' in the model"):
        one.stage({"0": nn.ReLU(), "relu": nn.ReLU()}, world)
    with pytest.raises(ValueError, match="the plan has 5 layers, and the model 6"):
        one.stage({**names, "5": nn.ReLU()}, world)
    wide = PipelinePlan.of(profile, LINK, Placement((Stage(0, 4, data=2),), 2, "1f1b", warm_up_rows([1], 2)))
    with pytest.raises(ValueError, match="the plan has 2 ranks for each stage, and dp has 1"):
        wide.stage(network(), world)
    with pytest.raises(TypeError, match="group must be a process group"):
        one.stage(network(), 3)  # type: ignore[arg-type]
    shared = dict(names)
    shared["4"] = shared["0"]
    with pytest.raises(ValueError, match="the layers '0' and '4' share a parameter"):
        one.stage(shared, world)


@pytest.mark.usefixtures("group")
def test_widths_that_differ_are_not_run() -> None:
    stages = (Stage(0, 3, data=2), Stage(4, 7, data=1))
    found = dataclasses.replace(
        planned(world_size=2, microbatches=2, stages=2), placement=Placement(stages, 2, "1f1b", warm_up_rows([2, 1], 2))
    )
    model = {f"layer{number}": nn.Linear(8, 8) for number in range(8)}

    with pytest.raises(ValueError, match="the stages have data widths 2, 1, and torch's stages talk one to one"):
        found.stage(model, dist.group.WORLD)
    assert found.placement.data == 0


@pytest.mark.usefixtures("group")
def test_a_torch_without_what_runs_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {f"layer{number}": nn.Linear(8, 8) for number in range(8)}
    whole = PipelinePlan.of(chain(), LINK, Placement.by_depth([8], [2], 4))
    monkeypatch.setattr(torch_runtime, "MISSING", ("_PipelineScheduleRuntime._load_csv",))
    stage = whole.stage(model, dist.group.WORLD)
    with pytest.raises(
        ValueError, match=r"torch .* lacks _PipelineScheduleRuntime._load_csv.*Schedule1F1B on stages of 8"
    ):
        whole.schedule(stage, nn.functional.mse_loss)
    for depth, kind in ((1, "Schedule1F1B"), (4, "ScheduleGPipe")):
        public = PipelinePlan.of(chain(), LINK, Placement.by_depth([8], [depth], 4))
        assert type(public.schedule(stage, nn.functional.mse_loss)).__name__ == kind


@pytest.mark.usefixtures("group")
def test_one_stage_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    profile = LayerProfile(
        tuple(dataclasses.replace(layer, name=str(number)) for number, layer in enumerate(chain().layers))
    )
    found = planned(profile=profile, world_size=1, microbatches=2)
    stage = found.stage(model, dist.group.WORLD)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    losses: list[torch.Tensor] = []
    found.schedule(stage, nn.functional.mse_loss).step(x, target=y, losses=losses)
    gradient = model[0].weight.grad
    assert gradient is not None
    expected = torch.autograd.grad(nn.functional.mse_loss(model(x), y), model[0].weight)[0]
    torch.testing.assert_close(gradient, expected)
    other = PipelinePlan.of(profile, LINK, Placement.by_depth([4, 4], [2, 1], 2))
    with pytest.raises(ValueError, match="got stage 0 of 1 on rank 0, and the plan has 2"):
        other.schedule(stage, nn.functional.mse_loss)
