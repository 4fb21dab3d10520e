"""What the tests of "dear" share: models, and training beside single-process training on the whole batch."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank
from largest import largest
from rows import own_groups
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import torchext

FORMS = ["sharded", "replicated"]
# As on CUDA, by the collectives of a group of their own.
WAYS = [*FORMS, *(f"{form} over collectives" for form in FORMS)]
# Three ranks pass no line of Python that two do not, but where one of them has no part of a small parameter; four pass
# none that three do not. One rank alone is in tests/python/dear.
SIZES = [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))]
SIZES_WITH_EMPTY_PARTS = [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))]
DTYPES = ["float32", "bfloat16"]
# Three ranks of the one, two of the other.
SIZES_AND_DTYPES = [
    pytest.param(size, dtype, marks=() if size == {"float32": 3, "bfloat16": 2}[dtype] else pytest.mark.slow)
    for size in (2, 3, 4)
    for dtype in DTYPES
]
EXACT = 1e-5  # of float32; sums in another order than the twin's
PHASES = [False, True]  # with the fallback the first steps are plain all-reduce
PLAIN = "plain DDP"
ROWS = 4  # of every rank's batch


class Residual(nn.Module):
    """ResNet-like: convolutions, normalisation by group (that of the batch would differ by its size), a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.view(-1, 1, 4, 4))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + torch.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


class Transformer(nn.Module):
    """A tiny language model with tied embeddings; MultiheadAttention reads its out_proj without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        # Without bias: that of the keys has no gradient but rounding, which Adagrad makes as large as any.
        self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = ((x[:, :8].float() + 1) * 5.99).long().clamp(0, 11)
        hidden = self.embed(tokens)
        hidden = self.norm(hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0])
        hidden = hidden + self.feed(hidden)
        return hidden.mean(1) @ self.embed.weight.t()


class Branches(nn.Module):
    """One of two branches is used, another is never; which, depends on the step, or on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)
        self.choice = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.left(x) if self.choice % 2 == 0 else self.right(x)))


class Shuffled(nn.Module):
    """Layers in another order each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 4)
        self.choice = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(4, generator=torch.Generator().manual_seed(self.choice))
        for layer in order.tolist():
            x = x + torch.tanh(self.layers[layer](x))
        return self.head(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 4))


def wide() -> nn.Module:
    """Large enough that exchanges are still on their way when the next thing happens."""
    return nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 4))


def made(kind: Callable[[], nn.Module], dtype: torch.dtype | None = None) -> nn.Module:
    torch.manual_seed(0)
    return kind().to(dtype or Pair.dtype)


def batch(step: int, size: int, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step; rank r's part is [r::size]."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.rand(ROWS * size, 16, generator=generator) * 2 - 1
    return inputs.to(dtype or Pair.dtype), (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.02)


def adamw_or_sgd(parameters: Any) -> torch.optim.Optimizer:
    """In 8 bits many gradients are but rounding, and Adam would step with those as with any."""
    return (adamw if Pair.dtype == torch.float32 else sgd)(parameters)


class PlainDDP:
    """In place of the synchronizer: what a script does that trains with DDP alone."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def wait(self) -> None:
        pass

    synchronize = detach = wait

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self._pair.module.parameters(), max_norm, norm_type)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        yield self._pair.module

    def stats(self) -> dict[str, Any]:
        return {"mode": "allreduce", "steps": self._pair.steps}


class Pair:
    """One model trained on all ranks, and its twin trained by this process alone, on the whole batch."""

    form = "sharded"
    """Or one of WAYS, or PLAIN: DDP alone, which rounds as "dear" does, and in whose place a test has it measured."""
    device = torch.device("cpu")
    dtype = torch.float32
    """Of models and batches whose type is not given."""
    fault: Callable[[Pair], None] | None = None
    """Done to every new pair: makes a mistake that the test is to notice."""

    def __init__(
        self,
        rank: Rank,
        model: nn.Module,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        *,
        bucket_mb: float | str = 0.001,
        fallback: bool = False,
        form: str | None = None,
        timeout: float = 30,
        **ddp: Any,
    ) -> None:
        self.rank, self.size = rank.rank, rank.size
        self.dtype = next(model.parameters()).dtype
        self.module: Any = model.to(Pair.device)
        self.twin: Any = copy.deepcopy(self.module)
        form, _, transport = (form or Pair.form).partition(" over ")
        plain = form == PLAIN
        options = torchext.DeAROptions(
            bucket_mb=bucket_mb,
            allreduce_fallback=fallback,
            form=FORMS[0] if plain else form,
            transport=transport or "auto",
        )
        self.group = dist.new_group(backend="dear", timeout=timedelta(seconds=timeout), pg_options=options)
        self.ddp = DistributedDataParallel(self.module, process_group=self.group, **ddp)
        self.optimizer, self.plain = optimizer(self.module.parameters()), optimizer(self.twin.parameters())
        self.steps = 0
        self.sync: Any = PlainDDP(self)
        if not plain:
            self.sync = torchext.attach(self.ddp, self.optimizer)
            assert isinstance(self.sync, torchext.DearSynchronizer)
            dedicated = transport == "collectives" or Pair.device.type != "cpu"
            assert (self.sync._dedicated_group is not None) == dedicated
        if Pair.fault is not None:
            Pair.fault(self)

    def losses(self, step: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of this rank's rows by the attached model, and that of all rows by the twin."""
        whole = batch(self.steps if step is None else step, self.size, self.dtype)
        inputs, targets = (part.to(Pair.device) for part in whole)
        own = slice(self.rank, None, self.size)
        return (
            cross_entropy(self.ddp(inputs[own]).float(), targets[own]),
            cross_entropy(self.twin(inputs).float(), targets),
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
        self.plain.zero_grad(set_to_none)

    def backward(self, factor: float = 1.0) -> None:
        for module in (self.module, self.twin):
            if hasattr(module, "choice"):
                module.choice = self.steps
        for loss in self.losses():
            (factor * loss).backward()

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Both models' gradients; returns how far their norms are apart, relative to them."""
        norm = self.sync.clip_grad_norm_(max_norm, norm_type)
        expected = self.clip_twin(max_norm, norm_type)
        return abs(float(norm / expected) - 1)

    def clip_twin(self, max_norm: float, norm_type: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.twin.parameters(), max_norm, norm_type)

    def update(self) -> None:
        self.optimizer.step()
        self.plain.step()
        self.steps += 1

    def step(self) -> None:
        self.zero_grad()
        self.backward()
        self.update()

    def run(self, steps: int) -> Pair:
        for _ in range(steps):
            self.step()
        return self

    def run_scaled(self, unscaled: Callable[[], Any] = lambda: None) -> list[float]:
        """Twelve steps under GradScalers; returns the scales.

        Every other step is unscaled first, and then `unscaled` is called. Two overflow, with one row of the batch.
        """
        scalers = [torch.amp.GradScaler(Pair.device.type, init_scale=2.0**10, growth_interval=3) for _ in range(2)]
        optimizers = (self.optimizer, self.plain)
        scales = []
        for step in range(12):
            self.zero_grad()
            own, whole = self.losses()
            if step in (3, 7):  # one rank's gradient, and with it everybody's
                whole = whole * float("inf")
                own = own * float("inf") if self.rank == min(1, self.size - 1) else own
            for scaler, optimizer, loss in zip(scalers, optimizers, (own, whole), strict=True):
                scaler.scale(loss).backward()
                if step % 2:
                    scaler.unscale_(optimizer)
            if step % 2:
                unscaled()
            for scaler, optimizer in zip(scalers, optimizers, strict=True):
                scaler.step(optimizer)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale()
            scales.append(scalers[0].get_scale())
            self.steps += 1
        return scales

    def difference(self) -> float:
        """The largest between the two models, relative to how large the parameters are."""
        self.sync.wait()
        return difference(self.module, self.twin)

    def done(self) -> float:
        worst = self.difference()
        self.sync.detach()
        dist.destroy_process_group(self.group)  # its threads would take their time beside all that follows
        return worst


def difference(one: nn.Module, other: nn.Module) -> float:
    return largest(
        float(((a - b).abs().max() / b.abs().max().clamp(min=0.1)).detach())
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def in_forms(rank: Rank, body: Callable[..., Any], *args: Any) -> dict[str, float]:
    """How far a body's Pairs are apart, in one form after the other; the body finds the ranks joined.

    It returns one figure, or several by their names.
    """
    return each_in_ways(rank, [body], FORMS, *args)


def each_in_ways(
    rank: Rank, bodies: Iterable[Callable[..., Any]], ways: Sequence[str] = FORMS, *args: Any
) -> dict[str, Any]:
    """As in_forms, of several bodies one after the other, in these of WAYS."""
    rank.init("dear")
    found: dict[str, Any] = {}
    for body, way in itertools.product(bodies, ways):
        figures = figures_of(way, body, rank, *args)
        found |= {f"{body.__name__}, {way} {name}": figure for name, figure in figures.items()}
    return found


def figures_of(form: str, body: Callable[..., Any], *args: Any) -> dict[str, float]:
    Pair.form = form
    try:
        with own_groups():
            found = body(*args)
    except BaseException as error:
        error.add_note(f"in the form {form!r}, with the fault {Pair.fault!r}")
        raise
    return found if isinstance(found, dict) else {"": found}


def check_within(worst: dict[str, float], bound: float = EXACT) -> None:
    """An error names what is further apart, or is not a number."""
    beyond = {name: figure for name, figure in worst.items() if not figure < bound}
    assert not beyond, f"beyond {bound:g}: {beyond}"


def in_form(rank: Rank, form: str, body: Callable[..., Any], *args: Any) -> Any:
    """Runs a body with every Pair in this form, or this one of WAYS."""
    Pair.form = form
    return body(rank, *args)
