"""A worker of the chaos run: trains digits with ``on_peer_failure="continue"`` and writes down what happens to it.

    python -m lab.faults.chaos_worker SETTINGS.json

Every line of its log is an event with a time of the machine's monotonic clock, which all hosts of a lab share.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext
from lab.workloads.digits import ROOT  # which puts the examples on the path

from train_digits import DigitsNet, load_data  # isort: skip

assert ROOT
PROJECTIONS = 4
WATCH_S = 0.005


class Log:
    """Events, a line each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def note(self, event: str, **fields: Any) -> None:
        """Writes an event down."""
        self._file.write(json.dumps({"t": time.monotonic(), "event": event, **fields}) + "\n")


class Counted(nn.Module):
    """The network, and a number that all workers agree on whenever they form an exact average."""

    def __init__(self) -> None:
        super().__init__()
        self.net = DigitsNet()
        self.register_buffer("stop", torch.zeros(()))  # above 0 once the first worker has set its own

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """As the network's."""
        scores: torch.Tensor = self.net(images)
        return scores


def watch(log: Log, model: DistributedDataParallel) -> None:
    """Notes when each group fails; in a thread of its own."""
    last = None
    while True:
        try:
            backend = torchext.backend_of(model.process_group)
            reason = backend.failure[1]
            if reason and backend is not last:
                last = backend
                log.note("failure", reason=reason)
        except (RuntimeError, ValueError):  # between two groups
            pass
        time.sleep(WATCH_S)


class _Events(logging.Handler):
    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.note("goes on", text=record.getMessage())


def projections(model: Counted) -> list[float]:
    """A few numbers that are linear in the parameters: their mean over workers is that of the mean of parameters."""
    flat = torch.cat([p.detach().reshape(-1) for p in model.net.parameters()]).double()
    generator = torch.Generator().manual_seed(7)
    return [float(flat @ torch.randn(flat.numel(), generator=generator).double()) for _ in range(PROJECTIONS)]


def digest(model: Counted) -> str:
    """The same for the same parameters, bit for bit."""
    flat = torch.cat([p.detach().reshape(-1) for p in model.net.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def accuracy(model: nn.Module) -> float:
    """On the test set."""
    images, labels = load_data()[1].tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def train(settings: dict[str, Any], log: Log) -> None:
    """Until the first worker finds ``stop`` in the store."""
    store = dist.TCPStore(settings["host"], settings["port"], is_master=False, timeout=timedelta(seconds=30))
    if settings["rank"] is None:
        torchext.join_running_job(settings["backend"], store=store)
    else:
        place = {"rank": settings["rank"], "world_size": settings["workers"]}
        dist.init_process_group(settings["backend"], store=store, **place)
    torch.manual_seed(0)
    model = DistributedDataParallel(Counted())
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=0.9)
    sync = torchext.attach(model, optimizer, on_peer_failure="continue")
    module: Counted = model.module
    log.note("in")
    threading.Thread(target=watch, args=(log, model), daemon=True).start()
    logging.getLogger("torchext").addHandler(_Events(log))

    images, labels = load_data()[0].tensors
    generator = torch.Generator().manual_seed(os.getpid())
    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)
    while module.stop.item() == 0:
        for _ in range(settings["steps"]):
            begin = time.monotonic()
            pick = torch.randint(len(images), (settings["batch"],), generator=generator)
            optimizer.zero_grad()
            loss = loss_function(model(images[pick]), labels[pick])
            loss.backward()
            optimizer.step()
            time.sleep(max(0.0, settings["step_s"] - (time.monotonic() - begin)))
        if dist.get_rank() == 0 and store.check(["stop"]):
            module.stop.fill_(1)
        recoveries = sync.stats()["recovery_ms"]
        with sync.averaged():
            stats = sync.stats()
            met = {"after": projections(module), "digest": digest(module), "stop": module.stop.item()}
        # What each one goes on with is what it gave to the average.
        calm = sync.stats()["recovery_ms"] == recoveries
        log.note(
            "met",
            own=projections(module),
            loss=loss.item(),
            calm=calm,
            workers=stats["workers"],
            **met,
        )
        stop = met["stop"]
        module.stop.fill_(stop)  # averaged() gives each its own back
    with sync.averaged():
        log.note("end", accuracy=accuracy(module), digest=digest(module))
    sync.detach()
    dist.destroy_process_group()


def main() -> None:
    """One worker."""
    torch.set_num_threads(1)
    settings = json.loads(Path(sys.argv[1]).read_text())
    log = Log(Path(settings["log"]))
    try:
        train(settings, log)
    except Exception as error:  # what it is, is a result
        log.note("error", kind=type(error).__name__, text=str(error)[:400])
        sys.stdout.flush()
        os._exit(1)
    log.note("left")


if __name__ == "__main__":
    main()
