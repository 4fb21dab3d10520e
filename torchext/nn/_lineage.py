"""The old name of ``torchext.nn.lineage``, for one release: whole modules that 0.2.0 pickled refer to it."""

from torchext.nn.lineage import Copied as Copied
from torchext.nn.lineage import Origin as Origin
from torchext.nn.lineage import Prunings as Prunings
