"""A whole table in DDP, plain or attached, trains as torch's does in plain DDP, by whatever is done to weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from attached import new_group
from harness import Rank
from rows import row, values_in_one_group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.nn import AdaptiveEmbedding, AdaptiveEmbeddingBag

ROWS, DIM, STEPS = 23, 8, 6
# With these two workers do what DDP does.
ATTACHED: dict[str, tuple[str, dict[str, Any]]] = {
    "prague": ("prague", {"generator": "static", "order": "atc"}),
    "dssync": ("dssync", {"order": "atc"}),
    "hop": ("hop", {"order": "serial", "graph": "ring"}),
    "dear-sharded": ("dear", {"allreduce_fallback": False, "form": "sharded", "bucket_mb": 0.001}),
    "dear-replicated": ("dear", {"allreduce_fallback": False, "form": "replicated", "bucket_mb": 0.001}),
}


class Recommender(nn.Module):
    """Bags whose values a script has put there, a frozen table, and a head that is tied to a third one."""

    def __init__(self, bag: Any, embedding: Any, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"chunk_dim": 4} if bag is AdaptiveEmbeddingBag else {}
        self.bag = bag(ROWS, DIM, mode="mean", sparse=sparse, **options)
        self.frozen, self.tied = embedding(ROWS, DIM), embedding(ROWS, DIM)
        self.bag.weight.data = torch.randn(ROWS, DIM)
        self.frozen.weight.requires_grad = False
        self.head = nn.Linear(DIM, ROWS)
        self.head.weight = self.tied.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.bag(ids) + self.frozen(ids[:, 0]) + self.tied(ids[:, 1])))


def trained(rank: Rank, model: Recommender, backend: str | None, options: dict[str, Any], sparse: bool) -> list[Tensor]:
    """Its state after some steps of weight decay by name."""
    group = None if backend is None else new_group(backend, **options)
    ddp = DistributedDataParallel(model, process_group=group)
    weights = [parameter for name, parameter in ddp.named_parameters() if "weight" in name and parameter.requires_grad]
    decay = 0.0 if sparse else 0.1
    optimizer = torch.optim.SGD([{"params": weights, "weight_decay": decay}, {"params": [model.head.bias]}], lr=0.3)
    sync = None if backend is None else torchext.attach(ddp, optimizer)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank.rank)
        ids, targets = torch.randint(0, ROWS, (2, 6, 3), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(ids), targets[:, 0]).backward()
        optimizer.step()
    if sync is not None:
        sync.synchronize()
        sync.detach()
    return [value.detach().clone() for value in model.state_dict().values()]


def body(rank: Rank, name: str) -> tuple[list[Tensor], list[Tensor]]:
    sparse = name == "gloo-sparse"
    expected = trained(rank, Recommender(nn.EmbeddingBag, nn.Embedding, sparse), None, {}, sparse)
    model = Recommender(AdaptiveEmbeddingBag, AdaptiveEmbedding, sparse)
    found = trained(rank, model, *ATTACHED.get(name, (None, {})), sparse)
    dist.barrier()
    return found, expected


def test_a_whole_table_trains_as_torchs() -> None:
    cases = {name: (body, name) for name in ("gloo", "gloo-sparse", *ATTACHED)}
    for name, ranks in values_in_one_group(cases, 2, timeout=30).items():
        with row(name):
            for found, expected in ranks:
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(ranks[0][0], ranks[1][0], rtol=0, atol=0)
