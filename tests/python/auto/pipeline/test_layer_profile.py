"""profile() times each layer, counts what it keeps, leaves no trace, and refuses what is no chain."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_examples import chain, network
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from torchext.auto import pipeline
from torchext.auto.pipeline import LayerProfile


class Sleeping(torch.autograd.Function):
    """Takes its time for the gradient of the input and for that of the weight apart."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        time.sleep(2 * ctx.seconds * ctx.needs_input_grad[0])
        return gradient, gradient.sum(0), None


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(4)), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleeping.apply(x, self.weight, self.seconds)


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


class Constant(nn.Module):
    """A layer beside the chain: what it gives has nothing to do with what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * 2


class Shelf:
    """Where a layer puts a tensor that a later one takes."""

    tensor = torch.zeros(())


class Puts(nn.Module):
    def __init__(self, shelf: Shelf, inner: nn.Module, *, its_input: bool) -> None:
        super().__init__()
        self.inner, self.shelf, self.its_input = inner, shelf, its_input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        self.shelf.tensor = x if self.its_input else out
        return out


class Takes(nn.Module):
    def __init__(self, shelf: Shelf) -> None:
        super().__init__()
        self.shelf = shelf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shelf.tensor


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_times_and_bytes() -> None:
    found = pipeline.profile({"a": Slow(0.01), "b": Slow(0.02), "head.out": nn.Linear(4, 2)}, torch.zeros(3, 4))
    assert found.names == ("a", "b", "head.out")
    first, second, last = found.layers
    assert 0.01 <= first.forward < 0.02 <= second.forward < 0.04
    assert first.backward_input == 0  # nobody wants the gradient of what the model gets
    assert 0.04 <= second.backward_input < 0.06
    assert second.backward_weight < 0.02
    assert (first.output_bytes, last.output_bytes) == (48, 24)
    assert (first.parameter_bytes, last.parameter_bytes) == (16, 40)
    assert (found.device, found.compiled) == ("cpu", False)


def test_kept_bytes_count_each_storage_once() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Flatten())
    found = pipeline.profile(model, torch.zeros(10, 8), repeats=1)
    # The first layer keeps the micro-batch, which is there anyway; the third what the second has kept.
    assert [layer.kept_bytes for layer in found.layers] == [0, 10 * 16 * 4, 0, 0]


def test_layers_that_write_into_their_input() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    found = pipeline.profile(model, torch.zeros(10, 8), repeats=1)
    assert found.layers[1].backward_input > 0


def test_it_leaves_no_trace() -> None:
    model = network()
    model[0].weight.grad = torch.ones(16, 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    pipeline.profile(nn.Sequential(*model, nn.Dropout(0.5)), torch.randn(6, 8), repeats=2)
    torch.set_rng_state(state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(model[0].weight.grad, torch.ones(16, 8))
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name != "0.weight")


def test_random_numbers_go_on_as_before() -> None:
    state = torch.get_rng_state()
    pipeline.profile(nn.Sequential(nn.Dropout(0.5)), torch.ones(6, 8), repeats=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_words_and_frozen_layers() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2))
    found = pipeline.profile(model, torch.zeros(4, 3, dtype=torch.long), repeats=1)
    assert found.layers[0].backward_input == 0
    assert found.layers[0].output_bytes == 4 * 3 * 8 * 4


def test_saved_and_loaded(tmp_path: Path) -> None:
    found = chain()
    found.save(tmp_path / "profile.json")
    assert LayerProfile.load(tmp_path / "profile.json") == found
    text = (tmp_path / "profile.json").read_text()
    (tmp_path / "new.json").write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(ValueError, match="version must be 1, got 2"):
        LayerProfile.load(tmp_path / "new.json")


LAYER = {
    "name": "a",
    "forward": 1.0,
    "backward_input": 1,
    "backward_weight": 1,
    "kept_bytes": 1,
    "output_bytes": 1,
    "parameter_bytes": 1,
}


def test_written_by_hand() -> None:
    found = LayerProfile.of({"layers": [LAYER]})
    assert (found.layers[0].name, found.overhead, found.device) == ("a", 0.0, "cpu")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([LAYER | {"forward": float("nan")}], r"layers\[0\].forward must be a finite number, 0 or more, got nan"),
        ([LAYER | {"forward": -1}], r"layers\[0\].forward must be a finite number, 0 or more, got -1"),
        ([LAYER | {"kept_bytes": -1}], "kept_bytes of the layer 'a' must be finite and 0 or more, got -1"),
        ([{"name": "a"}], r"the key 'layers\[0\].forward' is missing"),
        ([LAYER | {"flops": 1}], r"unknown key 'layers\[0\].flops'"),
        ([LAYER, LAYER], "layers must have names of their own, got 'a' twice"),
        ([], "layers must have one or more, got none"),
    ],
)
def test_bad_profiles(layers: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerProfile.of({"layers": layers})


# ---- What is no chain ----


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        (nn.Linear(8, 8), TypeError, "takes an nn.Sequential or {name: module} in the order .*, got Linear"),
        ({}, ValueError, "the model has no layers"),
        ({"a": torch.relu}, TypeError, "the layer 'a' must be a torch.nn.Module, got builtin"),
        (
            nn.Sequential(nn.Linear(8, 4), nn.Linear(8, 4)),
            ValueError,
            r"the layer '1' does not take what '0' gives, a tensor of shape \(2, 4\) .*neighbours only",
        ),
        (nn.Sequential(nn.Linear(8, 4), Pair()), TypeError, "the layer '1' gives tuple, and stages hand one tensor on"),
        (
            nn.Sequential(nn.Linear(8, 4), Constant()),
            ValueError,
            "what the layer '1' gives does not depend on what it gets; layers must be a chain",
        ),
    ],
)
def test_what_is_no_chain(layers: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pipeline.profile(layers, torch.zeros(2, 8), repeats=1)


@pytest.mark.parametrize(
    ("puts", "its_input"),
    [(0, False), (1, True), (1, False)],
    ids=["an output", "an input", "an output without weights"],
)
def test_a_tensor_that_skips_a_layer(puts: int, its_input: bool) -> None:
    shelf = Shelf()
    layers: dict[str, nn.Module] = {"a": nn.Linear(8, 8), "b": nn.Tanh(), "c": nn.Linear(8, 8), "d": Takes(shelf)}
    name = "ab"[puts]
    layers[name] = Puts(shelf, layers[name], its_input=its_input)
    with pytest.raises(
        ValueError,
        match=f"the layer 'd' uses a tensor of '{name}' that is not its input; layers must be a chain, .*neighbours "
        f"only: make one layer of all from '{name}' to 'd'",
    ):
        pipeline.profile(layers, torch.zeros(2, 8), repeats=1)


def test_a_layer_may_skip_inside_of_itself() -> None:
    shelf = Shelf()
    block = nn.Sequential(Puts(shelf, nn.Linear(8, 8), its_input=True), nn.Tanh(), Takes(shelf))
    found = pipeline.profile({"a": nn.Linear(8, 8), "block": block, "c": nn.Linear(8, 2)}, torch.zeros(2, 8), repeats=1)
    assert found.names == ("a", "block", "c")


def test_layers_that_share_a_parameter() -> None:
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    with pytest.raises(ValueError, match="the layers '0' and '2' share a parameter, and stages do not"):
        pipeline.profile(nn.Sequential(first, nn.ReLU(), last), torch.zeros(2, 8))


@pytest.mark.usefixtures("group")
def test_wrapped_and_sharded_layers() -> None:
    with pytest.raises(TypeError, match=r"wrapped .*pass the module"):
        pipeline.profile(DistributedDataParallel(nn.Linear(8, 8)), torch.zeros(2, 8))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the layer 'a': the model is wrapped"):
        pipeline.profile({"a": DistributedDataParallel(nn.Linear(8, 8))}, torch.zeros(2, 8))

    attached = DistributedDataParallel(nn.Linear(8, 8))
    attached._torchext_synchronizer = nn.Identity()  # as attach leaves it
    with pytest.raises(TypeError, match="the layer 'a': the model is attached"):
        pipeline.profile({"a": attached}, torch.zeros(2, 8))

    class FSDPModule(nn.Linear):  # as fully_shard names the class that it puts before a module's
        pass

    with pytest.raises(TypeError, match=r"the layer 'a' is sharded \(FSDP\)"):
        pipeline.profile({"a": FSDPModule(8, 8)}, torch.zeros(2, 8))


@pytest.mark.parametrize("repeats", [0, 1001, 1.5, True])
def test_a_number_of_repeats_out_of_range(repeats: Any) -> None:
    with pytest.raises(ValueError, match="repeats must be a whole number from 1 to 1000, got"):
        pipeline.profile(network(), torch.zeros(2, 8), repeats=repeats)


def test_what_is_no_micro_batch_and_no_device() -> None:
    with pytest.raises(TypeError, match="microbatch must be a tensor, got list"):
        pipeline.profile(network(), [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device is cuda, and the layers are on cpu"):
        pipeline.profile(network(), torch.zeros(2, 8), device="cuda")
