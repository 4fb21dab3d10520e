"""A training script as data: a setup, and phases of operations; ``source()`` is the loop that a person would write.

What is printed is what runs: a rank executes the source, there is no second interpreter. Every operation says what it
keeps: ``EXACT``, a step with SGD stays linear in the gradients, and averaging backends are plain DDP; ``LOCAL``, they
are what the reference ``local`` is; ``LOOSE``, only the replicas' agreement after ``synchronize()`` is promised.
``dear`` is plain DDP in the first two.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import nets
from operation import Op
from operations import OPERATIONS
from setups import Setup

PROLOGUE = '''"""{title}

    torchrun --nproc-per-node 2 THIS_FILE FORM
    # gloo, prague, dssync, hop, dear-sharded, dear-replicated, dear-default, torchext
"""
import contextlib, copy, io, os, sys
from collections import defaultdict
from dataclasses import dataclass
from typing import Any
import torch, torchext
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

FORM, rank = sys.argv[1], int(os.environ["RANK"])
OPTIONS = dict(
    gloo=lambda: None,
    prague=lambda: torchext.PragueOptions(generator="static", order="atc"),
    dssync=lambda: torchext.DSSyncOptions(order="atc"),
    hop=lambda: torchext.HopOptions(order="serial", graph="ring"),
)
OPTIONS["dear-sharded"] = lambda: torchext.DeAROptions(allreduce_fallback=False, form="sharded", bucket_mb=0.001)
OPTIONS["dear-replicated"] = lambda: torchext.DeAROptions(allreduce_fallback=False, form="replicated", bucket_mb=0.001)
OPTIONS["dear-default"] = OPTIONS["torchext"] = lambda: torchext.DeAROptions()
dist.init_process_group(FORM.partition("-")[0], pg_options=OPTIONS[FORM]())
torch.set_default_dtype(torch.{dtype})

class Plain:
    def __init__(self, ddp, optimizer): self.ddp, self.optimizer = ddp, optimizer
    def wait(self): pass
    synchronize = detach = wait
    @contextlib.contextmanager
    def averaged(self): yield self.ddp.module
    def clip_grad_norm_(self, *args): return nn.utils.clip_grad_norm_(list(self.ddp.parameters()), *args)
attach = Plain if FORM == "gloo" else torchext.attach
def batch(): return torch.randn(5, 4), torch.randn(5, 2)
def listed(value): return value if isinstance(value, (list, tuple, nn.Module)) else [value]
def same(value): print(rank, "same:", float(flat(listed(value)).sum()))
mine = same
'''

EPILOGUE = """
print(rank, "parameters:", repr(float(flat(model).sum())), flat(model)[:4].tolist())
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Phase:
    """A loop of ``times`` rounds; with ``times`` 0 a single pass without a loop around it."""

    times: int
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Script:
    seed: int
    setup: Setup
    phases: tuple[Phase, ...]

    def ops(self) -> Iterator[Op]:
        for phase in self.phases:
            yield from phase.ops

    def keeps(self) -> int:
        return min([self.setup.keeps(), *(OPERATIONS[op.name].keeps(op) for op in self.ops())])

    def features(self) -> set[str]:
        """What it holds, for the run's summary."""
        return self.setup.features() | {feature for op in self.ops() for feature in OPERATIONS[op.name].features(op)}

    def source(self) -> str:
        lines = self.setup.lines()
        for phase in self.phases:
            body = [line for op in phase.ops for line in OPERATIONS[op.name].lines(self.setup, op)]
            if phase.times:
                lines.append(f"for step in range({phase.times}):")
                lines += ["    " + line for line in body or ["pass"]]
            else:
                lines += body
        if self.setup.waits:
            lines = [part for line in lines for part in _with_wait(line)]
        return "\n".join([*lines, *self.setup.last_lines()]) + "\n"

    def standalone(self, title: str = "") -> str:
        """The same loop as a file for torchrun."""
        parts = [inspect.getsource(part) for part in (nets.Box, nets.Holder, nets.wrapped, nets.Net, nets.flat)]
        prologue = PROLOGUE.format(title=title or f"Script {self.seed}.", dtype=self.setup.dtype)
        return prologue + "\n" + "\n".join(parts) + "\n" + self.source() + EPILOGUE


def _with_wait(line: str) -> list[str]:
    """The line, and a wait after it where it is a step."""
    step = line.lstrip()
    stepped = step.startswith(("optimizer.step(", "scaler.step("))
    return [line, line.removesuffix(step) + "sync.wait()"] if stepped else [line]


def _without(items: tuple, index: int) -> tuple:
    return items[:index] + items[index + 1 :]


def simpler(script: Script) -> Iterator[Script]:
    """Scripts with one thing less, the largest first."""
    for k in range(len(script.phases)):
        if len(script.phases) > 1:
            yield dataclasses.replace(script, phases=_without(script.phases, k))
    for k, phase in enumerate(script.phases):
        for times in sorted({1, 2, phase.times - 1}):
            if 0 < times < phase.times:
                yield _with_phase(script, k, dataclasses.replace(phase, times=times))
        for j in range(len(phase.ops)):
            yield _with_phase(script, k, dataclasses.replace(phase, ops=_without(phase.ops, j)))
    for field in dataclasses.fields(Setup):
        if getattr(script.setup, field.name) != field.default:
            yield dataclasses.replace(script, setup=dataclasses.replace(script.setup, **{field.name: field.default}))
    for k, phase in enumerate(script.phases):
        for j, op in enumerate(phase.ops):
            for plainer in op.plainer():
                yield _with_phase(
                    script, k, dataclasses.replace(phase, ops=(*phase.ops[:j], plainer, *phase.ops[j + 1 :]))
                )


def _with_phase(script: Script, index: int, phase: Phase) -> Script:
    phases = script.phases
    return dataclasses.replace(script, phases=(*phases[:index], phase, *phases[index + 1 :]))


def shrunk(script: Script, still_fails: Callable[[Script], bool], trials: int = 300) -> Script:
    """The smallest script found that still fails, by taking away one thing at a time."""
    found = True
    while found and trials > 0:
        found = False
        for candidate in simpler(script):
            trials -= 1
            if still_fails(candidate):
                script, found = candidate, True
                break
            if trials <= 0:
                break
    return script
