"""The synchronizer of a model that is trained by "hop"."""

from __future__ import annotations

from typing import Any

from torchext import _C
from torchext.decentralized.averaging_synchronizer import AveragingSynchronizer

__all__ = ["HopSynchronizer"]


class HopSynchronizer(AveragingSynchronizer):
    """Decentralized training on a communication graph, every worker with its neighbours only.

    A worker that has come to ``synchronize``, ``averaged`` or ``detach`` waits there for the others; those go on
    without it until they have come, too. A collective of the user's own in the middle of training is another matter:
    all workers must come to it in the same iteration (:attr:`iteration`).
    """

    _core: _C.HopSynchronizer

    @property
    def iteration(self) -> int:
        """The iteration that is computed next: steps made, and iterations skipped (``max_jump``).

        A loop that is to see the same data as its neighbours, or to end with them, counts by it: ``while
        sync.iteration < iterations``.

        Raises:
            torch.distributed.DistBackendError: As :meth:`wait`, which comes first.
        """
        self.wait()
        return self._core.steps

    def _meet(self, core: _C.AveragingSynchronizer, steps: int | None, collectives: int) -> int:
        most = super()._meet(core, steps, collectives)
        self._core.begin()  # the others may first step another model, where they wait for this worker
        return most

    def stats(self) -> dict[str, Any]:
        """Counters, histograms (value to how often) and milliseconds since attach.

        ``exposed_ms`` is what training waited, in ``waits`` waits: ``model_wait_ms`` for neighbours' models,
        ``token_wait_ms`` for tokens or acknowledgements, ``send_wait_ms`` for memory that models still go out from;
        ``copy_ms`` is packing and averaging. ``gaps``: on entering each iteration, how far this worker was ahead of
        each in-neighbour, as that one's messages told; never above ``gap_bound``. ``ages``: how many iterations old the
        models were that were averaged. ``group_sizes``: models an average, its own included. ``skipped`` iterations
        were jumped over, ``too_late`` models arrived when their iteration had passed, ``not_sent`` ones were not even
        sent for that reason. ``tokens``: by out-neighbour, those left. ``slot_bytes``: memory for models, one and the
        largest lead of a neighbour (at most ``max_iteration_gap``) for each in-neighbour and the worker itself.
        ``consensus_distance`` is ``||x - mean|| / ||mean||`` at the last exact average. With
        ``on_peer_failure="continue"`` also ``workers``, ``lost_ranks``, ``joined_ranks`` and ``recovery_ms``, as
        with ``prague``.
        """
        return super().stats()
