"""Keeps torch.compile out of functions, without importing it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["STEP_IS_EAGER", "eager_only"]

STEP_IS_EAGER = "dear: optimizer.step() waits for gradients and is not compiled; compile the model instead"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def eager_only(reason: str) -> Callable[[_Function], _Function]:
    """As torch.compiler.disable, which imports torch._dynamo where it decorates: longer than all of torch takes.

    While nobody has imported it nobody compiles, and the function is called as it is.

    Args:
        reason: What the error under ``fullgraph=True`` says.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            return disabled()(*args, **kwargs)

        @functools.cache
        def disabled() -> Callable[..., Any]:
            return torch.compiler.disable(function, reason=reason)  # type: ignore[no-any-return, no-untyped-call]

        # What torch.compiler.disable leaves on its result, so that the compiler doesn't look into this one either.
        call._torchdynamo_disable = True  # type: ignore[attr-defined]
        call._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate
