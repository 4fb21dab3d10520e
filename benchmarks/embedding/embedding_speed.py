"""How fast is a training step of AdaptiveEmbeddingBag?

A table of 1,000,000 x 64 float32, 2,048 bags of 20 uniform ids, mode sum: forward, backward and update, on one thread.

    fbgemm            fbgemm-gpu-cpu's fused row-wise Adagrad, in a process with a torch that it can be loaded beside
    torch             nn.EmbeddingBag(sparse=True) and SGD
    whole             AdaptiveEmbeddingBag, everything resident, fused row-wise Adagrad
    quarter           a quarter of 4 chunks a row resident, in the direct layout, utilities collected
    whole:2threads    as whole, on two threads

Also measured: the share of the time that pruning takes in 2,000 steps of `quarter` with a pruner's defaults.

    python -m venv PEER && PEER/bin/pip install torch==2.13.0 numpy
    PEER/bin/pip install --no-deps fbgemm-gpu-cpu==1.8.0
    python benchmarks/embedding/embedding_speed.py --peer-python PEER/bin/python

Without --peer-python there is no fbgemm, and the ratios are over torch.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
from torch import Tensor

ROWS, DIM, BAGS, LENGTH, BATCHES, LR = 1_000_000, 64, 2048, 20, 8, 0.01


def batches() -> tuple[list[Tensor], Tensor, Tensor]:
    """Ids of each batch, offsets, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, ROWS, (BAGS * LENGTH,), generator=generator) for _ in range(BATCHES)]
    return ids, torch.arange(0, BAGS * LENGTH, LENGTH), torch.randn(BAGS, DIM, generator=generator)


def timed(step: Callable[[int], None], steps: int) -> float:
    """Milliseconds of one step, the median."""
    taken = []
    for number in range(steps):
        started = time.perf_counter()
        step(number)
        taken.append((time.perf_counter() - started) * 1e3)
    return statistics.median(taken)


def reference_error(before: Tensor, after: Tensor, ids: Tensor, upstream: Tensor, adagrad: bool) -> float:
    """How far the first step's new rows are from those computed with torch's own operators."""
    gradient = torch.zeros(ROWS, DIM).index_add_(0, ids, upstream.repeat_interleave(LENGTH, 0))
    change = LR * gradient
    if adagrad:
        change /= (gradient.square().mean(1, keepdim=True)).sqrt() + 1e-8
    return float((after - (before - change)).abs().max())


def fbgemm_worker() -> None:
    """Runs in the peer's interpreter: one line with the first step's error, then one with a time for each request."""
    import fbgemm_gpu  # noqa: F401
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    torch.set_num_threads(1)
    ids, offsets, upstream = batches()
    ends = torch.cat([offsets, torch.tensor([BAGS * LENGTH])])
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LR,
        eps=1e-8,
    )
    table.init_embedding_weights_uniform(-1, 1)

    def step(number: int) -> None:
        table(ids[number % BATCHES], ends).backward(upstream)

    weights = table.split_embedding_weights()[0]
    before = weights.clone()
    step(0)
    print(reference_error(before, table.split_embedding_weights()[0], ids[0], upstream, True), flush=True)
    timed(step, 3)
    for line in sys.stdin:
        print(timed(step, int(line)), flush=True)


class Peer:
    """fbgemm's process; it sleeps while others are timed."""

    def __init__(self, python: Path) -> None:
        command = [str(python), str(Path(__file__).resolve()), "--fbgemm-worker"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        line = self._read()
        self.error = float(line)

    def _read(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # the peer's packages may greet
            with contextlib.suppress(ValueError):
                float(line)
                return line
        raise SystemExit("the peer's process ended: does 'import torch, fbgemm_gpu' work there?")

    def milliseconds(self, steps: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def on_threads(count: int, step: Callable[[int], None], steps: int) -> float:
    torch.set_num_threads(count)
    try:
        return timed(step, steps)
    finally:
        torch.set_num_threads(1)


def pruning_share(make: Callable[[], Any], steps: int) -> dict[str, Any]:
    """What a ChunkPruner's pauses take of a training of so many steps with new ids in every step."""
    from torchext.nn import ChunkPruner

    bag = make()
    pruner = ChunkPruner(bag)
    _, offsets, upstream = batches()
    generator = torch.Generator().manual_seed(1)
    training, pauses = 0.0, []
    for _ in range(steps):
        ids = torch.randint(0, ROWS, (BAGS * LENGTH,), generator=generator)
        started = time.perf_counter()
        bag(ids, offsets).backward(upstream)
        trained = time.perf_counter()
        done = pruner.step()
        training += trained - started
        if done is not None:
            pauses.append(time.perf_counter() - trained)
    return {"steps": steps, "training_s": training, "pauses_s": pauses, "share": sum(pauses) / (training + sum(pauses))}


def main() -> None:
    """Checks the first step of every contender, then times them in turn."""
    from lab.report.results import Checks, Report, in_turn
    from lab.run import cli

    from torchext.nn import AdaptiveEmbeddingBag

    parser = cli.parser(__doc__ or "", contenders="fbgemm,torch,whole,quarter,whole:2threads", repeats=9)
    parser.add_argument("--peer-python", type=Path, help="interpreter with torch and fbgemm_gpu")
    parser.add_argument("--pruning-steps", type=int, default=2000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = cli.names(arguments.contenders)
    if arguments.peer_python is None:
        names = [name for name in names if name != "fbgemm"]
    repeats, steps = (2, 3) if arguments.quick else (arguments.repeats, 20)
    ids, offsets, upstream = batches()
    checks = Checks()

    def whole() -> Any:
        return AdaptiveEmbeddingBag(ROWS, DIM, mode="sum", training="fused", optimizer="adagrad", lr=LR)

    def quarter() -> Any:
        options: dict[str, Any] = {"mode": "sum", "training": "fused", "optimizer": "adagrad", "lr": LR}
        bag = AdaptiveEmbeddingBag(ROWS, DIM, budget=0.25, chunk_dim=16, layout="direct", **options)
        generator = torch.Generator().manual_seed(2)
        bag._take(torch.randn(ROWS, DIM, generator=generator))  # a random quarter is resident
        return bag

    def ours(name: str, bag: Any, adagrad: bool, optimizer: Any = None) -> Callable[[int], None]:
        def step(number: int) -> None:
            bag(ids[number % BATCHES], offsets).backward(upstream)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()

        before = bag.weight.detach().clone()
        step(0)
        after = bag.weight.detach()
        if name == "quarter":  # each resident chunk by its own mean of squares
            gradient = torch.zeros(ROWS, DIM).index_add_(0, ids[0], upstream.repeat_interleave(LENGTH, 0))
            parts = gradient.view(-1, 16)
            change = LR * parts / (parts.square().mean(1, keepdim=True).sqrt() + 1e-8)
            expected = before - (change * (before.view(-1, 16).abs().sum(1, keepdim=True) > 0)).view(ROWS, DIM)
            checks.confirm(name, float((after - expected).abs().max()), 1e-5)
        else:
            checks.confirm(name, reference_error(before, after, ids[0], upstream, adagrad), 1e-5)
        timed(step, 3)
        return step

    contenders: dict[str, Callable[[], float]] = {}
    peer: Peer | None = None
    for name in names:
        if name == "fbgemm":
            peer = Peer(arguments.peer_python)
            checks.confirm(name, peer.error, 1e-5)
            contenders[name] = lambda peer=peer: peer.milliseconds(steps)  # type: ignore[misc]
        elif name == "torch":
            bag = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
            step = ours(name, bag, False, torch.optim.SGD(bag.parameters(), lr=LR))
            contenders[name] = lambda step=step: timed(step, steps)  # type: ignore[misc]
        else:
            step = ours(name, quarter() if name == "quarter" else whole(), True)
            threads = 2 if name.endswith(":2threads") else 1
            contenders[name] = lambda step=step, threads=threads: on_threads(threads, step, steps)  # type: ignore[misc]
    report = Report(
        "embedding_speed",
        script=cli.script_line().replace(str(arguments.peer_python), "PEER/bin/python"),
        unit="ms",
        reference="fbgemm" if "fbgemm" in names else "torch",
        higher_is_better=False,
        conditions={"rows": ROWS, "dim": DIM, "bags": BAGS, "ids a bag": LENGTH, "steps a repeat": steps},
    )
    try:
        figures = in_turn(contenders, repeats)
    finally:
        if peer is not None:
            peer.close()
    pruned = pruning_share(
        lambda: AdaptiveEmbeddingBag(
            ROWS, DIM, mode="sum", training="fused", lr=LR, budget=0.25, chunk_dim=16, init_std=0.0
        ),
        20 if arguments.quick else arguments.pruning_steps,
    )
    print(f"pruning: {100 * pruned['share']:.1f} % of {pruned['steps']} steps, {len(pruned['pauses_s'])} pauses")
    report.add("a training step", figures, checks=checks.done, notes={"pruning": pruned})
    over_torch = {name: values for name, values in figures.items() if name != "fbgemm"}
    if "torch" in over_torch:
        for name, values in over_torch.items():
            ratios = sorted(a / b for a, b in zip(over_torch["torch"], values, strict=True))
            print(f"{name}: {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}] times torch's speed")
    report.write(arguments.results)


if __name__ == "__main__":
    if "--fbgemm-worker" in sys.argv:
        fbgemm_worker()
    else:
        main()
