"""Imports, once and in the fork server, what ranks and the modules of their tests import.

A rank that imports pytest by itself needs four times the processor time until its body begins. A module that starts
threads has no place here: a fork loses them. Neither have `torchext.optim` and `torchext.auto`, which a script imports
or not, and which then take part in `attach`.
"""

import gc
import importlib
import os

IMPORTED = (
    "attached",
    "beside_ddp",
    "elastic_training",
    "multiprocessing.popen_forkserver",
    "pytest",
    "resource",
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
