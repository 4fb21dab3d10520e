"""Random training scripts from a seed: a setup, then one to three phases of loops, and what stands between them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from nets import OUTPUTS
from operation import Op
from operations import OPERATIONS
from passes import EXTRAS, FORWARDS
from script import Phase, Script
from setups import DDP_ARGUMENTS, OPTIMIZERS, SCHEDULERS, Setup

# A script's own collectives, which a rank that has left out a step does not come to at the others' step.
COLLECTIVE = ("log", "grad by hand", "evaluate averaged")


class _Maker:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.setup = Setup()

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def maybe(self, probability: float, choices: Sequence[str], otherwise: str = "") -> str:
        return self.random.choice(list(choices)) if choices and self.chance(probability) else otherwise

    def slot(self, slot: str) -> list[str]:
        return [
            name for name, operation in OPERATIONS.items() if operation.slot == slot and operation.needs(self.setup)
        ]

    def make_setup(self) -> Setup:
        critic = self.chance(0.06)
        ddp = self.maybe(0.45, [name for name in DDP_ARGUMENTS if name])
        # DDP looks for unused parameters only behind tensors that it finds in the output.
        output = "tensor" if critic or ddp == "unused" else self.maybe(0.35, list(OUTPUTS), "tensor")
        optimizer = self.maybe(0.4, list(OPTIMIZERS), self.random.choice(["SGD", "SGD momentum", "SGD nesterov"]))
        dtype = "float32" if optimizer.startswith("SGD") and self.chance(0.3) else "float64"
        critic = critic and optimizer != "LBFGS"  # which steps by a closure
        scheduler = "" if critic else self.maybe(0.25, list(SCHEDULERS))
        if scheduler == "one cycle" and optimizer not in ("SGD momentum", "SGD nesterov", "AdamW"):
            scheduler = "step"
        frozen = self.chance(0.1)
        kfac = "" if critic or optimizer == "LBFGS" else self.maybe(0.04, ["first", "after"])
        return Setup(
            dtype="float64" if kfac else dtype,
            output=output,
            norm=self.maybe(0.25, ["batch", "layer"], "none"),
            tied=self.chance(0.15),
            checkpointed=self.chance(0.1),
            dropout=self.chance(0.1),
            ddp=ddp,
            optimizer=optimizer,
            groups="" if frozen or optimizer == "LBFGS" else self.maybe(0.2, ["decay", "lr", "added"]),
            scheduler=scheduler,
            scaler=not critic and not kfac and optimizer != "LBFGS" and self.chance(0.15),
            frozen=frozen,
            ema=self.maybe(0.25, ["list", "averaged"]),
            hook=self.maybe(0.12, ["tensor", "step"]),
            kfac=kfac,
            critic=critic,
            waits=self.chance(0.15),
            early=self.maybe(0.3, ["scheduler", "parameters"]),
        )

    def make_pass(self, sync: str = "", share: str = "", zero: str = "") -> Op:
        forwards = [name for name in FORWARDS if self._fits(name)]
        options = {
            "sync": sync,
            "share": share,
            "zero": zero,
            "forward": self.maybe(0.3, forwards),
            "extra": self.maybe(0.25, EXTRAS) if not self.setup.frozen else "",
            "loss": self.maybe(0.3, ["l1", "two"]),
        }
        return Op("pass", tuple((name, value) for name, value in options.items() if value))

    def _fits(self, forward: str) -> bool:
        setup = self.setup
        if "branch" in forward:
            return setup.ddp == "unused" and not setup.tied
        if forward == "evaluation mode":
            # Plain DDP takes rank 0's statistics, averaging backends take the average of all.
            return setup.norm != "batch"
        if forward == "embed alone":
            # With frozen parameters or unused ones DDP would not see the embedding's part of the graph.
            return setup.ddp != "unused" and not setup.frozen
        if forward == "head beside":
            return setup.ddp != "unused"
        if forward in ("input gradient", "gradient penalty", "looked at"):
            # No parameter's hook comes in these passes, which DDP's search for unused ones does not expect.
            return setup.ddp != "unused" and not setup.checkpointed
        if forward == "twice":
            return setup.norm != "batch" and setup.ddp != "unused"
        return True

    def make_step(self) -> tuple[Op, ...]:
        setup = self.setup
        if setup.critic and self.chance(0.8):
            return (Op("adversary"), *self.after(("log",)))
        if setup.optimizer == "LBFGS" or (not setup.scaler and self.chance(0.06)):
            inner = self.make_pass()
            return (
                Op("closure", tuple((k, v) for k, v in inner.options if k not in ("sync", "share"))),
                *self.after(("log",)),
            )
        if not setup.scaler and self.chance(0.06):
            options = (
                ("back", self.maybe(0.6, ["data", "data copy"])),
                ("whose", self.maybe(0.5, ["held"])),
                ("sync", self.maybe(0.5, ["no_sync"])),
            )
            return (Op("sharpness", tuple((k, v) for k, v in options if v)), *self.after())
        if setup.scaler and setup.output == "tensor" and self.chance(0.1):
            return (Op("overflow on one rank"), *self.after(COLLECTIVE))
        zero = Op(self.maybe(0.5, self.slot("zero"), "zero"))
        place = self.random.choice(["first", "first", "last", "middle"])
        passes = self.random.choice([1, 1, 1, 2, 3])
        place = "first" if passes > 1 and place == "middle" else place
        ops = [zero] if place == "first" else []
        if self.chance(0.08) and setup.ddp == "":
            ops.append(Op(self.random.choice(self.slot("before"))))
        how = self.random.choice(["no_sync", "no_sync", "flag"])
        share = str(passes) if passes > 1 and self.chance(0.7) else ""
        for k in range(passes):
            last = k == passes - 1
            ops.append(self.make_pass("" if last else how, share, zero.name if place == "middle" else ""))
        if setup.scaler and self.chance(0.5):
            ops.append(Op("unscale"))
        ops += [Op(name) for name in self.some(self.slot("gradient"), 0.45) if name != "unscale"]
        kind = "" if setup.scaler else self.maybe(0.06, ["odd"]) or self.maybe(0.03, ["twice"])
        ops.append(Op("step", (("kind", kind),) if kind else ()))
        if place == "last":
            ops.append(zero)
        return (*ops, *self.after())

    def some(self, names: list[str], probability: float) -> list[str]:
        chosen = []
        while self.chance(probability) and len(chosen) < 3:
            chosen.append(self.random.choice(names))
        return chosen

    def after(self, but: Sequence[str] = ()) -> list[Op]:
        setup = self.setup
        must = []
        if setup.scheduler:
            must.append("schedule")
        if setup.ema == "list":
            must.append(self.random.choice(["update ema", "update held ema", "update ema foreach"]))
        if setup.ema == "averaged":
            must.append("update swa")
        chosen = [*must, *self.some([name for name in self.slot("after") if name not in must], 0.5)]
        chosen = [name for name in chosen if name not in but]
        if setup.ddp == "unused" or setup.norm == "batch":
            chosen = [name for name in chosen if name != "evaluate"]
        self.random.shuffle(chosen)
        return [Op(name) for name in chosen]

    def make(self) -> Script:
        self.setup = self.make_setup()
        phases = [Phase(self.random.choice([3, 4, 6]), self.make_step())]
        for _ in range(self.random.choice([0, 0, 0, 1, 1, 2])):
            # A checkpoint's optimizer is that of the setup, which these change.
            changed = {op.name for phase in phases for op in phase.ops} & {"unfrozen", "added group", "new optimizer"}
            name = self.random.choice([n for n in self.slot("between") if not changed or n in ("synchronize", "wait")])
            options = []
            if name == "checkpoint":
                options = [("then", self.maybe(0.7, ["reload", "resume"])), ("averaged", self.maybe(0.4, ["yes"]))]
            if name in ("attached anew", "unfrozen") and any(
                OPERATIONS[op.name].slot == "gradient" for phase in phases for op in phase.ops
            ):
                options.append(("gradients", "changed"))
            phases.append(Phase(0, (Op(name, tuple((k, v) for k, v in options if v)),)))
            phases.append(Phase(self.random.choice([2, 3, 4]), self.make_step()))
        if any(op.name == "overflow on one rank" for phase in phases for op in phase.ops):
            phases = [Phase(p.times, tuple(op for op in p.ops if op.name not in COLLECTIVE)) for p in phases]
        return Script(self.seed, self.setup, tuple(phases))


def random_script(seed: int) -> Script:
    return _Maker(seed).make()
