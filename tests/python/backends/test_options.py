"""Options of the backends as values: shown, compared, copied, pickled, documented."""

from __future__ import annotations

import ast
import copy
import datetime
import inspect
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import torchext
from torchext import backends
from torchext.errors import BackendOptionsError

sys.path.append(str(Path(__file__).resolve().parents[3]))  # at the end: torchext stays the installed one

from tools import write_options

CHANGED: dict[type, dict[str, Any]] = {
    torchext.PragueOptions: {"group_size": 3, "generator": "random", "order": "atc", "shared_memory": False},
    torchext.HopOptions: {"neighbours": [[1], [0]], "staleness": 2, "heartbeat_timeout": timedelta(seconds=2.5)},
    torchext.DSSyncOptions: {"schedule": "topology", "racks": [0, 0, 1], "timeout": timedelta(minutes=1)},
    torchext.DeAROptions: {"form": "sharded", "bucket_mb": 0.1, "call_check": "off"},
}
each_class = pytest.mark.parametrize("kind", CHANGED, ids=lambda kind: kind.__name__)


@each_class
def test_representation_makes_an_equal_object(kind: type) -> None:
    for options in (kind(), kind(**CHANGED[kind])):
        again = eval(repr(options), {kind.__name__: kind, "datetime": datetime})
        assert again == options
        assert repr(again) == repr(options)
    assert all(f"{name}={value!r}" in repr(options) for name, value in CHANGED[kind].items())


@each_class
def test_equality_is_by_value(kind: type) -> None:
    changed = kind(**CHANGED[kind])
    assert changed == kind(**CHANGED[kind])
    for name, value in CHANGED[kind].items():
        assert kind() != kind(**{name: value, **({"schedule": "topology"} if name == "racks" else {})}), name
    assert changed != object()
    assert all(changed != other(**CHANGED[other]) for other in CHANGED if other is not kind)
    with pytest.raises(TypeError, match="unhashable"):
        hash(changed)


@each_class
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda options: pickle.loads(pickle.dumps(options))])
def test_copies_are_equal(kind: type, duplicate: Any) -> None:
    options = kind(**CHANGED[kind])
    other = duplicate(options)
    assert other == options and other is not options and type(other) is kind


@each_class
def test_every_argument_is_an_attribute_and_documented(kind: type) -> None:
    options: Any = kind(**CHANGED[kind])
    for name, value in CHANGED[kind].items():
        assert getattr(options, name) == value, name
    call = ast.parse(repr(options), mode="eval").body
    assert isinstance(call, ast.Call)
    names = {str(keyword.arg) for keyword in call.keywords}
    assert {"timeout", "heartbeat_timeout", "call_check", "operation_timeout", *CHANGED[kind]} < names
    text = inspect.getdoc(kind) or ""
    assert all(f"    {name}: " in text for name in names), text
    assert "Raises:" in text and "et al." in text


def test_a_negative_time_is_named() -> None:
    with pytest.raises(ValueError, match=r"heartbeat_timeout must be 0 \(off\) or from 0.2 s to a day, got 0.01 s"):
        torchext.PragueOptions(heartbeat_timeout=timedelta(seconds=0.01))


@each_class
def test_how_ranks_watch_each_other(kind: Any) -> None:
    assert kind().heartbeat_timeout == timedelta(seconds=5)
    assert kind().call_check == "new" and kind().operation_timeout == timedelta(0)
    whole = timedelta(seconds=90)
    options = kind(heartbeat_timeout=timedelta(seconds=0.2), call_check="every", operation_timeout=whole)
    assert options.operation_timeout == whole
    assert options.heartbeat_timeout == timedelta(seconds=0.2) and options.call_check == "every"
    assert kind(heartbeat_timeout=timedelta(0)).heartbeat_timeout == timedelta(0)
    for bad in (-1, 0.1, 1e6):
        with pytest.raises(ValueError, match=r"heartbeat_timeout must be 0 \(off\) or from 0\.2 s to a day, got"):
            kind(heartbeat_timeout=timedelta(seconds=bad))
        with pytest.raises(ValueError, match=r"operation_timeout must be 0 \(no limit\) or from 0\.5 s to a day, got"):
            kind(operation_timeout=timedelta(seconds=bad))
    with pytest.raises(ValueError, match='call_check must be one of new, every, lines, off; got "some"'):
        kind(call_check="some")


@each_class
def test_a_wrong_type_is_named(kind: Any) -> None:
    """Of each option, beside one that is right, and with the value."""
    for name in kind().__reduce__()[0].keywords:
        right: dict[str, Any] = {"call_check": "off"} if name != "call_check" else {"timeout": timedelta(minutes=1)}
        with pytest.raises(TypeError, match=rf"^{kind.__name__}: {name} must be a.*, got <object .*> \(object\)$"):
            kind(**right, **{name: object()})


@each_class
def test_an_unknown_option_is_named(kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{kind.__name__}: no option time_out: allowed .*; did you mean timeout\?$"):
        kind(time_out=timedelta(minutes=1))
    with pytest.raises(TypeError, match=rf"^{kind.__name__}: no option qqq, zzz: allowed .*, timeout$"):
        kind(qqq=1, zzz=2)
    with pytest.raises(TypeError, match=rf"^{kind.__name__}: takes keyword arguments only, got 3; {kind.__name__}\("):
        kind(3)


def test_a_number_of_seconds_is_no_time() -> None:
    with pytest.raises(TypeError, match=r"PragueOptions: timeout must be a datetime\.timedelta, got 5 \(int\)"):
        torchext.PragueOptions(timeout=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"group_size": 1}, r"group_size must be 0 or at least 2, got 1"),
        ({"group_size": -2}, r"group_size must be in \[0, \d+\], got -2"),
        ({"generator": "best"}, r'generator must be one of random, .*ready-set; got "best"'),
        ({"order": "both"}, r'order must be one of atc, cta; got "both"'),
        ({"slowdown_threshold": -2}, r"slowdown_threshold must be in \[-1, \d+\], got -2"),
        ({"sync_period": 0}, r"sync_period must be in \[1, \d+\], got 0"),
        ({"sync_every": -2}, r"sync_every must be in \[-1, \d+\], got -2"),
        ({"seed": -1}, r"seed must be in \[0, \d+\], got -1"),
        (
            {"generator": "static", "group_size": 3},
            r'group_size = 3: allowed 0 \(the default\) with generator "static", whose schedule .*; leave it out',
        ),
        ({"generator": "static", "sync_every": 0}, r'sync_every = 0: allowed -1 .* with generator "static"'),
        ({"generator": "static", "slowdown_threshold": 0}, r'slowdown_threshold = 0: .* generator "static"'),
        ({"generator": "random", "slowdown_threshold": 7}, r'slowdown_threshold = 7: .* generator "random"'),
    ],
    ids=str,
)
def test_an_option_of_prague_out_of_range(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        torchext.PragueOptions(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"groups": 2}, "^PragueOptions: no option groups: allowed group_size, generator, "),
        ({"group_size": "4"}, r"^PragueOptions: group_size must be an int, got '4' \(str\)$"),
        ({"generator": 3}, r"^PragueOptions: generator must be a str, got 3 \(int\)$"),
    ],
    ids=str,
)
def test_an_unknown_option_or_type_of_prague(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        torchext.PragueOptions(**options)


@each_class
def test_times_at_their_ends(kind: Any) -> None:
    """None at all, and more than clocks hold."""
    for seconds in (0, -1):
        with pytest.raises(ValueError, match="timeout must be more than 0"):
            kind(timeout=timedelta(seconds=seconds))
    for name in ("timeout", "heartbeat_timeout", "operation_timeout"):
        for value in (timedelta.max, timedelta(days=365 * 300), timedelta(days=3651)):
            with pytest.raises(ValueError, match=name):
                kind(**{name: value})


def test_groups_made_by_name_alone_have_the_default_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_default_options", {})
    given = torchext.DeAROptions(form="sharded")
    backends.set_default_options(given)
    taken = backends.options_for("dear", None)
    assert taken == given
    assert taken is not backends.options_for("dear", None)
    assert backends.options_for("dear", torchext.DeAROptions()) == torchext.DeAROptions()
    assert backends.options_for("hop", None) == torchext.HopOptions()
    with pytest.raises(BackendOptionsError, match=r"options are builtins\.str; pass one of torchext\.DeAROptions"):
        backends.set_default_options("sharded")


def test_the_page_and_the_stub_follow_from_the_options() -> None:
    stale = [path.name for path, text in write_options.written().items() if path.read_text() != text]
    assert not stale, f"{', '.join(stale)}: run python tools/write_options.py"
