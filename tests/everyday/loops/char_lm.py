"""A character language model: accumulation, a scaler, clipping, evaluation on rank 0, checkpoints.

torchrun --nproc-per-node 2 char_lm.py FOLDER
"""

import contextlib
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

BLOCK, BATCH, WIDTH, HEADS, LAYERS = 16, 4, 32, 2, 2
STEPS, ACCUMULATE, EVALUATE_EVERY, CLIP, LR = 12, 2, 4, 1.0, 3e-3

TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 12
LETTERS = sorted(set(TEXT))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, WIDTH))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(LETTERS), bias=False)
        self.head.weight = self.letters.weight
        nn.init.normal_(self.letters.weight, std=0.02)

    def forward(
        self, ids: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self.letters(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    def optimizer(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))


def draw(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - BLOCK - 1, (BATCH,))
    ids = torch.stack([data[s : s + BLOCK + 1] for s in starts])
    return ids[:, :-1], ids[:, 1:]


def learning_rate(step: int) -> float:
    if step < 3:
        return LR * (step + 1) / 3
    return LR * (0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS)))


@torch.no_grad()
def evaluate(module: nn.Module, data: torch.Tensor) -> float:
    module.eval()
    losses = []
    for start in range(0, 64, BLOCK):
        ids = data[start : start + BLOCK + 1][None]
        losses.append(module(ids[:, :-1], ids[:, 1:])[1].item())
    module.train()
    return sum(losses) / len(losses)


def main(folder: Path) -> nn.Module:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ids = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    train, held_out = ids[:900], ids[900:]
    torch.manual_seed(1337)
    model = DistributedDataParallel(Model())
    optimizer = model.module.optimizer()
    # attach here: model, optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    checkpoint, first = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        first = saved["step"]
    torch.manual_seed(1337 + rank + first)
    for step in range(first, first + STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step % STEPS)
        for micro in range(ACCUMULATE):
            last = micro == ACCUMULATE - 1
            with contextlib.nullcontext() if last else model.no_sync():
                _, loss = model(*draw(train))
                scaler.scale(loss / ACCUMULATE).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % EVALUATE_EVERY == 0:
            if rank == 0:
                print(f"step {step + 1}: training {loss.item():.3f}, held out {evaluate(model.module, held_out):.3f}")
            dist.barrier()
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    if rank == 0:
        torch.save({**state, "step": first + STEPS}, checkpoint)
    dist.barrier()
    dist.destroy_process_group()
    return model.module


if __name__ == "__main__":
    main(Path(sys.argv[1]))
