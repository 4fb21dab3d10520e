"""The errors and warnings of torchext's own; failures of a group are :class:`torch.distributed.DistBackendError`."""

from __future__ import annotations

__all__ = [
    "BackendOptionsError",
    "FactorGradientError",
    "KFACStateError",
    "NoSupportedLayerError",
    "ReplicaWarning",
    "UnsupportedBackendError",
]


class BackendOptionsError(TypeError):
    """``pg_options`` is of a type that the backend does not take."""


class FactorGradientError(RuntimeError):
    """A layer whose gradient is made of rows got one from elsewhere, which no rank averages."""


class UnsupportedBackendError(ValueError):
    """A process group was given whose backend is not one of torchext."""


class NoSupportedLayerError(ValueError):
    """A model was given to K-FAC that has no layer it can precondition."""


class KFACStateError(ValueError):
    """A K-FAC state does not belong to this model or these options; nothing of it was loaded."""


class ReplicaWarning(UserWarning):
    """A script reads the state of one replica where replicas differ, and may take it for the model's."""


NotABackendOfOursError = UnsupportedBackendError  # its name until 0.1
