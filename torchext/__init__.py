"""torchext: torch.distributed backends chosen by name."""

from torchext.backends import backend_of, register

__all__ = ["backend_of", "register"]

register()
