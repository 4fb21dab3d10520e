"""tools/make_docs.py: which pages and which names the site has. The site itself is built by ``make docs``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for tools; at the end, so that torchext stays the installed one

from tools.make_docs import copy_package, copy_pages, docstring_page, public_names  # noqa: E402


def test_public_names_are_read_without_an_import() -> None:
    assert {"attach", "PragueOptions", "Synchronizer"} <= set(public_names("torchext"))
    assert not {"nn", "optim", "__version__"} & set(public_names("torchext"))
    assert public_names("torchext.integrations.ray") == ["TorchextConfig"]
    assert "::: torchext.optim.SPDKFAC" in docstring_page().splitlines()


def test_pages_bring_what_they_link_to(tmp_path: Path) -> None:
    copy_pages(tmp_path)
    for name in ("README.md", "docs/index.md", "benchmarks/results/prague_straggler.png", "examples/train_digits.py"):
        assert (tmp_path / name).is_file(), name
    # Every page stands in the navigation, which the generator does not ask for.
    navigation = (ROOT / "docs" / "mkdocs.yml").read_text()
    assert [page for page in tmp_path.rglob("*.md") if f": {page.relative_to(tmp_path)}\n" not in navigation] == []


def test_docstrings_of_options_come_from_cpp(tmp_path: Path) -> None:
    copy_package(tmp_path)
    stub = (tmp_path / "torchext" / "_C.pyi").read_text()
    for name in ("PragueOptions", "HopOptions", "DSSyncOptions", "DeAROptions"):
        assert re.search(rf'class {name}\(GroupOptions\):\n    """Options of the ', stub), name
        assert re.search(rf"class {name}\(.*?\n    Args:\n        \w+: .*?\n        timeout: ", stub, re.DOTALL), name
    compile(stub, "_C.pyi", "exec")
    assert not re.search(r":(class|func|meth):`", (tmp_path / "torchext" / "_attach.py").read_text())
