"""docs/reference/api.md has everything public."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import torchext
import torchext.auto
import torchext.errors
import torchext.nn
import torchext.ops
import torchext.optim
import torchext.options

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "api.md"


def names() -> set[str]:
    """All that the page shows as code."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", PAGE.read_text()))))


@pytest.mark.parametrize(
    "module",
    [torchext, torchext.auto, torchext.errors, torchext.nn, torchext.ops, torchext.optim, torchext.options],
    ids=lambda module: module.__name__,
)
def test_every_public_name_has_a_row(module: ModuleType) -> None:
    missing = sorted(set(module.__all__) - names())
    assert not missing, f"docs/reference/api.md lacks {', '.join(missing)} of {module.__name__}; add a row"


@pytest.mark.parametrize(
    "owner",
    [
        *(torchext.Synchronizer, torchext.DearSynchronizer, torchext.HopSynchronizer),
        *(torchext.ProcessGroupPrague, torchext.ProcessGroupHop),
        *(torchext.ProcessGroupDSSync, torchext.ProcessGroupDear),
        *(torchext.optim.KFACPreconditioner, torchext.nn.ChunkPruner),
        *(torchext.auto.LinkModel, torchext.auto.OperationTable, torchext.auto.Profile, torchext.auto.SyncPlan),
    ],
    ids=lambda owner: owner.__name__,
)
def test_every_public_member_has_a_row(owner: type) -> None:
    missing = sorted({name for name in vars(owner) if not name.startswith("_")} - names())
    assert not missing, f"docs/reference/api.md lacks {', '.join(missing)} of {owner.__name__}; add a row"
