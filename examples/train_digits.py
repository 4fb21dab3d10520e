"""Train a small network on scikit-learn's handwritten digits with DistributedDataParallel.

An ordinary DDP script. ``--backend prague`` (or ``dear``, ``dssync``, ``hop``) changes two lines: the name given to
``init_process_group``, and ``sync = torchext.attach(model, optimizer)``. Evaluation then runs under
``sync.averaged()``, because the replicas of a decentralized backend differ between two averages.

    torchrun --nproc-per-node 4 examples/train_digits.py --backend gloo
    torchrun --nproc-per-node 4 examples/train_digits.py --backend prague
    torchrun --nproc-per-node 4 --max-restarts 3 examples/train_digits.py --backend gloo --checkpoint digits.pt --resume

Without torchrun, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself (``env://``). The data are 1,797 real
images that come inside scikit-learn: nothing is downloaded. It trains on the CPU, in seconds.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import errno
import functools
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# torchext's backends and the class of their options. A new backend joins this script by one more entry.
TORCHEXT_BACKENDS = {
    "prague": "PragueOptions",
    "dear": "DeAROptions",
    "torchext": "DeAROptions",
    "dssync": "DSSyncOptions",
    "hop": "HopOptions",
}


class DigitsNet(nn.Module):
    """Two convolutions and a linear layer for 8 x 8 images; 10 k parameters, no BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Class scores, shape (N, 10), of images of shape (N, 1, 8, 8)."""
        scores: Tensor = self.layers(images)
        return scores


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The training set (1,437 images) and the held-out test set (360), the same split in every process and run.

    The settings of this script were chosen with an eye on this test set, and there is no third part: its accuracy tells
    whether training works and how backends compare, not how well the network would read anyone else's digits.
    """
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16.0, labels, test_size=360, stratify=labels, random_state=0)
    train_x, test_x = (torch.tensor(part, dtype=torch.float32).reshape(-1, 1, 8, 8) for part in parts[:2])
    train_y, test_y = (torch.tensor(part) for part in parts[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


class Pace:
    """Emulates slower hardware by sleeping: a minimum step time, and one worker (the last rank) that is slower still.

    The sleep belongs between the forward and the backward pass. DDP communicates during the backward pass, so that the
    others wait for the slow worker's gradients just as they would wait for slow hardware.
    """

    def __init__(self, *, step_ms: float, straggler: float, rank: int, world_size: int) -> None:
        self.seconds = step_ms / 1000.0 * (straggler if rank == world_size - 1 else 1.0)

    def hold(self, step_started: float) -> None:
        """Sleep until the step that began at ``step_started`` (``time.perf_counter``) has lasted long enough."""
        left = step_started + self.seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)


def evaluate(model: nn.Module, test_set: TensorDataset) -> float:
    """The share of test images classified correctly; every worker looks at its part, the counts are summed."""
    images, labels = (tensor[dist.get_rank() :: dist.get_world_size()] for tensor in test_set.tensors)
    model.eval()
    with torch.no_grad():
        correct = (model(images).argmax(dim=1) == labels).sum()
    model.train()
    # An ordinary collective: exact under every backend.
    dist.all_reduce(correct)
    return correct.item() / len(test_set)


def write_atomically(path: Path, write: Any) -> None:
    """Call ``write(file)`` on a temporary file that then takes the place of ``path``: readers never see half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def refuse_unwritable(parser: argparse.ArgumentParser, path: Path) -> None:
    """Exit with an error now if ``path`` could not be written, not after the first epoch."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        parser.error(f"cannot write {path}: {error.strerror}")


def save_checkpoint(path: Path, shared: dict[str, Any], own: dict[str, Any]) -> None:
    """Rank 0 writes what all workers share and, in a list by rank, what each one has for itself.

    Momentum is always a worker's own under a decentralized backend, and so are the parameters between two averages.
    """
    workers = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, workers)
    if dist.get_rank() == 0:
        write_atomically(path, lambda file: torch.save({**shared, "workers": workers}, file))


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Rank 0 reads, the others receive: no shared file system is needed. None when there is no checkpoint yet."""
    found = [None]
    if dist.get_rank() == 0 and path.exists():
        found = [torch.load(path, map_location="cpu")]
    dist.broadcast_object_list(found)
    return found[0]


def with_progress(batches: Iterable[Any], *, label: str) -> Iterator[Any]:
    """A tqdm bar on rank 0's terminal; nothing elsewhere (each epoch ends with a plain line anyway)."""
    if dist.get_rank() == 0 and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            return iter(tqdm(batches, desc=label, leave=False, unit="step"))
    return iter(batches)


def train(args: argparse.Namespace) -> float:
    """Train as the command line says; returns the final accuracy on the test set, the same on every rank."""
    options = None
    if args.backend in TORCHEXT_BACKENDS:
        import torchext

        if args.option:
            options = getattr(torchext, TORCHEXT_BACKENDS[args.backend])(**dict(args.option))

    dist.init_process_group(args.backend, pg_options=options)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    train_set, test_set = load_data()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    pace = Pace(step_ms=args.step_ms, straggler=args.straggler, rank=rank, world_size=world_size)

    model = DistributedDataParallel(DigitsNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # attach refuses a group that is not one of torchext's: plain DDP has nothing to attach.
    sync = torchext.attach(model, optimizer) if args.backend in TORCHEXT_BACKENDS else None
    # Checkpoints here have each worker's own optimizer state besides, so that it goes on exactly.
    averaged = functools.partial(sync.averaged, optimizer_state=False) if sync else contextlib.nullcontext
    if sync:
        warnings.simplefilter("ignore", torchext.errors.ReplicaWarning)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=args.lr_decay)
    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)

    log: dict[str, Any] = {"settings": vars(args) | {"world_size": world_size}, "steps": [], "epochs": []}
    first_epoch, samples = 0, 0
    if args.resume and (checkpoint := load_checkpoint(args.checkpoint)):
        first_epoch = checkpoint["epoch"]
        log |= checkpoint["log"]
        samples = log["steps"][-1]["samples"]
        # Another number of workers or another backend is fine: all start alike, from the average instead of from their
        # own replica. DDP wants that: what differs between its replicas stays different.
        goes_on = len(checkpoint["workers"]) == world_size and checkpoint["backend"] == args.backend
        own = checkpoint["workers"][rank if goes_on else 0]
        model.module.load_state_dict(own["model"] if goes_on else checkpoint["model"])
        optimizer.load_state_dict(own["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        if sync and goes_on and own["sync"] is not None:
            sync.load_state_dict(own["sync"])
        if rank == 0:
            print(f"resumed from {args.checkpoint} after epoch {first_epoch}", flush=True)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        epoch_started = time.perf_counter()
        loss_sum = torch.zeros(())
        for images, labels in with_progress(loader, label=f"{args.backend} {epoch + 1}/{args.epochs}"):
            step_started = time.perf_counter()
            loss = loss_function(model(images), labels)
            pace.hold(step_started)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach()
            samples += len(labels) * world_size
            log["steps"].append(
                {
                    "samples": samples,
                    "loss": loss.item(),
                    "ms": (time.perf_counter() - step_started) * 1000.0,
                }
            )
        scheduler.step()

        with averaged():  # in which all workers have come to the same step, also those of hop that skip some
            dist.all_reduce(loss_sum)
            seconds = time.perf_counter() - epoch_started
            accuracy = evaluate(model.module, test_set)
            weights = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
        mean_loss = loss_sum.item() / len(loader) / world_size
        # How far apart the replicas were; plain DDP and dear hold one and the same model everywhere.
        distance = sync.stats().get("consensus_distance") if sync else None
        log["epochs"].append(
            {"loss": mean_loss, "accuracy": accuracy, "seconds": seconds, "consensus_distance": distance}
        )
        if rank == 0:
            print(
                f"{args.backend}  epoch {epoch + 1:3}/{args.epochs}  loss {mean_loss:.4f}"
                f"  accuracy {accuracy:7.2%}  {seconds:6.2f} s",
                flush=True,
            )
        if args.checkpoint:
            save_checkpoint(
                args.checkpoint,
                {
                    "backend": args.backend,
                    "epoch": epoch + 1,
                    "model": weights,
                    "scheduler": scheduler.state_dict(),
                    "log": {"steps": log["steps"], "epochs": log["epochs"]},
                },
                {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "sync": sync.state_dict() if sync else None,
                },
            )

    accuracy = log["epochs"][-1]["accuracy"]
    log["accuracy"] = accuracy
    log["seconds"] = sum(epoch["seconds"] for epoch in log["epochs"])
    log["stats"] = sync.stats() if sync else None
    if rank == 0:
        if args.log_file:
            text = json.dumps(log, default=str, indent=1)
            write_atomically(args.log_file, lambda file: file.write(text.encode()))
        print(f"\n{'backend':<10}{'workers':>8}{'samples':>10}{'seconds':>10}{'test accuracy':>16}")
        print(f"{args.backend:<10}{world_size:>8}{samples:>10,}{log['seconds']:>10.1f}{accuracy:>16.2%}", flush=True)
    return float(accuracy)


def parse_option(text: str) -> tuple[str, Any]:
    """``group_size=2`` to ("group_size", 2); what is no Python literal stays a string."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train scikit-learn's digits with DistributedDataParallel under torchrun."
    )
    add = parser.add_argument
    add("--backend", choices=["gloo", *TORCHEXT_BACKENDS], default="gloo", help="default: %(default)s")
    add("--option", type=parse_option, action="append", metavar="NAME=VALUE", help="option of a torchext backend")
    add("--epochs", type=int, default=20, help="default: %(default)s")
    add("--batch-size", type=int, default=16, help="samples a worker and step (default: %(default)s)")
    add("--lr", type=float, default=0.05, help="learning rate of the first epoch (default: %(default)s)")
    add("--lr-decay", type=float, default=0.93, help="factor on it after every epoch (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the initial weights and the sampler (default: %(default)s)")
    add("--checkpoint", type=Path, metavar="FILE", help="write a checkpoint here after every epoch")
    add("--resume", action="store_true", help="go on from --checkpoint if that file exists")
    # Not "--log": torchrun would take that for an abbreviation of options of its own and refuse it as ambiguous.
    add("--log-file", type=Path, metavar="FILE", help="write rank 0's loss and time of every step, as JSON")
    add("--min-accuracy", type=float, default=0.0, metavar="SHARE", help="fail when the final one is lower, e.g. 0.97")
    add("--step-ms", type=float, default=0.0, metavar="MS", help="emulate steps of at least this length by sleeping")
    add("--straggler", type=float, default=1.0, metavar="K", help="the last rank's --step-ms is K times longer")
    args = parser.parse_args()
    for name, value in (("--epochs", args.epochs), ("--batch-size", args.batch_size)):
        if value < 1:
            parser.error(f"{name} must be at least 1, got {value}")
    for name, value in (("--lr", args.lr), ("--lr-decay", args.lr_decay)):
        if not (0.0 < value < math.inf):
            parser.error(f"{name} must be above 0 and finite, got {value:g}")
    if not args.step_ms >= 0.0:
        parser.error(f"--step-ms must be at least 0, got {args.step_ms:g}")
    if not 0.0 <= args.min_accuracy <= 1.0:
        parser.error(f"--min-accuracy is a share from 0 to 1, got {args.min_accuracy:g}")
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint FILE")
    if args.straggler < 1.0 or (args.straggler > 1.0 and args.step_ms <= 0.0):
        parser.error(f"--straggler K needs K >= 1 and --step-ms above 0, got {args.straggler:g} and {args.step_ms:g}")
    if args.option and args.backend not in TORCHEXT_BACKENDS:
        parser.error(f"--option belongs to torchext's backends, not to {args.backend}")
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        parser.error(f"{', '.join(missing)} not set; start it by: torchrun --nproc-per-node 4 {sys.argv[0]}")
    if os.environ["RANK"] == "0":  # which writes
        for path in filter(None, (args.checkpoint, args.log_file)):
            refuse_unwritable(parser, path)
    return args


def main() -> None:
    args = parse_arguments()
    accuracy = train(args)
    # A thread of Gloo lets go of a tensor only after the collective that was waited for, and needs Python's lock to do
    # so. Had Python begun to shut down by then, it would abort: "terminate called without an active exception".
    # Waiting here, without the lock, gives those threads their turn: first for the other ranks, in a collective that
    # holds no tensor, then a moment for the threads themselves, for with DDP destroying the group does not end them.
    dist.barrier()
    time.sleep(0.1)
    dist.destroy_process_group()
    if accuracy < args.min_accuracy:
        raise SystemExit(f"accuracy {accuracy:.2%} is below --min-accuracy {args.min_accuracy:.2%}")


if __name__ == "__main__":
    main()
