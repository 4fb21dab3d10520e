"""What stands in the place of gradients, form by form, over a core whose averages are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_core import FakeCore, on_two_ranks
from torch import nn

from torchext.dear.replicated_gradients import ReplicatedGradients
from torchext.dear.sharded_gradients import ShardedGradients
from torchext.dear.sliced_gradient import SlicedGradient


class Both:
    """A model of three parameters, of which the first two have averages, 1, 2, 3 ... and -1, -2, -3 ..."""

    def __init__(self, form: type, rank: int = 0, group: Any = None) -> None:
        self.parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (5,), (4,))]
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, 7.0)
        averages = {0: torch.arange(1.0, 7.0).view(2, 3), 1: -torch.arange(1.0, 6.0)}
        self.core = FakeCore(self.parameters, averages, rank, 1 if group is None else group.size())
        self.released: set[int] = set()
        given: Any = (self.core, self.parameters, self.released.update, *(() if group is None else (group,)))
        self.averaged = form(*given)
        self.averaged.renew([0, 1, 2])


def test_replicated_ones_become_the_parameters_own_when_somebody_looks() -> None:
    both = Both(ReplicatedGradients)
    averaged, averages = both.averaged, both.core.averages
    assert all(position in averaged and averaged.stands_in(position) for position in range(3))
    assert averaged.gradient(0) is averages[0] is both.parameters[0].grad
    assert both.released == {0} and not averaged.stands_in(0)
    averaged.before_use([1])
    assert both.parameters[1].grad is averages[1] and 2 in averaged
    averaged.before_pass()
    assert both.parameters[2].grad is None and 2 not in averaged


def test_a_replicated_one_is_replaced() -> None:
    both = Both(ReplicatedGradients)
    given = torch.ones(5)
    both.averaged.replace(1, given)
    assert both.parameters[1].grad is given and both.released == {1}


@pytest.mark.parametrize("set_to_none", [False, True])
def test_cleared(set_to_none: bool) -> None:
    both = Both(ReplicatedGradients)
    before = [parameter.grad for parameter in both.parameters]
    both.averaged.clear(set_to_none, [0])
    assert 0 not in both.averaged and 1 in both.averaged and not both.core.calls
    both.averaged.clear(set_to_none)
    assert both.core.calls == ["clear_gradients"] and both.released == {0, 1, 2}
    for parameter, old in zip(both.parameters, before, strict=True):
        assert parameter.grad is None if set_to_none else not parameter.grad.any()
        assert old is not None and old.eq(7.0).all()  # a step under way has it


def of_two_ranks(check: Any) -> None:
    def body(rank: int, group: Any) -> None:
        check(rank, Both(ShardedGradients, rank, group))

    on_two_ranks(body)


def test_slices_work_as_the_whole() -> None:
    def check(rank: int, both: Both) -> None:
        averaged, whole = both.averaged, both.core.averages
        first, second = averaged.gradient(0), averaged.gradient(1)
        assert isinstance(first, SlicedGradient) and first is averaged.gradient(0) and averaged.gradient(2) is None
        for order in (2.0, 1.0, float("inf")):
            for gradient, full in ((first, whole[0]), (second, whole[1])):
                assert torch.linalg.vector_norm(gradient, order).allclose(torch.linalg.vector_norm(full, order))
        first.mul_(2)  # a norm of before counts no more
        assert torch.linalg.vector_norm(first).allclose(torch.linalg.vector_norm(torch.arange(2.0, 13.0, 2.0)))
        assert first.part.tolist() == [2.0, 4.0, 6.0] if rank == 0 else [8.0, 10.0, 12.0]
        assert both.parameters[0].grad is not None and both.parameters[0].grad.eq(7.0).all()

    of_two_ranks(check)


def test_slices_are_gathered_where_a_whole_gradient_is_wanted() -> None:
    def check(rank: int, both: Both) -> None:
        sliced = both.averaged.gradient(0)
        expected = both.core.averages[0].clone()
        assert torch.equal(sliced + 0, expected)
        assert both.released == {0, 1, 2} and not both.averaged.stands_in(1)
        assert torch.equal(both.parameters[0].grad, expected) and both.parameters[2].grad is None  # type: ignore[arg-type]
        assert torch.equal(sliced + 0, expected)  # and goes on being that

    of_two_ranks(check)


def test_a_change_of_slices_is_not_lost_between_passes() -> None:
    def check(rank: int, both: Both) -> None:
        both.averaged.gradient(1).zero_()  # the parameter's own are zeros, too
        assert not both.parameters[1].grad.any()  # type: ignore[union-attr]
        both.averaged.before_pass()
        assert 0 in both.averaged
        both.averaged.gradient(0).mul_(3)
        with pytest.raises(RuntimeError, match="changed between two backward passes"):
            both.averaged.accumulating()
        both.averaged.before_pass()
        assert both.parameters[0].grad.view(-1).tolist() == [3.0, 6.0, 9.0, 12.0, 15.0, 18.0]  # type: ignore[union-attr]
        both.averaged.accumulating()

    of_two_ranks(check)


@pytest.mark.parametrize("changed", [False, True])
def test_slices_that_a_step_has_used(changed: bool) -> None:
    def check(rank: int, both: Both) -> None:
        averaged, kept = both.averaged, both.averaged.gradient(0)
        if changed:
            kept.mul_(2)
        used = [averaged.own_slice(position) for position in range(3)]
        assert used[0].tolist() == kept.part.tolist() and used[2] is None
        both.released.clear()
        averaged.spend()
        assert both.core.calls == ["note_lost_change"] * changed
        assert 0 not in averaged and averaged.stands_in(0) and averaged.stands_in(1) and not averaged.stands_in(2)
        for gone in (kept, averaged.gradient(0), averaged.gradient(1)):
            with pytest.raises(RuntimeError, match=r"gone after optimizer.step\(\)"):
                gone.clone()
        averaged.replace(1, None)
        assert both.parameters[1].grad is None and not averaged.stands_in(1)
        both.parameters[0].grad = torch.full((2, 3), float(rank))
        averaged.restore()
        own = both.parameters[0].grad
        assert own is None if changed else own.eq(0.5).all()

    of_two_ranks(check)


def test_spent_ones_that_are_cleared_or_read_by_a_graph() -> None:
    def check(rank: int, both: Both) -> None:
        for position in (0, 1):
            both.averaged.own_slice(position)
        both.averaged.spend()
        both.averaged.forget_spent([0, 2])
        assert not both.averaged.stands_in(0) and both.averaged.stands_in(1)
        both.averaged.clear(set_to_none=False)
        assert not both.averaged.stands_in(1) and not both.parameters[1].grad.any()  # type: ignore[union-attr]

    of_two_ranks(check)
