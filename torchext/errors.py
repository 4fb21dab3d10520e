"""The errors of torchext that are its own; failures of a group are :class:`torch.distributed.DistBackendError`."""

from __future__ import annotations

__all__ = ["BackendOptionsError", "KFACStateError", "NoSupportedLayerError", "NotABackendOfOursError"]


class BackendOptionsError(TypeError):
    """``pg_options`` is of a type that the backend does not take."""


class NotABackendOfOursError(ValueError):
    """A process group was given whose backend is not one of torchext."""


class NoSupportedLayerError(ValueError):
    """A model was given to K-FAC that has no layer it can precondition."""


class KFACStateError(ValueError):
    """A K-FAC state does not belong to this model or these options; nothing of it was loaded."""
