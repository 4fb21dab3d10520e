"""Rows of a table over ranks: ids travel to their owners, sums of bags come back (FIITED's distributed training)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from torchext.nn.table_options import offsets_problem

if TYPE_CHECKING:
    from torchext.nn.adaptive_lookup import AdaptiveLookup

__all__ = ["Shards"]


class _ReturnBags(torch.autograd.Function):
    """Sends every rank its bags and adds up what comes back; the gradient goes the same way in reverse."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, sizes: list[int], group: Any) -> Tensor:
        world, mine = len(sizes), sizes[dist.get_rank(group)]
        ctx.sizes, ctx.group = sizes, group
        received = partial.new_empty(world * mine, partial.shape[1])
        dist.all_to_all_single(received, partial.contiguous(), [mine] * world, sizes, group=group)
        # Rank by rank: one order of summation, whatever arrives first.
        return received.view(world, mine, partial.shape[1]).sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        world, mine = len(ctx.sizes), len(gradient)
        # The gradient of the mean over ranks, as DDP averages.
        repeated = (gradient / world).repeat(world, 1)
        received = gradient.new_empty(sum(ctx.sizes), gradient.shape[1])
        dist.all_to_all_single(received, repeated, ctx.sizes, [mine] * world, group=ctx.group)
        return received, None, None


class _SendWeights(torch.autograd.Function):
    """Sends per-sample weights along with their ids; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, receive: list[int], send: list[int], group: Any) -> Tensor:
        ctx.args = (receive, send, group)
        received = weights.new_empty(sum(receive))
        dist.all_to_all_single(received, weights.contiguous(), receive, send, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        receive, send, group = ctx.args
        back = gradient.new_empty(sum(send))
        dist.all_to_all_single(back, gradient.contiguous(), send, receive, group=group)
        # _ReturnBags divided by the world for the table's sake; weights belong to this rank alone.
        return back * len(send), None, None, None


class _Agreed(NamedTuple):
    """What a lookup exchanges, by rank."""

    send: list[int]  # ids
    receive: list[int]
    bags: list[int]
    weighted: int  # the most that a rank has said of its weights


class Shards:
    """Who owns which rows: row r is row r // world of rank r mod world, so that popular low ids spread out.

    Args:
        num_embeddings: Rows of the whole table.
        group: Of the ranks; None: the default group.
    """

    def __init__(self, num_embeddings: int, group: Any) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("training = 'sharded' needs a process group: call init_process_group first")
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.num_embeddings = num_embeddings
        self.rows = len(range(self.rank, num_embeddings, self.world))

    def __deepcopy__(self, memo: dict[int, Any]) -> Shards:
        """Copies of a table are in the same process group, which cannot be copied."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise TypeError(
                "shards with a process_group of their own cannot be pickled; save state_dict() of each rank, and load "
                "it into a table that is made with the group of the new processes"
            )
        return self.__dict__

    def share(self, table: Tensor) -> Tensor:
        """The rows of the whole table that are this rank's."""
        return table[self.rank :: self.world]

    def local(self, row: int | None) -> int | None:
        """The row on this rank, or None when another has it."""
        return row // self.world if row is not None and row % self.world == self.rank else None

    def _check(self, ids: Tensor, offsets: Tensor, last: bool) -> Exception | None:
        """What is wrong with a batch."""
        bad = ((ids < 0) | (ids >= self.num_embeddings)).nonzero()
        if len(bad):
            at, last_row = int(bad[0]), self.num_embeddings - 1
            return IndexError(f"id {int(ids[at])} at position {at} is out of range; the table has rows 0..{last_row}")
        problem = offsets_problem(len(ids), offsets, last)
        return ValueError(problem) if problem else None

    def agree(self, counts: Tensor, *, bags: int = 0, weights: int = 0, failure: Exception | None = None) -> _Agreed:
        """Tells all ranks what this one will send, before anything else travels; a failure of one raises on all.

        Args:
            counts: Ids for each rank.
            bags: How many the ids are in.
            weights: 1 where the ids have some, 2 where these need a gradient.
            failure: Why this rank cannot look its batch up.
        """
        told = [counts.new_empty(self.world + 3) for _ in range(self.world)]
        own = torch.cat([counts, counts.new_tensor([bags, weights, int(failure is not None)])])
        dist.all_gather(told, own, group=self.group)
        rows = torch.stack(told).tolist()
        if failure is not None:
            raise failure
        faulty = [rank for rank, row in enumerate(rows) if row[-1]]
        if faulty:
            raise ValueError(f"rank {faulty[0]} was given a batch that it cannot look up; its own error says why")
        send, receive = rows[self.rank][: self.world], [row[self.rank] for row in rows]
        return _Agreed(send, receive, [row[-3] for row in rows], max(row[-2] for row in rows))

    def check_devices(self, device: torch.device, *given: Tensor | None) -> None:
        """Raises where ids, offsets or weights are on another device than the table: the others would wait for them."""
        for name, tensor in zip(("ids", "offsets", "per_sample_weights"), given, strict=False):
            if isinstance(tensor, Tensor) and tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}; the table is on {device}")

    def refuse(self, failure: Exception, device: torch.device) -> NoReturn:
        """Raises on all ranks what keeps this one from looking its batch up. Collective with their lookups."""
        self.agree(torch.zeros(self.world, dtype=torch.int64, device=device), failure=failure)
        raise failure

    def look_up(
        self,
        module: AdaptiveLookup,
        ids: Tensor,
        offsets: Tensor | None,
        bag_size: int,
        weights: Tensor | None,
        last: bool,
    ) -> Tensor:
        """The bags of this rank's ids. Collective; a bad batch of one rank raises on all of them.

        Everything that travels is on the table's device, the group's backend must take such tensors (NCCL for CUDA).
        """
        ids, device = ids.to(torch.int64), ids.device
        if offsets is None:
            offsets, last = torch.arange(0, len(ids) + 1, bag_size, device=device), True
        offsets = offsets.to(torch.int64)
        failure = self._check(ids, offsets, last)
        if failure is not None:
            self.refuse(failure, device)
        if not last:
            offsets = torch.cat([offsets, offsets.new_tensor([len(ids)])])
        bags = len(offsets) - 1
        ids = ids[: int(offsets[-1])]
        owner = ids % self.world
        has = 0 if weights is None else 2 if weights.requires_grad and torch.is_grad_enabled() else 1
        counts = torch.bincount(owner, minlength=self.world)
        send, receive, sizes, weighted = self.agree(counts, bags=bags, weights=has)

        order = torch.argsort(owner, stable=True)
        bag_of = torch.repeat_interleave(torch.arange(bags, device=device), offsets.diff())
        outgoing = torch.stack([ids // self.world, bag_of], 1)[order]
        incoming = outgoing.new_empty(sum(receive), 2)
        dist.all_to_all_single(incoming, outgoing, receive, send, group=self.group)
        # Bags of all ranks one after another; ids keep their order, so bags are still contiguous.
        starts = counts.new_tensor([0, *sizes]).cumsum(0)
        source = torch.repeat_interleave(torch.arange(self.world, device=device), counts.new_tensor(receive))
        global_bag = incoming[:, 1] + starts[source]
        bounds = counts.new_zeros(sum(sizes) + 1)
        bounds[1:] = torch.bincount(global_bag, minlength=sum(sizes)).cumsum(0)
        if weighted:  # on some rank: then they travel on all, and their gradients back
            own = weights[: len(ids)] if weights is not None else module.pool.new_ones(len(ids))
            if weighted == 2 and not own.requires_grad:
                own = own.detach().requires_grad_()
            weights = _SendWeights.apply(own[order], receive, send, self.group)
        partial = module._bags(module.pool, incoming[:, 0].contiguous(), bounds, 0, weights, True, "sum")
        output: Tensor = _ReturnBags.apply(partial, sizes, self.group)
        if module.mode == "mean":
            counted = torch.ones_like(ids) if module.padding_idx is None else (ids != module.padding_idx).to(ids.dtype)
            entries = counts.new_zeros(bags).index_add_(0, bag_of, counted)
            # 16 bits cannot count: 256 ones in bfloat16, 2,048 in float16, and no further.
            wide = output.to(torch.promote_types(output.dtype, torch.float32))
            output = (wide / entries.clamp(min=1).unsqueeze(1)).to(output.dtype)
        return output
