"""K-FAC's state from several ranks: it loads elsewhere, or is refused everywhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from attached import equal_everywhere, flat
from harness import Rank, run_ranks
from kfac_net import OPTIONS, Net, train, use_path
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext.errors import KFACStateError
from torchext.optim import KFAC


def body_save(rank: Rank, strategy: str, queued: bool) -> Any:
    use_path(queued)
    rank.init("gloo")
    model = DistributedDataParallel(Net())
    optimizer = KFAC(model, strategy=strategy, **OPTIONS)
    train(model, optimizer, 4, rank=rank.rank, size=rank.size)
    state = copy.deepcopy(optimizer.state_dict())  # torch's refers to the live buffers
    train(model, optimizer, 4, first=4, rank=rank.rank, size=rank.size)
    return {"optimizer": state, "flat": flat(model.module)}


def body_resume(rank: Rank, strategy: str, saved: Any, weights: Any, queued: bool) -> float:
    use_path(queued)
    rank.init("gloo")
    module = Net()
    module.load_state_dict(weights)
    model = DistributedDataParallel(module)
    optimizer = KFAC(model, strategy=strategy, **OPTIONS)
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # the test sends both ranks the same memory
    train(model, optimizer, 4, first=4, rank=rank.rank, size=rank.size)
    equal_everywhere(model.module)
    return float((flat(model.module) - saved["flat"]).abs().max() / saved["flat"].abs().max())


def weights_after(steps: int) -> Any:
    model = Net()
    train(model, KFAC(model, **OPTIONS), steps)
    return model.state_dict()


@pytest.mark.parametrize(
    ("before", "after", "queued"),
    [
        ("pad", "spd", False),
        ("mem-opt", "pad", True),
        pytest.param("pad", "spd", True, marks=pytest.mark.slow),
        pytest.param("mem-opt", "pad", False, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_loads_at_another_world_size_and_strategy(before: str, after: str, queued: bool) -> None:
    weights = weights_after(4)
    saved = run_ranks(body_save, 3, before, queued)[0]
    assert max(run_ranks(body_resume, 2, after, saved, weights, not queued)) < 1e-5


def body_refused_state(rank: Rank) -> str:
    rank.init("gloo")
    model = nn.Linear(3, 3)
    optimizer = KFAC(model)
    other = KFAC(nn.Linear(3, 2)).state_dict()
    try:
        optimizer.load_state_dict(other)
    except KFACStateError as error:
        return str(error)
    return ""


def test_a_state_of_another_model_is_refused_on_all_ranks() -> None:
    assert all("another model" in message for message in run_ranks(body_refused_state, 2))
