"""K-FAC's arguments: what is refused, and in which words, on both paths of the engine."""

from __future__ import annotations

import inspect
import typing
from collections import OrderedDict
from typing import Any

import pytest
import torch
from kfac_models import mlp
from torch import nn

from torchext.errors import NoSupportedLayerError
from torchext.optim import KFAC, PADKFAC, SPDKFAC, KFACOptions, KFACPreconditioner
from torchext.optim.kfac_options import PreconditionerOptions

pytestmark = pytest.mark.usefixtures("path")


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
        ({"direction_precision": "medium"}, 'direction_precision = "medium": allowed high, highest'),
        ({"sequences": "sum"}, 'sequences = "sum": allowed expand, reduce'),
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb = 0: allowed above 0"),
        ({"lr": -1.0}, "lr = -1.0: allowed 0 or more"),
        ({"momentum": 1.0}, r"momentum = 1.0: allowed \[0, 1\)"),
        ({"weight_decay": -1.0}, "weight_decay = -1.0"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov = True: allowed with momentum above 0"),
        (
            {"strategy": "spd", "worker_fraction": 0.5},
            'worker_fraction = 0.5: .*="hybrid" or "auto" only, this is "spd"',
        ),
        ({"split_directions": True, "method": "eigen"}, 'split_directions = True: allowed with method="inverse" only'),
        *(
            ({"split_directions": True, "strategy": strategy}, f'^split_directions = True: .*strategy="{strategy}"')
            for strategy in ("mem-opt", "dp")
        ),
        (
            {"bucket_cap_mb": 4.0, "strategy": "d-kfac"},
            '^bucket_cap_mb = 4.0: .*="d-kfac" sends every factor alone; leave',
        ),
        ({"bucket_cap_mb": 25.0, "strategy": "dp"}, '^bucket_cap_mb = 25.0: .*="dp" sends none; leave it out'),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KFAC(mlp(), **options)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (KFAC, {"dampng": 1.0}, r"^KFAC: no argument dampng: allowed lr, .*process_group; did you mean damping\?$"),
        (SPDKFAC, {"weightdecay": 0, "zzz": 1}, r"no argument weightdecay, zzz: .*; did you mean weight_decay\?$"),
        (SPDKFAC, {"zzz": 1}, "no argument zzz: .*, process_group$"),
        (SPDKFAC, {"dampng": 1.0}, "^SPDKFAC: no argument dampng: allowed"),
        (PADKFAC, {"optimizer": None, "_queued": True}, "^PADKFAC: no argument optimizer, _queued: allowed"),
        (
            KFACPreconditioner,
            {"dampng": 1.0},
            r"^KFACPreconditioner: no argument dampng: allowed optimizer, damping, .*; did you mean damping\?$",
        ),
        (SPDKFAC, {"strategy": "auto"}, '^SPDKFAC: strategy is always "spd" here; leave it out, or use KFAC'),
    ],
)
def test_unknown_arguments(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        kind(mlp(), **options)


def keywords(kind: type) -> dict[str, str]:
    """Public arguments that are passed by name, and their annotations."""
    parameters = inspect.signature(kind).parameters.values()
    named = [p for p in parameters if p.kind is p.KEYWORD_ONLY and not p.name.startswith("_") and p.name != "strategy"]
    return {parameter.name: parameter.annotation for parameter in named}


def test_a_type_checker_knows_every_option() -> None:
    of_preconditioner = keywords(KFACPreconditioner)
    for options, known in (
        (PreconditionerOptions, of_preconditioner),
        (KFACOptions, of_preconditioner | keywords(KFAC)),
    ):
        annotations = {name: reference.__forward_arg__ for name, reference in options.__annotations__.items()}
        assert annotations == known
        assert typing.get_type_hints(options).keys() == known.keys()  # can be evaluated, as editors do


@pytest.mark.parametrize("kind", [KFAC, PADKFAC, SPDKFAC, KFACPreconditioner])
def test_what_is_no_model(kind: Any) -> None:
    with pytest.raises(
        TypeError, match=f"{kind.__name__}: model must be a torch.nn.Module, got generator; pass the model"
    ):
        kind(mlp().parameters())


def test_a_learning_rate_in_the_place_of_parameters() -> None:
    with pytest.raises(TypeError, match=r"params must be parameters or groups, got 0.1; the learning rate is lr=0.1"):
        SPDKFAC(mlp(), 0.1)  # type: ignore[arg-type]


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
    with pytest.raises(NoSupportedLayerError, match=r"takes real weights, and first is torch\.complex64"):
        SPDKFAC(nn.Sequential(OrderedDict(first=nn.Linear(4, 3, dtype=torch.complex64))))
    with pytest.raises(NoSupportedLayerError, match="skip_layers"):
        KFAC(mlp(), skip_layers=[".*"])


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
