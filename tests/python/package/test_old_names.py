"""Names of 0.1 that have new ones are there for one release more, and are the same objects."""

from __future__ import annotations

import warnings

import torchext
from torchext import errors


def test_old_names_are_those_of_today() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert errors.NotABackendOfOursError is errors.UnsupportedBackendError
        assert torchext.join is torchext.join_running_job
