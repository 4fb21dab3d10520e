"""What holds for each thread that follows messages for an optimizer: how it ends with it, with a peer, in a fork."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attached import equal_everywhere, flat
from harness import Rank, elapsed_error, launch, run_ranks
from torch import nn

from torchext.optim import KFAC

# begin(rank, ddp, timeout): a process group, a model (in DDP or not), its optimizer after some steps, and what runs a
# backward pass that leaves messages on their way, for which a thread then waits.
Begin = Callable[[Rank, bool, float], tuple[nn.Module, KFAC, Callable[[], None]]]


def threads(name: str) -> int:
    """How many threads of this process have this name."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            count += (task / "comm").read_text().strip() == name
    return count


def _body_peer_stopped(rank: Rank, begin: Begin) -> float:
    """Rank 1 sends nothing; rank 0's thread waits for it while its optimizer goes."""
    # Without DDP, whose gradients would be waited for first.
    _, optimizer, backward = begin(rank, False, 60)
    if rank.rank == 0:
        backward()
        start = time.monotonic()
        del optimizer, backward
        gc.collect()
        seconds = time.monotonic() - start
        rank.report("gone")
        return seconds
    rank.pause()
    return 0.0


def check_end_waits_for_no_peer(begin: Begin) -> None:
    """The end of an optimizer takes no time, whatever its thread waits for."""
    with launch(_body_peer_stopped, 2, begin) as ranks:
        ranks.expect("gone", [0])
        ranks.proceed([1])
        gone, _ = ranks.outcomes()
        assert gone.ok and gone.value < 5, gone


def _body_forked(rank: Rank, begin: Begin) -> int:
    model, optimizer, backward = begin(rank, True, 30)
    backward()
    child = os.fork()
    if child == 0:
        del optimizer, backward
        gc.collect()
        os._exit(7)
    optimizer.step()
    end = time.monotonic() + 10
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < end, "the child hangs"
        time.sleep(0.02)
    equal_everywhere(model)
    return os.waitstatus_to_exitcode(ended[1])


def check_forked_child_lets_go(begin: Begin) -> None:
    """A child that was forked when the thread existed ends without it; the parent goes on."""
    assert run_ranks(_body_forked, 2, begin) == [7, 7]


def _body_killed(rank: Rank, begin: Begin) -> Any:
    model, optimizer, backward = begin(rank, False, 60)
    if rank.rank == 1:
        rank.report("ready")
        rank.pause()
    backward()
    before = flat(model)
    error = elapsed_error(optimizer.step)
    return error, torch.equal(before, flat(model))


def check_dead_peer_ends_the_step(begin: Begin) -> None:
    """What the thread's wait throws is thrown by step(), which changes nothing."""
    with launch(_body_killed, 2, begin) as ranks:
        ranks.expect("ready", [1])
        ranks.kill(1)
        (outcome,) = ranks.outcomes([0], deadline=40)
        (kind, text, seconds), unchanged = outcome.value
        assert kind == "DistBackendError" and "peer" in text and seconds < 20 and unchanged, (kind, text, seconds)
