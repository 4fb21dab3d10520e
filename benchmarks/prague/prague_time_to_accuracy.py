"""Does prague reach an accuracy sooner than plain DDP when one worker is slow?

On scikit-learn's digits. Steps last --step-ms, on the last rank --slow times as long, by sleeping. The work is a total
number of samples over all workers. Every worker draws endlessly from a shard of its own until the total is reached;
under prague the fast workers so do more of the work and the slow one less, while DDP keeps all in step. A counter in a
store that this script hosts, outside the training group, tells when the total is reached. (Accuracy at equal samples
of every worker is digits_accuracy.py's question.)

Measuring must not stall what it measures: every --snapshot-every steps rank 0, a fast worker, copies its *own*
parameters with the time, and evaluates all copies after training. Nobody is synchronized for it, so for prague the
curve is the accuracy of one replica, which between two averages is a little below that of the average. The time to
accuracy is that of the first of two consecutive snapshots at or above the target. Final accuracies are those of the
exact average.

    python benchmarks/prague/prague_time_to_accuracy.py     # three minutes
    python benchmarks/prague/prague_time_to_accuracy.py --quick  # that it runs, not what it says

Results: benchmarks/results/prague_time_to_accuracy.json and .png (other names by --output).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
import torch.distributed as dist
from lab.run.machine import describe_machine
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from processes import require_averages, started, wait_all
from train_digits import TORCHEXT_BACKENDS, DigitsNet, Pace, evaluate, load_data

COLOURS = {"gloo": "tab:grey", "prague": "tab:blue"}
TIMEOUT = datetime.timedelta(seconds=120)


# --- a run -------------------------------------------------------------------------------------------------------


def endless_batches(
    images: Tensor, labels: Tensor, *, seed: int, rank: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of one shard, shuffled anew after each pass over it."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        order = torch.randperm(len(images), generator=generator)
        for chosen in order.split(batch_size)[: len(images) // batch_size]:
            yield images[chosen], labels[chosen]


def straggler_worker(args: argparse.Namespace) -> None:
    """One worker of a run; rank 0 writes the run's result to --output."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    backend = args.backends[0]
    if backend in TORCHEXT_BACKENDS:
        import torchext
    # Two connections: a collective that waits in the store must not keep the counter waiting.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    group_store = dist.PrefixStore("group", dist.TCPStore(address, port, timeout=TIMEOUT))
    counter = dist.TCPStore(address, port, timeout=TIMEOUT)
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=world_size, timeout=TIMEOUT)

    torch.manual_seed(args.seed)
    train_set, test_set = load_data()
    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(args.seed))
    images, labels = (tensor[order[rank::world_size]] for tensor in train_set.tensors)
    model = DistributedDataParallel(DigitsNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sync = torchext.attach(model, optimizer) if backend in TORCHEXT_BACKENDS else None
    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)
    pace = Pace(step_ms=args.step_ms, straggler=args.slow, rank=rank, world_size=world_size)

    # DDP keeps its workers in step, so each must make the same number of steps or the last ones would wait for ever.
    own_limit = args.total_samples // (args.batch_size * world_size) if sync is None else None
    snapshots: list[tuple[float, int, dict[str, Tensor]]] = []
    steps, total = 0, 0
    dist.barrier()
    begin = time.perf_counter()
    for batch_images, batch_labels in endless_batches(
        images, labels, seed=args.seed, rank=rank, batch_size=args.batch_size
    ):
        step_started = time.perf_counter()
        loss = loss_function(model(batch_images), batch_labels)
        pace.hold(step_started)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        total = counter.add("samples", args.batch_size)
        if rank == 0 and steps % args.snapshot_every == 0:
            copy = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
            snapshots.append((time.perf_counter() - begin, total, copy))
        if steps == own_limit or (own_limit is None and total >= args.total_samples):
            break
    seconds = time.perf_counter() - begin

    with sync.averaged(optimizer_state=False) if sync else contextlib.nullcontext():
        final = evaluate(model.module, test_set)
    steps_of = torch.zeros(world_size, dtype=torch.int64)
    steps_of[rank] = steps
    dist.all_reduce(steps_of)
    if rank == 0:
        test_images, test_labels = test_set.tensors
        replica = DigitsNet()
        curve = []
        for at, samples, weights in snapshots:
            replica.load_state_dict(weights)
            with torch.no_grad():
                correct = (replica(test_images).argmax(dim=1) == test_labels).sum().item()
            curve.append({"seconds": at, "samples": samples, "accuracy": correct / len(test_labels)})
        result = {
            "backend": backend,
            "seed": args.seed,
            "seconds": seconds,
            "steps": steps_of.tolist(),
            "gradients_per_second": steps_of.sum().item() / seconds,
            "final_accuracy": final,
            "curve": curve,
            "stats": sync.stats() if sync else None,
        }
        args.output.write_text(json.dumps(result, default=str))
    # Everybody stays until rank 0 has written: the first to leave would end the run for the others.
    dist.barrier()
    dist.destroy_process_group()


def straggler_run(args: argparse.Namespace, backend: str, seed: int) -> dict[str, Any]:
    """Start the workers of one run and return rank 0's result."""
    # Port 0 lets the system choose: no guess that somebody else may have taken meanwhile.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        result_file = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--worker", f"--backends={backend}", f"--seed={seed}"]
        command += [f"--output={result_file}", f"--total-samples={args.total_samples}", f"--lr={args.lr}"]
        command += [f"--step-ms={args.step_ms}", f"--slow={args.slow}", f"--batch-size={args.batch_size}"]
        command += [f"--snapshot-every={args.snapshot_every}"]
        processes = []
        for rank in range(args.workers):
            output = stack.enter_context((Path(folder) / f"{rank}.txt").open("w"))
            env = {"RANK": str(rank), "WORLD_SIZE": str(args.workers), "OMP_NUM_THREADS": "1"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
            processes.append(stack.enter_context(started(command, env=env, output=output)))
        states = wait_all(processes, deadline=args.deadline)
        if any(states):
            texts = "\n".join((Path(folder) / f"{rank}.txt").read_text() for rank in range(args.workers))
            raise SystemExit(f"{texts}\n{backend}, seed {seed}: exit statuses {states}")
        result: dict[str, Any] = json.loads(result_file.read_text())
    require_averages(result["stats"])
    if sum(result["steps"]) * args.batch_size < args.total_samples - args.batch_size * args.workers:
        raise SystemExit(f"{backend}, seed {seed}: made only {sum(result['steps'])} steps")
    return result


def time_to(curve: list[dict[str, float]], target: float) -> float | None:
    """Seconds until the first of two consecutive snapshots at or above ``target``; None if that never happened."""
    for this, following in itertools.pairwise(curve):
        if min(this["accuracy"], following["accuracy"]) >= target:
            return this["seconds"]
    return None


def time_to_accuracy(args: argparse.Namespace) -> dict[str, Any]:
    runs = []
    for seed in range(args.seeds):
        for backend in args.backends:
            result = straggler_run(args, backend, seed)
            result["seconds_to_target"] = time_to(result["curve"], args.target)
            reached = result["seconds_to_target"]
            after = "never" if reached is None else f"after {reached:.1f} s"
            print(
                f"straggler      {backend:<8} seed {seed}  {args.target:.0%} {after},"
                f" {result['gradients_per_second']:.0f} gradients/s,"
                f" final {result['final_accuracy']:.2%}, steps {result['steps']}",
                flush=True,
            )
            runs.append(result)
    return {
        "workers": args.workers,
        "step_ms": args.step_ms,
        "slow": args.slow,
        "target": args.target,
        "total_samples": args.total_samples,
        "runs": runs,
    }


# --- what all runs say -------------------------------------------------------------------------------------------


def comparisons(runs: list[dict[str, Any]], backends: list[str]) -> dict[str, Any]:
    """The summary: medians and, with both backends measured, the speed-up."""
    summary: dict[str, Any] = {"seconds_to_target": {}}
    for backend in backends:
        times = [run["seconds_to_target"] for run in runs if run["backend"] == backend]
        reached = [value for value in times if value is not None]
        summary["seconds_to_target"][backend] = {
            # A median over the successful runs alone would hide the others.
            "median": statistics.median(reached) if len(reached) == len(times) else None,
            "runs": times,
        }
    if {"gloo", "prague"} <= set(backends):
        slow, fast = (summary["seconds_to_target"][name]["median"] for name in ("gloo", "prague"))
        summary["speedup"] = slow / fast if slow and fast else None
        summary["at_least_3x"] = bool(summary["speedup"] and summary["speedup"] >= 3.0)
    return summary


def draw(result: dict[str, Any], path: Path, backends: list[str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for run_number, run in enumerate(result["runs"]):
        axes.plot(
            [point["seconds"] for point in run["curve"]],
            [point["accuracy"] for point in run["curve"]],
            color=COLOURS.get(run["backend"]),
            label=run["backend"] if run_number < len(backends) else None,
        )
    axes.axhline(result["target"], color="black", linewidth=0.8, linestyle=":")
    title = f"one of {result['workers']} workers {result['slow']:g}x slower, {result['step_ms']:g} ms steps"
    axes.set(xlabel="seconds", ylabel="test accuracy of rank 0's replica", title=title)
    axes.legend()
    figure.savefig(path, dpi=130)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prague against DDP: time to accuracy with a straggler.")
    add = parser.add_argument
    add("--quick", action="store_true", help="few seeds and samples: that it runs, not what it says")
    add("--backends", nargs="+", default=["gloo", "prague"], metavar="NAME")
    add("--workers", type=int, default=4, help="default: %(default)s")
    add("--seeds", type=int, default=3, help="default: %(default)s")
    add("--step-ms", type=float, default=20.0, help="emulated time of a step; default: %(default)s")
    add("--slow", type=float, default=5.0, help="how much slower the last rank is; default: %(default)s")
    add("--target", type=float, default=0.95, help="the accuracy to reach; default: %(default)s")
    add("--total-samples", type=int, default=20_000, help="over all workers; default: %(default)s")
    add("--batch-size", type=int, default=16, help="a worker; default: %(default)s")
    add("--lr", type=float, default=0.05, help="default: %(default)s")
    add("--snapshot-every", type=int, default=5, help="steps of rank 0; default: %(default)s")
    add("--deadline", type=float, default=300.0, help="seconds a run may take; default: %(default)s")
    add("--output", type=Path, default=ROOT / "benchmarks/results/prague_time_to_accuracy.json", metavar="FILE")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.total_samples = 1, 6_000
    return args


def main() -> None:
    args = parse_arguments()
    if args.worker:
        straggler_worker(args)
        return
    # So that `kill` ends the workers too: the exception unwinds through the code that ends them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if set(args.backends) & set(TORCHEXT_BACKENDS):
        # Before minutes of baseline runs, not after them.
        import torchext  # noqa: F401
    machine = describe_machine()
    result = time_to_accuracy(args)
    result["summary"] = comparisons(result["runs"], args.backends)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "script": "benchmarks/prague/prague_time_to_accuracy.py",
        "machine": machine,
        "quick": args.quick,
        **result,
    }
    args.output.write_text(json.dumps(content, indent=1) + "\n")
    draw(result, args.output.with_suffix(".png"), args.backends)
    print(json.dumps(result["summary"], indent=1))
    print(f"{args.output} and {args.output.with_suffix('.png').name} beside it")


if __name__ == "__main__":
    main()
