"""Synchronizer is what :func:`torchext.attach` returns, whatever the backend."""

from torchext.ddp.synchronizer import Synchronizer

__all__ = ["Synchronizer"]
