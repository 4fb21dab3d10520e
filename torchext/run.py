"""Training scripts that are not to be touched, on a backend of torchext.

    torchrun --nproc-per-node 4 -m torchext.run --backend dear train.py --lr 0.1
    torchrun ... -m torchext.run --backend prague --option group_size=2 --option order=atc -m package.train

Whatever backend the script or its framework names, the default process group is made on this one. Each
DistributedDataParallel model over it is attached at its first training forward, with the optimizers that have its
parameters; rank 0 says so on standard error. Where that is not clear, it warns and training goes on as plain DDP.
Groups of new_group() stay what they are, and what names a backend of torchext already, or calls torchext.attach(),
stays as it is. The script sees what it would see without this.

With prague, dssync and hop each worker has a replica of its own. A barrier over the model's group makes them their
average, and a script that saves or evaluates between barriers is warned.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from datetime import timedelta
from typing import Any, NoReturn

from torchext.backends import BACKENDS
from torchext.ddp.synchronizer import Synchronizer
from torchext.integrations.automatic import attach_at_first_forward, has_seen_training
from torchext.integrations.barriers import average_at_barriers
from torchext.integrations.default_group import replace_default_backend
from torchext.integrations.script import ScriptNotFoundError, run_as_main

__all__ = ["main"]

_USAGE = (
    "usage: torchrun ... -m torchext.run --backend NAME [--option NAME=VALUE ...] (SCRIPT | -m MODULE) [ARGUMENT ...]"
)
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class UsageError(ValueError):
    """A command line that cannot be run."""


def parse(words: list[str]) -> tuple[str, list[str], list[str]]:
    """Takes a command line apart.

    Returns:
        The backend, its options as text, and the script (or -m and a module) with its arguments.

    Raises:
        UsageError: It is not what the usage says.
    """
    words, backends, options = list(words), list[str](), list[str]()
    while words and words[0].startswith("-") and words[0] != "-m":
        flag, equals, value = words.pop(0).partition("=")
        kept = {"--backend": backends, "--option": options}.get(flag)
        if kept is None:
            raise UsageError(f"no option {flag}: allowed --backend, --option, -m")
        if not equals:
            if not words:
                raise UsageError(f"{flag} wants a value")
            value = words.pop(0)
        kept.append(value)
    if not backends:
        raise UsageError(f"--backend is missing: allowed {', '.join(BACKENDS)}")
    if backends[-1] not in BACKENDS:
        raise UsageError(f"--backend {backends[-1]}: allowed {', '.join(BACKENDS)}")
    if not words or words == ["-m"]:
        raise UsageError("a script is missing, or -m and a module")
    return backends[-1], options, words


def options_of(backend: str, texts: list[str]) -> Any:
    """The options of a backend from ``name=value``: numbers, true or false, text, seconds, lists as Python writes them.

    Raises:
        UsageError: A name or value that the backend does not take, with those allowed.
    """
    kind = BACKENDS[backend].options
    defaults = kind().__reduce__()[0].keywords
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--option {text}: write NAME=VALUE")
        if name not in defaults:
            raise UsageError(f"{kind.__name__}: no option {name}: allowed {', '.join(defaults)}")
        try:
            values[name] = _value(value, defaults[name])
        except (ValueError, SyntaxError, OverflowError):
            raise UsageError(f"--option {text}: {name} wants {_wanted(defaults[name])}") from None
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None


def _value(text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() not in _FLAGS:
            raise ValueError(text)
        return _FLAGS[text.lower()]
    if isinstance(default, timedelta):
        return timedelta(seconds=float(text))
    if isinstance(default, int | float):
        return type(default)(text)
    if default is None or isinstance(default, list):
        return None if text.lower() == "none" else ast.literal_eval(text)
    try:  # "auto", or a number
        return text if default != "auto" else float(text)
    except ValueError:
        return text


def _wanted(default: Any) -> str:
    kinds = {bool: "true or false", int: "a whole number", float: "a number", timedelta: "seconds"}
    return kinds.get(type(default), "a list such as [0,0,1,1]")


def main() -> None:
    """Of ``python -m torchext.run``."""
    if any(word in ("-h", "--help") for word in sys.argv[1:2]):
        print(_USAGE, __doc__, sep="\n\n")
        return
    try:
        backend, texts, words = parse(sys.argv[1:])
        options = options_of(backend, texts)
    except UsageError as error:
        _refuse(f"{error}. {_USAGE}", 2)
    has_timeout = any(text.startswith("timeout=") for text in texts)
    replace_default_backend(backend, options, options.timeout if has_timeout else None)
    attach_at_first_forward(_model_is_made, _model_is_attached, _say)
    try:
        run_as_main(words)
    except ScriptNotFoundError as error:
        _refuse(str(error), error.status)
    if not has_seen_training():
        _say_once("no DistributedDataParallel model over the default process group was trained; nothing was attached")


def _model_is_made() -> None:
    if "transformers.trainer_callback" in sys.modules:
        importlib.import_module("torchext.integrations.transformers").use_everywhere(_say)


def _model_is_attached(synchronizer: Synchronizer) -> None:
    average_at_barriers(synchronizer)
    if "accelerate" in sys.modules:
        importlib.import_module("torchext.integrations.accelerate").save_averages_everywhere()


def _say(line: str) -> None:
    print(f"torchext.run: {line}", file=sys.stderr, flush=True)


def _say_once(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        _say(line)


def _refuse(line: str, status: int) -> NoReturn:
    _say_once(line)
    sys.exit(status)


if __name__ == "__main__":
    main()
