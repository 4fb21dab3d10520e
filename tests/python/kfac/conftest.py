"""Fixtures of K-FAC's tests in one process."""

from __future__ import annotations

import pytest

from torchext.optim import KFACPreconditioner


@pytest.fixture(params=[False, True], ids=["cpu", "queued"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """K-FAC's loops for the CPU, or what runs on accelerators, here with CPU tensors."""
    queued: bool = request.param
    monkeypatch.setitem(KFACPreconditioner.__init__.__kwdefaults__, "_queued", queued)  # type: ignore[arg-type]
    return queued
