"""Sources compiled several at a time: each once, by folder, and only what changed again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for tools; at the end, so that torchext stays the installed one

from tools.batches import batch_source, batches  # noqa: E402
from tools.build_config import BuildError, batch_size, batch_sources  # noqa: E402

SOURCES = [*(f"a/{i}.cpp" for i in range(9)), "b/one.cpp", "b/one.cu", "b/two.cpp"]


@pytest.mark.parametrize("size", range(1, 11))
def test_each_source_is_in_one_batch_of_its_folder(size: int) -> None:
    paths = [Path(source) for source in SOURCES]
    found = batches(paths, size)
    assert sorted(path for batch in found for path in batch) == sorted(paths)
    assert all(len({path.parent for path in batch}) == 1 and len(batch) <= size for batch in found)
    lengths = [len(batch) for batch in found if batch[0].parent == Path("a")]
    assert len(lengths) == -(-9 // size)
    assert max(lengths) - min(lengths) <= 1


def test_written_sources_include_theirs(tmp_path: Path) -> None:
    result = batch_sources(SOURCES, 4, tmp_path)
    written = [Path(path) for path in result if path.startswith(str(tmp_path))]
    assert set(result) - {str(path) for path in written} == {"b/one.cu"}
    assert [path.name for path in written] == ["a_0.cpp", "a_1.cpp", "a_2.cpp", "b_0.cpp"]
    included = [line.split('"')[1] for path in written for line in path.read_text().splitlines()]
    assert sorted(included) == sorted(source for source in SOURCES if source.endswith(".cpp"))
    assert written[-1].read_text() == batch_source([Path("b/one.cpp"), Path("b/two.cpp")])


def test_what_stays_the_same_is_not_written_again(tmp_path: Path) -> None:
    batch_sources(SOURCES, 4, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    batch_sources([*SOURCES, "b/three.cpp"], 4, tmp_path)
    changed = {path.name for path, time in before.items() if path.stat().st_mtime_ns != time}
    assert changed == {"b_0.cpp"}


def test_a_source_alone_is_compiled_as_it_is(tmp_path: Path) -> None:
    assert batch_sources(["c/only.cpp", "c/only.cu"], 4, tmp_path) == ["c/only.cu", "c/only.cpp"]


def test_the_environment_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHEXT_BATCH", raising=False)
    assert batch_size() == 8
    monkeypatch.setenv("TORCHEXT_BATCH", "1")
    assert batch_size() == 1
    for value in ("0", "-1", "many", ""):
        monkeypatch.setenv("TORCHEXT_BATCH", value)
        with pytest.raises(BuildError, match=f"TORCHEXT_BATCH='{value}': allowed are whole numbers from 1"):
            batch_size()
