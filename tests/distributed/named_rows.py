"""Rows of a table that one group of processes walks: it is starting processes that takes long, not what they do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def row(*values: Any) -> Iterator[None]:
    """An error inside says in which row it was raised."""
    try:
        yield
    except BaseException as error:
        error.add_note("in the row " + ", ".join(map(str, values)))
        raise
