"""GPUs of ranks: one each, and where there are fewer than ranks, shared.

NCCL takes several ranks on one GPU when it is told to, and is new enough. Where it is not, Gloo carries their CUDA
tensors in its place, by way of host memory: what these tests are about, streams and copies of our own, stays the same.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank

from torchext import backends

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")
SHARING_NCCL = 23000
"""2.30 knows NCCL_MULTI_RANK_GPU_ENABLE, 2.28 does not."""


def nccl_can(size: int) -> bool:
    if size <= torch.cuda.device_count():
        return True
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))  # that which is loaded; torch tells its own
    return version.value >= SHARING_NCCL


def take_gpu(rank: Rank) -> torch.device:
    """Makes it this process's current device. Before init()."""
    if rank.size > torch.cuda.device_count():
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if not nccl_can(rank.size):
        backends._nccl = _gloo_for_cuda
    device = torch.device("cuda", rank.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cudnn.allow_tf32 = False  # convolutions are compared with the CPU's
    return device


def _gloo_for_cuda(store: dist.Store, rank: int, size: int, timeout: Any, *_: Any) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(dist.PrefixStore("cuda", store), rank, size, timeout=timeout)
