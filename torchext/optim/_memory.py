"""How much memory one layer of K-FAC's may take."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import torch
from torch import nn

__all__ = ["SHARE", "factor_bytes", "memory_here"]

# Of the memory of a rank, for the factors and inverses of one layer.
SHARE = 1 / 8

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_here(model: nn.Module) -> int:
    """Bytes of memory where the model's layers lie: of the GPU, or what this process may take of the host's."""
    on_cuda = next((parameter.device for parameter in model.parameters() if parameter.is_cuda), None)
    if on_cuda is not None:
        return int(torch.cuda.get_device_properties(on_cuda).total_memory)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limits.append(int(Path(path).read_text()))
    limits += [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
    return min(limits)


def factor_bytes(module: nn.Module, bias: bool) -> int:
    """Bytes of a layer's factors: running averages and sums of a step as triangles, and the inverses."""
    weight = module._parameters["weight"]
    assert weight is not None
    groups = int(getattr(module, "groups", 1))
    if isinstance(module, nn.Embedding):
        dims = [weight.shape[1]]  # the other factor is a diagonal
    else:
        dims = [weight.shape[0] // groups, weight[0].numel() + int(bias)]
    return 2 * groups * sum(dim * dim for dim in dims) * (8 if weight.dtype == torch.float64 else 4)
