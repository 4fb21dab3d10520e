"""What adaptive embeddings refuse: options, batches, and backward passes over a table that has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from torchext.nn import AdaptiveEmbedding, AdaptiveEmbeddingBag, ChunkPruner, chunk_storage

NO_IDS = (torch.bool, torch.uint8, torch.int16, torch.float16, torch.float64, torch.complex64)
TABLES: list[dict[str, Any]] = [
    {"training": "dense"},
    {"training": "sparse"},
    {"training": "fused"},
    {"training": "sparse", "budget": 0.6, "layout": "direct"},
    {"training": "fused", "budget": 0.6, "layout": "hash", "optimizer": "adam"},
    {"training": "dense", "budget": 0.6, "layout": "sketch"},
]
NAMED = pytest.mark.parametrize("table", TABLES, ids=lambda table: "-".join(map(str, table.values())))
CLIPPED = pytest.mark.parametrize("max_norm", [None, 0.1])  # which writes


def seasoned(made: Any, ids: Tensor) -> Any:
    """A table of which all tensors have something in them."""
    optimizer = None if made.training_mode == "fused" else torch.optim.SGD(made.parameters(), lr=0.1)
    for _ in range(2):
        made(ids).sub(1).square().sum().backward()
        made.prune(optimizer=optimizer)
    made.zero_grad()
    with torch.no_grad():
        made.pool += 1  # far above max_norm
    assert all(value.any() for value in made.state_dict().values() if value.numel())
    return made


def problem(module: Any, *args: Any) -> tuple[type[BaseException], str]:
    """What is raised when it is called so; nothing of it is written: values, index, utilities, optimizer's state."""
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the callers compare the type
        module(*args)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert module.pool.grad is None
    return caught.type, str(caught.value)


@CLIPPED
@NAMED
def test_bad_batches_name_position_and_value(table: dict[str, Any], max_norm: float | None) -> None:
    bag = AdaptiveEmbeddingBag(10, 8, mode="sum", max_norm=max_norm, chunk_dim=4, **table)
    seasoned(bag, torch.arange(10).view(5, 2))
    ids, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2])
    long = torch.int64

    def t(*values: int, dtype: torch.dtype = long) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    cases: list[tuple[tuple[Any, ...], type[BaseException], str]] = [
        ((t(1, 10, 3), t(0)), IndexError, "id 10 at position 1 is out of range; the table has rows 0..9"),
        ((t(1, 2, -1), t(0)), IndexError, "id -1 at position 2"),
        ((t(1, -(2**31), dtype=torch.int32), t(0)), IndexError, "id -2147483648 at position 1"),
        ((t(1, 2**32 + 1), t(0)), IndexError, "id 4294967297 at position 1"),
        ((ids, t(1, 2)), ValueError, "offsets[0] is 1, but the first bag must begin at 0"),
        ((ids, t(0, 5)), ValueError, "offsets[1] is 5, past the end of 4 ids"),
        ((ids, t(0, 3, 2)), ValueError, "offsets[2] is 2, less than the one before it, 3"),
        ((ids, t(0, -1)), ValueError, "offsets[1] is -1, less than"),
        ((ids.float(), offsets), TypeError, "input is torch.float32; it must be int32 or int64"),
        ((ids, offsets.float()), TypeError, "offsets is torch.float32"),
        *(((ids.to(kind), offsets), TypeError, f"input is {kind}; it must be int32 or int64") for kind in NO_IDS),
        *(((ids, offsets.to(kind)), TypeError, f"offsets is {kind}; it must be int32 or int64") for kind in NO_IDS),
        ((ids,), ValueError, "offsets must be given with a 1-D input"),
        ((ids, t(0).view(1, 1)), ValueError, "offsets has shape (1, 1); it must be 1-D"),
        ((ids, t(0).view(())), ValueError, "offsets has shape (); it must be 1-D"),
        ((ids.view(2, 2), offsets), ValueError, "offsets must be None with a 2-D input"),
        ((ids.view(1, 2, 2),), ValueError, "input has shape (1, 2, 2)"),
        ((ids, offsets, torch.ones(3)), ValueError, "per_sample_weights has shape (3,), input (4,)"),
        ((ids, offsets, torch.ones(4).double()), TypeError, "they must be the same"),
    ]
    for args, kind, text in cases:
        assert problem(bag, *args)[0] is kind, text
        assert text in problem(bag, *args)[1]
    for mode in ("mean", "max"):
        other = AdaptiveEmbeddingBag(10, 8, mode=mode, max_norm=max_norm, chunk_dim=4, **table)
        kind, text = problem(other, ids, offsets, torch.ones(4))
        assert kind is NotImplementedError
        assert text == f"per_sample_weights need mode 'sum', not {mode!r}"


@CLIPPED
@NAMED
def test_bad_ids_of_single_vectors_name_position_and_value(table: dict[str, Any], max_norm: float | None) -> None:
    layer = seasoned(AdaptiveEmbedding(10, 8, max_norm=max_norm, chunk_dim=4, **table), torch.arange(10))
    good = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for dtype in (torch.int32, torch.int64):
        for bad in (10, -1, 2**31 - 1, -(2**31)):
            ids = good.to(dtype)
            ids[1, 1] = bad  # counted as it lies in memory
            kind, text = problem(layer, ids)
            assert kind is IndexError
            assert f"id {bad} at position 4 is out of range; the table has rows 0..9" in text
    for given in NO_IDS:
        assert problem(layer, good.to(given)) == (TypeError, f"input is {given}; it must be int32 or int64")


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"budget": 0.0}, ValueError, "budget = 0.0: allowed 0 < share <= 1"),
        ({"budget": 1.5}, ValueError, "budget = 1.5"),
        ({"budget": float("nan")}, ValueError, "budget = nan"),
        ({"budget": 0}, ValueError, "budget = 0: allowed 1..40 chunks"),
        ({"budget": 41, "chunk_dim": 4}, ValueError, "budget = 41"),
        ({"budget": "half"}, TypeError, "budget = 'half' is a str"),
        ({"chunk_dim": 5}, ValueError, "chunk_dim = 5: allowed divisors of embedding_dim = 16 from 4 on: [4, 8, 16]"),
        ({"chunk_dim": 2}, ValueError, "chunk_dim = 2"),
        ({"chunk_dim": 4.0}, TypeError, "chunk_dim = 4.0 is a float; it must be an int"),
        ({"mode": "median"}, ValueError, "mode = 'median'"),
        ({"mode": "max", "scale_grad_by_freq": True}, ValueError, "mode = 'max' goes with neither"),
        ({"training": "magic"}, ValueError, "training = 'magic'"),
        ({"training": "fused", "optimizer": "lamb"}, ValueError, "optimizer = 'lamb': allowed 'sgd', 'adagrad'"),
        ({"training": "fused", "sparse": True}, ValueError, "give one of them"),
        ({"lr": -1.0}, ValueError, "lr = -1.0"),
        ({"gamma": 1.0}, ValueError, "gamma = 1.0"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas = (0.9, 1.0)"),
        ({"betas": 0.9}, TypeError, "betas = 0.9; it must be a pair of numbers, 0 <= beta < 1"),
        ({"betas": (0.9,)}, TypeError, "betas = (0.9,); it must be a pair"),
        ({"betas": (0.9, "x")}, TypeError, "betas[1] = 'x' is a str; it must be a number"),
        ({"eps": -1.0}, ValueError, "eps = -1.0: allowed 0 or more, finite"),
        ({"eps": float("inf")}, ValueError, "eps = inf"),
        ({"eps": "x"}, TypeError, "eps = 'x' is a str; it must be a number, 0 or more, finite"),
        ({"init_std": float("inf")}, ValueError, "init_std = inf: allowed 0 or more, finite"),
        ({"init_std": float("nan")}, ValueError, "init_std = nan"),
        ({"seed": -1}, ValueError, "seed = -1: allowed 0..2^63 - 1"),
        ({"seed": 2**63}, ValueError, "seed = 9223372036854775808"),
        ({"seed": 1.5}, TypeError, "seed = 1.5 is a float; it must be an int, 0..2^63 - 1"),
        ({"max_norm": -1.0}, ValueError, "max_norm = -1.0: allowed above 0, or None"),
        ({"max_norm": float("nan")}, ValueError, "max_norm = nan"),
        ({"max_norm": "x"}, TypeError, "max_norm = 'x' is a str; it must be a number, above 0, or None"),
        ({"norm_type": 0}, ValueError, "norm_type = 0: allowed above 0"),
        ({"norm_type": "fro"}, TypeError, "norm_type = 'fro' is a str; it must be a number, above 0"),
        ({"budget": 1.0, "layout": "hash"}, ValueError, "layout = 'hash': allowed 'auto' with budget 1.0, which keeps"),
        ({"padding_idx": 10}, ValueError, "padding_idx = 10: allowed -10..9"),
        ({"padding_idx": 1.5}, TypeError, "padding_idx = 1.5 is a float; it must be an int, -10..9, or None"),
        ({"dtype": torch.int8}, TypeError, "dtype is torch.int8"),
        ({"device": "mps"}, NotImplementedError, "run on the CPU and on CUDA"),
        ({"training": "sharded"}, RuntimeError, "needs a process group"),
        ({"optimizer": "adam"}, ValueError, "optimizer = 'adam': allowed with training = 'fused' or 'sharded', which"),
        (
            {"lr": 0.1, "sparse": True},
            ValueError,
            "lr = 0.1: allowed with training = 'fused' or 'sharded', which update",
        ),
        ({"lr": torch.tensor(0.1)}, ValueError, "'dense' leaves that to an optimizer of yours, so leave it out"),
        ({"eps": 1e-3}, ValueError, "eps = 0.001: allowed with training = 'fused'"),
        ({"training": "fused", "betas": (0.8, 0.9)}, ValueError, "betas = (0.8, 0.9): allowed with optimizer = 'adam'"),
        (
            {"training": "fused", "optimizer": "sgd", "eps": 1e-3},
            ValueError,
            "eps = 0.001: allowed with optimizer = 'ad",
        ),
        ({"training": "fused", "process_group": 3}, ValueError, "process_group = 3: allowed with training = 'sharded'"),
    ],
)
def test_bad_options_are_named(
    options: dict[str, Any], kind: type[BaseException], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_storage, "_memory", None)  # nothing is allocated before
    with pytest.raises(kind) as caught:
        AdaptiveEmbeddingBag(10, 16, **{"budget": 0.5, "chunk_dim": 4} | options)
    assert text in str(caught.value)


def test_the_largest_seed_and_infinite_norms_work() -> None:
    bag = AdaptiveEmbeddingBag(10, 8, budget=10, chunk_dim=4, training="fused", seed=2**63 - 1, max_norm=float("inf"))
    bag(torch.arange(10).view(5, 2)).sum().backward()
    assert bag.prune()["admitted"] == 10
    clipped = AdaptiveEmbeddingBag(10, 8, max_norm=0.1, norm_type=float("inf"))
    assert clipped(torch.arange(10).view(10, 1)).abs().max() <= 0.1


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (-1.0, ValueError, "lr = -1.0: allowed 0 or more, finite"),
        (float("inf"), ValueError, "lr = inf"),
        (torch.tensor(float("nan")), ValueError, "lr = nan"),
        ("0.1", TypeError, "lr = '0.1' is a str; it must be a number, 0 or more, finite"),
        (None, TypeError, "lr = None"),
        (True, TypeError, "lr = True"),
        (torch.ones(2), TypeError, "lr is a tensor of shape (2,), torch.float32; it must hold one number"),
    ],
    ids=str,
)
def test_bad_learning_rates_are_named_and_leave_the_old_one(value: Any, kind: type[BaseException], text: str) -> None:
    bag = AdaptiveEmbeddingBag(4, 4, training="fused", lr=0.5)
    optimizer = torch.optim.SGD([bag.param_group()], lr=0.5)
    with pytest.raises(kind) as made:
        AdaptiveEmbeddingBag(4, 4, training="fused", lr=value)
    with pytest.raises(kind) as assigned:
        bag.lr = value
    optimizer.param_groups[0]["lr"] = value
    with pytest.raises(kind) as followed:
        optimizer.step()
    assert all(text in str(caught.value) for caught in (made, assigned, followed))
    assert bag.lr == 0.5


@pytest.mark.parametrize("budget", [1.0, 0.5])
@pytest.mark.parametrize("compiled", [False, True])
def test_weights_of_a_table_that_changed_meanwhile_are_refused(compiled: bool, budget: float) -> None:
    torch.manual_seed(9)
    bag = AdaptiveEmbeddingBag(5, 8, mode="sum", training="fused", lr=0.5, budget=budget, chunk_dim=4)
    bag._take(torch.randn(5, 8))
    run = torch.compile(bag, backend="aot_eager", fullgraph=True) if compiled else bag
    weights = [torch.ones(2, 3, requires_grad=True) for _ in range(2)]
    ids = torch.randint(0, 5, (2, 3))
    outputs = [run(ids, None, given) for given in weights]
    text = "modified by an inplace operation" if compiled else "needs the table as it was in the forward pass"
    with pytest.raises(RuntimeError, match=text):
        (outputs[0].sum() + outputs[1].sum()).backward()
    run(ids, None, weights[0]).sum().backward()  # one by one it is right
    if not compiled:  # and without weights no backward pass reads the table
        (run(ids) + run(ids)).sum().backward()


def test_weights_of_a_table_that_was_clipped_meanwhile_are_refused() -> None:
    bag = AdaptiveEmbeddingBag(5, 8, mode="sum", max_norm=0.5)
    weights = torch.ones(2, 3, requires_grad=True)
    output = bag(torch.tensor([[0, 1, 2], [2, 3, 3]]), None, weights)
    output.sum().backward(retain_graph=True)
    bag(torch.tensor([[4]]))
    with pytest.raises(RuntimeError, match="by an optimizer, or by max_norm"):
        output.sum().backward()


def change_slots(bag: AdaptiveEmbeddingBag, how: str, optimizer: torch.optim.Optimizer | None) -> None:
    if how == "prune":
        bag.prune(optimizer=optimizer)
    elif how == "grow":
        bag.prune(optimizer=optimizer, capacity=2000)
    elif how == "shrink":
        bag.prune(optimizer=optimizer, capacity=10)
    elif how == "there and back":
        bag.prune(optimizer=optimizer, capacity=2000)
        bag.prune(optimizer=optimizer, capacity=40)
    elif how == "reset":
        bag.reset_parameters()
    elif how == "share":
        ChunkPruner(bag, optimizer=optimizer, shared_budget=2000).prune()
    else:
        budget = 2000 if how == "load a larger one" else 40
        other = AdaptiveEmbeddingBag(900, 16, budget=budget, chunk_dim=4, layout=bag.layout, training=bag.training_mode)
        other(torch.arange(900).view(-1, 4)).sum().backward()
        other.prune(optimizer=None if other.trigger is not None else torch.optim.SGD(other.parameters()))
        bag.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    "how", ["prune", "grow", "shrink", "there and back", "reset", "share", "load", "load a larger one"]
)
@pytest.mark.parametrize("layout", ["direct", "hash", "sketch"])
@pytest.mark.parametrize("training", ["dense", "sparse", "fused"])
def test_chunks_that_changed_their_slots_since_the_forward_pass_are_refused(
    training: str, layout: str, how: str
) -> None:
    bag = AdaptiveEmbeddingBag(900, 16, mode="sum", budget=40, chunk_dim=4, layout=layout, training=training)
    optimizer = None if training == "fused" else torch.optim.SGD(bag.parameters(), lr=0.1)
    ids = torch.arange(900).view(-1, 4)
    weights = torch.ones(ids.shape, requires_grad=True)
    bag(ids).sum().backward()
    outputs = bag(ids), bag(ids, None, weights)
    change_slots(bag, how, optimizer)
    bag.pool.grad = None
    before = copy.deepcopy(bag.state_dict())
    for output in outputs:
        with pytest.raises(RuntimeError, match=r"changed their slots since the forward.*before the next forward pass"):
            output.sum().backward()
    assert bag.pool.grad is weights.grad is None
    assert all(torch.equal(value, before[name]) for name, value in bag.state_dict().items())
    bag(ids, None, weights).sum().backward()


@pytest.mark.parametrize("how", ["prune", "grow", "shrink", "there and back", "reset", "load", "load a larger one"])
@pytest.mark.parametrize("training", ["dense", "fused"])
def test_chunks_that_changed_their_slots_in_a_compiled_step_are_refused(training: str, how: str) -> None:
    torch.compiler.reset()
    bag = AdaptiveEmbeddingBag(900, 16, mode="sum", budget=40, chunk_dim=4, layout="direct", training=training)
    optimizer = None if training == "fused" else torch.optim.SGD(bag.parameters(), lr=0.1)
    run = torch.compile(bag, backend="aot_eager", fullgraph=True)
    ids = torch.arange(900).view(-1, 4)
    run(ids).sum().backward()
    output = run(ids)
    change_slots(bag, how, optimizer)
    before = copy.deepcopy(bag.state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in bag.state_dict().items())
    run(ids).sum().backward()


def test_a_whole_table_has_no_slots_to_change() -> None:
    bag = AdaptiveEmbeddingBag(9, 8, mode="sum", training="fused", optimizer="sgd", lr=1.0)
    output = bag(torch.arange(9).view(3, 3))
    bag.load_state_dict({"weight": torch.zeros(9, 8)})
    bag.load_state_dict(bag.state_dict())
    bag.prune()
    output.sum().backward()
    assert torch.equal(bag.weight, torch.full((9, 8), -1.0))


@pytest.mark.parametrize("training", ["dense", "fused"])
def test_second_derivatives_are_refused(training: str) -> None:
    table = AdaptiveEmbedding(5, 4, training=training)
    loss = table(torch.tensor([1, 2])).square().sum()
    (gradient,) = torch.autograd.grad(loss, table._trained, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (loss + gradient.sum()).backward()
