"""Fixtures of the embeddings' tests in one process."""

from __future__ import annotations

import pytest
from adaptive_device import NO_GPU, Device, load_simulated


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The simulated device, compiled once."""
    load_simulated(tmp_path_factory.mktemp("simulated_cuda"))


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=NO_GPU)])
def device(request: pytest.FixtureRequest) -> Device:
    """Where the second of two equal tables runs."""
    if request.param == "simulated":
        request.getfixturevalue("simulated")
    return Device(request.param)
