"""An optimizer that holds slices of parameters for a while: its state and its gradients then and afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_core import FakeCore
from torch import nn

from torchext.dear.optimizer_state import OptimizerState
from torchext.dear.parameter_slices import ParameterSlices


class Held:
    """Three parameters in two groups, of which the second is stepped whole; rank 1 of 2 has the others' last halves."""

    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.ones(4)) for _ in range(3)]
        groups = [{"params": self.parameters[:2]}, {"params": self.parameters[2:], "lr": 0.5}]
        self.optimizer = torch.optim.SGD(groups, lr=0.25, momentum=0.9)
        core: Any = FakeCore(self.parameters, rank=1, size=2)
        self.slices = ParameterSlices(core, self.optimizer, OptimizerState(self.optimizer, self.parameters), {1})

    def step(self) -> None:
        with self.slices.in_param_groups() as position_of:
            params = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            assert [position_of(parameter) for parameter in params] == [0, None, 2]
            assert params[1] is self.parameters[1]
            for parameter in params:
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()


def test_slices_are_stepped_in_the_memory_of_parameters() -> None:
    held = Held()
    held.step()
    assert [parameter.tolist() for parameter in held.parameters] == [[1, 1, 0.75, 0.75], [0.75] * 4, [1, 1, 0.5, 0.5]]
    params = [parameter for group in held.optimizer.param_groups for parameter in group["params"]]
    assert all(one is other for one, other in zip(params, held.parameters, strict=True))
    assert list(held.slices.positions) == [0, 2] and held.slices[0].grad is None


def test_state_is_the_parameters_before_and_afterwards() -> None:
    held = Held()
    held.step()
    assert [id(key) for key in held.optimizer.state] == [id(parameter) for parameter in held.parameters]
    held.step()
    assert set(map(id, held.optimizer.state)) == set(map(id, held.parameters))
    assert [len(held.optimizer.state[parameter]["momentum_buffer"]) for parameter in held.parameters] == [2, 4, 2]


def test_a_step_that_raises_gives_the_parameters_back() -> None:
    held = Held()
    held.step()
    with pytest.raises(ArithmeticError), held.slices.in_param_groups():
        raise ArithmeticError
    assert held.optimizer.param_groups[1]["params"][0] is held.parameters[2]
    assert set(map(id, held.optimizer.state)) == set(map(id, held.parameters))


def test_versions_and_new_memory() -> None:
    held = Held()
    held.step()
    before = held.slices.versions()
    held.step()
    assert held.slices.versions() != before
    held.parameters[0].data = torch.full((4,), 8.0)
    held.slices.moved([0, 1])
    assert list(held.slices.positions) == [2]
    held.step()
    assert held.parameters[0][0] == 8 and held.parameters[0][3] < 8
