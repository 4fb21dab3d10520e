"""torchext_warm in one process: what its command line may be, and what its socket is named."""

from __future__ import annotations

import os
import re
import sys

import pytest

import torchext_warm


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "torchrun ... -m torchext_warm"),
        (["-m"], "torchrun ... -m torchext_warm"),
        (["--lr", "1"], "torchrun ... -m torchext_warm"),
        (["--preload"], "write --preload=MODULE,MODULE"),
        (["--preload=", "script.py"], "write --preload=MODULE,MODULE"),
        (["--preloads=a", "script.py"], "write --preload=MODULE,MODULE"),
    ],
)
def test_bad_arguments(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["torchext_warm", *words])
    with pytest.raises(SystemExit) as end:
        torchext_warm.main()
    assert isinstance(end.value.code, str), "which is exit status 1, the text on standard error"
    assert said in end.value.code


def test_nobody_can_know_the_name_beforehand() -> None:
    """It has a digest of what the kernel shows to this user only."""
    address = torchext_warm._address(os.getpid())
    assert address == torchext_warm._address(os.getpid()) != torchext_warm._address(os.getppid())
    assert re.fullmatch(rb"\0torchext-warm-[0-9a-f]{64}", address)
