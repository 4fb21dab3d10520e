"""Names of 0.1 that have new ones are there for one release more, and are the same objects."""

from __future__ import annotations

import warnings

import pytest
from torch import nn

import torchext
from torchext import errors
from torchext.optim import KFACPreconditioner


def test_old_names_are_those_of_today() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert errors.NotABackendOfOursError is errors.UnsupportedBackendError
        assert torchext.join is torchext.join_running_job


def test_max_run_mb_is_bucket_cap_mb() -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb = 0: allowed above 0"):
        KFACPreconditioner(nn.Linear(2, 2), max_run_mb=0.0)


def test_modules_that_were_pickled_whole_find_their_class() -> None:
    from torchext.nn import _lineage, lineage

    assert _lineage.Prunings is lineage.Prunings
    assert _lineage.Copied is lineage.Copied and _lineage.Origin is lineage.Origin
