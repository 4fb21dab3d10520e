"""What happens when LAPACK gives up on a factor: float64, then the last good inverse."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchext.optim import KFACPreconditioner

pytestmark = pytest.mark.usefixtures("path")

# The upper triangle of X^T X / n for 11 samples of 15 features, 4 of them ever active, all tiny: finite, of rank 4. As
# bits of float32, because another rounding makes it converge. syevd of MKL 2024.2 does not, in float32; float64 does.
BITS = (
    "03a88285 0 022829f4 0 0 0 0 0 0 0 0 82027b6f 0 8336bd90 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0423bae4 0 0 "
    "0 0 0 0 0 0 82d964fa 0 83c116a4 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 "
    "0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 03cb96bd 0 0288feb8 0 0 0 0 "
    "03edd992 0 0 "
)
DIM = 15


def the_matrix() -> Tensor:
    values = [struct.unpack("<f", struct.pack("<I", int(word, 16)))[0] for word in BITS.split()]
    return torch.tensor(values, dtype=torch.float32)


def full(packed: Tensor) -> Tensor:
    matrix = torch.zeros(DIM, DIM)
    matrix[torch.triu_indices(DIM, DIM).unbind()] = packed
    return matrix + matrix.triu(1).T


def load(kfac: KFACPreconditioner, state: dict[str, Any]) -> None:
    """As load_state_dict(), which refuses NaN."""
    kfac._engine.load(state["factors"], state["steps"], state["factor_updates"])


def preconditioned(a: Tensor, method: str) -> tuple[nn.Linear, KFACPreconditioner]:
    """A layer whose A is `a`, after one step that makes inverses of it."""
    torch.manual_seed(0)
    model = nn.Linear(DIM, 2, bias=False)
    kfac = KFACPreconditioner(model, method=method, kl_clip=None)
    state = kfac.state_dict()
    state["factors"] = [(torch.tensor([1.0, 0.0, 1.0]), None, None), (a, None, None)]
    kfac.load_state_dict(state)
    model.weight.grad = torch.randn(2, DIM)
    kfac.step()
    return model, kfac


def test_the_matrix_is_one_on_which_float32_gives_up() -> None:
    matrix = full(the_matrix())
    assert bool(torch.isfinite(matrix).all())
    assert int(torch.linalg.matrix_rank(matrix.double() / matrix.abs().max())) == 4
    torch.linalg.eigh(matrix.double())
    try:
        torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:
        return
    pytest.skip("the LAPACK of this torch converges on it in float32, so that the retry cannot be seen")


def test_eigh_is_tried_again_in_float64() -> None:
    model, kfac = preconditioned(the_matrix(), "eigen")
    try:
        torch.linalg.eigh(full(the_matrix()))
        retried = 0
    except torch.linalg.LinAlgError:
        retried = 1
    assert kfac.stats()["inverses_retried"] == retried
    assert kfac.stats()["inverses_kept"] == 0
    assert model.weight.grad is not None
    assert bool(torch.isfinite(model.weight.grad).all())


@pytest.mark.parametrize("method", ["inverse", "eigen"])
def test_the_last_good_inverse_is_used_where_none_can_be_made(method: str) -> None:
    """A factor with NaN, which no merge lets in, stands for one on which float64 fails too."""
    model, kfac = preconditioned(torch.ones(DIM * (DIM + 1) // 2) + the_matrix(), method)
    good = kfac.state_dict()
    gradient = torch.randn(2, DIM)
    model.weight.grad = gradient.clone()
    kfac.step()
    expected = model.weight.grad.clone()
    good["factors"][1] = (torch.full_like(the_matrix(), float("nan")), *good["factors"][1][1:])
    good["steps"] = 10  # inverses are due again
    kept = kfac.stats()["inverses_kept"]
    load(kfac, good)
    model.weight.grad = gradient.clone()
    assert kfac.step()
    assert kfac.stats()["inverses_kept"] == kept + 1
    assert torch.equal(model.weight.grad, expected)


@pytest.mark.parametrize("method", ["inverse", "eigen"])
def test_a_factor_that_fails_leaves_others_of_its_size_alone(method: str) -> None:
    """Factors of equal size are inverted in one call on accelerators."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(2)))
    rows, columns = torch.triu_indices(DIM, DIM).unbind()
    noise = [torch.randn(40, DIM) for _ in range(4)]
    packed = [(x.T @ x / 40)[rows, columns] for x in noise]  # G and A of the last layer, then of the first
    gradients = [torch.randn(DIM, DIM) for _ in range(2)]
    found = []
    for broken in (False, True):
        kfac = KFACPreconditioner(model, method=method, damping=0.1, kl_clip=None, inverse_update_steps=1)
        state = kfac.state_dict()
        if broken:
            packed[1] = torch.full_like(packed[1], float("nan"))
        state["factors"] = [(factor, None, None) for factor in packed]
        load(kfac, state)
        for layer, gradient in zip(model, gradients, strict=True):
            layer.weight.grad = gradient.clone()  # type: ignore[assignment, union-attr]
        assert kfac.step()
        assert kfac.stats()["inverses_kept"] == broken
        found.append([layer.weight.grad for layer in model])
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-4)
    assert torch.equal(found[1][1], gradients[1])  # its inverse was never made
    assert not torch.equal(found[0][1], gradients[1])
