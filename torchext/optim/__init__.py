"""Second-order optimizers: distributed K-FAC, drop-in for ``torch.optim.SGD`` or in front of any optimizer."""

from torchext.optim import _operators as _operators
from torchext.optim._options import KFACOptions
from torchext.optim.kfac import KFAC, PADKFAC, SPDKFAC
from torchext.optim.preconditioner import KFACPreconditioner

__all__ = ["KFAC", "PADKFAC", "SPDKFAC", "KFACOptions", "KFACPreconditioner"]
