"""The largest of some figures, where max() loses a NaN that is not the first: max(0.0, nan) is 0.0."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def largest(*values: Any) -> float:
    """As max(), of figures or of one iterable of them; NaN if one of them is."""
    figures: Iterable[Any] = values[0] if len(values) == 1 and isinstance(values[0], Iterable) else values
    found = [float(figure) for figure in figures]
    return math.nan if any(map(math.isnan, found)) else max(found)
