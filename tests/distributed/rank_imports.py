"""Imports, once and in the fork server, what ranks and the modules of their tests import.

A rank that imports pytest by itself needs four times the processor time until its body begins. A module that starts
threads has no place here: a fork loses them. Neither have `torchext.optim` and `torchext.auto`, which a script imports
or not, and which then take part in `attach`.
"""

import ctypes
import gc
import importlib
import os
from pathlib import Path

MADV_COLLAPSE = 25  # of <linux/mman.h>

IMPORTED = (
    "attached",
    "beside_ddp",
    "elastic_training",
    "multiprocessing.popen_forkserver",
    "pytest",
    "resource",
    "rows",
    "sharded",
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.optim",
    "torch.nn.parallel",
    "torch.utils.serialization",
    "torchext",
)

# The first folder of this is where harness.py has put the modules above; processes that ranks start have no need of it.
_, _, rest = os.environ.pop("PYTHONPATH").partition(os.pathsep)
if rest:
    os.environ["PYTHONPATH"] = rest

# What remains is no garbage; a collection in a rank would copy the pages of it all.
gc.disable()
for name in IMPORTED:
    importlib.import_module(name)
gc.collect()
gc.freeze()
gc.enable()


def collapse_pages() -> None:
    """Makes huge pages of this process' memory: a fork copies the table of its pages, and its end undoes that.

    It takes a quarter of the time then, which for a short test is much of the whole. Linux before 6.1 cannot.
    """
    size = 1 << 21
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for region in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = region.split()
        if access != "rw-p" or inode != "0":
            continue
        first, end = (int(address, 16) for address in addresses.split("-"))
        for address in range(-(-first // size) * size, end - size + 1, size):
            madvise(address, size, MADV_COLLAPSE)  # a part that it refuses stays as it is


collapse_pages()
