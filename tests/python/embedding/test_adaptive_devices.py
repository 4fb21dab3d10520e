"""Devices of adaptive embeddings: which there can be, moving between them, and what is said of mixed ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from adaptive_device import NO_GPU

from torchext.nn import AdaptiveEmbeddingBag, ChunkPruner, table_options

NAMES = [
    "adaptive_bag",
    "adaptive_bag_weight_gradient",
    "adaptive_bag_dense_gradient",
    "adaptive_bag_observe_",
    "adaptive_bag_sparse_gradient",
    "adaptive_bag_update_",
    "adaptive_bag_renorm_",
    "adaptive_table_prune_",
    "adaptive_table_carry_",
    "adaptive_table_meet_",
    "adaptive_table_candidates",
    "adaptive_table_advise_huge_pages",
]


@NO_GPU
@pytest.mark.parametrize("layout", ["direct", "hash", "sketch"])
def test_checkpoints_cross_devices(layout: str) -> None:
    torch.manual_seed(5)
    options: dict[str, Any] = {"budget": 0.3, "chunk_dim": 4, "layout": layout, "training": "fused"}
    bag = AdaptiveEmbeddingBag(50, 16, device="cuda", **options)
    assert bag.pool.is_cuda
    for _ in range(5):
        bag(torch.randint(0, 50, (10, 4), device="cuda")).sub(1).square().sum().backward()
        bag.prune()
    for device in ("cpu", "cuda"):
        other = AdaptiveEmbeddingBag(50, 16, device=device, **options)
        other.load_state_dict(bag.state_dict())
        for name, value in other.state_dict().items():
            assert value.device.type == ("cpu" if name in ("clock", "lr", "extent") else device), name
            assert torch.equal(value.cpu(), bag.state_dict()[name].cpu()), name
    back = copy.deepcopy(bag).cpu()
    assert torch.equal(back.weight, bag.weight.cpu())


@NO_GPU
def test_mixed_devices_are_named() -> None:
    bag = AdaptiveEmbeddingBag(10, 8, mode="sum", device="cuda")
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0])
    with pytest.raises(ValueError, match="ids is on cpu; the table is on cuda:0"):
        bag(ids, offsets.cuda())
    with pytest.raises(ValueError, match="offsets is on cpu; the table is on cuda:0"):
        bag(ids.cuda(), offsets)
    with pytest.raises(ValueError, match="per_sample_weights is on cpu, the table on cuda:0"):
        bag(ids.cuda(), offsets.cuda(), torch.ones(2))
    with pytest.raises(ValueError, match="pool is on cpu"):
        bag.cpu()(ids.cuda(), offsets.cuda())


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_the_cuda_key_holds_a_kernel_that_checks_or_explains(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"torchext::{name}", "CUDA")
    if name == "adaptive_bag":
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        layout = (torch.tensor([0]), None, 1, False, None, 4, 1, 0, -1)
        with pytest.raises((ValueError, NotImplementedError), match=r"all must be on one device|without CUDA kernels"):
            torch.ops.torchext.adaptive_bag.default.redispatch(
                key, torch.zeros(4, 4), torch.empty(0, dtype=torch.int32), *layout
            )


@pytest.mark.parametrize("layout", ["direct", "hash", "sketch"])
def test_moving_takes_all_but_what_every_step_reads(layout: str) -> None:
    """To the meta device, in place of one that may not be here."""
    bag = AdaptiveEmbeddingBag(50, 8, budget=0.3, chunk_dim=4, layout=layout, training="fused", optimizer="adam")
    bag.to("meta")
    moved = {name for name, value in bag.state_dict().items() if value.device.type == "meta"}
    assert moved == {"pool", "trigger", "index", "utility", "sketch", "seen", "state0", "state1"}
    assert set(bag.state_dict()) - moved == {"clock", "lr", "extent"}


def test_devices_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"budget": 0.01, "chunk_dim": 4}
    with pytest.raises(NotImplementedError, match="run on the CPU and on CUDA"):
        AdaptiveEmbeddingBag(100, 16, device="mps", **options)
    monkeypatch.setattr(table_options, "build_info", lambda: {"cuda": False})
    with pytest.raises(NotImplementedError, match=r"without CUDA kernels .* TORCHEXT_CUDA=1"):
        AdaptiveEmbeddingBag(100, 16, device="cuda", **options)
    assert AdaptiveEmbeddingBag(100, 16, **options).layout == "sketch"


@pytest.mark.parametrize("layout", ["direct", "hash", "sketch"])
@pytest.mark.parametrize("training", ["dense", "sparse", "fused"])
def test_what_is_made_without_a_device_is_made_where_the_table_is(training: str, layout: str) -> None:
    def run() -> dict[str, torch.Tensor]:
        bag = copy.deepcopy(begun)
        optimizer = None if training == "fused" else torch.optim.SGD(bag.parameters(), lr=0.1, momentum=0.9)
        pruner = ChunkPruner(bag, optimizer=optimizer, first=1, growth=1.0, interval=1)
        for step in range(3):
            bag(batches[step], offsets).square().sum().backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            assert pruner.step() is not None
        bag.load_state_dict(copy.deepcopy(bag).state_dict())
        assert bag.stats()["resident_chunks"] > 0
        return bag.state_dict() | {"weight": bag.weight.detach()}

    torch.manual_seed(0)
    begun = AdaptiveEmbeddingBag(60, 8, mode="sum", budget=0.3, chunk_dim=4, layout=layout, training=training)
    begun.load_state_dict({"weight": torch.randn(60, 8)})
    batches, offsets = torch.randint(0, 60, (3, 40)), torch.arange(0, 40, 4)
    expected = run()
    with torch.device("meta"):
        found = run()
    torch.set_default_device("meta")
    try:
        again = run()
    finally:
        torch.set_default_device(None)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert torch.equal(again[name], value), name
