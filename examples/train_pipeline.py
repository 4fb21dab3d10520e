"""Train a small transformer on characters over two pipeline stages of two ranks each, as a plan says.

    torchrun --nproc-per-node 4 examples/train_pipeline.py
    torchrun --nproc-per-node 4 examples/train_pipeline.py --png step.png --schedules 1f1b zero-bubble

The layers and the links are measured, in seconds. The plan says where to cut and how deep to fill the stages, and
torch's own pipelines run it. The text is this repository's documentation: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torchext import auto
from torchext.auto import pipeline

SYMBOLS, LENGTH, WIDTH, HEADS = 128, 64, 64, 4
MICROBATCHES, MICROBATCH = 8, 4  # of one pipeline; pieces of text in each


class Embedding(nn.Module):
    """Symbols and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        return self.symbols(symbols) + self.places(torch.arange(symbols.shape[1], device=symbols.device))


class Block(nn.Module):
    """Attention to what came before, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.queries_keys_values(self.norm(x)).chunk(3, dim=-1)
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attention = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(attention.transpose(1, 2).flatten(-2))
        return x + self.perceptron(self.inner_norm(x))


def network(blocks: int) -> nn.Sequential:
    """Returns the model: a chain, whose parts have names."""
    torch.manual_seed(0)
    layers: OrderedDict[str, nn.Module] = OrderedDict(embedding=Embedding())
    layers.update((f"block{number}", Block()) for number in range(blocks))
    layers["head"] = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))
    return nn.Sequential(layers)


def text() -> torch.Tensor:
    """Returns the documentation, a symbol an element."""
    pages = sorted((Path(__file__).resolve().parent.parent / "docs").rglob("*.md"))
    whole = "".join(page.read_text() for page in pages).encode("ascii", "ignore")
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()


def batch(source: torch.Tensor, rank: int, step: int, pieces: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns pieces of the text, and the same moved by one symbol."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(source) - LENGTH, (pieces, 1), generator=draw)
    found = source[starts + torch.arange(LENGTH + 1)]
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross entropy of a micro-batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    """Measures, plans, trains, and says what was predicted beside what a step took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--memory", help="of a rank, as 64MiB; default: no limit")
    parser.add_argument("--schedules", nargs="+", default=["1f1b"])
    parser.add_argument("--png", help="draws a step of the plan over one of 1F1B; needs matplotlib")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    width = world_size // args.stages
    model, source = network(args.blocks), text()

    link = auto.calibrate(max_seconds=1.0)
    box: list[pipeline.PipelinePlan | None] = [None]
    if rank == 0:  # every rank measures other times: one of them plans
        profile = pipeline.profile(model, batch(source, 0, 0, MICROBATCH)[0])
        box[0] = pipeline.plan(
            profile,
            link,
            world_size=world_size,
            microbatches=MICROBATCHES * width,
            stages=args.stages,
            memory=args.memory,
            schedules=args.schedules,
        )
    dist.broadcast_object_list(box)
    plan = box[0]
    assert plan is not None
    if rank == 0:
        print(plan.explain(), flush=True)
        if args.png:
            plan.timeline(args.png)

    mesh = init_device_mesh("cpu", (width, args.stages), mesh_dim_names=("dp", "pp"))
    stage = plan.stage(model, mesh["pp"].get_group(), dp=mesh["dp"].get_group())
    schedule = plan.schedule(stage, loss_of)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=3e-3)

    def run(step: int) -> list[torch.Tensor]:
        """Runs the passes of one step; returns the losses of the micro-batches on the last stage."""
        x, y = batch(source, mesh["dp"].get_local_rank(), step, MICROBATCHES * MICROBATCH)
        losses: list[torch.Tensor] = []
        schedule.step(*([x] if stage.is_first else []), target=y if stage.is_last else None, losses=losses)
        return losses

    began = time.perf_counter()
    for step in range(args.steps):
        optimizer.zero_grad()
        losses = run(step)
        optimizer.step()
        if rank == args.stages - 1 and (step % 10 == 9 or step == 0):
            mean = torch.stack(losses).mean().item()
            print(f"step {step + 1:3d}  loss {mean:.3f}  {time.perf_counter() - began:.1f} s", flush=True)
    steps = itertools.count(args.steps)
    found = pipeline.verify(plan, lambda: run(next(steps)), 5)
    if rank == 0:
        print(found, flush=True)
    dist.barrier()
    time.sleep(0.1)  # see train_digits.py: threads of Gloo let go of tensors before Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
