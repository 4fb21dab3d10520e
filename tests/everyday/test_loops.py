"""Loops as people write them, plain scripts for Gloo, run on every backend with two lines changed.

Each runs twice in one folder, so that the second run goes on from the first's checkpoint where the loop has one.
Averaging backends are compared with the reference of forms.py that averages parameters after each step.
"""

from __future__ import annotations

import os
import re
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import forms
import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import Rank, free_port, launch
from largest import largest
from nets import flat

LOOPS = sorted((Path(__file__).parent / "loops").glob("*.py"))
TIMEOUT = timedelta(seconds=40)
RUNS = 2
EXACT = 1e-7


def with_two_lines(source: str) -> str:
    """The loop after the change that the README asks for; ``NAME``, ``OPTIONS`` and ``attach`` are the form's."""
    init = 'dist.init_process_group("gloo")'
    place = re.compile("# attach here: (.+)")
    assert source.count(init) == len(place.findall(source)) == 1
    return place.sub(r"sync = attach(\1)", source.replace(init, "dist.init_process_group(NAME, pg_options=OPTIONS)"))


def run(code: Any, form: str, folder: Path, port: int) -> np.ndarray:
    """The parameters after one run."""
    os.environ["MASTER_PORT"] = str(port)
    names: dict[str, Any] = {
        "__name__": "loop",
        "NAME": forms.backend_name(form),
        "OPTIONS": forms.options(form, TIMEOUT),
        "attach": forms.attacher(form),
    }
    exec(code, names)
    try:
        return flat(names["main"](folder)).numpy()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def body(rank: Rank, path: Path, ports: dict[str, list[int]]) -> dict[str, list[np.ndarray] | str]:
    """Rank function: of each form the parameters after each run, or the error."""
    torch.set_default_dtype(torch.float64)
    os.environ.update(RANK=str(rank.rank), WORLD_SIZE=str(rank.size), MASTER_ADDR="127.0.0.1")
    code = compile(with_two_lines(path.read_text()), str(path), "exec")
    results: dict[str, list[np.ndarray] | str] = {}
    for form, own in ports.items():
        folder = rank.folder / form
        folder.mkdir(exist_ok=True)
        rank.report(f"begins {form}")
        try:
            results[form] = [run(code, form, folder, port) for port in own]
        except Exception:
            results[form] = traceback.format_exc()[-1500:]
    return results


@pytest.mark.parametrize("path", LOOPS, ids=lambda path: path.stem)
def test_loop_is_the_same_on_every_backend(path: Path) -> None:
    ports = {form: [free_port() for _ in range(RUNS)] for form in (forms.REFERENCE, forms.LOCAL, *forms.FORMS)}
    with launch(body, 2, path, ports) as ranks:
        results = ranks.values(deadline=240)
    plain = results[0][forms.REFERENCE]
    assert np.abs(plain[0] - plain[1]).max() > 1e-3, plain  # it trains
    wrong = []
    for rank, own in enumerate(results):
        for form in forms.FORMS:
            expected = own[forms.LOCAL if form in forms.AVERAGING else forms.REFERENCE]
            if isinstance(own[form], str):
                wrong.append(f"{form}, rank {rank}: {own[form]}")
                continue
            apart = [float(np.abs(a - b).max()) for a, b in zip(own[form], expected, strict=True)]
            if not largest(apart) <= EXACT:
                wrong.append(f"{form}, rank {rank}: after each run apart by {apart}")
    assert not wrong, "\n".join(wrong)


def test_loops_are_short() -> None:
    assert len(LOOPS) == 4
    assert all(len(path.read_text().splitlines()) <= 300 for path in LOOPS)
