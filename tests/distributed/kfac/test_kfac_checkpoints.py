"""K-FAC's state from several ranks loads elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import torch
from attached import equal_everywhere, flat
from harness import Rank
from kfac_net import OPTIONS, Net, train, use_path
from largest import largest
from rows import values_in_one_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from torchext.optim import KFAC

# After four steps there have been two updates of factors and one of inverses, which the next two steps use; both counts
# say what the steps from then on do.
COUNTED = OPTIONS | {"factor_update_steps": 2, "inverse_update_steps": 6, "martens_decay": True}


def body_save(rank: Rank, strategy: str, queued: bool) -> Any:
    use_path(queued)
    model = DistributedDataParallel(Net())
    optimizer = KFAC(model, strategy=strategy, **COUNTED)
    train(model, optimizer, 4, rank=rank.rank, size=rank.size)
    state = copy.deepcopy(optimizer.state_dict())  # torch's refers to the live buffers
    train(model, optimizer, 4, first=4, rank=rank.rank, size=rank.size)
    return {"optimizer": state, "flat": flat(model.module)}


def body_resume(rank: Rank, strategy: str, saved: Any, weights: Any, queued: bool) -> float:
    use_path(queued)
    module = Net()
    module.load_state_dict(weights)
    model = DistributedDataParallel(module)
    optimizer = KFAC(model, strategy=strategy, **COUNTED)
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # the test sends both ranks the same memory
    train(model, optimizer, 4, first=4, rank=rank.rank, size=rank.size)
    equal_everywhere(model.module)
    return float((flat(model.module) - saved["flat"]).abs().max() / saved["flat"].abs().max())


def weights_after(steps: int) -> Any:
    model = Net()
    train(model, KFAC(model, **COUNTED), steps)
    return model.state_dict()


def alike(one: Any, other: Any) -> bool:
    """Whether states are the same to the last bit."""
    (values, shape), (others, other_shape) = _pytree.tree_flatten(one), _pytree.tree_flatten(other)
    same = [torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(values, others, strict=True)]
    return shape == other_shape and all(same)


WAYS = [("pad", "spd", False), ("mem-opt", "pad", True), ("pad", "spd", True), ("mem-opt", "pad", False)]


def test_a_checkpoint_loads_at_another_world_size_and_strategy() -> None:
    weights = weights_after(4)
    named = {f"{before} to {after}, queued before {queued}": (before, after, queued) for before, after, queued in WAYS}
    saving = {name: (body_save, before, queued) for name, (before, _, queued) in named.items()}
    saved = {}
    for name, values in values_in_one_group(saving, 3).items():
        assert all(alike(values[0], other) for other in values[1:]), name
        saved[name] = values[0]
    resuming = {
        name: (body_resume, after, saved[name], weights, not queued) for name, (_, after, queued) in named.items()
    }
    for name, differences in values_in_one_group(resuming, 2).items():
        assert largest(differences) < 1e-5, name
