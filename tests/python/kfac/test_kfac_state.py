"""K-FAC's state_dict: what it resumes, and what is refused."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from kfac_models import flat, mlp, train
from torch import nn

from torchext.errors import KFACStateError
from torchext.optim import KFAC, SPDKFAC

on_both_paths = pytest.mark.usefixtures("path")  # what of the state is the engine's


@on_both_paths
@pytest.mark.parametrize("method", ["inverse", "eigen"])
def test_state_dict_resumes_exactly(method: str) -> None:
    models = [mlp(), mlp()]
    options: dict[str, Any] = {"lr": 0.1, "inverse_update_steps": 4, "method": method}
    whole, first = SPDKFAC(models[0], **options), SPDKFAC(models[1], **options)
    train(models[0], whole, 9)
    train(models[1], first, 6)  # between two updates of the inverses
    file = io.BytesIO()
    torch.save({"model": models[1].state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed_model = mlp()
    resumed_model.load_state_dict(saved["model"])
    resumed = SPDKFAC(resumed_model, **options)
    resumed.load_state_dict(saved["optimizer"])
    train(resumed_model, resumed, 3, first=6)
    assert torch.equal(flat(resumed_model), flat(models[0]))


def test_state_of_another_model_is_refused_and_nothing_is_loaded() -> None:
    model, other = mlp(), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizer, others = KFAC(model), KFAC(other)
    train(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(KFACStateError, match=r"another model: it has layer \('2', \[4, 8\], True\)"):
        optimizer.load_state_dict(others.state_dict())
    with pytest.raises(KFACStateError, match='no "kfac"'):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=1).state_dict())
    with pytest.raises(KFACStateError, match='method="eigen"'):
        optimizer.load_state_dict(KFAC(mlp(), method="eigen").state_dict())
    with pytest.raises(KFACStateError, match='factor_scaling="kfac-pytorch"'):
        optimizer.load_state_dict(KFAC(mlp(), factor_scaling="kfac-pytorch").state_dict())
    with pytest.raises(KFACStateError, match="1 layers, the model has 2"):
        optimizer.load_state_dict(KFAC(mlp(), skip_layers=["2"]).state_dict())
    after = optimizer.state_dict()
    assert after["state"].keys() == before["state"].keys()
    assert all(
        torch.equal(a[0], b[0]) for a, b in zip(after["kfac"]["factors"], before["kfac"]["factors"], strict=True)
    )


def _put(state: dict[str, Any], place: int, value: Any) -> None:
    entry = list(state["factors"][0])
    entry[place] = value
    state["factors"][0] = tuple(entry)


_DAMAGES: dict[str, tuple[Any, str]] = {
    "not a mapping": (lambda s: 3, "the state is of type int: allowed the mapping"),
    "no version": (lambda s: s.pop("version"), "version = None: this release reads 1"),
    "no method": (lambda s: s.pop("method"), 'the state has no "method": allowed all of version, method'),
    "no factors": (lambda s: s.pop("factors"), 'the state has no "factors"'),
    "no steps": (lambda s: s.pop("steps"), 'the state has no "steps"'),
    "negative steps": (lambda s: s.update(steps=-5), "steps = -5: allowed an int, 0 or more"),
    "steps in words": (lambda s: s.update(steps="x"), "steps = 'x': allowed an int"),
    "a bool": (lambda s: s.update(factor_updates=True), "factor_updates = True: allowed an int"),
    "too large": (lambda s: s.update(steps=2**70), "steps = 1180591620717411303424: allowed an int"),
    "no damping": (lambda s: s.update(damping=0.0), "damping = 0(.0)?: allowed above 0, finite"),
    "damping in words": (lambda s: s.update(damping="x"), "damping = 'x': allowed"),
    "a clip below 0": (lambda s: s.update(kl_clip=-1.0), "kl_clip = -1(.0)?: allowed above 0, finite; None for"),
    "layers": (lambda s: s.update(layers=[("0", [8, 6])]), r"layers = \[\('0', \[8, 6\]\)\]: allowed a list of"),
    "factors are none": (lambda s: s.update(factors=None), "factors is None: allowed a list of 4"),
    "too few": (lambda s: s["factors"].pop(), "the state has 3 factors, the model 4"),
    "no entry": (lambda s: s["factors"].__setitem__(0, None), "factor [AG] of [02] is None: allowed"),
    "no factor": (lambda s: _put(s, 0, None), "factor [AG] of [02] is None: allowed a finite, dense floating-point"),
    "shape": (lambda s: _put(s, 0, torch.zeros(3, 3)), r"factor [AG] of [02] has shape \[3, 3\]: allowed .* shape \["),
    "type": (lambda s: _put(s, 0, s["factors"][0][0].int()), "factor [AG] of [02] is torch.int32"),
    "nan": (lambda s: s["factors"][0][0].fill_(float("nan")), "factor [AG] of [02] has values that are NaN"),
    "inverse's shape": (lambda s: _put(s, 1, torch.zeros(2)), r"the inverse of factor [AG] of [02] has shape \[2\]"),
    "inverse's nan": (lambda s: s["factors"][0][1].fill_(float("inf")), "the inverse of .* or infinite"),
    "eigenvalues": (lambda s: _put(s, 2, "x"), "the eigenvalues of factor [AG] of [02] (is|are) of type str: allowed"),
}


def _unchanged(after: dict[str, Any], before: dict[str, Any]) -> bool:
    assert all(
        (one is None and other is None) or torch.equal(one, other)
        for mine, theirs in zip(after["kfac"].pop("factors"), before["kfac"].pop("factors"), strict=True)
        for one, other in zip(mine, theirs, strict=True)
    )
    for number, values in before.pop("state", {}).items():
        assert torch.equal(after["state"][number]["momentum_buffer"], values["momentum_buffer"])
    after.pop("state", None)
    return after == before


@pytest.mark.parametrize("what", _DAMAGES)
def test_a_damaged_state_is_refused_and_nothing_is_loaded(what: str) -> None:
    damage, message = _DAMAGES[what]
    method = "eigen" if what == "eigenvalues" else "inverse"
    models = [mlp(), mlp()]
    saved, optimizer = (
        SPDKFAC(model, lr=lr, method=method, inverse_update_steps=1)
        for model, lr in zip(models, (0.1, 0.3), strict=True)
    )
    train(models[0], saved, 3)
    train(models[1], optimizer, 1)
    state, before = copy.deepcopy(saved.state_dict()), copy.deepcopy(optimizer.state_dict())
    changed = damage(state["kfac"])
    if what == "not a mapping":
        state["kfac"] = changed
    with pytest.raises(KFACStateError, match=message):
        optimizer.load_state_dict(state)
    with pytest.raises(KFACStateError, match=message):
        optimizer.kfac.load_state_dict(state["kfac"])
    assert _unchanged(optimizer.state_dict(), before)
    train(models[1], optimizer, 1)
    assert torch.isfinite(flat(models[1])).all()


_HALF_FITTING: dict[str, tuple[Any, str]] = {
    "not a mapping": (lambda s: 3, "the state is of type int: allowed the mapping"),
    "no momenta": (lambda s: s.pop("state"), 'the state has no "state"'),
    "no groups": (lambda s: s.pop("param_groups"), 'the state has no "param_groups"'),
    "groups are none": (lambda s: s.update(param_groups=3), "param_groups is no list of groups"),
    "other groups": (lambda s: s["param_groups"].append(s["param_groups"][0]), r"groups of \[4, 4\] .* of \[4\]"),
    "fewer parameters": (lambda s: s["param_groups"][0]["params"].pop(), r"groups of \[3\] parameters"),
    "no rate": (lambda s: s["param_groups"][0].pop("lr"), r"param_groups\[0\] has no 'lr'"),
    "a rate below 0": (lambda s: s["param_groups"][0].update(lr=-1.0), r"param_groups\[0\]: lr = -1.0: allowed 0 or"),
    "a rate in words": (lambda s: s["param_groups"][0].update(lr="x"), r"param_groups\[0\]: .*'x'"),
    "momenta are none": (lambda s: s.update(state=None), "the momenta are None: allowed a mapping"),
    "no such parameter": (lambda s: s["state"].update({7: s["state"][0]}), "the state of parameter 7: allowed those"),
    "no buffer": (lambda s: s["state"][1].clear(), "the state of parameter 1 has nothing: allowed momentum_buffer"),
    "more": (lambda s: s["state"][1].update(step=1), "parameter 1 has momentum_buffer, step: allowed"),
    "an entry of another kind": (lambda s: s["state"].update({1: None}), "the state of parameter 1 is None: allowed"),
    "None": (lambda s: s["state"][1].update(momentum_buffer=None), "the momentum of parameter 1 is None: allowed"),
    "shape": (lambda s: s["state"][2].update(momentum_buffer=torch.zeros(3)), r"momentum of .* 2 has shape \[3\]"),
    "transposed": (lambda s: s["state"][0].update(momentum_buffer=torch.zeros(6, 8)), r"shape \[6, 8\]: .* \[8, 6\]"),
    "type": (lambda s: s["state"][1].update(momentum_buffer=torch.zeros(8).int()), "parameter 1 is torch.int32"),
    "nan": (lambda s: s["state"][1]["momentum_buffer"].fill_(float("nan")), "parameter 1 has values that are NaN"),
}


@pytest.mark.parametrize("what", _HALF_FITTING)
def test_a_state_whose_momentum_does_not_fit_is_refused_and_nothing_is_loaded(what: str) -> None:
    damage, message = _HALF_FITTING[what]
    models = [mlp(), mlp()]
    saved, optimizer = (SPDKFAC(model, lr=lr) for model, lr in zip(models, (0.1, 0.3), strict=True))
    train(models[0], saved, 3)
    train(models[1], optimizer, 1)
    state, before = copy.deepcopy(saved.state_dict()), copy.deepcopy(optimizer.state_dict())
    changed = damage(state)
    with pytest.raises(KFACStateError, match=message):
        optimizer.load_state_dict(changed if what == "not a mapping" else state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"] and after["state"].keys() == before["state"].keys()
    assert _unchanged(after, before)
    train(models[1], optimizer, 1)


def test_what_was_changed_in_training_is_a_part_of_the_state() -> None:
    models = [mlp(), mlp()]
    optimizers = [SPDKFAC(model, damping=0.01, kl_clip=0.002) for model in models]
    train(models[0], optimizers[0], 2)
    optimizers[0].kfac.damping = 0.1
    optimizers[0].kfac.kl_clip = None
    state = copy.deepcopy(optimizers[0].state_dict())
    optimizers[1].load_state_dict(state)
    assert (optimizers[1].kfac.damping, optimizers[1].kfac.kl_clip) == (0.1, None)
    # One that was saved before states said so.
    of_old = SPDKFAC(mlp(), damping=0.01, kl_clip=0.002)
    del state["kfac"]["damping"], state["kfac"]["kl_clip"]
    of_old.load_state_dict(state)
    assert (of_old.kfac.damping, of_old.kfac.kl_clip) == (0.01, 0.002)


@on_both_paths
def test_a_state_is_loaded_as_often_as_one_likes() -> None:
    """torch adds to an optimizer's defaults when it loads a state."""
    model = mlp()
    optimizer = SPDKFAC(model, lr=0.1)
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        train(model, optimizer, 1)
        optimizer.load_state_dict(copy.deepcopy(state))
        assert _unchanged(optimizer.state_dict(), copy.deepcopy(state))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5})
    assert optimizer.param_groups[1]["lr"] == 0.5 and optimizer.param_groups[1]["momentum"] == 0.9


def test_a_state_of_another_precision_is_taken_as_torch_takes_it() -> None:
    model = mlp()
    optimizer = SPDKFAC(model)
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        values["momentum_buffer"] = values["momentum_buffer"].to(torch.float16)
    optimizer.load_state_dict(state)
    assert all(values["momentum_buffer"].dtype == model[0].weight.dtype for values in optimizer.state.values())


@on_both_paths
@pytest.mark.parametrize("method", ["inverse", "eigen"])
def test_a_state_of_all_kinds_of_layers_is_taken(method: str) -> None:
    """Diagonal factors, groups, and a state without inverses."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Embedding(9, 4), nn.Conv1d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(12, 3, bias=False)
        )

    states = []
    for steps in (0, 2):
        model = made()
        optimizer = KFAC(model, method=method, inverse_update_steps=1)
        for step in range(steps):
            optimizer.zero_grad()
            tokens = torch.randint(0, 9, (8, 4), generator=torch.Generator().manual_seed(step))
            model[1:](model[0](tokens).transpose(1, 2)[..., :3]).sin().sum(1).mean().backward()  # type: ignore[index]
            optimizer.step()
        states.append(optimizer.state_dict())
        other = KFAC(made(), method=method)
        other.load_state_dict(copy.deepcopy(states[-1]))
        assert _unchanged({"kfac": other.state_dict()["kfac"]}, {"kfac": states[-1]["kfac"]})
