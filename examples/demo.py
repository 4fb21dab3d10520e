"""``make demo`` runs this: time to accuracy with one slow worker, for gloo, prague and hop.

    python examples/demo.py
    python examples/demo.py --slow 2 --backends gloo prague dssync

Four workers train the network of train_digits.py with DistributedDataParallel, and one of them is 4 times slower. The
slowness is emulated: a step lasts at least 20 ms, on the last worker 80 ms, by sleeping. Each worker draws batches from
a shard of its own until all together have made 10,000 samples. Plain DDP keeps all workers in step.

Prints a table and writes demo.png, and each run's figures, to demo-output/.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from processes import installed, require_averages

COLOURS = {
    "gloo": "tab:grey",
    "prague": "tab:blue",
    "dear": "tab:orange",
    "dssync": "tab:green",
    "hop": "tab:red",
}
# For a worker that is always slow: who is far behind jumps, and one late model is not waited for.
OPTIONS = {"hop": {"backup_workers": 1, "max_iteration_gap": 5, "max_jump": 10}}
# Workers are forked from a process that has imported everything: that takes most of a short run.
FORKS = multiprocessing.get_context("forkserver")
TIMEOUT = datetime.timedelta(seconds=120)
SNAPSHOT_EVERY = 5  # steps of rank 0


# --- a worker ----------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, backend: str, rank: int, port: int) -> None:
    """What each worker does; rank 0 writes the run's figures into --output."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from train_digits import TORCHEXT_BACKENDS, DigitsNet, Pace, evaluate, load_data

    world_size, options = args.workers, None
    if ours := backend in TORCHEXT_BACKENDS:
        import torchext

        options = getattr(torchext, TORCHEXT_BACKENDS[backend])(**OPTIONS.get(backend, {}))
    # Two connections: a collective that waits in the store must not keep the counter waiting.
    store = dist.PrefixStore("group", dist.TCPStore("127.0.0.1", port, timeout=TIMEOUT))
    counter = dist.TCPStore("127.0.0.1", port, timeout=TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT, pg_options=options)

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train_set, test_set = load_data()
    shard = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(args.seed))[rank::world_size]
    images, labels = (tensor[shard] for tensor in train_set.tensors)
    model = DistributedDataParallel(DigitsNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sync = torchext.attach(model, optimizer) if ours else None
    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)
    pace = Pace(step_ms=args.step_ms, straggler=args.slow, rank=rank, world_size=world_size)

    # Backends that keep workers in step need as many steps of each: the last ones would wait for ever.
    in_step = backend not in ("prague", "hop")
    own_steps = args.samples // (args.batch_size * world_size)
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)
    snapshots: list[tuple[float, dict[str, Any]]] = []
    dist.barrier()
    begin = time.perf_counter()
    for step in itertools.count(1):
        step_started = time.perf_counter()
        chosen = torch.randint(len(images), (args.batch_size,), generator=generator)
        loss = loss_function(model(images[chosen]), labels[chosen])
        pace.hold(step_started)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        samples = counter.add("samples", args.batch_size)
        if rank == 0 and step % SNAPSHOT_EVERY == 0:
            # Its own replica, so that nobody is waited for; looked at when training is over.
            copy = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
            snapshots.append((time.perf_counter() - begin, copy))
        if step == own_steps if in_step else samples >= args.samples:
            break
    seconds = time.perf_counter() - begin

    # Of all replicas: the model that one would save.
    with sync.averaged(optimizer_state=False) if sync else contextlib.nullcontext():
        final = evaluate(model.module, test_set)
    steps = torch.zeros(world_size, dtype=torch.int64)
    steps[rank] = step
    dist.all_reduce(steps)
    if rank == 0:
        test_images, test_labels = test_set.tensors
        replica, curve = DigitsNet(), []
        for at, weights in snapshots:
            replica.load_state_dict(weights)
            with torch.no_grad():
                accuracy = (replica(test_images).argmax(dim=1) == test_labels).float().mean().item()
            curve.append({"seconds": at, "accuracy": accuracy})
        figures = {"backend": backend, "seconds": seconds, "steps": steps.tolist(), "accuracy": final, "curve": curve}
        text = json.dumps({**figures, "stats": sync.stats() if sync else None}, default=str, indent=1)
        (args.output / f"{backend}.json").write_text(text)
    # Everybody stays until rank 0 has written: the first to leave would end the run for the others.
    dist.barrier()
    dist.destroy_process_group()


# --- a run -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress(name: str, store: Any, total: int) -> Iterator[None]:
    """Shows how many samples the workers have made while the block runs: a bar on a terminal, else nothing."""
    ended = threading.Event()

    def show() -> None:
        began = time.perf_counter()
        while not ended.wait(0.2):
            done = min(store.add("samples", 0), total)
            bar = "#" * (30 * done // total)
            state = "training" if done else "starting"
            sys.stderr.write(f"\r{name:<8}[{bar:<30}] {state} {time.perf_counter() - began:5.1f} s")
            sys.stderr.flush()
        sys.stderr.write("\r" + " " * 70 + "\r")

    thread = threading.Thread(target=show)
    if sys.stderr.isatty():
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()


def work(args: argparse.Namespace, backend: str, rank: int, port: int, log: Path) -> None:
    """A worker's process: what it prints goes to its log."""
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    train(args, backend, rank, port)


def run(backend: str, args: argparse.Namespace) -> dict[str, Any]:
    """One training run on all workers; returns its figures."""
    from torch.distributed import TCPStore

    # Port 0 lets the system choose. The store is outside of the workers, and counts their samples.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    logs = [args.output / f"{backend}.{rank}.txt" for rank in range(args.workers)]
    processes = [
        FORKS.Process(target=work, args=(args, backend, rank, store.port, log), daemon=True)
        for rank, log in enumerate(logs)
    ]
    try:
        for process in processes:
            process.start()
        with progress(backend, store, args.samples):
            limit = time.monotonic() + args.deadline
            # As soon as one fails nobody waits for the others.
            while any(process.exitcode is None for process in processes):
                if any(process.exitcode for process in processes) or time.monotonic() > limit:
                    break
                multiprocessing.connection.wait([of.sentinel for of in processes if of.exitcode is None], 0.5)
        states = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    if any(state != 0 for state in states):
        text = "\n".join(log.read_text() for log in logs if log.exists())
        late = f" after {args.deadline:g} s" if all(state in (0, None) for state in states) else ""
        raise SystemExit(f"{text}\ndemo: the {backend} run failed{late}: exit statuses {states}; its output is above")
    for log in logs:
        log.unlink()
    figures: dict[str, Any] = json.loads((args.output / f"{backend}.json").read_text())
    try:
        require_averages(figures["stats"])
    except RuntimeError as error:
        raise SystemExit(f"demo: the {backend} run is not valid: {error}") from None
    figures["reached"] = time_to(figures["curve"], args.target)
    after = "was not reached" if figures["reached"] is None else f"after {figures['reached']:.1f} s"
    print(f"{backend:<8} {args.target:.0%} accuracy {after}; {figures['seconds']:.1f} s of training", flush=True)
    return figures


def time_to(curve: list[dict[str, float]], target: float) -> float | None:
    """Seconds until the first of two consecutive snapshots at or above ``target``; None if that never happened."""
    for this, following in itertools.pairwise(curve):
        if min(this["accuracy"], following["accuracy"]) >= target:
            return this["seconds"]
    return None


# --- what all runs say -------------------------------------------------------------------------------------------


def print_table(runs: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    first = next(iter(runs.values()))
    print(f"\n{'backend':<10}{f's to {args.target:.0%}':>10}{'times sooner':>14}{'gradients/s':>13}{'at the end':>12}")
    for backend, of in runs.items():
        reached = "never" if of["reached"] is None else f"{of['reached']:.1f}"
        sooner = f"{first['reached'] / of['reached']:.1f}" if first["reached"] and of["reached"] else ""
        speed = sum(of["steps"]) / of["seconds"]
        print(f"{backend:<10}{reached:>10}{sooner:>14}{speed:>13.0f}{of['accuracy']:>12.2%}")


def draw(runs: dict[str, dict[str, Any]], args: argparse.Namespace, path: Path) -> None:
    """The accuracy of rank 0's replica over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for backend, of in runs.items():
        at, accuracy = ([point[key] for point in of["curve"]] for key in ("seconds", "accuracy"))
        reached = "" if of["reached"] is None else f": {of['reached']:.1f} s"
        axes.plot(at, accuracy, color=COLOURS.get(backend), label=backend + reached)
    axes.axhline(args.target, color="black", linewidth=0.8, linestyle=":")
    title = f"scikit-learn digits, one of {args.workers} workers {args.slow:g} times slower (emulated by sleeping)"
    axes.set(xlabel="seconds of training", ylabel="test accuracy of rank 0's replica")
    axes.set_title(title, fontsize="medium")
    axes.legend()
    figure.savefig(path, dpi=130)


def check_requirements(backends: list[str]) -> None:
    """Say what is missing before anything runs, rather than after the first minute."""
    needed = {"torch": "torch", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}
    missing = [package for module, package in needed.items() if not installed(module)]
    if missing:
        raise SystemExit(f"demo: missing packages; type: {sys.executable} -m pip install {' '.join(missing)}")
    if set(backends) - {"gloo"} and not installed("torchext"):
        raise SystemExit(
            "demo: torchext is not installed; `make demo` installs it first, or type: "
            "pip install --no-build-isolation ."
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to accuracy with one slow worker.")
    add = parser.add_argument
    add("--backends", nargs="+", default=["gloo", "prague", "hop"], metavar="NAME", help="default: gloo prague hop")
    add("--workers", type=int, default=4, help="processes a run (default: %(default)s)")
    add("--step-ms", type=float, default=20.0, metavar="MS", help="emulated length of a step (default: %(default)s)")
    add("--slow", type=float, default=4.0, metavar="K", help="the last worker is K times slower (default: %(default)s)")
    add("--target", type=float, default=0.95, metavar="SHARE", help="accuracy to reach (default: %(default)s)")
    add("--samples", type=int, default=10_000, help="of all workers together (default: %(default)s)")
    add("--batch-size", type=int, default=16, help="of a worker (default: %(default)s)")
    add("--lr", type=float, default=0.05, help="default: %(default)s")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--deadline", type=float, default=300.0, metavar="S", help="seconds a run may take (default: %(default)s)")
    add("--output", type=Path, default=Path("demo-output"), metavar="FOLDER", help="default: %(default)s")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    # So that `kill` ends the workers too: the exception unwinds through the code that ends them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    check_requirements(args.backends)
    args.output.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # several workers share this machine
    ours = ["torchext"] if set(args.backends) - {"gloo"} else []
    FORKS.set_forkserver_preload(["torch", "torch.nn.parallel", "torch._dynamo", "sklearn.model_selection", *ours])
    pace = f"steps of {args.step_ms:g} ms by sleeping"
    print(f"{args.workers} workers, one of them {args.slow:g} times slower (emulated: {pace})", flush=True)
    runs = {backend: run(backend, args) for backend in args.backends}
    print_table(runs, args)
    draw(runs, args, args.output / "demo.png")
    print(f"\n{args.output / 'demo.png'} shows the accuracy over time; the figures lie beside it.")
    if never := [backend for backend, of in runs.items() if of["reached"] is None]:
        raise SystemExit(f"demo: {', '.join(never)} did not reach {args.target:.0%}")


if __name__ == "__main__":
    main()
