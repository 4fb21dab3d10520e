"""Saves frozen dataclasses as JSON, and loads them with a check of every key and every number."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["dumps", "load", "loads", "save"]

_VERSION = 1
_Value = TypeVar("_Value")


def dumps(value: Any) -> str:
    """The text of a frozen dataclass: its fields, the name of its class, and the version of the format."""
    head = {"format": f"torchext.auto.{type(value).__name__}", "version": _VERSION}
    return json.dumps(head | dataclasses.asdict(value), indent=1, allow_nan=False)


def loads(kind: type[_Value], text: str, source: str = "the text") -> _Value:
    """The dataclass that :func:`dumps` made a text of.

    Args:
        kind: Its class.
        text: JSON.
        source: What the text is called in errors.

    Raises:
        ValueError: No JSON, another class or version, a key that is unknown or missing, or a value out of range; the
            message has the key.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is no JSON: {error}; save it anew") from None
    expected = f"torchext.auto.{kind.__name__}"
    found = data.pop("format", None) if isinstance(data, dict) else None
    if found != expected:
        raise ValueError(f"{source}: format must be {expected!r}, got {found!r}; load it with the class that saved it")
    version = data.pop("version", None)
    if version != _VERSION:
        raise ValueError(
            f"{source}: version must be {_VERSION}, got {version!r}; this torchext reads no other, so measure anew"
        )
    value: _Value = _read(kind, data, "", source)
    return value


def save(value: Any, path: str | os.PathLike[str]) -> None:
    """Writes :func:`dumps`' text to a file."""
    Path(path).write_text(dumps(value) + "\n")


def load(kind: type[_Value], path: str | os.PathLike[str]) -> _Value:
    """Reads what :func:`save` wrote; see :func:`loads`."""
    return loads(kind, Path(path).read_text(), os.fspath(path))


def _read(kind: Any, data: Any, key: str, source: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):  # of one type and None
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if data is None else _read(inner, data, key, source)
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, data, key, source)
    if origin is dict:
        _check(isinstance(data, dict), key, source, "an object", data)
        return {name: _read(arguments[1], value, _inside(key, name), source) for name, value in data.items()}
    if origin is tuple:
        _check(isinstance(data, list), key, source, "a list", data)
        kinds = [arguments[0]] * len(data) if arguments[-1] is Ellipsis else list(arguments)
        _check(len(kinds) == len(data), key, source, f"a list of {len(kinds)}", data)
        parts = enumerate(zip(kinds, data, strict=True))
        return tuple(_read(part, value, f"{key}[{i}]", source) for i, (part, value) in parts)
    return _read_plain(kind, data, key, source)


def _read_fields(kind: Any, data: Any, key: str, source: str) -> Any:
    _check(isinstance(data, dict), key, source, "an object", data)
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    for name in data:
        if name not in names:
            raise ValueError(f"{source}: unknown key {_inside(key, name)!r}; allowed here: {', '.join(names)}")
    for name in names:
        if name not in data:
            raise ValueError(f"{source}: the key {_inside(key, name)!r} is missing; save it anew")
    values = {name: _read(hints[name], data[name], _inside(key, name), source) for name in names}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _read_plain(kind: Any, data: Any, key: str, source: str) -> Any:
    if kind is float:
        number = isinstance(data, (int, float)) and not isinstance(data, bool)
        _check(number and math.isfinite(data) and data >= 0, key, source, "a finite number, 0 or more", data)
        return float(data)
    if kind is int:  # -1 is a position that is none
        whole = isinstance(data, int) and not isinstance(data, bool)
        _check(whole and data >= -1, key, source, "a whole number from -1 on", data)
        return data
    _check(isinstance(data, kind), key, source, "a text" if kind is str else "true or false", data)
    return data


def _inside(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _check(good: bool, key: str, source: str, allowed: str, data: Any) -> None:
    if not good:
        raise ValueError(f"{source}: {key or 'the whole'} must be {allowed}, got {str(data)[:60]}")
