"""Writes what follows from the options of the backends: the reference page's tables and the classes in the stub.

``python tools/write_options.py`` rewrites both; with ``--check`` it fails where they are not what it would write. An
option itself is written once, in ``csrc/c10d/backend/process_group_<backend>.h``. Needs an installed torchext.
"""

from __future__ import annotations

import inspect
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torchext

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "options.md"
STUB = ROOT / "torchext" / "_C.pyi"
CLASSES: tuple[Any, ...] = (
    torchext.DeAROptions,
    torchext.HopOptions,
    torchext.DSSyncOptions,
    torchext.PragueOptions,
)


def meanings(kind: Any) -> dict[str, str]:
    """Option -> what its docstring says, on one line."""
    arguments = (inspect.getdoc(kind) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", arguments, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).replace("``", "`") for name, text in entries}


def defaults(kind: Any) -> dict[str, Any]:
    """Option -> its default, in the order of the constructor."""
    return dict(kind().__reduce__()[0].keywords)


def own_names(kind: Any) -> list[str]:
    """The options that only this backend has."""
    return [name for name in defaults(kind) if isinstance(vars(kind).get(name), property)]


def source(value: Any) -> str:
    """A default as Python's source has it."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def page_tables() -> str:
    """A table for each backend, and one for what all take."""
    tables = []
    for kind in CLASSES:
        said, given = meanings(kind), defaults(kind)
        rows = [f"| `{name}` | `{source(given[name])}` | {said[name]} |" for name in own_names(kind)]
        tables.append([f"| `{kind.__name__}` | default | meaning |", "| --- | --- | --- |", *rows])
    said, given = meanings(CLASSES[0]), defaults(CLASSES[0])
    rows = []
    for name in given:
        if name not in own_names(CLASSES[0]):
            value = given[name]
            default = f"{value.total_seconds():g} s" if isinstance(value, timedelta) else f"`{source(value)}`"
            rows.append(f"| `{name}` | {default} | {said[name]} |")
    tables.append(["| all of them | default | meaning |", "| --- | --- | --- |", *rows])
    return "\n\n".join("\n".join(table) for table in tables)


def stub_class(kind: Any) -> str:
    """The class as the stub has it."""
    name, own = kind.__name__, own_names(kind)
    types = {option: str(vars(kind)[option].fget.__doc__).partition(" -> ")[2].strip() for option in own}
    lines = [f"class {name}(GroupOptions):", "    def __init__(", "        self,", "        *,"]
    for option, default in defaults(kind).items():
        taken = types.get(option, "str" if isinstance(default, str) else "timedelta").replace("list[", "Sequence[")
        value = "..." if isinstance(default, (timedelta, list)) else source(default)
        lines.append(f"        {option}: {taken} = {value},")
    lines += ["    ) -> None: ...", f"    def __copy__(self) -> {name}: ..."]
    lines.append("    def __eq__(self, other: object) -> bool: ...")
    if "_fitted" in vars(kind):
        lines.append(f"    def _fitted(self, members: Sequence[int]) -> {name}: ...")
    for option in own:
        lines += ["    @property", f"    def {option}(self) -> {types[option]}: ..."]
    return "\n".join(lines) + "\n"


def written() -> dict[Path, str]:
    """What the two files should hold."""
    page, stub = PAGE.read_text(), STUB.read_text()
    begin, end = "<!-- options: written by tools/write_options.py -->\n", "\n<!-- end of options -->"
    before, _, rest = page.partition(begin)
    page = before + begin + page_tables() + end + rest.partition(end)[2]
    for kind in CLASSES:
        old = re.search(rf"^class {kind.__name__}\(.*?\n(?=\n)", stub, flags=re.MULTILINE | re.DOTALL)
        if old is None:
            raise LookupError(f"{STUB.name} has no class {kind.__name__}: add one line, class {kind.__name__}(): ...")
        stub = stub[: old.start()] + stub_class(kind) + stub[old.end() :]
    return {PAGE: page, STUB: stub}


def main() -> int:
    """Writes or checks; returns the exit status."""
    stale = [path for path, text in written().items() if path.read_text() != text]
    for path in stale:
        if "--check" in sys.argv:
            print(f"{path.relative_to(ROOT)} is not what the options say: python tools/write_options.py")
        else:
            path.write_text(written()[path])
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
