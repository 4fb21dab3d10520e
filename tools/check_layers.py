"""Checks which folder uses which: ``python tools/check_layers.py [ROOT]``; ``--table`` prints the laws instead.

tools/layer_laws.py says of every folder under csrc/, kernels/ and torchext/ what it is for and which others it may use.
Read are all ``#include "..."`` and all imports, those under TYPE_CHECKING and inside of functions, too. Five things are
findings:

- an arrow that the laws do not allow, and above all one that runs up;
- a circle of folders, or of files that import each other when they run;
- a look-up of one of our own modules in sys.modules, which is an import that nobody sees;
- a file in a folder that has no law, or a law of what is not there;
- a module whose name begins with an underscore: ``__all__`` of a package says what is public.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tools

from tools.layer_laws import LAWS, Law

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
CPP_SUFFIXES = {".h", ".hpp", ".cpp", ".cc", ".cu", ".cuh"}
PACKAGE = "torchext"
NATIVE = {"_C", "_kernels"}  # below all of Python; the stub of one of them is a file
UNDERSCORED = {f"{PACKAGE}/{name}.py" for name in ("_attach", "_build", "_version", "nn/_lineage")}


@dataclass(frozen=True)
class Arrow:
    """One file uses another, at a line; `typing`: for type checkers alone."""

    source: str
    target: str
    line: int
    typing: bool = False


# ------------------------------------------------------------------------------------------------ reading a tree


def cpp_arrows(root: Path) -> Iterator[Arrow]:
    """The includes of ours, by the compiler's rule: beside the file, then in the root, then in csrc/."""
    for path in sorted(p for top in ("csrc", "kernels") for p in root.glob(f"{top}/**/*") if p.suffix in CPP_SUFFIXES):
        source = path.relative_to(root).as_posix()
        text = path.read_text()
        for match in INCLUDE.finditer(text):
            for folder in (path.parent, root, root / "csrc"):
                target = (folder / match[1]).resolve()
                if target.is_file() and target.is_relative_to(root):
                    line = text.count("\n", 0, match.start()) + 1
                    yield Arrow(source, target.relative_to(root).as_posix(), line)
                    break


def module_file(root: Path, name: str) -> str | None:
    """The file of a module, if it is one of ours."""
    path = Path(*name.split("."))
    for candidate in (path / "__init__.py", path.with_suffix(".py")):
        if (root / candidate).is_file():
            return candidate.as_posix()
    return None


def is_native(name: str) -> bool:
    """Whether a name is that of a compiled module, or of something in one."""
    parts = name.split(".")
    return parts[0] == PACKAGE and len(parts) > 1 and parts[1] in NATIVE


class _Imports(ast.NodeVisitor):
    """All that a module imports of ours, and what it looks up in sys.modules."""

    def __init__(self, root: Path, source: str) -> None:
        self.root, self.source = root, source
        self.arrows: list[Arrow] = []
        self.looked_up: list[tuple[int, str]] = []
        self._typing = False

    def _add(self, name: str, line: int) -> None:
        """An import of a module, or of a name in one."""
        if name.split(".")[0] != PACKAGE or is_native(name) or name.endswith("."):  # the rest of a name is made
            return
        target = module_file(self.root, name) or module_file(self.root, name.rpartition(".")[0])
        if target is not None and target != self.source:
            self.arrows.append(Arrow(self.source, target, line, self._typing))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            parts = Path(self.source).parts
            module = ".".join([*parts[: len(parts) - node.level], *([module] if module else [])])
        for alias in node.names:
            self._add(f"{module}.{alias.name}", node.lineno)

    def visit_If(self, node: ast.If) -> None:
        inside = any(
            isinstance(n, (ast.Name, ast.Attribute)) and _last(n) == "TYPE_CHECKING" for n in ast.walk(node.test)
        )
        before, self._typing = self._typing, self._typing or inside
        for child in node.body:
            self.visit(child)
        self._typing = before
        for child in node.orelse:
            self.visit(child)

    def visit_Call(self, node: ast.Call) -> None:
        name, text = _last(node.func), _text(node.args[0]) if node.args else ""
        if name in ("import_module", "__import__"):
            self._add(text, node.lineno)
        elif isinstance(node.func, ast.Attribute) and _last(node.func.value) == "modules":
            self._look_up(text, node.lineno)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if _last(node.value) == "modules":
            self._look_up(_text(node.slice), node.lineno)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(_last(other) == "modules" for other in node.comparators):
            self._look_up(_text(node.left), node.lineno)
        self.generic_visit(node)

    def _look_up(self, text: str, line: int) -> None:
        if text.split(".")[0] == PACKAGE:
            self.looked_up.append((line, text))


def _last(node: ast.AST) -> str:
    """The last name of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.AST) -> str:
    """A string's value, or the beginning of one that is put together."""
    if isinstance(node, ast.JoinedStr) and node.values:
        return _text(node.values[0])
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def python_imports(root: Path) -> Iterator[_Imports]:
    """The imports of every module of the package."""
    for path in sorted((root / PACKAGE).rglob("*.py")):
        found = _Imports(root, path.relative_to(root).as_posix())
        found.visit(ast.parse(path.read_text(), filename=str(path)))
        yield found


# ---------------------------------------------------------------------------------------------------- the laws


def place_of(file: str, laws: Mapping[str, Law]) -> str | None:
    """The law of a file: its own, or that of its folder or of the nearest one above."""
    if file in laws:
        return file
    for folder in Path(file).parents:
        if folder.as_posix() in laws:
            # A folder whose subfolders have laws is no home for new subfolders.
            direct = folder == Path(file).parent or not any(p.startswith(f"{folder.as_posix()}/") for p in laws)
            return folder.as_posix() if direct else None
    return None


def covered(place: str, by: Iterable[str]) -> bool:
    """Whether a place is one of the names, or below one that ends in a star."""
    return any(place.startswith(name[:-1]) if name.endswith("/*") else place == name for name in by)


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """One circle for each set of nodes that reach each other."""
    found: list[list[str]] = []
    done: set[str] = set()
    for start in sorted(edges):
        if start in done:
            continue
        path, left = [start], [iter(sorted(edges.get(start, ())))]
        while path:
            following = next(left[-1], None)
            if following is None:
                done.add(path.pop())
                left.pop()
            elif following in path:
                circle = path[path.index(following) :]
                first = circle.index(min(circle))
                found.append([*circle[first:], *circle[: first + 1]])
            elif following not in done:
                path.append(following)
                left.append(iter(sorted(edges.get(following, ()))))
    return found


def table(laws: Mapping[str, Law]) -> str:
    """The laws as CONTRIBUTING.md shows them."""
    rows = [f"| `{place}` | {law.sentence} | {_names(law.uses)} |" for place, law in laws.items()]
    return "\n".join(["| folder | what belongs there | what it may use |", "| --- | --- | --- |", *rows]) + "\n"


def _names(uses: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in uses) or "nothing of ours"


def findings(root: Path, laws: Mapping[str, Law] = LAWS) -> list[str]:
    """What breaks the laws in the tree, one line each."""
    root = root.resolve()
    said = [f"LAWS: there is no {place}" for place in laws if not (root / place).exists()]
    allowed = {place: [p for p in laws if p != place and covered(p, law.uses)] for place, law in laws.items()}
    said += [f"LAWS allow a circle: {' -> '.join(circle)}" for circle in circles(allowed)]
    arrows = list(cpp_arrows(root))
    for module in python_imports(root):
        arrows += module.arrows
        said += [
            f"{module.source}:{line}: looks {name} up in sys.modules; let that module register what is wanted of it"
            for line, name in module.looked_up
        ]
    files = [p for top in ("csrc", "kernels") for p in root.glob(f"{top}/**/*") if p.suffix in CPP_SUFFIXES - {".hpp"}]
    for path in sorted([*files, *(root / PACKAGE).rglob("*.py")]):
        if place_of(path.relative_to(root).as_posix(), laws) is None:
            said.append(
                f"{path.relative_to(root)}: has no law; move it, or give its folder one in {Path(__file__).name}"
            )
    modules = sorted(path.relative_to(root).as_posix() for path in (root / PACKAGE).rglob("_[!_]*.py"))
    said += [
        f"{module}: begins with an underscore; name it after what it holds"
        for module in modules
        if module not in UNDERSCORED
    ]

    used: dict[str, set[str]] = {}
    for arrow in arrows:
        source, target = place_of(arrow.source, laws), place_of(arrow.target, laws)
        if source is None or target is None or source == target:
            continue
        used.setdefault(source, set()).add(target)
        if not covered(target, laws[source].uses):
            up = covered(source, laws[target].uses)
            said.append(
                f"{arrow.source}:{arrow.line}: {source} must not use {target} ({arrow.target})"
                + (": the arrow runs up" if up else f"; it may use {_names(laws[source].uses)}")
            )
    said += [f"circle of folders: {' -> '.join(circle)}" for circle in circles(used)]
    by_file: dict[str, set[str]] = {}
    for arrow in arrows:
        if not arrow.typing:
            by_file.setdefault(arrow.source, set()).add(arrow.target)
    said += [f"circle of files: {' -> '.join(circle)}" for circle in circles(by_file)]
    return list(dict.fromkeys(said))


def main() -> int:
    """Prints the findings, or the table."""
    if "--table" in sys.argv[1:]:
        print(table(LAWS), end="")
        return 0
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    said = findings(root)
    print(*said, sep="\n", end="\n" if said else "")
    print(f"{len(LAWS)} laws, {len(said)} findings")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
