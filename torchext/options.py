"""Options of each backend, passed as ``pg_options=`` to ``init_process_group`` or ``new_group``."""

from __future__ import annotations

import difflib
from datetime import timedelta
from typing import Any

from torchext._C import DeAROptions, DSSyncOptions, HopOptions, PragueOptions
from torchext.base.plain import plain

__all__ = ["DSSyncOptions", "DeAROptions", "HopOptions", "PragueOptions"]

# Of every wait. Times add up below that, in nanoseconds of 64 bits.
LONGEST_TIMEOUT = timedelta(days=3650)

# What an option must be, by its name, or else by its default.
_NAMED = {
    "bucket_mb": 'a number, or "auto"',
    "neighbours": "a list of ranks for each rank, or None",
    "weights": "a list of numbers for each rank, or None",
    "racks": "a list of an int for each rank",
}
_TYPES = {bool: "a bool", int: "an int", float: "a number", str: "a str", timedelta: "a datetime.timedelta"}


def _explain_refusals(kind: Any) -> None:
    """Has the constructor of an options class name the argument that it does not take, which C++ does not."""
    construct = kind.__init__

    def init(self: Any, *positional: Any, **options: Any) -> None:
        options = {name: _plain(value) for name, value in options.items()}
        for name, value in options.items():
            if isinstance(value, timedelta) and abs(value) > LONGEST_TIMEOUT:  # which C++ might take for another time
                raise ValueError(f"{kind.__name__}: {name} must be at most {LONGEST_TIMEOUT.days} days, got {value}")
        try:
            construct(self, *positional, **options)
        except TypeError:
            reason = _refusal(kind, construct, positional, options)
            if not reason:
                raise
            raise TypeError(f"{kind.__name__}: {reason}") from None

    init.__name__, init.__qualname__, init.__doc__ = "__init__", f"{kind.__qualname__}.__init__", construct.__doc__
    kind.__init__ = init


def _plain(value: Any) -> Any:
    """Python's numbers for NumPy's and tensors', in lists, too, and lists for their arrays."""
    if getattr(value, "ndim", 0) and hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(element) for element in value] if isinstance(value, list | tuple) else plain(value)


def _refusal(kind: Any, construct: Any, positional: tuple[Any, ...], options: dict[str, Any]) -> str:
    """What is wrong with the names or the types of arguments; empty if that is not known."""
    if positional:
        return f"takes keyword arguments only, got {', '.join(map(repr, positional))}; {kind.__name__}(option=value)"
    defaults = kind().__reduce__()[0].keywords  # all options, by name
    unknown = [name for name in options if name not in defaults]
    if unknown:
        near = [found for name in unknown for found in difflib.get_close_matches(name, defaults, n=1)]
        meant = f"; did you mean {', '.join(near)}?" if near else ""
        return f"no option {', '.join(unknown)}: allowed {', '.join(defaults)}{meant}"
    for name, value in options.items():
        if not _takes(kind, construct, name, value):
            expected = _NAMED.get(name) or _TYPES[type(defaults[name])]
            return f"{name} must be {expected}, got {value!r} ({type(value).__name__})"
    return ""


def _takes(kind: Any, construct: Any, name: str, value: Any) -> bool:
    """Whether the option can be of this type."""
    try:
        construct(kind.__new__(kind), **{name: value})
    except TypeError:
        return False
    except Exception:  # out of its range, or nothing without another
        return True
    return True


for _kind in (DeAROptions, DSSyncOptions, HopOptions, PragueOptions):
    _explain_refusals(_kind)
