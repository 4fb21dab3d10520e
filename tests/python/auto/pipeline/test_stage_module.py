"""A stage runs layers under their own names, and refuses micro-batches that differ."""

from __future__ import annotations

import pytest
import torch
from pipeline_examples import network
from torch import nn

from torchext.auto.pipeline.stage_module import StageModule


def test_names_are_those_of_the_model() -> None:
    model = nn.ModuleDict({"embed": nn.Linear(4, 4), "blocks": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
    layers = {"embed": model["embed"], "blocks.0": model["blocks"][0], "blocks.1": model["blocks"][1]}  # type: ignore[index]
    stage = StageModule(layers, 0)
    assert list(stage.state_dict()) == list(model.state_dict())
    x = torch.randn(2, 4)
    torch.testing.assert_close(stage(x), layers["blocks.1"](layers["blocks.0"](layers["embed"](x))))


@pytest.mark.parametrize("names", [["a", "a.b"], ["a.b", "a"]])
def test_a_layer_inside_of_another(names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"the layer '.*' (is inside of another layer|has others inside)"):
        StageModule({name: nn.Linear(1, 1) for name in names}, 0)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_the_model_s_own(recompute: bool) -> None:
    model = network().eval()
    x = torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    stage = StageModule(dict(model.named_children()), 1, recompute=recompute)
    found = torch.autograd.grad(stage(x).sum(), [x, *stage.parameters()])
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_gradients_come_without_gaps() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    stage = StageModule({"a": nn.Identity()}, 1)
    (gradient,) = torch.autograd.grad(stage(x).sum(), x)
    assert gradient.is_contiguous()


def test_recomputing_keeps_the_input_alone() -> None:
    def saved(recompute: bool) -> int:
        stage = StageModule({str(n): nn.Tanh() for n in range(5)}, 0, recompute=recompute)
        sizes: set[int] = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes.add(tensor.data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            stage(torch.randn(4, 8, requires_grad=True))
        return len(sizes)

    assert saved(recompute=True) <= 1
    assert saved(recompute=False) == 5


def test_micro_batches_that_differ() -> None:
    stage = StageModule({"a": nn.Linear(8, 4)}, 2)
    stage(torch.zeros(3, 8))
    with pytest.raises(ValueError, match=r"stage 2 got a micro-batch of shape \(1, 8\), and before one of \(3, 8\)"):
        stage(torch.zeros(1, 8))
