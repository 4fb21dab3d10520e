"""AdaptiveEmbeddingBag and AdaptiveEmbedding with everything resident are nn.EmbeddingBag and nn.Embedding."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchext.nn import AdaptiveEmbedding, AdaptiveEmbeddingBag
from torchext.nn._ops import _ops

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def close(ours: Tensor, theirs: Tensor) -> None:
    theirs = theirs.to(ours.dtype)
    tolerance = TOLERANCE[theirs.dtype]
    scale = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * scale)


def torch_scales_by_frequency() -> bool:
    """torch 2.11 counts wrongly where an id repeats after another one: there is nothing to compare with then."""
    bag = nn.EmbeddingBag(2, 1, mode="sum", scale_grad_by_freq=True)
    bag(torch.tensor([[1, 0, 0]])).backward(torch.ones(1, 1))
    assert bag.weight.grad is not None
    return bag.weight.grad.tolist() == [[1.0], [1.0]]


SCALES = torch_scales_by_frequency()


class Draw:
    """One random way to call an embedding bag that torch accepts."""

    def __init__(self, seed: int) -> None:
        pick = random.Random(seed)
        torch.manual_seed(seed)
        self.rows = pick.choice([1, 7, 60])
        self.chunk_dim = pick.choice([4, 5, 8, 12])
        self.dim = self.chunk_dim * pick.choice([1, 2, 3, 5])
        self.dtype = pick.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
        self.mode = pick.choice(["sum", "mean", "max"])
        self.options: dict[str, Any] = {"mode": self.mode, "dtype": self.dtype}
        if pick.random() < 0.4:
            self.options["padding_idx"] = pick.randrange(-self.rows, self.rows)
        if pick.random() < 0.2:
            self.options |= {"max_norm": pick.choice([0.5, 2.0]), "norm_type": pick.choice([1.0, 2.0, 3.0])}
        if self.mode != "max" and pick.random() < 0.3 and SCALES:
            self.options["scale_grad_by_freq"] = True
        bags = pick.choice([0, 1, 5, 33])
        ids_type, offsets_type = (pick.choice([torch.int32, torch.int64]) for _ in range(2))
        self.offsets: Tensor | None = None
        if pick.random() < 0.3:
            self.ids = torch.randint(0, self.rows, (bags, pick.choice([1, 4])), dtype=ids_type)
        else:
            sizes = torch.tensor([pick.choice([0, 0, 1, 3, 9]) for _ in range(bags)], dtype=torch.int64)
            ends = sizes.cumsum(0)
            self.ids = torch.randint(0, self.rows, (int(sizes.sum()),), dtype=ids_type)
            self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(offsets_type)
            if pick.random() < 0.5:
                self.options["include_last_offset"] = True
            else:
                self.offsets = self.offsets[:-1]
        self.weights = None
        if self.mode == "sum" and pick.random() < 0.5:
            self.weights = torch.randn(self.ids.shape).to(self.dtype)

    def pair(self, **options: Any) -> tuple[AdaptiveEmbeddingBag, nn.EmbeddingBag]:
        # torch adds 16-bit gradients up in 16 bits; the reference computes in float32 with the same rounded values.
        wide = torch.float32 if self.dtype in (torch.bfloat16, torch.float16) else self.dtype
        sparse = options.get("training") == "sparse"
        theirs = nn.EmbeddingBag(self.rows, self.dim, **self.options | {"dtype": wide}, sparse=sparse)
        theirs.weight.data = theirs.weight.data.to(self.dtype).to(wide)
        options.setdefault("chunk_dim", None if self.chunk_dim == self.dim else self.chunk_dim)
        ours = AdaptiveEmbeddingBag(self.rows, self.dim, **self.options, **options)
        ours.load_state_dict({"weight": theirs.weight.detach()})
        return ours, theirs

    def call(self, bag: nn.Module, ids: Tensor, weights: Tensor | None, offsets: Tensor | None) -> Tensor:
        same = ids if isinstance(bag, AdaptiveEmbeddingBag) or offsets is None else ids.to(torch.int64)
        if offsets is not None and not isinstance(bag, AdaptiveEmbeddingBag):
            offsets = offsets.to(torch.int64)
        output: Tensor = bag(same, offsets, weights)
        return output

    def step(self, bag: nn.Module, optimizer: torch.optim.Optimizer | None, upstream: Tensor | None) -> Any:
        dtype = next(bag.parameters()).dtype
        weights = None if self.weights is None else self.weights.to(dtype, copy=True).requires_grad_()
        output = self.call(bag, self.ids, weights, self.offsets)
        if upstream is None:
            upstream = torch.randn(output.shape).to(self.dtype)
        output.backward(upstream.to(dtype))
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        return output.detach(), None if weights is None else weights.grad, upstream


@pytest.mark.parametrize("seed", range(120))
def test_dense_gradient_equals_embedding_bag(seed: int) -> None:
    draw = Draw(seed)
    ours, theirs = draw.pair()
    expected, expected_weights, upstream = draw.step(theirs, None, None)
    output, weights, _ = draw.step(ours, None, upstream)
    close(output, expected)
    close(ours.weight, theirs.weight.detach())  # max_norm writes
    assert ours.pool.grad is not None
    assert theirs.weight.grad is not None
    close(ours.pool.grad.view(draw.rows, draw.dim), theirs.weight.grad)
    if weights is not None:
        close(weights, expected_weights)
    # Evaluation takes another path.
    with torch.no_grad():
        close(draw.call(ours, draw.ids, draw.weights, draw.offsets), expected)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("seed", range(200, 220))
def test_sparse_gradient_equals_embedding_bag(seed: int, name: str) -> None:
    draw = Draw(seed)
    if draw.mode == "max" or draw.dtype in (torch.bfloat16, torch.float16):
        draw.options |= {"mode": "sum", "dtype": torch.float64}
        draw.mode, draw.dtype, draw.weights = "sum", torch.float64, None
    for name_of_option in ("max_norm", "scale_grad_by_freq"):  # torch has neither with sparse gradients
        draw.options.pop(name_of_option, None)
    ours, theirs = draw.pair(training="sparse")
    make = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}[name]
    optimizers = [make(module.parameters(), lr=0.1) for module in (ours, theirs)]
    for _ in range(3):
        _, _, upstream = draw.step(theirs, optimizers[1], None)
        draw.step(ours, optimizers[0], upstream)
    close(ours.weight, theirs.weight.detach())


@pytest.mark.parametrize("training", ["dense", "sparse", "fused"])
@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_a_frozen_table_stays_what_it_is(training: str, budget: float) -> None:
    torch.manual_seed(7)
    options: dict[str, Any] = {"mode": "sum", "training": training, "budget": budget, "chunk_dim": 4}
    bag = AdaptiveEmbeddingBag.from_pretrained(torch.randn(9, 8), **options)
    ids, weights = torch.randint(0, 9, (4, 3)), torch.randn(4, 3, requires_grad=True)

    def train() -> bool:
        """Whether that changed anything of the table."""
        before = copy.deepcopy(bag.state_dict())
        bag(ids, None, weights).sum().backward()
        gathered, bag.pool.grad = bag.pool.grad, None
        same = all(torch.equal(value, before[name]) for name, value in bag.state_dict().items())
        return gathered is not None or not same

    assert not train()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, bag.weight.sum(1)[ids])
    assert not bag(ids).requires_grad
    for holder in (bag, nn.Sequential(bag)):  # a model asks its parameters, not its modules
        assert holder.requires_grad_() is holder
        assert train()
        holder.requires_grad_(False)
        assert not train()


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("seed", range(300, 330))
def test_fused_update_equals_embedding_bag_and_optimizer(seed: int, name: str) -> None:
    draw = Draw(seed)
    if draw.mode == "max":  # no sparse gradient in torch
        draw.options["mode"] = draw.mode = "sum"
    draw.options.pop("max_norm", None)
    if name != "adagrad":
        draw.options.pop("scale_grad_by_freq", None)  # not in torch's sparse gradients
    if draw.dtype in (torch.bfloat16, torch.float16) and name == "adam":
        draw.options["dtype"] = draw.dtype = torch.float32  # state is float32 here, of the weight's type in torch
        draw.weights = None if draw.weights is None else draw.weights.float()
    # Row-wise Adagrad is not in torch: the reference is written here.
    ours, theirs = draw.pair(training="fused", optimizer=name, lr=0.1, eps=1e-8)
    if name == "adagrad":
        theirs.sparse = False
        optimizer: torch.optim.Optimizer | None = None
    else:
        theirs.sparse = True
        optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.SparseAdam}[name](theirs.parameters(), lr=0.1)
    sums = torch.zeros(draw.rows * ours.chunks, dtype=torch.float64)
    for _ in range(3):
        output, weights, upstream = draw.step(theirs, optimizer, None)
        if name == "adagrad":
            assert theirs.weight.grad is not None
            gradient = theirs.weight.grad.double().view(-1, ours.chunk_dim)
            sums += gradient.square().mean(1)
            step = 0.1 * gradient / (sums.sqrt() + 1e-8).unsqueeze(1)
            theirs.weight.data -= step.view_as(theirs.weight).to(theirs.weight.dtype)
            theirs.zero_grad()
        ours_output, ours_weights, _ = draw.step(ours, None, upstream)
        close(ours_output, output)
        if weights is not None:
            close(ours_weights, weights)
    close(ours.weight, theirs.weight.detach())
    assert ours.pool.grad is None


@pytest.mark.parametrize("training", ["dense", "sparse", "fused"])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (2, 0, 3)])
def test_embedding_equals_embedding(shape: tuple[int, ...], padding_idx: int | None, training: str) -> None:
    torch.manual_seed(1)
    theirs = nn.Embedding(20, 8, padding_idx=padding_idx)
    ours = AdaptiveEmbedding(20, 8, padding_idx=padding_idx, training=training, optimizer="sgd", lr=0.5, chunk_dim=4)
    ours.load_state_dict(theirs.state_dict())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    ids = torch.randint(0, 20, shape)
    expected, output = theirs(ids), ours(ids)
    assert torch.equal(output, expected)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    output.backward(upstream)
    optimizer.step()
    if training != "fused":
        torch.optim.SGD(ours.parameters(), lr=0.5).step()
    close(ours.weight, theirs.weight.detach())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("training", ["dense", "fused"])
def test_bags_without_room_for_ids_take_part_in_training(training: str, mode: str) -> None:
    bag = AdaptiveEmbeddingBag(5, 4, mode=mode, training=training, include_last_offset=True)
    before = bag.weight.clone()
    for bags in (0, 3):
        output = bag(torch.zeros(bags, 0, dtype=torch.int64))
        assert torch.equal(output, torch.zeros(bags, 4))
        output.sum().backward()
    assert torch.equal(bag.weight, before)
    if training == "dense":
        assert bag.pool.grad is not None
        assert not bag.pool.grad.any()


def test_padding_row_starts_at_zero() -> None:
    assert not AdaptiveEmbedding(5, 4, padding_idx=2).weight[2].any()
    assert not AdaptiveEmbeddingBag(5, 4, padding_idx=-1).weight[4].any()
    assert AdaptiveEmbeddingBag(5, 4).weight.all()


def problem(bag: AdaptiveEmbeddingBag, *args: Any) -> tuple[type[BaseException], str]:
    before = copy.deepcopy(bag.state_dict())
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the callers compare the type
        bag(*args)
    for name, value in bag.state_dict().items():
        assert torch.equal(value, before[name]), name
    return caught.type, str(caught.value)


@pytest.mark.parametrize("max_norm", [None, 0.1])  # which writes
@pytest.mark.parametrize("training", ["dense", "fused"])
def test_bad_batches_name_position_and_value(training: str, max_norm: float | None) -> None:
    bag = AdaptiveEmbeddingBag(10, 8, mode="sum", training=training, max_norm=max_norm)
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
        ((ids,), ValueError, "offsets must be given with a 1-D input"),
        ((ids.view(2, 2), offsets), ValueError, "offsets must be None with a 2-D input"),
        ((ids.view(1, 2, 2),), ValueError, "input has shape (1, 2, 2)"),
        ((ids, offsets, torch.ones(3)), ValueError, "per_sample_weights has shape (3,), input (4,)"),
        ((ids, offsets, torch.ones(4).double()), TypeError, "they must be the same"),
    ]
    for args, kind, text in cases:
        assert problem(bag, *args)[0] is kind, text
        assert text in problem(bag, *args)[1]
    mean = AdaptiveEmbeddingBag(10, 8)
    assert problem(mean, ids, offsets, torch.ones(4))[0] is NotImplementedError


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"budget": 0.0}, ValueError, "budget = 0.0: allowed 0 < share <= 1"),
        ({"budget": 1.5}, ValueError, "budget = 1.5"),
        ({"budget": float("nan")}, ValueError, "budget = nan"),
        ({"budget": 0}, ValueError, "budget = 0: allowed 1..40 chunks"),
        ({"budget": 41, "chunk_dim": 4}, ValueError, "budget = 41"),
        ({"budget": "half"}, TypeError, "budget is a str"),
        ({"chunk_dim": 5}, ValueError, "chunk_dim = 5: allowed divisors of embedding_dim = 16 from 4 on: [4, 8, 16]"),
        ({"chunk_dim": 2}, ValueError, "chunk_dim = 2"),
        ({"chunk_dim": 4.0}, TypeError, "chunk_dim is a float"),
        ({"mode": "median"}, ValueError, "mode = 'median'"),
        ({"mode": "max", "sparse": True}, ValueError, "mode = 'max' goes with neither"),
        ({"training": "magic"}, ValueError, "training = 'magic'"),
        ({"training": "fused", "optimizer": "lamb"}, ValueError, "optimizer = 'lamb': allowed 'sgd', 'adagrad'"),
        ({"training": "fused", "sparse": True}, ValueError, "give one of them"),
        ({"lr": -1.0}, ValueError, "lr = -1.0"),
        ({"gamma": 1.0}, ValueError, "gamma = 1.0"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas = (0.9, 1.0)"),
        ({"padding_idx": 10}, ValueError, "padding_idx = 10: allowed -10..9"),
        ({"dtype": torch.int8}, TypeError, "dtype is torch.int8"),
        ({"device": "meta"}, NotImplementedError, "run on the CPU and on CUDA"),
        ({"training": "sharded"}, RuntimeError, "needs a process group"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], kind: type[BaseException], text: str) -> None:
    with pytest.raises(kind) as caught:
        AdaptiveEmbeddingBag(10, 16, **{"budget": 0.5, "chunk_dim": 4} | options)
    assert text in str(caught.value)


def test_the_derivative_is_right() -> None:
    torch.manual_seed(2)
    index = torch.full((6 * 3,), -1, dtype=torch.int32)
    index[torch.tensor([0, 1, 4, 8, 9, 10, 11, 17])] = torch.randperm(8).to(torch.int32)
    pool = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    ids, offsets = torch.randint(0, 6, (9,)), torch.tensor([0, 3, 3, 8])
    weights = torch.randn(9, dtype=torch.float64, requires_grad=True)
    for mode in (0, 1, 2):
        given = weights if mode == 0 else None

        def bag(values: Tensor, scales: Tensor | None, mode: int = mode) -> Tensor:
            output: Tensor = _ops.adaptive_bag(values, index, ids, offsets, 0, False, scales, 6, 3, mode, 2)[0]
            return output

        assert torch.autograd.gradcheck(bag, (pool, given))


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


@pytest.mark.parametrize("training", ["dense", "fused"])
def test_second_derivatives_are_refused(training: str) -> None:
    table = AdaptiveEmbedding(5, 4, training=training)
    loss = table(torch.tensor([1, 2])).square().sum()
    (gradient,) = torch.autograd.grad(loss, table._trained, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (loss + gradient.sum()).backward()


def samples() -> list[tuple[str, tuple[Any, ...]]]:
    torch.manual_seed(3)
    index = torch.full((12,), -1, dtype=torch.int32)
    index[:5] = torch.arange(5, dtype=torch.int32)
    pool, ids, offsets = torch.randn(5, 4), torch.randint(0, 4, (6,)), torch.tensor([0, 2])
    layout = (ids, offsets, 0, False, None, 4, 3, 0, -1)
    upstream, none = torch.randn(2, 12), torch.empty(0, 12, dtype=torch.int32)
    sketch, clock = torch.empty(0, dtype=torch.int32), torch.tensor([0.0, 1.0], dtype=torch.float64)
    observed = (torch.zeros(12), sketch, clock)
    return [
        ("adaptive_bag", (pool.clone().requires_grad_(), index, *layout)),
        ("adaptive_bag", (pool, index, ids, None, 3, False, torch.randn(6).requires_grad_(), 4, 3, 0, 1)),
        ("adaptive_bag", (pool.clone().requires_grad_(), index, *layout[:-2], 2, -1)),
        ("adaptive_bag_weight_gradient", (upstream, pool, index, *layout)),
        ("adaptive_bag_dense_gradient", (upstream, none, pool, index, *layout, True)),
        ("adaptive_bag_observe_", (upstream, none, pool, index, *observed, *layout, False, 0.99)),
        ("adaptive_bag_sparse_gradient", (upstream, none, pool, index, *observed, *layout, False, 0.99)),
        (
            "adaptive_bag_update_",
            (
                *(upstream, none, pool, [torch.zeros(5)], index, *observed, torch.tensor(0.1, dtype=torch.float64)),
                *(*layout, False, 0.99, "adagrad", 0.9, 0.999, 1e-8),
            ),
        ),
        ("adaptive_bag_renorm_", (pool, index, ids, 4, 3, 0.5, 2.0)),
        ("adaptive_table_prune_", (index, torch.rand(12), sketch, 5, 4, 3, 5, 2, 0.0)),
        ("adaptive_table_carry_", (pool, torch.tensor([[1, 2], [4, 1]]), torch.tensor([[7, 4]]))),
        ("adaptive_table_meet_", (torch.zeros(1, dtype=torch.uint8), torch.tensor([[1, 0], [2, 1], [7, 3]]), 3)),
        ("adaptive_table_candidates", (index, torch.rand(12), sketch, 5, 4, 3)),
    ]


@pytest.mark.parametrize("number", range(13))
def test_opcheck(number: int) -> None:
    name, arguments = samples()[number]
    torch.library.opcheck(getattr(_ops, name).default, arguments)


@pytest.mark.parametrize("training", ["dense", "fused"])
@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_compiles_into_one_graph(training: str, budget: float) -> None:
    def build() -> AdaptiveEmbeddingBag:
        torch.manual_seed(4)
        bag = AdaptiveEmbeddingBag(30, 16, mode="sum", training=training, lr=0.5, budget=budget, chunk_dim=4)
        bag._take(torch.randn(30, 16))
        return bag

    eager, compiled = build(), build()
    run = torch.compile(compiled, fullgraph=True)
    for step in range(3):
        ids, offsets = torch.randint(0, 30, (20 + step,)), torch.tensor([0, 4, 4, 11])
        outputs = [module(ids, offsets) for module in (eager, run)]
        torch.testing.assert_close(outputs[0], outputs[1])
        for module, output in zip((eager, compiled), outputs, strict=True):
            output.square().sum().backward()
            if training == "dense":
                torch.optim.SGD([module.pool], lr=0.1).step()
                module.zero_grad()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value, msg=name)


def test_results_do_not_depend_on_threads() -> None:
    def train(threads: int, layout: str) -> dict[str, Tensor]:
        torch.set_num_threads(threads)
        torch.manual_seed(5)
        bag = AdaptiveEmbeddingBag(
            3000, 16, mode="sum", training="fused", budget=0.3, chunk_dim=4, layout=layout, init_std=0.1
        )
        for _ in range(6):
            ids = (torch.rand(20_000) ** 3 * 3000).long()
            bag(ids, torch.arange(0, 20_000, 10)).square().sum().backward()
            bag.prune(hysteresis=0.1)
            bag(ids, torch.arange(0, 20_000, 10)).sin().sum().backward()
        return bag.state_dict()

    before = torch.get_num_threads()
    try:
        for layout in ("direct", "hash", "sketch"):
            single = train(1, layout)
            for threads in (2, 3):
                for name, value in train(threads, layout).items():
                    assert torch.equal(value, single[name]), (layout, threads, name)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 40, 700])
@pytest.mark.parametrize("chunk_dim", [8, 16, 20, 32, 64, 128])
@pytest.mark.parametrize("budget", [1.0, 0.4])
def test_widths_with_loops_of_their_own(chunk_dim: int, rows: int, budget: float) -> None:
    """More positions than are looked up ahead, repeated ids and single ones, chunks absent and present."""
    torch.manual_seed(6)
    dim = 2 * chunk_dim
    weight = torch.randn(rows, dim)
    bag = AdaptiveEmbeddingBag(
        rows, dim, mode="sum", budget=budget, chunk_dim=chunk_dim, layout="direct", training="fused", lr=0.1, eps=1e-8
    )
    bag._take(weight)
    weight = bag.weight.clone()
    present = weight.view(-1, chunk_dim).abs().sum(1) > 0
    ids, offsets = torch.randint(0, rows, (300,)), torch.arange(0, 300, 3)
    upstream = torch.randn(100, dim)
    output = bag(ids, offsets)
    close(output, torch.nn.functional.embedding_bag(ids, weight, offsets, mode="sum"))
    output.backward(upstream)
    gradient = torch.zeros(rows, dim).index_add_(0, ids, upstream.repeat_interleave(3, 0)).view(-1, chunk_dim)
    change = 0.1 * gradient / (gradient.square().mean(1, keepdim=True).sqrt() + 1e-8)
    close(bag.weight, weight - (change * present.unsqueeze(1)).view(rows, dim))
    if budget < 1:
        counts = torch.bincount(ids, minlength=rows).repeat_interleave(2)
        close(bag.utility, counts * gradient.norm(dim=1) / 0.99)


def test_schedulers_reach_the_fused_update() -> None:
    bag = AdaptiveEmbeddingBag(4, 4, mode="sum", training="fused", optimizer="sgd", lr=1.0)
    bag._take(torch.zeros(4, 4))
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": 1.0}, bag.param_group()], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen = []
    for _ in range(3):
        bag(torch.tensor([[1]])).sum().backward()
        optimizer.step()
        scheduler.step()
        seen.append(float(bag.weight[1, 0]))
    assert seen == [-1.0, -1.5, -1.75]


def test_learning_rates_that_are_put_into_the_group_are_taken_over() -> None:
    bag = AdaptiveEmbeddingBag(4, 4, mode="sum", training="fused", optimizer="sgd", lr=1.0)
    bag._take(torch.zeros(4, 4))
    optimizer = torch.optim.SGD([bag.param_group()], lr=1.0)

    def train(bag: AdaptiveEmbeddingBag, optimizer: torch.optim.Optimizer) -> float:
        before = bag.weight[1, 0].item()
        bag(torch.tensor([[1]])).sum().backward()
        optimizer.step()
        return before - bag.weight[1, 0].item()

    saved = copy.deepcopy(optimizer.state_dict())
    bag.lr.fill_(0.25)
    optimizer.load_state_dict(saved)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(bag, optimizer)
    assert bag.lr == 1.0
    scheduler.step()
    assert train(bag, optimizer) == 0.5  # the loaded group is the table's again
    for pair in ((bag, optimizer), copy.deepcopy((bag, optimizer))):
        pair[1].param_groups[0]["lr"] = 0.125
        assert train(*pair) == 0.5
        assert train(*pair) == 0.125


def test_copies_and_pickles_are_tables_of_their_own() -> None:
    bag = AdaptiveEmbeddingBag(20, 8, budget=0.5, chunk_dim=4, training="fused")
    bag._take(torch.randn(20, 8))
    twin = copy.deepcopy(bag)
    file = io.BytesIO()
    torch.save(bag, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    ids = torch.randint(0, 20, (6, 3))
    bag(ids).sum().backward()
    for other in (twin, loaded):
        assert not torch.equal(other.weight, bag.weight)
        other(ids).sum().backward()
        assert torch.equal(other.weight, bag.weight)


def test_half_and_double_convert() -> None:
    bag = AdaptiveEmbeddingBag(20, 8, training="fused", mode="sum")
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        bag.to(dtype)
        output = bag(torch.randint(0, 20, (6, 3)))
        assert output.dtype == dtype
        output.sum().backward()
