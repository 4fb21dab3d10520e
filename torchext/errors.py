"""The errors of torchext that are its own; failures of a group are :class:`torch.distributed.DistBackendError`."""

from __future__ import annotations

__all__ = ["BackendOptionsError", "NotABackendOfOursError"]


class BackendOptionsError(TypeError):
    """``pg_options`` is of a type that the backend does not take."""


class NotABackendOfOursError(ValueError):
    """A process group was given whose backend is not one of torchext."""
