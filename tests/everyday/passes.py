"""Forward and backward passes of random scripts, and steps that make their own."""

from __future__ import annotations

from nets import OUTPUTS
from operation import OPERATIONS, Op, Operation
from setups import EXACT, LOCAL, Setup

# --- gradients to zero

ZEROS = {
    "zero": "optimizer.zero_grad()",
    "zero kept": "optimizer.zero_grad(set_to_none=False)",
    "zero model": "model.zero_grad()",
    "zero ddp kept": "ddp.zero_grad(set_to_none=False)",
    "zero by None": "for p in model.parameters():\n    p.grad = None",
    "zero in place": "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.zero_()",
    "zero groups": 'for group in optimizer.param_groups:\n    for p in group["params"]:\n        p.grad = None',
    "zero detached": "for p in held:\n    if p.grad is not None:\n        p.grad = p.grad.detach().zero_()",
    "zero foreach": "grads = [p.grad for p in held if p.grad is not None]\nif grads:\n    torch._foreach_zero_(grads)",
}

# --- passes


def _loss(setup: Setup, op: Op) -> list[str]:
    """Lines that leave a loss; see PASSES for the kinds of forward passes."""
    take = OUTPUTS[setup.output].format
    forward, extra = op.get("forward"), op.get("extra")
    lines = ["x, y = batch()"]
    before = {
        "penalty before": "reg = 0.01 * (model.head.weight.square().sum() + model.embed.weight.square().sum())",
        "tied before": "reg = 0.1 * F.linear(x, model.embed.weight).square().mean()",
        "all before": "reg = 0.001 * sum(p.square().sum() for p in model.parameters())",
    }
    if extra in before:
        lines.append(before[extra])
    if forward == "embed alone":
        lines += ["h = torch.tanh(model.embed(x))", f"out = {take('ddp(h, embedded=True)')}"]
    elif forward == "twice":
        lines += [f"out = {take('ddp(x)')} + {take('ddp(x + 1)')}"]
    elif forward == "head beside":
        lines += [f"out = {take('ddp(x)')} + model.head(torch.tanh(model.body(torch.randn(5, 16))))"]
    elif forward == "input gradient":
        lines += [
            "x.requires_grad_()",
            f"slope, = torch.autograd.grad({take('ddp(x)')}.square().mean(), x)",
            f"out = {take('ddp(x.detach() + 0.1 * slope.sign())')}",
        ]
    elif forward == "gradient penalty":
        lines += [
            "x.requires_grad_()",
            f"out = {take('ddp(x)')}",
            "slope, = torch.autograd.grad(out.sum(), x, create_graph=True)",
        ]
    elif forward == "looked at":
        lines += ["with torch.no_grad():", f"    guess = {take('ddp(x)')}", f"out = {take('ddp(x + guess.mean())')}"]
    elif forward == "one branch":
        lines += ['model.which = "a"', f"out = {take('ddp(x)')}", 'model.which = "ab"']
    elif forward == "branch by rank":
        lines += ['model.which = "ab"[rank]', f"out = {take('ddp(x)')}", 'model.which = "ab"']
    elif forward == "evaluation mode":
        lines += ["model.eval()", f"out = {take('ddp(x)')}", "model.train()"]
    else:
        lines.append(f"out = {take('ddp(x)')}")
    loss = {
        "": "F.mse_loss(out, y)",
        "l1": "F.smooth_l1_loss(out, y)",
        "two": "F.mse_loss(out, y) + 0.3 * out.abs().mean()",
    }
    lines.append(f"loss = {loss[op.get('loss')]}")
    after = {
        "penalty after": "loss = loss + 0.01 * model.head.weight.square().sum()",
        "tied after": "loss = loss + 0.1 * F.linear(x, model.embed.weight).square().mean()",
        "all after": "loss = loss + 0.001 * sum(p.square().sum() for p in model.parameters())",
        "norm after": "loss = loss + 0.01 * torch.stack([p.norm() for p in model.parameters()]).sum()",
    }
    if forward == "gradient penalty":
        lines.append("loss = loss + 0.1 * slope.square().sum(1).mean()")
    if extra in before:
        lines.append("loss = loss + reg")
    if extra in after:
        lines.append(after[extra])
    return lines


def _backward(setup: Setup, op: Op) -> list[str]:
    loss = f"loss / {op.get('share')}" if op.get("share") else "loss"
    if setup.scaler:
        return [f"scaler.scale({loss}).backward()"]
    return [f"({loss}).backward()" if op.get("share") else "loss.backward()"]


def indented(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def _pass(setup: Setup, op: Op) -> list[str]:
    sync = op.get("sync")
    loss, backward = _loss(setup, op), _backward(setup, op)
    middle = ZEROS[op.get("zero")].split("\n") if op.get("zero") else []
    if sync == "no_sync":
        return ["with ddp.no_sync():", *indented([*loss, *middle, *backward])]
    if sync == "flag":
        return [
            "ddp.require_backward_grad_sync = False",
            *loss,
            *middle,
            *backward,
            "ddp.require_backward_grad_sync = True",
        ]
    if sync == "forward inside":
        return ["with ddp.no_sync():", *indented(loss), *middle, *backward]
    return [*loss, *middle, *backward]


FORWARDS = (
    *("embed alone", "twice", "head beside", "input gradient", "gradient penalty", "looked at", "one branch"),
    *("branch by rank", "evaluation mode"),
)
EXTRAS = (*("penalty before", "tied before", "all before", "penalty after", "tied after", "all after", "norm after"),)
# A rank without a gradient skips a parameter's decay and momentum.
OPERATIONS["pass"] = Operation(_pass, lambda op: LOCAL if op.get("forward") == "branch by rank" else EXACT, "pass")


def _closure(setup: Setup, op: Op) -> list[str]:
    """One step by a closure over one batch."""
    body = [*_loss(setup, op), "loss.backward()", "return loss"]
    draw, *rest = body
    return [draw, "def closure():", *indented(["optimizer.zero_grad()", *rest]), "optimizer.step(closure)"]


OPERATIONS["closure"] = Operation(_closure, lambda op: EXACT, "closure", lambda s: not s.scaler)


def _sharpness(setup: Setup, op: Op) -> list[str]:
    """Two passes a step: weights move up along the gradient, and are put back before the step."""
    back = {
        "": "p.copy_(q)",
        "data copy": "p.data.copy_(q)",
        "data": "p.data = q",
    }[op.get("back")]
    whose = "held" if op.get("whose") == "held" else '[p for group in optimizer.param_groups for p in group["params"]]'
    first = _pass(setup, Op("pass", (("sync", op.get("sync")),)))
    return [
        "optimizer.zero_grad()",
        *first,
        f"moved = [p for p in {whose} if p.grad is not None]",
        "old = [p.detach().clone() for p in moved]",
        "with torch.no_grad():",
        "    for p in moved:",
        "        p.add_(p.grad, alpha=0.1)",
        "optimizer.zero_grad()",
        *_pass(setup, Op("pass")),
        "with torch.no_grad():",
        "    for p, q in zip(moved, old):",
        f"        {back}",
        "optimizer.step()",
    ]


OPERATIONS["sharpness"] = Operation(_sharpness, lambda op: LOCAL, "whole", lambda s: not s.scaler)
