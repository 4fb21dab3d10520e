"""Python's numbers for those of NumPy and of tensors without dimensions, wherever a number or a flag is taken."""

from __future__ import annotations

from typing import Any

__all__ = ["plain"]


def plain(value: Any) -> Any:
    """The number of Python's that NumPy or a tensor without dimensions holds; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
