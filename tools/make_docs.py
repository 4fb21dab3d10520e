"""Builds the site of README.md and docs/: ``python tools/make_docs.py``. Needs docs/requirements.txt, and no torch.

The site is build/docs/site, and can be read from disk. The pages are copied to build/docs/source in the folders where
they are, so that links between them and to files of the tree hold. The page of docstrings is made of ``__all__``.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from tools.check_docs import ROOT, linked_files, pages

BUILD = ROOT / "build" / "docs"
# Pages for readers of the site. What lies deeper in the tree speaks to who has the tree open.
PAGES = ("*.md", "docs/**/*.md", "benchmarks/*.md", "benchmarks/results/*.md")
MODULES = (
    *("torchext", "torchext.auto", "torchext.optim", "torchext.nn", "torchext.ops", "torchext.errors"),
    *("torchext.integrations.transformers", "torchext.integrations.accelerate", "torchext.integrations.ray"),
)
# Docstrings are written for help() and Sphinx's roles; the site's generator knows neither.
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`~?([^`]+)`")

_OPTIONS_TEXT = re.compile(r'R"\((Options of the "(\w+)" .*?)\)";', re.DOTALL)
_OPTIONS_NAME = re.compile(r'kName = "(\w+)"')


def copy_pages(target: Path) -> None:
    """Copies the pages, and the files of the tree that they link to."""
    chosen = {page for pattern in PAGES for page in ROOT.glob(pattern)} & set(pages(ROOT))
    for page in sorted(chosen):
        for file in {page, *(file for file in linked_files(page) if file.is_file())}:
            there = target / file.relative_to(ROOT)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, there)


def copy_package(target: Path) -> None:
    """Copies the Python sources, with roles as plain code, and with the docstrings of options, which are in C++."""
    for pattern in ("*.py", "*.pyi"):
        for file in (ROOT / "torchext").rglob(pattern):
            there = target / file.relative_to(ROOT)
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_text(_ROLE.sub(r"`\1`", file.read_text()))
    stub = target / "torchext" / "_C.pyi"
    text = stub.read_text()
    for source in sorted((ROOT / "csrc" / "python").glob("bind_*.cpp")):
        for about, backend in _OPTIONS_TEXT.findall(source.read_text()):
            header = ROOT / "csrc" / "c10d" / "backend" / f"process_group_{backend}.h"
            name = _OPTIONS_NAME.findall(header.read_text())[0]
            arguments = "\n".join(f"    {option}: {meaning}" for option, meaning in options_of(name))
            quoted = textwrap.indent(f'"""{about.strip()}\n{arguments}\n"""\n', "    ")
            text = text.replace(f"class {name}(GroupOptions):\n", f"class {name}(GroupOptions):\n{quoted}")
    stub.write_text(text)


def options_of(name: str) -> list[tuple[str, str]]:
    """The options of one backend with their meanings, as tools/write_options.py has written them."""
    page = (ROOT / "docs" / "reference" / "options.md").read_text()
    rows: list[tuple[str, str]] = []
    for heading in (f"`{name}`", "all of them"):
        table = page.partition(f"| {heading} | default | meaning |\n")[2].partition("\n\n")[0]
        rows += re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", table, re.MULTILINE)
    return rows


def public_names(module: str) -> list[str]:
    """The names of a module's ``__all__`` that are no modules, read without an import."""
    path = ROOT / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            nested = {entry.stem for entry in path.glob("*")}
            return [name for name in names if name not in nested and not name.startswith("_")]
    raise SystemExit(f"make_docs: {file.relative_to(ROOT)} has no __all__")


def docstring_page() -> str:
    """The page from which the docstrings are drawn: a heading a module, a line a name."""
    lines = ["# Docstrings", "", "Made from the source. [Everything public](api.md) is the short form.", ""]
    for module in MODULES:
        lines += [f"## {module}", ""]
        lines += [line for name in public_names(module) for line in (f"::: {module}.{name}", "")]
    return "\n".join(lines)


def main() -> int:
    """Builds the site; a warning of the generator, such as of a link that leads nowhere, fails."""
    shutil.rmtree(BUILD, ignore_errors=True)
    copy_pages(BUILD / "source")
    copy_package(BUILD / "package")
    page = BUILD / "source" / "docs" / "reference" / "docstrings.md"
    page.write_text(docstring_page())
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", "docs/mkdocs.yml"]
    status = subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode
    if status == 0:
        print(f"The site: {(BUILD / 'site' / 'index.html').relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
