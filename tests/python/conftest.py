"""Fixtures of the tests in one process."""

from __future__ import annotations

import pytest
from adaptive_device import NO_GPU, Device, load_simulated

from torchext.optim import KFACPreconditioner


@pytest.fixture(params=[False, True], ids=["cpu", "queued"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """K-FAC's loops for the CPU, or what runs on accelerators, here with CPU tensors."""
    queued: bool = request.param
    monkeypatch.setitem(KFACPreconditioner.__init__.__kwdefaults__, "_queued", queued)  # type: ignore[arg-type]
    return queued


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
