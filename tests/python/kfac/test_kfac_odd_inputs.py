"""Inputs that are not laid out as usual, and layers whose factors are huge."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kfac_models import data, flat, mlp
from torch import Tensor, nn

from torchext.errors import NoSupportedLayerError
from torchext.optim import KFAC, KFACPreconditioner, layers, preconditioner

on_both_paths = pytest.mark.usefixtures("path")
ignore_prototypes = pytest.mark.filterwarnings("ignore:.*(CSR|CSC|nested|Nested).*:UserWarning")


def trained(inputs: Callable[[Tensor], Tensor], flatten: Callable[[Tensor], Tensor], **options: Any) -> Tensor:
    model = mlp()
    optimizer = KFAC(model, lr=0.1, inverse_update_steps=2, **options)
    for step in range(4):
        optimizer.zero_grad()
        rows = data(seed=step)[0] * (data(seed=step + 50)[0] > 0)
        flatten(model(inputs(rows))).sin().sum(-1).mean().backward()
        optimizer.step()
    assert optimizer.stats()["factor_updates"] == 4
    return flat(model)


def whole(output: Tensor) -> Tensor:
    return output


@on_both_paths
@ignore_prototypes
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_inputs_are_their_dense_ones(layout: str) -> None:
    found = trained(lambda rows: getattr(rows, layout)(), whole)
    torch.testing.assert_close(found, trained(whole, whole), rtol=0, atol=1e-11)


PARTS = (5, 1, 6)


@on_both_paths
@ignore_prototypes
def test_nested_inputs_are_their_rows() -> None:
    def nested(rows: Tensor) -> Tensor:
        return torch.nested.nested_tensor(list(rows.split(PARTS)), layout=torch.jagged)

    found = trained(nested, lambda output: torch.cat(output.unbind()))
    torch.testing.assert_close(found, trained(whole, whole), rtol=0, atol=1e-11)


@on_both_paths
@ignore_prototypes
def test_nested_inputs_are_reduced_as_sequences() -> None:
    """As sequences of equal length, of which there is a dense tensor."""

    def nested(rows: Tensor) -> Tensor:
        return torch.nested.nested_tensor(list(rows.split(4)), layout=torch.jagged)

    found = trained(nested, lambda output: torch.stack(output.unbind()), sequences="reduce")
    dense = trained(lambda rows: rows.reshape(3, 4, 6), whole, sequences="reduce")
    torch.testing.assert_close(found, dense, rtol=0, atol=1e-11)


@ignore_prototypes
def test_a_nested_input_of_another_layer_is_refused_by_name() -> None:
    model = nn.ModuleDict({"ids": nn.Embedding(7, 4)})
    kfac = KFACPreconditioner(model)
    ids = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"ids was called with a nested tensor.* by its name in skip_layers"):
        model["ids"](ids)
    kfac.remove()


def head() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 8), nn.Linear(8, 300, bias=False))


def test_a_layer_of_huge_factors_keeps_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    # Factors of 8 and 300: 2 (8^2 + 300^2) numbers of 4 bytes.
    needs = 2 * (8 * 8 + 300 * 300) * 4
    monkeypatch.setattr(preconditioner, "memory_here", lambda model: 8 * needs - 1)
    with pytest.warns(UserWarning, match="leaves 2 to the plain gradient") as seen:
        kfac = KFACPreconditioner(head())
    text = str(seen[0].message)
    assert "[300, 8]" in text and "an eighth" in text and "skip_layers=['2']" in text
    assert kfac.layers == ["0", "1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert KFACPreconditioner(head(), skip_layers=["2"]).layers == ["0", "1"]
        monkeypatch.setattr(preconditioner, "memory_here", lambda model: 8 * needs)
        assert KFACPreconditioner(head()).layers == ["0", "1", "2"]


def test_a_model_of_huge_layers_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditioner, "memory_here", lambda model: 1000)
    with (
        pytest.warns(UserWarning, match="leaves the model itself to the plain gradient"),
        pytest.raises(NoSupportedLayerError, match=re.escape("whose factors fit into an eighth of 1e-06 GB")),
    ):
        KFACPreconditioner(nn.Linear(100, 100))


@pytest.mark.parametrize(
    ("layer", "bias", "numbers"),
    [
        (nn.Linear(3, 5), True, 2 * (4 * 4 + 5 * 5)),
        (nn.Linear(3, 5).double(), False, 2 * 2 * (3 * 3 + 5 * 5)),
        (nn.Conv2d(4, 6, 3, groups=2), True, 2 * 2 * (19 * 19 + 3 * 3)),
        (nn.Embedding(1000, 5), False, 2 * 5 * 5),
    ],
)
def test_what_factors_take(layer: nn.Module, bias: bool, numbers: int) -> None:
    assert layers.factor_bytes(layer, bias) == 4 * numbers


def test_the_memory_of_this_host_is_known() -> None:
    assert 2**28 < layers.memory_here(nn.Linear(2, 2)) < 2**50
