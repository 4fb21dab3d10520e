"""With budget 1.0 whatever a script does with ``weight`` has the effect that it has on torch's embeddings."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from torchext.nn import AdaptiveEmbedding, AdaptiveEmbeddingBag

IDS = torch.tensor([[1, 2, 4], [5, 4, 3]])
ROWS, DIM = 10, 8
Make = Callable[..., Any]


def kinds(sparse: bool = True) -> Any:
    """Decorates with ``torchs`` and ``ours``, which make the same."""
    made: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "vectors": (nn.Embedding, AdaptiveEmbedding, {"padding_idx": 4}),
        "bags": (nn.EmbeddingBag, AdaptiveEmbeddingBag, {"mode": "sum"}),
        "clipped": (nn.EmbeddingBag, AdaptiveEmbeddingBag, {"mode": "mean", "max_norm": 1.0}),
    }
    if sparse:
        made["sparse"] = (nn.EmbeddingBag, AdaptiveEmbeddingBag, {"mode": "sum", "sparse": True})
    cases = [
        pytest.param(
            lambda theirs=theirs, options=options, **more: theirs(ROWS, DIM, **options, **more),
            # What it is cut into is nobody's business.
            lambda ours=ours, options=options, **more: ours(ROWS, DIM, chunk_dim=4, **options, **more),
            id=name,
        )
        for name, (theirs, ours, options) in made.items()
    ]
    return pytest.mark.parametrize(("torchs", "ours"), cases)


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            same(*pair)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert found == expected


def both(torchs: Make, ours: Make, action: Callable[[Make], Any]) -> Any:
    """What the action makes of either, from one seed; they must be the same."""
    found = []
    for make in (torchs, ours):
        torch.manual_seed(0)
        found.append(action(make))
    same(found[1], found[0])
    return found[1]


def train(table: Any, optimizer: torch.optim.Optimizer | None = None, ids: Tensor = IDS) -> Tensor:
    """The weight after three steps."""
    optimizer = optimizer or torch.optim.SGD(table.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        table(ids).sub(1).square().sum().backward()
        optimizer.step()
    return table.weight.detach().clone()


def begun(table: Any) -> Any:
    """The same values in either, whatever has been drawn for its padding."""
    with torch.no_grad():
        table.weight.copy_(torch.arange(ROWS * DIM).view(ROWS, DIM) / 50)
    return table


@kinds()
def test_the_weight_is_a_parameter_that_trains(torchs: Make, ours: Make) -> None:
    def action(make: Make) -> Any:
        table = begun(make())
        assert isinstance(table.weight, nn.Parameter)
        assert table.weight.is_leaf
        assert [name for name, _ in table.named_parameters()] == list(table.state_dict()) == ["weight"]
        seen: list[Tensor] = []
        table.weight.register_hook(lambda gradient: seen.append(gradient.to_dense().clone()))
        trained = train(table, torch.optim.SGD([table.weight], lr=0.1))
        (found,) = torch.autograd.grad(table(IDS).square().sum(), [table.weight])
        return trained, seen, found.to_dense(), table.weight.grad.to_dense()

    both(torchs, ours, action)


@kinds()
@pytest.mark.parametrize("how", ["attribute", "method", "module"])
def test_a_frozen_weight_is_not_trained(torchs: Make, ours: Make, how: str) -> None:
    def action(make: Make) -> Any:
        table = begun(make())
        if how == "attribute":
            table.weight.requires_grad = False
        elif how == "method":
            table.weight.requires_grad_(False)
        else:
            table.requires_grad_(False)
        frozen = table(IDS)
        table.weight.requires_grad = True
        return frozen.requires_grad, train(table)

    assert both(torchs, ours, action)[0] is False


def write_data(table: Any, values: Tensor) -> None:
    table.weight.data = values


def write_parameter(table: Any, values: Tensor) -> None:
    table.weight = nn.Parameter(values)


def write_registered(table: Any, values: Tensor) -> None:
    del table.weight
    assert not hasattr(table, "weight")
    table.register_parameter("weight", nn.Parameter(values))


def write_in_place(table: Any, values: Tensor) -> None:
    with torch.no_grad():
        for row, value in zip(table.weight, values, strict=True):
            row.copy_(value)


@kinds()
@pytest.mark.parametrize(
    ("write", "values"),
    [
        (write_data, torch.ones(ROWS, DIM).cumsum(0)),
        (write_data, torch.ones(2 * ROWS, DIM).cumsum(0)),  # of other sizes, as torch looks at the weight alone
        (write_parameter, torch.ones(ROWS, 6).cumsum(0)),
        (write_parameter, torch.arange(1.0, ROWS * DIM + 1).view(DIM, ROWS).t()),  # not contiguous
        (write_data, torch.ones(ROWS, DIM, dtype=torch.float64).cumsum(0)),
        (write_registered, torch.ones(ROWS, DIM).cumsum(1)),
        (write_in_place, torch.ones(ROWS, DIM).cumsum(1)),
    ],
    ids=["data", "rows", "columns", "transposed", "float64", "registered", "in_place"],
)
def test_values_that_a_script_puts_there_are_looked_up(
    torchs: Make, ours: Make, write: Callable[[Any, Tensor], None], values: Tensor
) -> None:
    def action(make: Make) -> Any:
        table = make()
        write(table, values.clone(memory_format=torch.preserve_format))
        ids = IDS + len(values) - ROWS
        return table(ids).detach(), train(table, ids=ids)

    both(torchs, ours, action)


@kinds(sparse=False)
def test_a_head_is_tied_to_it_either_way(torchs: Make, ours: Make) -> None:
    def tie(make: Make) -> Any:
        table, head = begun(make()), nn.Linear(DIM, ROWS)
        head.weight = table.weight
        model = nn.ModuleList([table, head])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        head(table(IDS)).square().sum().backward()
        optimizer.step()
        assert table.weight is head.weight
        assert [name for name, _ in model.named_parameters()] == ["0.weight", "1.bias"]
        return table.weight.detach()

    def tie_the_table(make: Make) -> Any:
        table, head = make(), nn.Linear(DIM, ROWS, bias=False)
        table.weight = head.weight
        nn.functional.linear(table(IDS), table.weight).square().sum().backward()
        assert table.weight is head.weight
        return head.weight.grad

    both(torchs, ours, tie)
    both(torchs, ours, tie_the_table)


@kinds(sparse=False)
def test_penalties_and_weight_decay_by_name_reach_it(torchs: Make, ours: Make) -> None:
    def action(make: Make) -> Any:
        table = begun(make())
        decaying = [parameter for name, parameter in table.named_parameters() if name.endswith("weight")]
        optimizer = torch.optim.AdamW([{"params": decaying, "weight_decay": 0.3}], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (table(IDS).sum() + table.weight.square().sum()).backward()
            nn.utils.clip_grad_norm_(table.parameters(), 0.5)
            optimizer.step()
        return table.weight.detach()

    both(torchs, ours, action)


@kinds()
def test_states_go_to_and_from_torchs_modules(torchs: Make, ours: Make) -> None:
    theirs, table = torchs(), ours()
    assert str(table.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    torch.testing.assert_close(table.weight, theirs.weight)
    train(table)
    assert str(theirs.load_state_dict(table.state_dict())) == "<All keys matched successfully>"
    torch.testing.assert_close(theirs.weight, table.weight)
    with pytest.raises(RuntimeError, match="size mismatch for weight: "):
        table.load_state_dict({"weight": torch.ones(3, DIM)})
    assert table.load_state_dict({}, strict=False).missing_keys == ["weight"]
    assert table.load_state_dict({"index": torch.ones(1)}, strict=False).unexpected_keys == ["index"]


@kinds()
def test_copies_are_tables_of_their_own(torchs: Make, ours: Make) -> None:
    def through_file(table: Any) -> Any:
        file = io.BytesIO()
        torch.save(table, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    for duplicate in (copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table)), through_file):

        def action(make: Make, duplicate: Any = duplicate) -> Any:
            table = begun(make())
            other = duplicate(table)
            return train(other), table.weight.detach()

        both(torchs, ours, action)


class Doubled(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return 2 * values


@kinds(sparse=False)
def test_torchs_utilities_replace_it(torchs: Make, ours: Make) -> None:
    def pruned(make: Make) -> Any:
        table = begun(make())
        prune.l1_unstructured(table, "weight", 0.5)
        trained = train(table)
        prune.remove(table, "weight")
        return trained, table.weight.detach(), list(table.state_dict())

    def normed(make: Make) -> Any:
        table = parametrizations.weight_norm(begun(make()))
        return train(table), list(table.state_dict())

    def doubled(make: Make) -> Any:
        table = begun(make())
        parametrize.register_parametrization(table, "weight", Doubled())
        trained = train(table)
        assert not table.requires_grad_(False)(IDS).requires_grad
        parametrize.remove_parametrizations(table, "weight")
        return trained, table.weight.detach(), list(table.state_dict())

    def called_with(make: Make) -> Any:
        table, other = make(), torch.ones(ROWS, DIM, requires_grad=True)
        torch.func.functional_call(table, {"weight": other}, (IDS,)).square().sum().backward()
        assert table.weight.grad is None
        return other.grad

    for action in (pruned, normed, doubled, called_with):
        both(torchs, ours, action)


@kinds()
def test_it_moves_and_begins_on_the_meta_device(torchs: Make, ours: Make) -> None:
    def to_empty(make: Make) -> Any:
        with torch.device("meta"):
            table = make()
        assert table.weight.is_meta
        assert table(IDS.to("meta")).is_meta
        return train(begun(table.to_empty(device="cpu")))

    def assigned(make: Make) -> Any:
        table = make(device="meta")
        table.load_state_dict({"weight": torch.ones(ROWS, DIM)}, assign=True)
        return train(table)

    def put(make: Make) -> Any:
        table = make(device="meta")
        table.weight = nn.Parameter(torch.ones(ROWS, DIM))
        return train(table)

    def elsewhere(make: Make) -> Any:  # while what is made without a device is made on another one
        table = begun(make())
        torch.set_default_device("meta")
        try:
            trained = train(table)
            table.load_state_dict(copy.deepcopy(table).state_dict())
            table.reset_parameters()
            assert make().weight.is_meta
        finally:
            torch.set_default_device(None)
        return trained, table.weight.device.type

    for action in (to_empty, assigned, put, elsewhere):
        both(torchs, ours, action)


@pytest.mark.parametrize("cls", [AdaptiveEmbedding, AdaptiveEmbeddingBag])
def test_skip_init_leaves_the_values_to_the_caller(cls: Any) -> None:
    table = nn.utils.skip_init(cls, ROWS, DIM)
    nn.init.ones_(table.weight)
    assert torch.equal(table(torch.tensor([[3]])).flatten(), torch.ones(DIM))


@kinds(sparse=False)
def test_compiled_tables_have_it_too(torchs: Make, ours: Make) -> None:
    def action(make: Make) -> Any:
        table = begun(make())
        compiled = torch.compile(table, backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.SGD([table.weight], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            compiled(IDS).sub(1).square().sum().backward()
            optimizer.step()
            table.weight.data = table.weight.data + 1
        return table.weight.detach()

    both(torchs, ours, action)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_the_pool_is_the_weight_also_where_chunks_were_asked_for(optimizer: str) -> None:
    make = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[optimizer]
    trained = []
    for name in ("pool", "weight"):
        torch.manual_seed(0)
        table = AdaptiveEmbeddingBag(ROWS, DIM, mode="sum", sparse=True, chunk_dim=4)
        assert table.pool is table.weight
        trained.append(train(table, make([getattr(table, name)], lr=0.1)))
    assert torch.equal(*trained)


def test_a_budget_of_all_chunks_as_a_number_is_the_same() -> None:
    table = AdaptiveEmbedding(ROWS, DIM, chunk_dim=4, budget=2 * ROWS)
    assert isinstance(table.weight, nn.Parameter)
    assert list(table.state_dict()) == ["weight"]


def old_state(table: Any, chunk_dim: int, prefix: str = "") -> dict[str, Tensor]:
    """What a table with all of its chunks was saved as before it had a weight."""
    rows, columns = table.weight.shape
    plain = {name: getattr(table, name) for name in table._PLAIN}
    pool = table.weight.detach().view(-1, chunk_dim)
    saved = {"pool": pool, "extent": torch.tensor([rows, columns // chunk_dim]), **plain}
    return {prefix + name: value.clone() for name, value in saved.items()}


def test_checkpoints_of_before_are_taken() -> None:
    table, other = (AdaptiveEmbeddingBag(ROWS, DIM, chunk_dim=4) for _ in range(2))
    model = nn.Sequential(other)
    assert str(model.load_state_dict(old_state(table, 4, "0."))) == "<All keys matched successfully>"
    assert torch.equal(other.weight, table.weight)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*state0"):  # of a fused table
        other.load_state_dict(old_state(table, 4) | {"state0": torch.zeros(2 * ROWS)})
    before = other.weight.detach().clone()
    for wrong in (
        old_state(table, 8),
        old_state(AdaptiveEmbeddingBag(DIM, ROWS * 2, chunk_dim=4), 4),
        AdaptiveEmbeddingBag(ROWS, DIM, chunk_dim=4, budget=0.5).state_dict(),
    ):
        with pytest.raises(RuntimeError, match=r"pool: saved with shape .*allowed \(20, 4\), all chunks of 10 rows"):
            other.load_state_dict(wrong)
    assert torch.equal(other.weight, before)
