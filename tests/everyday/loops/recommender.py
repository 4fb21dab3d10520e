"""A click predictor: embedding bags of several features, dense features, Adagrad, AUC over all ranks' scores.

torchrun --nproc-per-node 2 recommender.py FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROWS, WIDTH, DENSE, STEPS, BATCH = (50, 30, 20), 8, 4, 16, 16


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, WIDTH, mode="sum") for rows in ROWS)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 16), nn.GELU(), nn.Linear(16, WIDTH), nn.GELU())
        pairs = (len(ROWS) + 1) * len(ROWS) // 2
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, bags: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        x = self.bottom(dense)
        parts = torch.stack([x, *(bag(ids, offsets) for bag, (ids, offsets) in zip(self.bags, bags, strict=True))], 1)
        products = parts @ parts.transpose(1, 2)
        rows, columns = torch.tril_indices(parts.shape[1], parts.shape[1], -1)
        return self.top(torch.cat([x, products[:, rows, columns]], 1)).squeeze(1)


def draw() -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    dense = torch.randn(BATCH, DENSE)
    bags = []
    for rows in ROWS:
        sizes = torch.randint(1, 4, (BATCH,))
        ids = torch.randint(rows, (int(sizes.sum()),))
        bags.append((ids, torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)[:-1]])))
    first = bags[0][0][bags[0][1]]
    return dense, bags, ((first % 2 == 0) ^ (dense[:, 0] > 1)).to(dense.dtype)


@torch.no_grad()
def auc(model: nn.Module) -> float:
    """Over the scores of all ranks."""
    model.eval()
    scores, labels = [], []
    for _ in range(4):
        dense, bags, clicked = draw()
        scores.append(model(dense, bags).sigmoid())
        labels.append(clicked)
    model.train()
    mine = torch.stack([torch.cat(scores), torch.cat(labels)])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    score, label = torch.cat(everyone, 1)
    ranks = torch.empty_like(score)
    ranks[score.argsort()] = torch.arange(1, len(score) + 1, dtype=score.dtype)
    positive = label.sum()
    return float((ranks[label > 0].sum() - positive * (positive + 1) / 2) / (positive * (len(label) - positive)))


def main(folder: Path) -> nn.Module:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Recommender())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    # attach here: model, optimizer
    if (folder / "model.pt").exists():
        model.module.load_state_dict(torch.load(folder / "model.pt"))
    torch.manual_seed(1 + rank)
    running = 0.0
    for step in range(STEPS):
        dense, bags, clicked = draw()
        logits = model(dense, bags)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, clicked)
        loss = loss + 1e-4 * sum(bag.weight.square().sum() for bag in model.module.bags)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running = 0.9 * running + 0.1 * loss.item()
        if (step + 1) % 8 == 0:
            value = auc(model)
            if rank == 0:
                print(f"step {step + 1}: loss {running:.3f}, AUC {value:.3f}")
                torch.save(model.module.state_dict(), folder / "model.pt")
    dist.barrier()
    dist.destroy_process_group()
    return model.module


if __name__ == "__main__":
    main(Path(sys.argv[1]))
