"""Fixtures of the embeddings' tests in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from adaptive_device import NO_GPU, Device, load_simulated


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """How often other tests have compiled the same code does not count towards torch's limit."""
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


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
