"""Where ``weight`` is no parameter it can be read, and what would have to reach the table through it raises."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchext.nn import AdaptiveEmbedding, AdaptiveEmbeddingBag

ROWS, DIM = 10, 8
IDS = torch.tensor([1, 2, 4])
VALUES = torch.arange(1.0, ROWS * DIM + 1).view(ROWS, DIM)
# Below a budget of 1.0 however it is trained, and where the update is fused whatever the budget.
TABLES: dict[str, dict[str, Any]] = {
    "dense": {"budget": 0.5, "layout": "direct"},
    "sparse": {"budget": 0.5, "layout": "hash", "sparse": True},
    "fused": {"budget": 0.5, "layout": "sketch", "training": "fused"},
    "whole-fused": {"training": "fused"},
}
COMPUTED = pytest.mark.parametrize("name", [name for name in TABLES if name != "whole-fused"])
ALL = pytest.mark.parametrize("name", list(TABLES))


def table(name: str) -> AdaptiveEmbedding:
    made = AdaptiveEmbedding(ROWS, DIM, chunk_dim=4, **TABLES[name])
    made.load_state_dict({"weight": VALUES}, strict=False)
    return made


def expected(name: str) -> Tensor:
    """The chunks with the largest norms."""
    return VALUES if name == "whole-fused" else VALUES * (VALUES[4, -1] < VALUES)


def refused(action: Callable[[AdaptiveEmbedding], Any], name: str, asked: str, way_out: str) -> None:
    made = table(name)
    before = copy.deepcopy(made.state_dict())
    with pytest.raises(
        RuntimeError, match=rf"weight of this table {asked}, but it is made for reading: .*{way_out}.*1\.0"
    ):
        action(made)
    for key, value in made.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert made._trained.requires_grad


def assign(made: Any, values: Any) -> None:
    made.weight = values


def assign_data(made: Any) -> None:
    made.weight.data = VALUES


def assign_row(made: Any) -> None:
    made.weight[0] = 1.0


def fill_a_row(made: Any) -> None:
    with torch.no_grad():
        made.weight[0].fill_(1.0)


def add_into(made: Any) -> None:
    weight = made.weight
    weight += 1


SETTINGS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda made: assign(made, VALUES),
    "data": assign_data,
    "data of data": lambda made: made.weight.data.copy_(VALUES),
    "copy_": lambda made: made.weight.copy_(VALUES),
    "detached": lambda made: made.weight.detach().copy_(VALUES),
    "init": lambda made: nn.init.xavier_uniform_(made.weight),
    "init without a generator": lambda made: nn.init.ones_(made.weight),
    "row": assign_row,
    "view": fill_a_row,
    "rows": lambda made: [row.zero_() for row in made.weight],
    "operator": add_into,
    "out": lambda made: torch.add(VALUES, 1, out=made.weight),
    "clipped": lambda made: torch.embedding_renorm_(made.weight, IDS, 1.0, 2.0),
}


@COMPUTED
@pytest.mark.parametrize("how", list(SETTINGS))
def test_setting_it_is_refused(name: str, how: str) -> None:
    refused(SETTINGS[how], name, "is set", "load_state_dict")


def test_of_a_whole_fused_table_it_is_a_view_into_which_values_may_be_written() -> None:
    for how in ("data of data", "copy_", "detached"):
        made = table("whole-fused")
        nn.init.zeros_(made.weight)
        SETTINGS[how](made)
        assert torch.equal(made(IDS), VALUES[IDS]), how
    for how in ("tensor", "data"):
        refused(SETTINGS[how], "whole-fused", "is set", "load_state_dict")


def set_requires_grad(made: Any, value: bool) -> None:
    made.weight.requires_grad = value


@ALL
@pytest.mark.parametrize(
    "freeze",
    [
        lambda made: set_requires_grad(made, False),
        lambda made: set_requires_grad(made, True),
        lambda made: made.weight.requires_grad_(False),
        lambda made: made.weight[2:].requires_grad_(True),
    ],
)
def test_freezing_and_thawing_it_is_refused(name: str, freeze: Callable[[Any], Any]) -> None:
    refused(freeze, name, "is frozen, thawed or made a parameter", "requires_grad_")


@ALL
@pytest.mark.parametrize(
    "make",
    [
        lambda weight: torch.optim.SGD([weight], lr=0.1),
        lambda weight: torch.optim.Adam([{"params": [nn.Parameter(torch.ones(1)), weight], "lr": 0.1}]),
        lambda weight: torch.optim.SGD([nn.Parameter(torch.ones(1))]).add_param_group({"params": weight}),
    ],
)
def test_an_optimizer_of_it_is_refused(name: str, make: Callable[[Tensor], Any]) -> None:
    refused(lambda made: make(made.weight), name, "is given to an optimizer", r"parameters\(\)")


def penalized(made: Any) -> Any:
    return made(IDS).sum() + 0.1 * made.weight.square().sum()


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "logits": lambda made: nn.functional.linear(made(IDS), made.weight),
    "logits of a transpose": lambda made: made(IDS) @ made.weight.T,
    "logits of rows": lambda made: made(IDS) @ made.weight[:3].T,
    "penalty": penalized,
    "backward": lambda made: made.weight.sum().backward(),
    "autograd.grad": lambda made: torch.autograd.grad(made(IDS).sum(), [made.weight]),
    "grad": lambda made: made.weight.grad,
    "hook": lambda made: made.weight.register_hook(print),
    "retain_grad": lambda made: made.weight.retain_grad(),
    "lookup": lambda made: nn.functional.embedding(IDS, made.weight) * made(IDS),
}


@ALL
@pytest.mark.parametrize("how", list(GRADIENTS))
def test_a_gradient_of_it_is_refused(name: str, how: str) -> None:
    refused(GRADIENTS[how], name, "is asked for a gradient", "gradient of pool")


@ALL
def test_tying_it_is_refused(name: str) -> None:
    refused(lambda made: assign(made, nn.Parameter(VALUES)), name, "is replaced by a parameter", "load_state_dict")
    refused(
        lambda made: assign(made, nn.Linear(DIM, ROWS).weight), name, "is replaced by a parameter", "load_state_dict"
    )
    head = nn.Linear(DIM, ROWS)
    with pytest.raises(TypeError, match="as parameter 'weight'"):  # torch's own
        head.weight = table(name).weight  # type: ignore[assignment]
    made = table(name)
    copied = nn.Parameter(made.weight.detach().clone())
    copied.data.copy_(made.weight)
    assert torch.equal(copied, expected(name))
    if name != "whole-fused":
        refused(lambda made: nn.Parameter(made.weight), name, "is frozen, thawed or made a parameter", "requires_grad_")


@ALL
def test_it_is_read_as_any_tensor(name: str) -> None:
    made, values = table(name), expected(name)
    assert torch.equal(made.weight, values)
    torch.testing.assert_close(made.weight, values)
    assert made.weight.tolist() == values.tolist()
    assert (made.weight.numpy() == values.numpy()).all()
    assert made.weight.dtype == torch.float32 and tuple(made.weight.shape) == (ROWS, DIM)
    assert not made.weight.requires_grad and not isinstance(made.weight, nn.Parameter)
    assert float(made.weight.norm()) == float(values.norm())
    assert torch.equal(made.weight.argmax(1), values.argmax(1))
    assert type(made.weight.detach().clone()) is Tensor
    doubled = made.weight * 2  # memory of the caller's own
    doubled += 1
    assert torch.equal(doubled, values * 2 + 1)
    target = torch.zeros(ROWS, DIM)
    target.copy_(made.weight)
    assert torch.equal(target, values)
    assert torch.equal(nn.Parameter(VALUES.clone()) == made.weight, values == VALUES)
    with torch.no_grad():
        assert type(made(IDS) @ made.weight.clone().T) is Tensor
    query = torch.ones(1, DIM, requires_grad=True)
    (query @ made.weight.detach().T).sum().backward()  # as a constant
    torch.testing.assert_close(query.grad, values.sum(0, keepdim=True))


@ALL
def test_copies_of_it_are_plain(name: str) -> None:
    weight, file = table(name).weight, io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), torch.load(file)):
        assert type(other) is Tensor
        assert torch.equal(other, expected(name))
    assert repr(weight) == repr(expected(name))


@ALL
def test_the_table_trains_beside_it(name: str) -> None:
    made = table(name)
    optimizer = None if made.training_mode == "fused" else torch.optim.SGD(made.parameters(), lr=0.1)
    before = made.weight.clone()
    made(torch.arange(ROWS)).square().sum().backward()
    if optimizer is not None:
        optimizer.step()
    assert not torch.equal(made.weight, before)


def test_on_the_meta_device_it_has_a_shape_and_comes_back_empty() -> None:
    with torch.device("meta"):
        made = AdaptiveEmbeddingBag(ROWS, DIM, chunk_dim=4, budget=0.5, training="fused")
    assert made.weight.is_meta
    assert made.weight.shape == (ROWS, DIM)
    made.to_empty(device="cpu")
    assert not made.weight.any()
    assert made.stats()["resident_chunks"] == 0
    made.load_state_dict({"weight": VALUES})
    assert torch.equal(made.weight, expected("dense"))


@ALL
def test_compiled_it_is_read_and_refused_as_well(name: str) -> None:
    made = table(name)

    def doubled() -> Tensor:
        with torch.no_grad():
            return made.weight * 2

    def logits() -> Tensor:
        return nn.functional.linear(made(IDS), made.weight)

    assert torch.equal(torch.compile(doubled, backend="aot_eager", fullgraph=True)(), 2 * expected(name))
    with pytest.raises(Exception, match="weight of this table is asked for a gradient"):
        torch.compile(logits, backend="aot_eager")()
