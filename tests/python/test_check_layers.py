"""tools/check_layers.py: what it finds in small trees, and that it finds nothing in this one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for tools; at the end, so that torchext stays the installed one

from tools.check_layers import circles, findings, table  # noqa: E402
from tools.layer_laws import LAWS, Law  # noqa: E402

CPP = {
    "csrc/core/base": Law("numbers"),
    "csrc/core/hop": Law("queues", ("csrc/core/base",)),
    "csrc/c10d/backend": Law("groups", ("csrc/core/*",)),
}
PYTHON = {
    "torchext/errors.py": Law("errors"),
    "torchext/ddp": Law("hooks", ("torchext/errors.py",)),
    "torchext/dear": Law("gradients", ("torchext/ddp", "torchext/errors.py")),
    "torchext/__init__.py": Law("the face", ("torchext/dear", "torchext/ddp")),
}
CLEAN_CPP = {
    "csrc/core/base/check.h": "#pragma once\n#include <string>\n",
    "csrc/core/hop/queue.h": '#include "core/base/check.h"\n',
    "csrc/core/hop/queue.cpp": '#include "core/hop/queue.h"\n',
    "csrc/c10d/backend/group.cpp": '#include "core/hop/queue.h"\n#include "nlohmann/json.hpp"\n',
}
CLEAN_PYTHON = {
    "torchext/__init__.py": "from torchext.dear.step import Step\n",
    "torchext/errors.py": "import sys\n",
    "torchext/ddp/__init__.py": "",
    "torchext/ddp/hooks.py": "import sys\nfrom torchext import _C, errors\nTORCH = sys.modules['torch']\n",
    "torchext/dear/__init__.py": "",
    "torchext/dear/step.py": "from torchext import _C\nfrom torchext.ddp.hooks import Hook\nfrom . import state\n",
    "torchext/dear/state.py": "def later():\n    from torchext.ddp import hooks\n",
}


def found(root: Path, tree: dict[str, str], laws: dict[str, Law]) -> list[str]:
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return findings(root, laws)


def test_a_clean_tree(tmp_path: Path) -> None:
    assert found(tmp_path, {**CLEAN_CPP, **CLEAN_PYTHON}, {**CPP, **PYTHON}) == []


def test_an_include_that_runs_up(tmp_path: Path) -> None:
    up = {"csrc/core/base/check.h": '#pragma once\n\n#  include "core/hop/names.h"\n', "csrc/core/hop/names.h": ""}
    assert found(tmp_path, {**CLEAN_CPP, **up}, CPP) == [
        "csrc/core/base/check.h:3: csrc/core/base must not use csrc/core/hop (csrc/core/hop/names.h): "
        "the arrow runs up",
        "circle of folders: csrc/core/base -> csrc/core/hop -> csrc/core/base",
    ]


def test_an_include_beside_the_file_and_from_the_root(tmp_path: Path) -> None:
    up = {"csrc/core/base/a.h": '#include "b.h"\n', "csrc/core/base/b.h": '#include "csrc/core/hop/queue.h"\n'}
    said = found(tmp_path, {**CLEAN_CPP, **up}, CPP)
    assert said[0].startswith("csrc/core/base/b.h:1: csrc/core/base must not use csrc/core/hop")


def test_an_arrow_sideways(tmp_path: Path) -> None:
    laws = {**CPP, "csrc/core/dear": Law("buckets", ("csrc/core/base",))}
    said = found(tmp_path, {**CLEAN_CPP, "csrc/core/dear/plan.cpp": '#include "core/hop/queue.h"\n'}, laws)
    assert said == [
        "csrc/core/dear/plan.cpp:1: csrc/core/dear must not use csrc/core/hop (csrc/core/hop/queue.h); "
        "it may use `csrc/core/base`"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "from torchext.dear.step import Step\n",
        "from torchext.dear import step\n",
        "import torchext.dear.step\n",
        "from ..dear import step\n",
        "def later():\n    from torchext.dear import step\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torchext.dear import step\n",
        "import importlib\nSTEP = importlib.import_module('torchext.dear.step')\n",
    ],
)
def test_an_import_that_runs_up(tmp_path: Path, text: str) -> None:
    said = found(tmp_path, {**CLEAN_PYTHON, "torchext/ddp/hooks.py": text}, PYTHON)
    assert said[0].endswith("torchext/ddp must not use torchext/dear (torchext/dear/step.py): the arrow runs up")
    assert "circle of folders: torchext/ddp -> torchext/dear -> torchext/ddp" in said


def test_a_circle_of_files_in_one_folder(tmp_path: Path) -> None:
    lazy = "def later():\n    from torchext.dear.step import Step\n"
    tree = {**CLEAN_PYTHON, "torchext/dear/state.py": lazy}
    assert found(tmp_path, tree, PYTHON) == [
        "circle of files: torchext/dear/state.py -> torchext/dear/step.py -> torchext/dear/state.py"
    ]


def test_types_alone_may_name_each_other_in_one_folder(tmp_path: Path) -> None:
    typing = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torchext.dear.step import Step\n"
    assert found(tmp_path, {**CLEAN_PYTHON, "torchext/dear/state.py": typing}, PYTHON) == []


@pytest.mark.parametrize(
    "text",
    [
        'import sys\nSTEP = sys.modules.get("torchext.dear.step")\n',
        'import sys\nSTEP = sys.modules["torchext.dear.step"]\n',
        'import sys\nTHERE = "torchext.dear.step" in sys.modules\n',
        'from sys import modules\nTHERE = "torchext.dear.step" not in modules\n',
    ],
)
def test_a_look_up(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, {**CLEAN_PYTHON, "torchext/ddp/hooks.py": text}, PYTHON) == [
        "torchext/ddp/hooks.py:2: looks torchext.dear.step up in sys.modules; "
        "let that module register what is wanted of it"
    ]


def test_a_file_without_a_law(tmp_path: Path) -> None:
    said = found(tmp_path, {**CLEAN_CPP, "csrc/core/auto/plan.h": "", "csrc/core/flat.h": ""}, CPP)
    assert [line.partition(":")[0] for line in said] == ["csrc/core/auto/plan.h", "csrc/core/flat.h"]


def test_a_module_with_an_underscore(tmp_path: Path) -> None:
    said = found(tmp_path, {**CLEAN_PYTHON, "torchext/ddp/_hooks.py": "", "torchext/_build.py": ""}, PYTHON)
    assert "torchext/ddp/_hooks.py: begins with an underscore; name it after what it holds" in said
    assert not any("_build.py: begins" in line for line in said)


def test_laws_that_cannot_be(tmp_path: Path) -> None:
    laws = {
        "csrc/core/base": Law("numbers", ("csrc/core/hop",)),
        "csrc/core/hop": Law("queues", ("csrc/core/base",)),
        "csrc/core/gone": Law("nothing"),
    }
    tree = {name: text for name, text in CLEAN_CPP.items() if name.startswith("csrc/core/")}
    assert found(tmp_path, tree, laws) == [
        "LAWS: there is no csrc/core/gone",
        "LAWS allow a circle: csrc/core/base -> csrc/core/hop -> csrc/core/base",
    ]


def test_circles() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": []}) == []
    assert circles({"a": ["b", "c"], "b": ["c"], "c": ["b"]}) == [["b", "c", "b"]]
    assert circles({"a": ["a"]}) == [["a", "a"]]


def test_this_tree() -> None:
    assert findings(ROOT) == []


def test_the_table_is_in_contributing() -> None:
    assert table(LAWS) in (ROOT / "CONTRIBUTING.md").read_text(), (
        "python tools/check_layers.py --table prints what to put there"
    )


def test_no_two_test_files_have_one_name() -> None:
    names = [path.name for path in ROOT.glob("tests/**/test_*.py")]  # pytest imports them by these, the slow of all
    assert sorted(names) == sorted(set(names))
