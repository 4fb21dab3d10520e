"""Runs clang-tidy over the C++ sources, each when something about it changed: ``python tools/clang_tidy.py CACHE``.

torch's headers cost half a minute a run, so the sources of a folder are checked in batches, as one source that includes
them. A source with findings, or one that can't stand beside the others (two helpers of one name), is taken out of its
batch. What was clean is remembered: CACHE holds one empty file for each clean result, named by the hash of all that it
depends on. Left out are the tests, where GoogleTest's macros cost as much, and what needs CUDA's headers.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.batches import batch_source, batches  # noqa: E402

COMMON = ["-x", "c++", "-std=c++20", "-I.", "-Icsrc", "-idiraftercsrc/c10d/stubs"]
KEEP_SECONDS = 30 * 24 * 3600
BATCH = 16
# clang's analyzer looks into sources that another one includes if the other one's name says so.
BATCH_NAME = "UnifiedSource.cpp"
NAMED = re.compile(r"^(\S+):\d+:\d+: (?:error|warning)", re.MULTILINE)
NO_COMPILE = "[clang-diagnostic-error]"
# What clang-tidy says about the headers that it was not asked about.
NOISE = re.compile(r"^(\d+ warnings? .*generated|Suppressed \d+|Use -header-filter)")


def torch_flags() -> list[str]:
    """The flags of setup.py that matter here. torch is not imported, which alone would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("clang-tidy: this Python has no torch, whose headers the sources include")
    include = Path(spec.submodule_search_locations[0], "include")
    folders = [include, include / "torch/csrc/api/include", sysconfig.get_path("include")]
    return [f"-isystem{folder}" for folder in folders] + ["-DTORCH_EXTENSION_NAME=_C", "-fopenmp"]


def sources() -> dict[Path, list[str]]:
    """Each file to check, with its flags; those that take longest first."""
    # bag_run.h includes all headers of CUDA kernels that need no toolkit.
    light = sorted([*ROOT.glob("csrc/core/**/*.cpp"), *ROOT.glob("kernels/cpu/*.h"), ROOT / "kernels/cuda/bag_run.h"])
    heavy = {*ROOT.glob("csrc/**/*.cpp"), *ROOT.glob("kernels/**/*.cpp")} - {*light, *ROOT.glob("kernels/cuda/*.cpp")}
    return dict.fromkeys(sorted(heavy), COMMON + torch_flags()) | dict.fromkeys(light, COMMON)


def closure(path: Path) -> set[Path]:
    """The file and all of ours that it includes, directly or not."""
    found, left = set(), [path]
    while left:
        file = left.pop()
        found.add(file)
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', file.read_text(), re.MULTILINE):
            candidates = (folder / name for folder in (file.parent, ROOT, ROOT / "csrc"))
            left += [c.resolve() for c in candidates if c.is_file() and c.resolve() not in found]
    return found


def key(path: Path, flags: list[str], versions: str) -> str:
    """What the result of a file depends on: of torch its version, not where it lies."""
    own = [flag for flag in flags if not flag.startswith("-isystem")]
    digest = hashlib.sha256(f"{versions} {own} {path.relative_to(ROOT)}".encode())
    for file in sorted(closure(path)):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def clang_tidy(path: Path, flags: list[str]) -> tuple[bool, str]:
    """Whether one source is clean, and what clang-tidy says."""
    command = ["clang-tidy", "--quiet", "--warnings-as-errors=*", f"--config-file={ROOT / '.clang-tidy'}", str(path)]
    done = subprocess.run(
        [*command, "--", *flags], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    lines = (done.stdout + done.stderr).splitlines()
    return done.returncode == 0, "\n".join(line for line in lines if line and not NOISE.match(line))


def check(batch: list[Path], flags: list[str]) -> dict[Path, str]:
    """What clang-tidy says about each source that is not clean."""
    if len(batch) == 1:
        clean, text = clang_tidy(batch[0], flags)
        return {} if clean else {batch[0]: text}
    with tempfile.TemporaryDirectory() as folder:
        unified = Path(folder, BATCH_NAME)
        unified.write_text(batch_source([path.relative_to(ROOT) for path in batch]))
        clean, text = clang_tidy(unified, flags)
    if clean:
        return {}
    named = {(ROOT / name).resolve() for name in NAMED.findall(text)} & set(batch)
    aside, rest = [path for path in batch if path in named], [path for path in batch if path not in named]
    if not aside or not rest:
        parts = [[path] for path in batch]
    elif NO_COMPILE in text:
        parts = [rest, aside]  # What can't stand beside the rest may do so beside others of its kind.
    else:
        parts = [rest, *([path] for path in aside)]
    return {path: said for part in parts for path, said in check(part, flags).items()}


def batched(files: list[Path], flags_of: dict[Path, list[str]]) -> Iterator[list[Path]]:
    """Sources of one folder and of the same flags; those that take longest come first, as they do in ``files``."""
    kinds: dict[int, list[Path]] = {}
    for path in files:
        kinds.setdefault(len(flags_of[path]), []).append(path)
    for kind in kinds.values():
        yield from batches(kind, BATCH)


def main() -> int:
    """Checks what is not known to be clean."""
    cache = Path(sys.argv[1])
    cache.mkdir(parents=True, exist_ok=True)
    for mark in cache.iterdir():
        if time.time() - mark.stat().st_mtime > KEEP_SECONDS:
            mark.unlink(missing_ok=True)
    version = subprocess.run(["clang-tidy", "--version"], capture_output=True, text=True, check=True).stdout
    config = (ROOT / ".clang-tidy").read_text()
    versions = f"{version} {config} {importlib.metadata.version('torch')}"

    flags_of = sources()
    marks = {path: cache / key(path, flags, versions) for path, flags in flags_of.items()}
    stale = [path for path in marks if not marks[path].exists()]
    for path in marks.keys() - set(stale):
        marks[path].touch()

    def run(batch: list[Path]) -> dict[Path, str]:
        findings = check(batch, flags_of[batch[0]])
        for path in set(batch) - findings.keys():
            marks[path].touch()
        return findings

    failed = 0
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        for findings in pool.map(run, list(batched(stale, flags_of))):
            failed += len(findings)
            print(*findings.values(), sep="\n", end="\n" if findings else "", flush=True)
    print(f"{len(marks)} files, {len(stale)} of them checked now, {failed} with findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
