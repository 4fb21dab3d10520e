"""An optimizer's state by positions among a model's parameters, whose order is another than the optimizer's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchext.dear.optimizer_state import OptimizerState, groups_of, in_order


def made(kind: Any = torch.optim.Adam, **options: Any) -> tuple[list[nn.Parameter], Any, OptimizerState]:
    """The optimizer has positions 2, 0 and 1, of which the last was frozen already, and one that is not the model's."""
    parameters = [nn.Parameter(torch.ones(size), requires_grad=size != 2) for size in (1, 2, 3)]
    other = nn.Parameter(torch.ones(9))
    groups = [{"params": [parameters[2], other]}, {"params": [parameters[0], parameters[1]]}]
    optimizer = kind(groups, lr=0.1, **options)
    return parameters, optimizer, OptimizerState(optimizer, parameters)


def test_states_are_got_and_put_by_position() -> None:
    parameters, optimizer, state = made()
    assert [position for position, _ in state.trained()] == [2, 0] and state.states() == {}
    parameters[0].requires_grad_(False)  # later than that
    state.put({0: {"step": 5}, 1: {"step": 6}})
    assert state.states() == {0: {"step": 5}} and optimizer.state[parameters[0]] == {"step": 5}
    optimizer.state[optimizer.param_groups[0]["params"][1]] = {"step": 7}
    state.forget()
    assert state.states() == {} and len(optimizer.state) == 1


@pytest.mark.parametrize("names", [["0", "1", "2", "3"], ["c", "other", "a", "b"]])
def test_state_dicts_by_numbers_and_by_names(names: list[str]) -> None:
    _, optimizer, state = made()
    groups = [{"params": names[:2]}, {"params": names[2:]}]
    state_dict = {"state": {names[0]: {"step": 1}, names[1]: {"step": 2}}, "param_groups": groups}
    assert state.given(state_dict) == {2: {"step": 1}}
    translated = state.translated(state_dict, {2: {"step": 3}, 0: {"step": 4}})
    assert translated["state"] == {names[0]: {"step": 3}, names[1]: {"step": 2}, names[2]: {"step": 4}}
    assert translated["param_groups"] is groups and state_dict["state"][names[0]] == {"step": 1}
    assert not optimizer.state


def test_the_first_states_are_those_of_a_first_step() -> None:
    parameters, optimizer, state = made()
    optimizer.register_step_post_hook(lambda *_: pytest.fail("nobody steps"))
    created = state.first(lambda position, parameter: parameter.detach()[:1] if position == 2 else parameter)
    assert {position: values["exp_avg"].shape for position, values in created.items()} == {2: (1,), 0: (1,)}
    assert not optimizer.state and optimizer.param_groups[0]["params"][0] is parameters[2]
    assert all(parameter.eq(1).all() and parameter.grad is None for parameter in parameters)


def test_the_first_states_of_others_are_not_known() -> None:
    class Own(torch.optim.Adam):
        pass

    with pytest.raises(RuntimeError, match="Own has no state yet"):
        made(Own)[2].first(lambda _, parameter: parameter)


def test_order_and_groups_of_a_step_in_parts() -> None:
    parameters, optimizer, state = made()
    state.put({0: {"step": 1}})
    state.put({2: {"step": 2}})
    assert [id(key) for key in optimizer.state] == [id(parameters[0]), id(parameters[2])]
    in_order(optimizer)
    assert [id(key) for key in optimizer.state] == [id(parameters[2]), id(parameters[0])]
    positions = {id(parameter): position for position, parameter in enumerate(parameters)}
    groups = groups_of(optimizer.param_groups, {0}, lambda parameter: positions.get(id(parameter)))
    assert [len(group["params"]) for group in groups] == [0, 1] and groups[1]["params"][0] is parameters[0]
    assert len(optimizer.param_groups[0]["params"]) == 2
