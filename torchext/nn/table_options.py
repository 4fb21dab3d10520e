"""Options of adaptive tables: names, ranges, devices, and the errors that say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torchext._build import build_info
from torchext.base.plain import plain

MODES = {"sum": 0, "mean": 1, "max": 2}
_TRAINING = ("dense", "sparse", "fused", "sharded")
OPTIMIZERS = {"sgd": 0, "adagrad": 1, "adam": 2}  # tensors of state
_UPDATING = ("fused", "sharded")
# Of the update that these make, and what they are where they are not given.
_OF_UPDATE = {"optimizer": "adagrad", "lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}
SEEDS = 2**63
_ALL_BITS = 2**64 - 1  # of mixed_seed
_LAYOUTS = ("auto", "direct", "hash", "sketch")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Shares of resident chunks from which a layout pays (see AdaptiveEmbeddingBag).
_DIRECT_FROM, _HASH_FROM = 1 / 8, 1 / 32


def refuse(name: str, value: object, allowed: str) -> ValueError:
    """The error for a value out of its range."""
    return ValueError(f"{name} = {value!r}: allowed {allowed}")


def flag(name: str, value: Any) -> bool:
    """True or False, from whatever says so in a number."""
    value = plain(value)
    if not isinstance(value, int):
        raise TypeError(f"{name} = {value!r} is a {type(value).__name__}; it must be True or False")
    return bool(value)


def check_number(name: str, value: Any, fits: Callable[[Any], bool], allowed: str) -> None:
    """Refuses what is no number, or not one of those allowed; NaN fits nothing."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} = {value!r} is a {type(value).__name__}; it must be a number, {allowed}")
    if not fits(value):
        raise refuse(name, value, allowed)


def check_int(name: str, value: Any, allowed: str) -> None:
    """Refuses what is no int."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} = {value!r} is a {type(value).__name__}; it must be an int, {allowed}")


def check_hysteresis(value: Any) -> None:
    """Refuses what utilities cannot be multiplied by; they are float32."""
    most = torch.finfo(torch.float32).max
    check_number("hysteresis", value, lambda hysteresis: 0 <= hysteresis <= most, "0 or more, finite in float32")


def learning_rate(value: Any) -> float:
    """Of the fused update, from a number or a tensor of one."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
            shape = tuple(value.shape)
            raise TypeError(
                f"lr is a tensor of shape {shape}, {value.dtype}; it must hold one number, 0 or more, finite"
            )
        value = value.item()
    value = plain(value)
    check_number("lr", value, lambda lr: 0 <= lr < float("inf"), "0 or more, finite")
    return float(value)


def chunk_dim_of(embedding_dim: int, chunk_dim: int | None, whole: bool) -> int:
    """The columns of a chunk: as asked, if they fit, else chosen."""
    if chunk_dim is None:
        fitting = [c for c in (16, 8, 4) if embedding_dim % c == 0]
        chunk_dim = embedding_dim if whole or not fitting else fitting[0]
    else:
        check_int("chunk_dim", chunk_dim, "a divisor of embedding_dim")
    fits = [c for c in range(4, embedding_dim + 1) if embedding_dim % c == 0]
    if chunk_dim not in fits and not (whole and chunk_dim == embedding_dim):
        raise refuse("chunk_dim", chunk_dim, f"divisors of embedding_dim = {embedding_dim} from 4 on: {fits}")
    return chunk_dim


def check_device(device: torch.device) -> None:
    """Refuses devices that a table cannot live on."""
    if device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(f"device {device}: adaptive embeddings run on the CPU and on CUDA")
    if device.type != "cuda":
        return
    if not build_info()["cuda"]:
        raise NotImplementedError(
            f"device {device}: torchext was built without CUDA kernels (python -m torchext says why). Build them with "
            "TORCHEXT_CUDA=1 pip install --no-build-isolation <the torchext source folder>"
        )


def capacity_of(budget: float, chunks: int) -> int:
    """Slots of the pool, from a number of chunks (int) or a share of them (float)."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(
            f"budget = {budget!r} is a {type(budget).__name__}; it must be a number: of chunks an int, a share of them "
            "a float"
        )
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise refuse("budget", budget, "0 < share <= 1, or a number of chunks as an int")
        return max(1, round(budget * chunks)) if chunks else 0
    if not min(1, chunks) <= budget <= chunks:
        raise refuse("budget", budget, f"1..{chunks} chunks, or a share as a float")
    return budget


def layout_of(layout: str, budget: int, total: int) -> str:
    """How a table of so many resident chunks of all finds them; "identity" where all are resident."""
    if budget == total:
        return "identity"
    if layout == "auto":
        return "direct" if budget / total >= _DIRECT_FROM else "hash" if budget / total >= _HASH_FROM else "sketch"
    return layout


@dataclass(frozen=True)
class TableOptions:
    """What a table is made with beside its size: one record, checked when it is made."""

    budget: float
    chunk_dim: int | None
    layout: str
    training: str
    optimizer: str
    lr: float
    betas: tuple[float, float]
    eps: float
    gamma: float
    init_std: float
    seed: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "lr":  # of which a tensor has an error of its own
                object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        if isinstance(self.betas, (tuple, list)):
            object.__setattr__(self, "betas", tuple(map(plain, self.betas)))
        for name, choice, choices in (
            ("layout", self.layout, _LAYOUTS),
            ("training", self.training, _TRAINING),
            ("optimizer", self.optimizer, tuple(OPTIMIZERS)),
        ):
            if choice not in choices:
                raise refuse(name, choice, ", ".join(map(repr, choices)))
        learning_rate(self.lr)
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise TypeError(f"betas = {self.betas!r}; it must be a pair of numbers, 0 <= beta < 1")
        for place, beta in enumerate(self.betas):
            check_number(f"betas = {self.betas!r}, betas[{place}]", beta, lambda beta: 0 <= beta < 1, "0 <= beta < 1")
        for name in ("eps", "init_std"):
            check_number(name, getattr(self, name), lambda value: 0 <= value < float("inf"), "0 or more, finite")
        check_number("gamma", self.gamma, lambda gamma: 0.5 <= gamma < 1, "0.5 <= gamma < 1")
        check_int("seed", self.seed, "0..2^63 - 1")
        if not 0 <= self.seed < SEEDS:
            raise refuse("seed", self.seed, "0..2^63 - 1")
        if self.layout != "auto" and isinstance(self.budget, float) and self.budget == 1:
            raise refuse("layout", self.layout, "'auto' with budget 1.0, which keeps everything and needs no layout")

    def check_used(self) -> None:
        """Refuses what was given for an update that is not made, or not so."""
        for name, default in _OF_UPDATE.items():
            given = getattr(self, name)
            if (learning_rate(given) if name == "lr" else tuple(given) if name == "betas" else given) == default:
                continue
            if self.training not in _UPDATING:
                raise refuse(
                    name,
                    given,
                    f"with training = 'fused' or 'sharded', which update the table by themselves; {self.training!r} "
                    "leaves that to an optimizer of yours, so leave it out",
                )
            if name == "betas" and self.optimizer != "adam":
                raise refuse(name, given, f"with optimizer = 'adam', this is {self.optimizer!r}; leave it out")
            if name == "eps" and self.optimizer == "sgd":
                raise refuse(name, given, "with optimizer = 'adagrad' or 'adam', this is 'sgd'; leave it out")

    def of_shard(self, rank: int, rows: int, num_embeddings: int, embedding_dim: int) -> TableOptions:
        """These options for a rank's rows: a budget that is a number of chunks is divided by rows, seeds differ.

        Numbers that the whole table cannot have are refused, so that all ranks raise or none.
        """
        budget = self.budget
        if isinstance(budget, int):
            chunks = embedding_dim // chunk_dim_of(embedding_dim, self.chunk_dim, whole=False)
            budget = capacity_of(budget, num_embeddings * chunks)
            budget = max(min(1, rows), budget * rows // max(1, num_embeddings))
        return replace(self, budget=budget, seed=(self.seed + rank) % SEEDS)


def padding_of(padding_idx: Any, num_embeddings: int) -> int | None:
    """The row that is padding, counted from the first one."""
    padding_idx = plain(padding_idx)
    if padding_idx is None:
        return None
    allowed = f"{-num_embeddings}..{num_embeddings - 1}, or None"
    check_int("padding_idx", padding_idx, allowed)
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise refuse("padding_idx", padding_idx, allowed)
    return int(padding_idx % num_embeddings)


def norm_of(max_norm: Any, norm_type: Any, sharded: bool) -> tuple[float | None, float]:
    """Both as numbers; refuses norms that rows cannot be clipped to."""
    max_norm, norm_type = (
        float(value) if isinstance(value, bool) else value for value in (plain(max_norm), plain(norm_type))
    )
    check_number("norm_type", norm_type, lambda value: value > 0, "above 0")
    if max_norm is not None:
        check_number("max_norm", max_norm, lambda value: value > 0, "above 0, or None")
        if sharded:
            raise ValueError("max_norm with training = 'sharded' is not supported; clip the rows of weight instead")
    return max_norm, norm_type


def check_size(num_embeddings: int, embedding_dim: int, dtype: torch.dtype) -> None:
    """Refuses sizes and dtypes that no table can have."""
    for name, size, least in (("num_embeddings", num_embeddings, 0), ("embedding_dim", embedding_dim, 1)):
        check_int(name, size, f"{least} or more")
        if size < least:
            raise refuse(name, size, f"{least} or more")
    if dtype not in _DTYPES:
        raise TypeError(f"dtype is {dtype}; supported are {', '.join(map(str, _DTYPES))}")


def offsets_problem(ids: int, offsets: Tensor, last: bool) -> str:
    """What is wrong with the offsets of so many ids; empty: nothing. The operators say the same."""
    if len(offsets) and int(offsets[0]) != 0:
        return f"offsets[0] is {int(offsets[0])}, but the first bag must begin at 0"
    falls = (offsets.diff() < 0).nonzero()
    if len(falls):
        at = int(falls[0]) + 1
        return f"offsets[{at}] is {int(offsets[at])}, less than the one before it, {int(offsets[at - 1])}"
    if len(offsets) and int(offsets[-1]) > ids:
        return f"offsets[{len(offsets) - 1}] is {int(offsets[-1])}, past the end of {ids} ids"
    return "" if len(offsets) or not last else "include_last_offset is set, but offsets is empty"


def mixed_seed(*numbers: int) -> int:
    """A seed, 0..2^64 - 1, of which all bits depend on all numbers and on their order: splitmix64 after each.

    Torch's generator for the CPU begins with the lower 32 bits only, so sums and products of the numbers would not do.
    """
    state = 0
    for number in numbers:
        state = (state ^ number & _ALL_BITS) + 0x9E3779B97F4A7C15 & _ALL_BITS
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _ALL_BITS
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _ALL_BITS
        state ^= state >> 31
    return state
