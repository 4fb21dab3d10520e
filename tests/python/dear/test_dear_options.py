"""Options of "dear" out of their ranges."""

from __future__ import annotations

from typing import Any

import pytest

import torchext


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"form": "split"}, r'form must be one of sharded, replicated; got "split"'),
        ({"transport": "nccl"}, r'transport must be one of auto, hierarchical, collectives; got "nccl"'),
        ({"bucket_mb": "big"}, r'bucket_mb must be "auto" or in \[0.001, 4096\] MiB, got "big"'),
        ({"bucket_mb": 0}, r"bucket_mb must be .* got 0"),
        ({"bucket_mb": 5000}, r"bucket_mb must be .* got 5000"),
        ({"bucket_mb": -1.0}, r"bucket_mb must be .* got -1"),
        ({"bucket_mb": float("nan")}, r"bucket_mb must be .* got nan"),
    ],
    ids=str,
)
def test_an_option_out_of_range(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        torchext.DeAROptions(**options)
