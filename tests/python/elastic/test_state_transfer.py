"""What a newcomer gets of the first worker, packed there and unpacked here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchext.elastic import state_transfer


class Peculiar(nn.Module):
    """Has more than parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.extra: Any = 0
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("none", None, persistent=False)

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)


def test_all_that_a_model_and_its_optimizer_have() -> None:
    module, other = Peculiar(), Peculiar()
    optimizer, others = sgd(module), sgd(other)
    module.net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    module.extra = 7
    module.seen.fill_(3)
    module.count.fill_(4)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"] = np.float64(0.03), (np.float32(0.5), 0.9)
    state_transfer.unpack(state_transfer._packed(module, [optimizer]), other, [others])
    assert torch.equal(other.net.weight, module.net.weight)
    assert (other.extra, other.seen.tolist(), int(other.count)) == (7, [3, 3], 4)
    assert (others.param_groups[0]["lr"], others.param_groups[0]["betas"]) == (0.03, (0.5, 0.9))
    buffers = [own.state[own.param_groups[0]["params"][0]]["momentum_buffer"] for own in (optimizer, others)]
    assert torch.equal(*buffers)


def generator() -> Any:
    return (_ for _ in ())


@pytest.mark.parametrize(
    ("extra", "error", "match"),
    [
        (lambda: print, Exception, "Weights only load failed"),
        (generator, RuntimeError, "that worker could not save it: TypeError: cannot pickle 'generator' object"),
    ],
)
def test_what_cannot_be_sent(extra: Callable[[], Any], error: type[Exception], match: str) -> None:
    module, other = Peculiar(), Peculiar()
    module.extra = extra()
    with pytest.raises(error, match=match) as caught:
        state_transfer.unpack(state_transfer._packed(module, [sgd(module)]), other, [sgd(other)])
    assert type(caught.value).__name__ == ("UnpicklingError" if error is Exception else "RuntimeError")
