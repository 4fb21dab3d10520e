"""Runs a script in this process as ``python SCRIPT ...`` or ``python -m MODULE ...`` would."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

__all__ = ["ScriptNotFoundError", "run_as_main"]


class ScriptNotFoundError(Exception):
    """There is no such script or module; ``status`` is the exit status that Python has for it."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def run_as_main(words: list[str]) -> None:
    """Runs a script, or, behind ``-m``, a module, as ``__main__``.

    Returns when it has ended. An uncaught exception is printed by ``sys.excepthook`` as the interpreter would, without
    the callers in here, and ends the process with status 1; SystemExit and KeyboardInterrupt are raised.

    Raises:
        ScriptNotFoundError: It cannot be read.
    """
    code, attributes = _module(words[1]) if words[0] == "-m" else _script(words[0])
    module = types.ModuleType("__main__")
    module.__dict__.update(attributes, __builtins__=__builtins__)
    sys.argv = [module.__dict__["__file__"], *words[2:]] if words[0] == "-m" else words
    sys.modules["__main__"] = module
    try:
        exec(code, module.__dict__)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        # What the interpreter does, which would print this function's frames, too.
        sys.last_exc = error  # type: ignore[attr-defined]
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _script(name: str) -> tuple[Any, dict[str, Any]]:
    path = Path(name).absolute()
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ScriptNotFoundError(f"can't open file {str(path)!r}: {error.strerror}", 2) from None
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)
    loader = importlib.machinery.SourceFileLoader("__main__", str(path))
    # dont_inherit: the script's annotations are not to be strings because those here are.
    return _compiled(source, str(path)), {"__file__": str(path), "__loader__": loader, "__cached__": None}


def _compiled(source: bytes, path: str) -> Any:
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        sys.excepthook(type(error), error, None)
        sys.exit(1)


def _module(name: str) -> tuple[Any, dict[str, Any]]:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError) as error:
        raise ScriptNotFoundError(f"cannot find module {name!r} ({error})", 1) from None
    code = getattr(spec.loader, "get_code", lambda _: None)(name) if spec is not None else None
    if spec is None or code is None:
        raise ScriptNotFoundError(f"no module named {name!r} that can be run", 1)
    return code, {
        "__file__": spec.origin,
        "__loader__": spec.loader,
        "__cached__": spec.cached,
        "__package__": spec.parent,
        "__spec__": spec,
    }
