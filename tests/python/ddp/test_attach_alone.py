"""What ``attach`` and its synchronizers take and refuse, by a group of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.backends import BACKENDS


@pytest.fixture
def init() -> Iterator[Callable[..., None]]:
    """Makes the default group; it ends with the test."""

    def make(backend: str, **options: Any) -> None:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, **options)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def detail(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's debug mode DETAIL."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    dist.set_debug_level_from_env()
    yield
    monkeypatch.undo()
    dist.set_debug_level_from_env()


each_backend = pytest.mark.parametrize("backend", sorted(BACKENDS))


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def step(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()


# ---- Groups ----


def test_before_init_process_group() -> None:
    model = nn.Linear(4, 1)
    with pytest.raises(RuntimeError, match=r"before torch\.distributed\.init_process_group"):
        torchext.attach(model, sgd(model))  # type: ignore[arg-type]


@each_backend
def test_a_group_without_time_or_with_centuries(init: Callable[..., None], backend: str) -> None:
    text = f"timeout of a {backend} group must be more than 0 and at most 3650 days"
    for value in (timedelta(0), timedelta.max, timedelta(days=365 * 300), timedelta(days=3651)):
        with pytest.raises(ValueError, match=text):
            init(backend, timeout=value)


@pytest.mark.usefixtures("detail")
def test_prague_in_the_debug_mode_in_which_torch_has_all_ranks_meet(init: Callable[..., None]) -> None:
    init("prague")
    ddp = DistributedDataParallel(nn.Linear(4, 1))
    with pytest.raises(ValueError, match=r"TORCH_DISTRIBUTED_DEBUG=DETAIL .* set it to INFO"):
        torchext.attach(ddp, sgd(ddp))


# ---- Models and optimizers ----


@each_backend
def test_parameters_of_another_attached_model(init: Callable[..., None], backend: str) -> None:
    """Two wrappers of the same parameters: a module that is wrapped anew, and a part that two models have."""
    init(backend)
    encoder = nn.Linear(4, 4)
    model, other = nn.Sequential(encoder, nn.Linear(4, 1)), nn.Sequential(encoder, nn.Linear(4, 2))
    first = DistributedDataParallel(model)
    sync = torchext.attach(first, sgd(first))
    for module in (model, other):
        again = DistributedDataParallel(module)
        with pytest.raises(ValueError, match=r"\(0\.weight, .* are those of a model .* call detach\(\) of what"):
            torchext.attach(again, sgd(again))
    sync.detach()
    again = DistributedDataParallel(model)
    optimizer = sgd(again)
    sync = torchext.attach(again, optimizer)
    step(again, optimizer)
    sync.detach()


@each_backend
def test_an_optimizer_that_sends_parameters_itself(init: Callable[..., None], backend: str) -> None:
    init(backend)
    ddp = DistributedDataParallel(nn.Linear(4, 1))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.Adam)
    with pytest.raises(TypeError, match=r"ZeroRedundancyOptimizer sends .* optimizer_class itself; dear"):
        torchext.attach(ddp, zero)
    torchext.attach(ddp, sgd(ddp)).detach()


@pytest.mark.parametrize("backend", ["prague", "dear"])
def test_lists_of_optimizers(init: Callable[..., None], backend: str) -> None:
    init(backend)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)))
    matrices = [p for p in ddp.parameters() if p.ndim == 2]
    others = [p for p in ddp.parameters() if p.ndim == 1]
    first, second = torch.optim.SGD(matrices, lr=0.1), torch.optim.SGD(others, lr=0.1)
    whole = sgd(ddp)
    given: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "list of optimizers is empty"),
        ([first], ValueError, "does not own 4 of the model's trainable"),
        ([first, first, second], ValueError, r"2 of the model's parameters .*0.weight.* more than once"),
        ([first, whole], ValueError, "share no parameter"),
        ([first, None], TypeError, "or a list of them, got NoneType"),
        ({"a": first}, TypeError, "or a list of them, got dict"),
    ]
    for optimizers, error, text in given:
        with pytest.raises(error, match=text):
            torchext.attach(ddp, optimizers)
    sync = torchext.attach(ddp, (first, second))
    with pytest.raises(RuntimeError, match=r"attached with another optimizer \(SGD, SGD\)"):
        whole.step()
    sync.detach()


class Personal(nn.Module):
    """With a head that DDP is told to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.own = nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))


def test_dear_wants_an_optimizer_of_its_own_for_what_is_ignored(init: Callable[..., None]) -> None:
    init("dear")
    model = Personal()
    ignored = [name for name in model.state_dict() if name.startswith("own.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"told to ignore own\.0\.weight, own\.0\.bias, .* an optimizer of its own"):
        torchext.attach(ddp, sgd(model))


# ---- Numbers ----


@pytest.mark.parametrize(
    ("whole", "real"),
    [(np.int64, np.float64), (np.int32, np.float32), (torch.tensor, torch.tensor)],
    ids=["numpy", "numpy, narrow", "tensors"],
)
@pytest.mark.parametrize("backend", ["prague", "hop", "dssync", "dear"])
def test_numbers_of_others(init: Callable[..., None], backend: str, whole: Any, real: Any) -> None:
    """Of NumPy, and tensors without dimensions, given to attach and to a synchronizer."""
    init(backend)
    ddp = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = sgd(ddp)
    sync = torchext.attach(ddp, optimizer, bucket_mb="auto" if backend == "hop" else real(0.5))
    for _ in range(2):
        ddp(torch.ones(2, 4)).sum().backward()
        sync.clip_grad_norm_(real(0.5))
        optimizer.step()
        optimizer.zero_grad()
    sync.synchronize()
    sync.load_state_dict({"version": whole(1), "steps": whole(2)})
    with pytest.raises(ValueError, match="steps must be an int"):
        sync.load_state_dict({"version": 1, "steps": real(2.0)})
    with pytest.raises(ValueError, match="steps must be an int"):
        sync.load_state_dict({"version": 1, "steps": np.bool_(True)})
    sync.detach()


@each_backend
def test_steps_that_no_counter_holds(init: Callable[..., None], backend: str) -> None:
    init(backend)
    ddp = DistributedDataParallel(nn.Linear(4, 1))
    sync = torchext.attach(ddp, sgd(ddp))
    for steps in (2**62 + 1, 2**63 - 1, 2**63, 2**64, -1):
        with pytest.raises(ValueError, match=r"steps must be an int in \[0, 2\*\*62\]"):
            sync.load_state_dict({"version": 1, "steps": steps})
    sync.detach()
