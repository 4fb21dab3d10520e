"""Gradients that steps have used up: which they are, and what two ranks make of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_core import on_two_ranks
from torch import nn

from torchext.dear.spent_gradients import SpentGradients


def spent(parameters: list[nn.Parameter], group: Any, used: list[int], changed: bool = False) -> SpentGradients:
    gradients = SpentGradients(parameters, group)
    for position in used:
        gradients.use(position)
    gradients.end_step(range(len(parameters)), alone=True, changed=changed)
    return gradients


def test_what_a_step_has_used_of_what_was_averaged() -> None:
    gradients = SpentGradients([], None)  # type: ignore[arg-type]
    for position in (0, 1, 2):
        gradients.use(position)
    gradients.end_step({0, 1, 3}, alone=True, changed=False)
    assert [position in gradients for position in range(4)] == [True, True, False, False]
    gradients.use(3)  # of another optimizer
    gradients.end_step({3}, alone=False, changed=False)
    assert 0 in gradients and 3 in gradients
    assert gradients.discard([0, 2]) == {0} and 0 not in gradients
    gradients.end_step({1, 3}, alone=True, changed=False)  # the same step does not count twice
    assert 1 not in gradients and 3 not in gradients
    gradients.use(1)
    gradients.end_step({1}, alone=True, changed=False)
    gradients.clear()
    assert 1 not in gradients


@pytest.mark.parametrize("changed_on", [None, 0, 1])
def test_restored_on_two_ranks(changed_on: int | None) -> None:
    def body(rank: int, group: Any) -> list[list[float] | None]:
        parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
        for position, parameter in enumerate(parameters):
            parameter.grad = torch.full((2,), 10.0 * position + rank)
        if rank == 1:
            parameters[1].grad = None
        gradients = spent(parameters, group, [0, 1] if rank == 0 else [0, 1, 2], changed_on == rank)
        gradients.restore()
        assert 0 not in gradients
        return [None if p.grad is None else p.grad.tolist() for p in parameters]

    average = [[0.5, 0.5], [5.0, 5.0]] if changed_on is None else [None, None]
    for rank, found in enumerate(on_two_ranks(body)):
        # The last is not spent on all ranks: another's has been replaced.
        assert found == [*average, [20.0 + rank] * 2]
