"""How a random script begins: its model, DDP, optimizer and what else is made before the first step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

# What a feature keeps of the equality with plain DDP; see script.py.
LOOSE, LOCAL, EXACT = 0, 1, 2

# Name -> (source of the constructor's arguments, what it keeps).
OPTIMIZERS: dict[str, tuple[str, int]] = {
    "SGD": ("lr=0.1", EXACT),
    "SGD momentum": ("lr=0.05, momentum=0.9", EXACT),
    "SGD nesterov": ("lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01", EXACT),
    "SGD foreach": ("lr=0.05, momentum=0.9, foreach=True", EXACT),
    "SGD fused": ("lr=0.05, momentum=0.9, fused=True", EXACT),
    "SGD dampening": ("lr=0.05, momentum=0.8, dampening=0.3, maximize=False", EXACT),
    "Adam": ("lr=0.01", LOCAL),
    "Adam amsgrad": ("lr=0.01, amsgrad=True, weight_decay=0.01", LOCAL),
    "AdamW": ("lr=0.01, weight_decay=0.1", LOCAL),
    "AdamW fused": ("lr=0.01, fused=True", LOCAL),
    "RMSprop": ("lr=0.01, momentum=0.5", LOCAL),
    "Adagrad": ("lr=0.05", LOCAL),
    "Adamax": ("lr=0.01", LOCAL),
    "NAdam": ("lr=0.01", LOCAL),
    "RAdam": ("lr=0.01", LOCAL),
    "Adadelta": ("lr=1.0", LOCAL),
    "Rprop": ("lr=0.01", LOCAL),
    "ASGD": ("lr=0.05", EXACT),
    "Adafactor": ("lr=0.01", LOCAL),
    "LBFGS": ("lr=0.5, max_iter=3", LOCAL),
}

SCHEDULERS = {
    "step": "torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)",
    "cosine": "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)",
    "lambda": "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1))",
    "warmup": "torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)",
    "one cycle": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=64)",
}

DDP_ARGUMENTS = {
    "": "",
    "unused": "find_unused_parameters=True",
    "views": "gradient_as_bucket_view=True",
    "small": "bucket_cap_mb=0.001",
    "still": "broadcast_buffers=False",
}


@dataclass(frozen=True)
class Setup:
    dtype: str = "float64"
    output: str = "tensor"
    norm: str = "none"
    tied: bool = False
    checkpointed: bool = False
    dropout: bool = False
    ddp: str = ""
    optimizer: str = "SGD"
    groups: str = ""  # "", "decay", "lr", "added"
    scheduler: str = ""
    scaler: bool = False
    frozen: bool = False  # the embedding, from the start
    ema: str = ""  # "", "list", "averaged"
    hook: str = ""  # "", "tensor", "step"
    kfac: str = ""  # "", "first", "after": made before attach, or after it
    critic: bool = False
    waits: bool = False  # calls sync.wait() after each step
    early: str = ""  # what is made before attach: "", "scheduler", "parameters"

    def keeps(self) -> int:
        # K-FAC averages its factors, which averaging backends refuse.
        return min(OPTIMIZERS[self.optimizer][1], LOOSE if self.kfac else EXACT)

    def features(self) -> set[str]:
        default = Setup()
        return {
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        }

    def net(self) -> str:
        default, said = Setup(), []
        for name in ("output", "norm", "tied", "checkpointed"):
            if getattr(self, name) != getattr(default, name):
                said.append(f"{name}={getattr(self, name)!r}")
        return f"Net({', '.join([*said, 'dropout=0.2'] if self.dropout else said)})"

    def make_optimizer(self, model: str = "model") -> list[str]:
        kind, arguments = self.optimizer.split()[0], OPTIMIZERS[self.optimizer][0]
        some = f"[p for p in {model}.parameters() if p.requires_grad]" if self.frozen else f"{model}.parameters()"
        lines, added = [], ""
        if self.groups in ("decay", "lr") and kind != "LBFGS":
            other = {"decay": '"weight_decay": 0.05', "lr": '"lr": 0.02'}[self.groups]
            lines += [
                f"weights = [p for p in {model}.parameters() if p.requires_grad and p.ndim > 1]",
                f"others = [p for p in {model}.parameters() if p.requires_grad and p.ndim <= 1]",
            ]
            some = f'[{{"params": weights, {other}}}, {{"params": others}}]'
        elif self.groups == "added" and kind != "LBFGS":
            lines.append(f"head = list({model}.head.parameters())")
            some = f"[p for p in {model}.parameters() if p.requires_grad and not any(p is q for q in head)]"
            added = 'optimizer.add_param_group({"params": head})'
        lines.append(f"optimizer = torch.optim.{kind}({some}, {arguments})")
        return [*lines, added] if added else lines

    def make_scheduler(self) -> list[str]:
        return [f"scheduler = {SCHEDULERS[self.scheduler]}"] if self.scheduler else []

    def lines(self) -> list[str]:
        lines = ["torch.manual_seed(0)", f"model = {self.net()}"]
        if self.frozen:
            lines.append("model.embed.requires_grad_(False)")
        lines.append(f"ddp = DDP(model{', ' if self.ddp else ''}{DDP_ARGUMENTS[self.ddp]})")
        if self.hook == "tensor":
            lines += [
                "for p in model.parameters():",
                "    if p.requires_grad:",
                "        p.register_hook(lambda g: g * 0.5)",
            ]
        lines += self.make_optimizer()
        if self.hook == "step":
            lines += ["counted = []", "optimizer.register_step_post_hook(lambda *_: counted.append(1))"]
        kfac = 'kfac = torchext.optim.KFACPreconditioner(model, optimizer, strategy="spd", inverse_update_steps=2)'
        lines += [kfac] if self.kfac == "first" else []
        if self.early == "scheduler":
            lines += self.make_scheduler()
        if self.early == "parameters":
            lines.append("held = list(model.parameters())")
        lines.append("sync = attach(ddp, optimizer)")
        lines += [kfac] if self.kfac == "after" else []
        if self.early != "scheduler":
            lines += self.make_scheduler()
        if self.early != "parameters":
            lines.append("held = list(model.parameters())")
        if self.scaler:
            lines.append('scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)')
        if self.ema == "list":
            lines.append("ema = [p.detach().clone() for p in model.parameters()]")
        if self.ema == "averaged":
            lines.append("swa = torch.optim.swa_utils.AveragedModel(model)")
        if self.critic:
            lines += [
                "critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))",
                "ddp_critic = DDP(critic)",
                "critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.5)",
                "critic_sync = attach(ddp_critic, critic_optimizer)",
            ]
        return [*lines, "torch.manual_seed(1 + rank)"]

    def last_lines(self) -> list[str]:
        lines = []
        if self.ema:
            lines.append("same(ema)" if self.ema == "list" else "same(swa)")
        lines.append("sync.synchronize()")
        return [*lines, "critic_sync.synchronize()"] if self.critic else lines
