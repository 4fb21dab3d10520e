"""The optimizer's surface, on both paths of the engine."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from kfac_models import data, flat, mlp, train
from kfac_reference import Reference, same
from torch import Tensor, nn

from torchext.errors import KFACStateError, NoSupportedLayerError
from torchext.optim import KFAC, PADKFAC, SPDKFAC, KFACPreconditioner

pytestmark = pytest.mark.usefixtures("path")


@pytest.mark.parametrize("martens", [False, True])
@pytest.mark.parametrize("method", ["inverse", "eigen"])
def test_a_network_against_the_definition(method: str, martens: bool) -> None:
    """Running averages, inverses every 3 steps, the clip over all layers, momentum and weight decay."""
    model, plain = mlp(), mlp()
    reference = Reference(
        [plain[0], plain[2]], method=method, kl_clip=1e-3, lr=0.1, inverse_every=3, damping=0.01, martens=martens
    )
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    kfac = SPDKFAC(
        model,
        lr=0.1,
        weight_decay=1e-3,
        method=method,
        damping=0.01,
        inverse_update_steps=3,
        martens_decay=martens,
    )
    for step in range(8):
        train(model, kfac, 1, step)
        sgd.zero_grad()
        inputs, targets = data(seed=step)
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        for module, found in reference.directions().items():
            module.weight.grad.copy_(found[:, :-1])  # type: ignore[union-attr, operator]
            module.bias.grad.copy_(found[:, -1])  # type: ignore[union-attr, operator]
        sgd.step()
        same(flat(model), flat(plain))


def test_one_step_reaches_the_optimum_of_a_linear_gaussian_model() -> None:
    """There G = I times the noise's scale, and A (x) G is the Hessian: K-FAC is Newton's method."""
    torch.manual_seed(0)
    inputs = torch.randn(40, 5, dtype=torch.float64)
    weights, noise = torch.randn(5, 2, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    targets = inputs @ weights + 1 + 0.1 * noise
    model = nn.Linear(5, 2).double()
    # Samples whose output gradients are exactly white: the Fisher's own, by an antithetic set of unit residuals.
    units = torch.eye(2, dtype=torch.float64).repeat(20, 1) * 2**0.5
    optimizer = KFAC(model, lr=1.0, momentum=0.0, damping=1e-12, factor_decay=0.0, kl_clip=None, inverse_update_steps=1)
    output = model(inputs)
    # The engine sees `units` as the gradients at the output; .grad is then replaced by the loss's own.
    output.backward(units / len(inputs))
    gradient = (output.detach() - targets) / len(inputs)
    model.weight.grad = gradient.T @ inputs
    model.bias.grad = gradient.sum(0)
    optimizer.step()
    design = torch.cat([inputs, torch.ones(40, 1, dtype=torch.float64)], 1)
    best = torch.linalg.lstsq(design, targets).solution.T
    same(torch.cat([model.weight, model.bias[:, None]], 1).detach(), best, 1e-5)


def test_closure_schedulers_and_groups() -> None:
    model = mlp()
    optimizer = PADKFAC(
        model, [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.0}], lr=0.1
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    inputs, targets = data()
    before = flat(model[2])

    def closure() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return float(loss.detach())

    losses = []
    for _ in range(4):
        losses.append(optimizer.step(closure))
        scheduler.step()
    assert losses[-1] < losses[0]
    assert torch.equal(flat(model[2]), before)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 16)


class Strided(nn.Module):
    """A layer, and a parameter that K-FAC leaves alone, with the strides of `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 3)
        self.base = torch.randn(6, 8)
        if how == "slice":
            self.weight = nn.Parameter(self.base[:, :6])
        else:
            self.weight = nn.Parameter(torch.randn(6, 6).t() if how == "transposed" else torch.randn(6, 6))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs @ self.weight)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["slice", "transposed", "gradient", "momentum"])
def test_any_strides_are_stepped_as_sgd_does(how: str) -> None:
    model = Strided(how)
    outside = model.base[:, 6:].clone()
    optimizer = SPDKFAC(model, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    twin = model.weight.detach().clone()
    sgd = torch.optim.SGD([twin], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = data(seed=step)
        nn.functional.cross_entropy(model(inputs.float()), targets).backward()
        gradient = model.weight.grad
        assert gradient is not None
        if how == "gradient":
            model.weight.grad = gradient = gradient.t().contiguous().t()
        if how == "momentum" and step == 1:  # as of a checkpoint made with other strides
            state = optimizer.state[model.weight]
            state["momentum_buffer"] = state["momentum_buffer"].t().contiguous().t()
        twin.grad = gradient.clone()
        optimizer.step()
        sgd.step()
        same(model.weight.detach(), twin, 1e-6)
    assert torch.equal(model.base[:, 6:], outside)


def test_a_sparse_gradient_is_stepped_as_sgd_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Linear(6, 3))
    optimizer = SPDKFAC(model, lr=0.1, momentum=0.9)
    twin = model[0].weight.detach().clone()
    sgd = torch.optim.SGD([twin], lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(0, 10, (4,))).sin().sum().backward()
        twin.grad = model[0].weight.grad.clone()
        optimizer.step()
        sgd.step()
        same(model[0].weight.detach(), twin, 1e-6)


def test_a_closure_in_front_of_another_optimizer() -> None:
    models, inputs, targets = [mlp(), mlp(), mlp()], *data()
    for model, how in zip(models, ("none", "positional", "keyword"), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = KFACPreconditioner(model, optimizer, inverse_update_steps=1)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            return float(loss.detach())

        for _ in range(3):
            if how == "none":
                closure()
                optimizer.step()
            else:
                assert (optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)) > 0
        assert kfac.stats()["steps"] == 3
    assert torch.equal(flat(models[1]), flat(models[0]))
    assert torch.equal(flat(models[2]), flat(models[0]))


class Evaluates(torch.optim.SGD):
    """Calls its closure twice."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return closure()


def test_an_optimizer_with_several_gradients_a_step_is_refused() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="optimizer = LBFGS"):
        KFACPreconditioner(model, torch.optim.LBFGS(model.parameters()))
    optimizer = Evaluates(model.parameters(), lr=0.1)
    KFACPreconditioner(model, optimizer)
    with pytest.raises(RuntimeError, match="Evaluates calls its closure more than once"):
        optimizer.step(lambda: model(data()[0]).sum().backward())


def test_kl_clip_none_and_its_bound() -> None:
    for kappa in (None, 1e-6, 1e9):
        model = mlp()
        optimizer = KFAC(model, lr=0.1, kl_clip=kappa)
        train(model, optimizer, 1)
        clip = optimizer.stats()["clip"]
        assert clip < 1 if kappa == 1e-6 else clip == 1
    optimizer.kfac.kl_clip = None
    assert optimizer.kfac.kl_clip is None


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


def test_a_state_of_another_precision_is_taken_as_torch_takes_it() -> None:
    model = mlp()
    optimizer = SPDKFAC(model)
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        values["momentum_buffer"] = values["momentum_buffer"].to(torch.float16)
    optimizer.load_state_dict(state)
    assert all(values["momentum_buffer"].dtype == model[0].weight.dtype for values in optimizer.state.values())


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 0.0}, "damping = 0: allowed above 0"),
        ({"damping": float("nan")}, "damping = nan: allowed above 0"),
        ({"factor_decay": 1.0}, r"factor_decay = 1: allowed \[0, 1\)"),
        ({"factor_decay": -0.1}, "factor_decay = -0.1"),
        ({"kl_clip": 0.0}, "kl_clip = 0: allowed above 0"),
        ({"factor_update_steps": 0}, "factor_update_steps = 0: allowed 1 or more"),
        ({"inverse_update_steps": 0}, "inverse_update_steps = 0: allowed a multiple"),
        ({"inverse_update_steps": 5, "factor_update_steps": 2}, "a multiple of factor_update_steps = 2"),
        ({"method": "lu"}, 'method = "lu": allowed inverse, eigen'),
        ({"strategy": "kaisa"}, 'strategy = "kaisa": allowed spd, pad'),
        ({"worker_fraction": 0.0}, "worker_fraction = 0: allowed above 0, up to 1"),
        ({"factor_scaling": "x"}, 'factor_scaling = "x": allowed kfc, kfac-pytorch'),
        ({"sequences": "sum"}, 'sequences = "sum": allowed expand, reduce'),
        ({"max_run_mb": 0.0}, "max_run_mb = 0: allowed above 0"),
        ({"lr": -1.0}, "lr = -1.0: allowed 0 or more"),
        ({"momentum": 1.0}, r"momentum = 1.0: allowed \[0, 1\)"),
        ({"weight_decay": -1.0}, "weight_decay = -1.0"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov = True: allowed with momentum above 0"),
        (
            {"strategy": "spd", "worker_fraction": 0.5},
            'worker_fraction = 0.5: .*="hybrid" or "auto" only, this is "spd"',
        ),
        ({"split_directions": True, "method": "eigen"}, 'split_directions = True: allowed with method="inverse" only'),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KFAC(mlp(), **options)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (KFAC, {"dampng": 1.0}, "^KFAC: no argument dampng: allowed lr, momentum, .*damping"),
        (SPDKFAC, {"dampng": 1.0}, "^SPDKFAC: no argument dampng: allowed"),
        (PADKFAC, {"optimizer": None, "_queued": True}, "^PADKFAC: no argument optimizer, _queued: allowed"),
        (KFACPreconditioner, {"dampng": 1.0}, "^KFACPreconditioner: no argument dampng: allowed optimizer, damping, "),
        (SPDKFAC, {"strategy": "auto"}, '^SPDKFAC: strategy is always "spd" here; leave it out, or use KFAC'),
    ],
)
def test_unknown_arguments(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        kind(mlp(), **options)


def test_attributes_are_checked_too() -> None:
    kfac = KFACPreconditioner(mlp())
    with pytest.raises(ValueError, match="damping = -1"):
        kfac.damping = -1.0
    assert kfac.damping == 0.003
    kfac.damping = 0.1
    assert kfac.damping == 0.1
    with pytest.raises(ValueError, match=r"lr = 0\.5: allowed without param_groups, which have their own"):
        kfac.step([{"params": [], "lr": 0.1}], lr=0.5)


def test_a_model_without_a_supported_layer() -> None:
    with pytest.raises(NoSupportedLayerError, match="no Linear, Conv"):
        KFAC(nn.Sequential(nn.LayerNorm(4)))
    with pytest.raises(NoSupportedLayerError, match="skip_layers"):
        KFAC(mlp(), skip_layers=[".*"])


def test_other_parameters_keep_their_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    kfac = KFACPreconditioner(model)
    model(data()[0]).sin().sum().backward()
    before = model[1].weight.grad.clone()
    kfac.step()
    assert torch.equal(model[1].weight.grad, before)


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


@pytest.mark.parametrize(
    ("skip", "kind", "message"),
    [
        ("0", TypeError, r"skip_layers = '0': allowed a list of regular expressions; pass \['0'\]"),
        ([3], TypeError, "skip_layers has 3: allowed regular expressions"),
        (["0", "("], ValueError, r"skip_layers has '\(': not a regular expression \(missing \)"),
        (["0", "encoderr"], ValueError, "skip_layers has 'encoderr': matches the full name of no layer"),
        (["encoder"], ValueError, r"skip_layers has 'encoder': .* r'encoder\\\.\.\*' for those inside encoder"),
    ],
    ids=str,
)
def test_patterns_that_leave_nothing_alone(skip: Any, kind: type[Exception], message: str) -> None:
    model = nn.Sequential()
    model.add_module("0", nn.Linear(3, 3))
    model.add_module("encoder", nn.Sequential(nn.Linear(3, 3), nn.Dropout()))
    with pytest.raises(kind, match=message):
        KFACPreconditioner(model, skip_layers=skip)
    assert KFACPreconditioner(model, skip_layers=(r"encoder\..*", r"encoder\.1")).layers == ["0"]


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


def test_the_plan_prints() -> None:
    model = mlp()
    optimizer = KFAC(model)
    train(model, optimizer, 2)
    text = str(optimizer.plan())
    assert "strategy spd, 1 rank(s)" in text
    assert "A 9" in text
    assert "predicted; measured" in text
