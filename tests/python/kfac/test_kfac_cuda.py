"""K-FAC of a model on a GPU is K-FAC of that model on the CPU. What needs no GPU of it is tested in test_kfac_*.py."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from torchext.optim import KFAC, KFACPreconditioner

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")


class Net(nn.Module):
    """Every kind of layer, and a normalisation that is left alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2, stride=2, padding="valid")
        self.tokens = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(22)
        self.hidden = nn.ModuleList([nn.Linear(22, 22), nn.Linear(22, 22)])  # equal sizes: one batch
        self.head = nn.Linear(22, 3, bias=False)
        self.double()

    def forward(self, image: Tensor, token: Tensor) -> Tensor:
        x = self.grouped(torch.tanh(self.conv(image))).flatten(1)
        x = self.norm(torch.cat([x, self.tokens(token)], 1))
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


def batch(step: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    image = torch.randn(12, 1, 5, 5, generator=generator, dtype=torch.float64)
    token, target = torch.randint(0, 7, (12,), generator=generator), torch.randint(0, 3, (12,), generator=generator)
    return image.to(device), token.to(device), target.to(device)


def train(model: nn.Module, optimizer: KFAC, steps: int, device: str, first: int = 0) -> None:
    for step in range(first, first + steps):
        image, token, target = batch(step, device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(image, token), target).backward()
        optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()])


OPTIONS = {"lr": 0.1, "damping": 0.01, "inverse_update_steps": 3}


@gpu
@pytest.mark.parametrize("method", ["inverse", "eigen"])
def test_cuda_is_cpu(method: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = Net().to(device)
        train(model, KFAC(model, method=method, **OPTIONS), 8, device)
        found.append(flat(model))
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-8)


@gpu
@pytest.mark.parametrize(("before", "after"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_state_goes_from_device_to_device(before: str, after: str) -> None:
    model = Net().to(before)
    optimizer = KFAC(model, **OPTIONS)
    train(model, optimizer, 4, before)
    other = Net().to(after)
    other.load_state_dict(model.state_dict())
    resumed = KFAC(other, **OPTIONS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 4, before, first=4)
    train(other, resumed, 4, after, first=4)
    torch.testing.assert_close(flat(other), flat(model), rtol=1e-8, atol=1e-8)


@gpu
def test_layers_on_side_streams() -> None:
    found = []
    for streams in (False, True):
        model = Net().to("cuda")
        optimizer = KFAC(model, **OPTIONS)
        if streams:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                train(model, optimizer, 6, "cuda")
            torch.cuda.current_stream().wait_stream(side)
        else:
            train(model, optimizer, 6, "cuda")
        found.append(flat(model))
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-8)


@gpu
def test_nan_is_skipped_and_counted() -> None:
    model = Net().to("cuda")
    optimizer = KFAC(model, **OPTIONS)
    train(model, optimizer, 2, "cuda")
    before = flat(model)
    image, token, target = batch(2, "cuda")
    image[0, 0, 0, 0] = float("nan")
    nn.functional.cross_entropy(model(image, token), target).backward()
    optimizer.step()
    assert torch.equal(flat(model), before)
    assert optimizer.stats()["skipped"] == 1


@gpu
def test_how_often_a_step_waits_for_the_device(capfd: pytest.CaptureFixture[str]) -> None:
    """Once, for the question whether all gradients are finite; once more where inverses are made."""
    model = Net().to("cuda")
    kfac = KFACPreconditioner(model, inverse_update_steps=3)
    waits = []
    for step in range(6):
        image, token, target = batch(step, "cuda")
        model.zero_grad()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                nn.functional.cross_entropy(model(image, token), target).backward()
                kfac.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        # Of C++ without Python in between torch writes them to stderr.
        texts = [*(str(w.message) for w in caught), *capfd.readouterr().err.splitlines()]
        waits.append(sum("synchronizing CUDA operation" in text for text in texts))
    assert waits == [2, 1, 1, 2, 1, 1]


def test_layers_on_several_devices_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    with pytest.raises(ValueError, match="0 is on cpu, 1 on meta; all layers must be on one device"):
        KFAC(model)
    assert KFAC(model, skip_layers=["1"]).kfac.layers == ["0"]


def test_other_devices_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="0 is on meta; K-FAC runs on the CPU and on CUDA"):
        KFAC(nn.Sequential(nn.Linear(3, 3, device="meta")))


@gpu
def test_sums_that_overflow_are_left_out() -> None:
    model = nn.Linear(2, 1, bias=False, device="cuda")
    kfac = KFACPreconditioner(model, inverse_update_steps=1)
    (model(torch.full((1, 2), 1e30, device="cuda")) * 1e-10).sum().backward()
    assert kfac.step()
    assert kfac.stats()["factors_left_out"] == 1
    assert bool(torch.isfinite(model.weight.grad).all())  # type: ignore[arg-type]
