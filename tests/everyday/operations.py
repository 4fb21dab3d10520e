"""What a training loop does, each operation as the lines that it is; its passes stand in passes.py."""

from __future__ import annotations

import dataclasses

from operation import OPERATIONS, Op, Operation, text
from passes import ZEROS, indented
from setups import DDP_ARGUMENTS, EXACT, LOCAL, LOOSE, OPTIMIZERS, Setup

for _name, _source in ZEROS.items():
    text(_name, "zero", _source)


text(
    "adversary",
    "whole",
    """
x, y = batch()
critic_optimizer.zero_grad()
(ddp_critic(y).mean() - ddp_critic(model(x).detach()).mean()).backward()
critic_optimizer.step()
optimizer.zero_grad()
(-critic(ddp(x)).mean()).backward()
optimizer.step()
""",
    needs=lambda s: s.critic,
)

# --- between the backward pass and the step

text("clip", "gradient", "mine(nn.utils.clip_grad_norm_(model.parameters(), 0.05))", LOCAL)
text("clip ddp", "gradient", "nn.utils.clip_grad_norm_(ddp.parameters(), 0.05, norm_type=float('inf'))", LOCAL)
text(
    "clip groups",
    "gradient",
    'nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)',
    LOCAL,
)
text("clip held", "gradient", "nn.utils.clip_grad_norm_(held, 0.05)", LOCAL)
text("clip sync", "gradient", "mine(sync.clip_grad_norm_(0.05))", LOCAL)
text("clip value", "gradient", "nn.utils.clip_grad_value_(model.parameters(), 0.01)", LOCAL)
text("clip part", "gradient", "nn.utils.clip_grad_norm_(model.body.parameters(), 0.02)", LOCAL)
_EACH = "for p in model.parameters():\n    if p.grad is not None:\n        "
_EACH_OF_GROUPS = (
    'for group in optimizer.param_groups:\n    for p in group["params"]:\n        if p.grad is not None:\n            '
)
text("grad scaled", "gradient", _EACH + "p.grad.mul_(0.5)")
text("grad scaled in groups", "gradient", _EACH_OF_GROUPS + "p.grad.mul_(0.5)")
text("grad scaled by data", "gradient", _EACH + "p.grad.data.mul_(0.5)")
text("grad scaled foreach", "gradient", "torch._foreach_mul_([p.grad for p in held if p.grad is not None], 0.5)")
text("grad replaced", "gradient", _EACH + "p.grad = p.grad * 0.5")
text("grad replaced in groups", "gradient", _EACH_OF_GROUPS + "p.grad = p.grad * 0.5")
text("grad cloned", "gradient", _EACH + "p.grad = p.grad.clone()")
text("grad dropped", "gradient", "model.head.bias.grad = None")
text("grad decay", "gradient", _EACH + "p.grad.add_(p.detach(), alpha=0.01)")
text("grad centred", "gradient", _EACH + "p.grad.sub_(p.grad.mean())")
text("grad sign", "gradient", _EACH + "p.grad.sign_()", LOCAL)
text("grad by hand", "gradient", _EACH + "dist.all_reduce(p.grad)\n        p.grad.div_(2)")
text("grad norms", "gradient", "mine([p.grad.norm() for p in model.parameters() if p.grad is not None])")
text("grad read", "gradient", "mine([p.grad for p in held])")
text("grad read in groups", "gradient", 'mine([p.grad for group in optimizer.param_groups for p in group["params"]])')
text(
    "grad finite",
    "gradient",
    "if not all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):\n    break",
)
text("weights read", "gradient", "same(model)")
text("unscale", "gradient", "scaler.unscale_(optimizer)", needs=lambda s: s.scaler)

# --- the step


def _step(setup: Setup, op: Op) -> list[str]:
    step = ["scaler.step(optimizer)", "scaler.update()"] if setup.scaler else ["optimizer.step()"]
    kind = op.get("kind")
    if kind == "odd":
        return ["if step % 2 == 0:", *indented(step)]
    if kind == "twice":
        return [*step, *step]
    return step


OPERATIONS["step"] = Operation(_step, lambda op: EXACT, "step", lambda s: s.optimizer != "LBFGS")

# --- after it

text("schedule", "after", "scheduler.step()", needs=lambda s: bool(s.scheduler))
text(
    "lower lr", "after", 'for group in optimizer.param_groups:\n    group["lr"] *= 0.9', needs=lambda s: not s.scheduler
)
text(
    "update ema",
    "after",
    "with torch.no_grad():\n    for e, p in zip(ema, model.parameters()):\n        e.lerp_(p, 0.1)",
    needs=lambda s: s.ema == "list",
)
text(
    "update held ema",
    "after",
    "for e, p in zip(ema, held):\n    e.mul_(0.9).add_(p.data, alpha=0.1)",
    needs=lambda s: s.ema == "list",
)
text(
    "update ema foreach",
    "after",
    "torch._foreach_lerp_(ema, [p.detach() for p in held], 0.2)",
    needs=lambda s: s.ema == "list",
)
text("update swa", "after", "swa.update_parameters(model)", needs=lambda s: s.ema == "averaged")
text(
    "clamp groups",
    "after",
    'for group in optimizer.param_groups:\n    for p in group["params"]:\n        p.data.clamp_(-0.2, 0.2)',
)
text("clamp model", "after", "with torch.no_grad():\n    for p in model.parameters():\n        p.clamp_(-0.2, 0.2)")
text("clamp held", "after", "for p in held:\n    p.data.clamp_(-0.2, 0.2)")
text("weights by data", "after", "model.head.weight.data = model.head.weight.data / model.head.weight.data.norm()")
text("weights shrunk", "after", "with torch.no_grad():\n    torch._foreach_mul_(held, 0.99)")
text(
    "momentum reset",
    "after",
    'for s in optimizer.state.values():\n    if "momentum_buffer" in s:\n        s["momentum_buffer"].zero_()',
)
text("state cleared", "after", "optimizer.state.clear()", needs=lambda s: s.optimizer != "LBFGS")
text("state dropped", "after", "optimizer.state = defaultdict(dict)", needs=lambda s: s.optimizer != "LBFGS")
text(
    "state read",
    "after",
    "looked = [v.sum() for p in held for v in optimizer.state.get(p, {}).values() if torch.is_tensor(v)]",
    needs=lambda s: s.optimizer != "LBFGS",
)
text(
    "state dict read",
    "after",
    'mine([v for s in optimizer.state_dict()["state"].values() for v in s.values() if torch.is_tensor(v)])',
    needs=lambda s: s.optimizer != "LBFGS",
)
text("weights read after", "after", "same(model)")
text("held read after", "after", "same(held)")
text("one weight read after", "after", "same(model.body.weight.norm())")
text("grad read after", "after", "mine([p.grad for p in model.parameters()])")
text("model state read", "after", "same(list(model.state_dict().values())[:2])")
text("log", "after", "mean = loss.detach().clone()\ndist.all_reduce(mean)\nmine(mean)")
text(
    "evaluate on rank 0",
    "after",
    "if rank == 0:\n    model.eval()\n    with torch.no_grad():\n        model(batch()[0])\n    model.train()",
)
text("evaluate", "after", "with torch.inference_mode():\n    ddp(batch()[0])")
text(
    "evaluate averaged",
    "after",
    "with sync.averaged() as module, torch.no_grad():\n    module.eval()\n    module(batch()[0])\n    module.train()",
)
text("copy", "after", "twin = copy.deepcopy(model)\nsame(twin)")
text("best", "after", "best = copy.deepcopy(model.state_dict())\nmodel.load_state_dict(best)")
text(
    "overflow",
    "before",
    """
scaler.scale(F.mse_loss(ddp(batch()[0]), batch()[1]) * float("inf")).backward()
scaler.step(optimizer)
scaler.update()
optimizer.zero_grad()
""",
    needs=lambda s: s.scaler and s.output == "tensor",
)
text(
    "overflow on one rank",
    "whole",
    """
loss = F.mse_loss(ddp(batch()[0]), batch()[1]) * (float("inf") if rank == 0 else 1.0)
optimizer.zero_grad()
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
    LOOSE,
    needs=lambda s: s.scaler and s.output == "tensor",
)
text(
    "bad forward",
    "before",
    "model.fail = True\ntry:\n    ddp(batch()[0])\nexcept ValueError:\n    pass\nmodel.fail = False",
)
text(
    "bad loss",
    "before",
    "try:\n    F.mse_loss(ddp(batch()[0]), torch.zeros(3)).backward()\nexcept Exception:\n    pass",
)
text("forward alone", "before", "ddp(batch()[0])")
text("forward in no_sync", "before", "with ddp.no_sync():\n    ddp(batch()[0])")

# --- between phases


def _checkpoint(setup: Setup, op: Op) -> list[str]:
    whose = "with sync.averaged():\n    " if op.get("averaged") else ""
    save = 'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)'
    lines = ["file = io.BytesIO()", *(whose + save).split("\n"), "file.seek(0)", "saved = torch.load(file)"]
    kind = op.get("then")
    if kind == "reload":
        lines += ['model.load_state_dict(saved["model"])', 'optimizer.load_state_dict(saved["optimizer"])']
    elif kind == "resume":
        lines += ["sync.detach()", f"model = {setup.net()}", 'model.load_state_dict(saved["model"])']
        lines += ["model.embed.requires_grad_(False)"] if setup.frozen else []
        lines += _rewrap(setup)
        lines.append('optimizer.load_state_dict(saved["optimizer"])')
    else:
        lines += [f"plain = {setup.net()}", 'plain.load_state_dict(saved["model"])', "same(plain)"]
        if not setup.groups and not setup.frozen:
            kind, arguments = setup.optimizer.split()[0], OPTIMIZERS[setup.optimizer][0]
            lines += [
                f"other = torch.optim.{kind}(plain.parameters(), {arguments})",
                'other.load_state_dict(saved["optimizer"])',
                "for p in plain.parameters():",
                "    p.grad = torch.ones_like(p)",
                "other.step()",
                "mine(plain)",
            ]
    return lines


def _rewrap(setup: Setup) -> list[str]:
    lines = [f"ddp = DDP(model{', ' if setup.ddp else ''}{DDP_ARGUMENTS[setup.ddp]})", *setup.make_optimizer()]
    return [*lines, "sync = attach(ddp, optimizer)", *setup.make_scheduler(), "held = list(model.parameters())"]


def _without_gradients(op: Op) -> list[str]:
    # What a script has made of gradients before a step does not outlast dear's sharded form.
    return ["optimizer.zero_grad()"] if op.get("gradients") == "changed" else []


OPERATIONS["checkpoint"] = Operation(_checkpoint, lambda op: EXACT, "between", lambda s: s.optimizer != "LBFGS")
OPERATIONS["new optimizer"] = Operation(
    lambda s, op: [*s.make_optimizer(), *s.make_scheduler()], lambda op: EXACT, "between"
)
OPERATIONS["attached anew"] = Operation(
    lambda s, op: [*_without_gradients(op), "sync.detach()", *_rewrap(s)], lambda op: EXACT, "between"
)
OPERATIONS["unfrozen"] = Operation(
    lambda s, op: [
        *_without_gradients(op),
        "sync.detach()",
        "model.embed.requires_grad_(True)",
        *_rewrap(dataclasses.replace(s, frozen=False)),
    ],
    lambda op: EXACT,
    "between",
    lambda s: s.frozen,
)
text("freeze body", "between", "model.body.requires_grad_(False)", needs=lambda s: s.ddp == "unused" and not s.tied)
text("freeze embed", "between", "model.embed.requires_grad_(False)", needs=lambda s: s.ddp == "unused")
text(
    "added group",
    "between",
    'optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})',
    needs=lambda s: not s.scheduler and s.optimizer != "LBFGS",
)
text("synchronize", "between", "sync.synchronize()\nsame(model)")
text("wait", "between", "sync.wait()")
