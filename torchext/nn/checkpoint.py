"""Adaptive tables in a state_dict: what is saved of one, and loading that takes everything or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchext.nn.optimizer_hooks import expect_other_size

if TYPE_CHECKING:
    from torchext.nn.adaptive_table import AdaptiveTable

# 1: state of the fused optimizer as "state.0" and so on, utilities in bytes 2^16 times as large (chunk_utility.h), no
#    "shard".
# 2: no "extent".
VERSION = 3
_NEWER = ("shard", "extent")  # what earlier versions lack, and loading does not need


def unregistered_tensors(table: AdaptiveTable) -> Iterable[tuple[str, Tensor]]:
    """What belongs into a checkpoint besides the parameters that torch saves by itself: of a whole table nothing."""
    if table._whole:
        return
    if table.training_mode == "sharded":
        yield "pool", table.pool.detach()
    if table.shard is not None:
        yield "shard", table.shard
    yield "extent", table.extent
    yield from table.plain_tensors()
    yield from zip(table.state_names, table.state, strict=True)


def _own_tensors(table: AdaptiveTable, prefix: str) -> dict[str, Tensor]:
    own = {prefix + name: tensor for name, tensor in unregistered_tensors(table)}
    own[prefix + "pool"] = table.pool
    if "trigger" in table._parameters and table.trigger is not None:
        own[prefix + "trigger"] = table.trigger
    return own


def _lengths(table: AdaptiveTable, name: str, slots: int, cells: int) -> tuple[int, int] | None:
    """Least and largest length of one of a table's tensors beside a pool of so many slots; None: it has one length.

    Pools change their size when several tables share a budget; the rest follows, but an index never shrinks, and a
    sketch keeps the cells that it was made with.
    """
    total = table.num_embeddings * table.chunks
    if table.layout == "identity":
        return None
    if name == "pool":
        return 0, total
    if name in table.state_names:
        return slots, slots
    if name == "sketch" and table.layout == "sketch":
        return table._sketch_cells(0), table._sketch_cells(total)
    if name == "index" and table.layout != "direct":
        return table._index_cells(slots), table._index_cells(total)
    if name == "utility" and table.layout == "sketch":
        return slots + cells, slots + cells
    return None


def _unexpected_keys(table: AdaptiveTable, saved: Mapping[str, Any], prefix: str) -> list[str]:
    """Of a checkpoint's index and sketch, what this table cannot hold; the operators rely on it."""
    chunks = table.num_embeddings * table.chunks
    slots = saved.get(prefix + "pool", table.pool).numel() // table.chunk_dim
    problems = []

    def check(name: str, what: str, values: Tensor, count: int) -> None:
        if not len(values):
            return
        worst = int(values.min() if values.min() < 0 else values.max())
        if not 0 <= worst < count:
            problems.append(f"{prefix}{name}: holds {what} {worst}, allowed 0..{count - 1}; it is another table's")

    index, sketch = (saved.get(prefix + name) for name in ("index", "sketch"))
    if index is not None:
        held = index[index != -1]
        if index.dtype == torch.int64:
            check("index", "chunk", held >> 32, chunks)
            held = held & 0x7FFFFFFF
        check("index", "slot", held, slots)
        if len(held) > slots:  # a hash without an empty cell would be searched for ever
            problems.append(f"{prefix}index: holds {len(held)} chunks, allowed {slots}, the slots of its pool")
    if sketch is not None:
        check("sketch", "chunk", sketch[sketch != -1], chunks)
    return problems


def _problems(table: AdaptiveTable, own: Mapping[str, Tensor], saved: Mapping[str, Any], prefix: str) -> list[str]:
    """Of tensors that were saved, those that cannot be this table's."""
    slots = saved.get(prefix + "pool", table.pool).numel() // table.chunk_dim
    cells = saved.get(prefix + "sketch", table.sketch).numel()
    problems = []
    if slots != table.budget_chunks and table._ddp is not None and table.optimizer_trains:
        problems.append(
            f"{prefix}pool: another number of slots inside DDP; load before DistributedDataParallel is made"
        )
    for key, tensor in own.items():
        given = saved.get(key)
        if given is None:
            continue
        lengths = _lengths(table, key[len(prefix) :], slots, cells)
        if lengths is None:
            fits, allowed = given.shape == tensor.shape, str(tuple(tensor.shape))
        else:
            fits = given.dim() == tensor.dim() and given.shape[1:] == tensor.shape[1:]
            fits = fits and lengths[0] <= len(given) <= lengths[1]
            allowed = f"{lengths[0]}..{lengths[1]} as its first size, then {tuple(tensor.shape[1:])}"
        if not fits:
            problems.append(f"{key}: saved with shape {tuple(given.shape)}, allowed {allowed}")
        elif given.dtype != tensor.dtype and key != prefix + "pool":
            problems.append(f"{key}: saved as {given.dtype}, the table has {tensor.dtype}")
        elif key == prefix + "extent" and given.tolist() != tensor.tolist():
            (rows, chunks), (own_rows, own_chunks) = given.tolist(), tensor.tolist()
            problems.append(
                f"{key}: saved of a table of {rows} rows with {chunks} chunks each, this one has {own_rows} with "
                f"{own_chunks}"
            )
        elif tensor is table.shard and given.tolist() != tensor.tolist():
            (rank, world, rows), (own_rank, own_world, own_rows) = given.tolist(), tensor.tolist()
            problems.append(
                f"{key}: saved by rank {rank} of {world}, of a table of {rows} rows; this is rank {own_rank} of "
                f"{own_world}, of {own_rows}. Every rank loads what it has saved itself"
            )
    return problems or _unexpected_keys(table, saved, prefix)


def _renamed(saved: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """What the first version saved, by the names of now."""
    old = prefix + "state."
    return {prefix + "state" + key[len(old) :] if key.startswith(old) else key: saved[key] for key in saved}


def with_weight(
    table: AdaptiveTable, saved: Mapping[str, Any], prefix: str, error_msgs: list[str]
) -> Mapping[str, Any] | None:
    """A whole table's checkpoint as nn.EmbeddingBag's; it has been saved with a pool in place of the weight before.

    What is wrong with the pool is appended to ``error_msgs``, and there is no checkpoint then.
    """
    key = prefix + "pool"
    if key not in saved or prefix + "weight" in saved:
        return saved
    pool, index, extent = saved[key], saved.get(prefix + "index"), saved.get(prefix + "extent")
    rows, columns = table.weight.shape
    expected = (rows * table.chunks, table.chunk_dim)
    fits = pool.shape == expected and (index is None or not index.numel())
    if not fits or (extent is not None and extent.tolist() != [rows, table.chunks]):
        error_msgs.append(
            f"{key}: saved with shape {tuple(pool.shape)}, allowed {expected}, all chunks of {rows} rows. Load another "
            "table's checkpoint into one that is made as it was, and its weight into this one, as {'weight': values}"
        )
        return None
    left = {key, *(prefix + name for name in ("extent", *table._PLAIN))}
    return {name: value for name, value in saved.items() if name not in left} | {
        prefix + "weight": pool.view(rows, columns)
    }


def load_table(
    table: AdaptiveTable,
    saved: Mapping[str, Any],
    prefix: str,
    version: int,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Checks everything, then takes everything: a table is never half of one checkpoint and half of another.

    The fused optimizer's state begins anew where it is missing, as in checkpoints of tables that an optimizer trained.
    Where anything else is missing nothing is taken. Either way all keys that were not taken are missing: torch says
    that it is strict whether it is or not, and raises afterwards.

    The arguments are those of ``nn.Module._load_from_state_dict``; what is wrong is appended to the lists.
    """
    if prefix + "weight" in saved and prefix + "pool" not in saved:  # of nn.EmbeddingBag
        try:
            table._take(saved[prefix + "weight"])
        except ValueError as error:
            error_msgs.append(f"{prefix}weight: {error}")
        unexpected_keys[:] = [key for key in unexpected_keys if key != prefix + "weight"]
        return
    if prefix + "state.0" in saved:  # whatever has become of the metadata
        saved, version = _renamed(saved, prefix), 1
    own = _own_tensors(table, prefix)
    problems = _problems(table, own, saved, prefix)
    if not 1 <= version <= VERSION:
        problems.insert(
            0,
            f"{prefix[:-1] or 'table'}: saved as version {version}, this is version {VERSION}, which takes "
            f"1..{VERSION}",
        )
    missing = [key for key in own if key not in saved and key[len(prefix) :] not in _NEWER]
    state = [prefix + name for name in table.state_names]
    takes = not problems and set(missing) <= {prefix + "trigger", *state}
    if missing:  # those first
        left = state if takes and set(missing) & set(state) else () if takes else own
        missing += [key for key in left if key not in missing and key[len(prefix) :] not in _NEWER]
    missing_keys.extend(missing)
    error_msgs.extend(problems)
    if strict:
        unexpected_keys.extend(key for key in saved if key.startswith(prefix) and key not in own)
    if not takes:
        return
    with torch.no_grad():
        if len(saved[prefix + "pool"]) != table.budget_chunks and table.trigger is None:
            expect_other_size(table)
        table._resize(*(len(saved[prefix + name]) for name in ("pool", "index", "utility", "sketch")))
        table.pool.copy_(saved[prefix + "pool"])
        for name, tensor in unregistered_tensors(table):
            if prefix + name in missing:
                tensor.zero_()
            else:
                tensor.copy_(saved.get(prefix + name, tensor))
        if version == 1 and table.utility.dtype == torch.uint8:
            table.clock[1] *= 2.0**16  # true utility is stored over the factor
