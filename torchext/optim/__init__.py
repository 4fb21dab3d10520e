"""Second-order optimizers: distributed K-FAC, drop-in for ``torch.optim.SGD`` or in front of any optimizer."""

from torchext.optim import operators as operators
from torchext.optim.kfac import KFAC, PADKFAC, SPDKFAC
from torchext.optim.kfac_options import KFACOptions
from torchext.optim.preconditioner import KFACPreconditioner

__all__ = ["KFAC", "PADKFAC", "SPDKFAC", "KFACOptions", "KFACPreconditioner"]
