"""K-FAC's hooks in a model: copies have none, and they go with the optimizer; on both paths of the engine."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from kfac_models import data, flat, mlp, train
from torch import nn

from torchext.optim import KFAC, SPDKFAC, KFACPreconditioner

pytestmark = pytest.mark.usefixtures("path")


def test_copies_and_pickles_of_the_model_are_plain_models() -> None:
    model = mlp()
    optimizer = KFAC(model, lr=0.1)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    train(model, optimizer, 1)
    for other in (twin, loaded):
        nn.functional.cross_entropy(other(data()[0]), data()[1]).backward()
    before = optimizer.state_dict()["kfac"]["factors"]
    optimizer.step()
    after = optimizer.state_dict()["kfac"]["factors"]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(before, after, strict=True))


def test_the_optimizer_itself_is_not_copied() -> None:
    model = mlp()
    optimizer = SPDKFAC(model)
    with pytest.raises(TypeError, match="SPDKFAC cannot be copied or pickled"):
        copy.deepcopy((model, optimizer))
    with pytest.raises(TypeError, match="load_state_dict"):
        pickle.dumps(optimizer)
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"KFACPreconditioner cannot be copied or pickled.*load_state_dict"):
            make(optimizer.kfac)


@pytest.mark.parametrize("front", [False, True])
def test_an_optimizer_that_is_gone_leaves_no_hooks(front: bool) -> None:
    model = mlp()
    optimizer: torch.optim.Optimizer
    if front:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        KFACPreconditioner(model, optimizer)
    else:
        optimizer = SPDKFAC(model)
    train(model, optimizer, 1)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert not model[0]._forward_hooks
    assert not model[2]._forward_hooks


def test_remove_takes_all_hooks_away() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFACPreconditioner(model, optimizer)
    kfac.remove()
    twin = mlp()
    train(model, optimizer, 2)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 2)
    assert torch.equal(flat(model), flat(twin))
    assert kfac.stats()["steps"] == 0
