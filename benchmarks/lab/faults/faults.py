"""The faults of fault_table.py: what happens, what every rank does, and what an error should name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness import Rank

from lab.faults import fault_acts as acts
from lab.faults import fault_stages as stages
from lab.faults.fault_acts import VICTIM

OURS = ("prague", "hop", "dssync", "dear")
_FLAP_S = 2.0


@dataclass(frozen=True)
class Fault:
    """One row for each number of ranks and backend.

    Args:
        what: Happens, as the table says it.
        act: What every rank does.
        join: How ranks make their group before; None: it is a part of ``act``.
        named: A pattern of what an error should say.
        backends: Beside gloo.
        worlds: Numbers of ranks.
        absent: Ranks that nothing is asked of.
        stage: For a number of ranks.
        options: Of the backends of torchext.
        begin_s: When the fault happens, in seconds from the start of ``act``, where no strike makes it.
    """

    what: str
    act: Callable[[Rank, str, acts.Options, Any], acts.Saw]
    join: Callable[[Rank, str, acts.Options, Any], None] | None
    named: str = "$^"
    backends: tuple[str, ...] = OURS
    worlds: tuple[int, ...] = (2, 4, 8)
    absent: tuple[int, ...] = ()
    stage: stages.StageMaker = stages.quiet
    options: Mapping[str, Any] = field(default_factory=dict)
    begin_s: float = 0.0


FAULTS = {
    "killed": Fault(
        "rank 1 is killed (SIGKILL) in a loop of all_reduce",
        acts.loop_for_ever,
        acts.join,
        r"rank 1 died",
        absent=(VICTIM,),
        stage=stages.killed,
    ),
    "stopped": Fault(
        "rank 1 is stopped (SIGSTOP) in a loop of all_reduce",
        acts.loop_for_ever,
        acts.join,
        r"rank 1 has been silent[^;]*",
        absent=(VICTIM,),
        stage=stages.stopped,
    ),
    "gone": Fault(
        'rank 1 is killed (SIGKILL) in training; ours with on_peer_failure="continue"',
        acts.train,
        acts.join,
        backends=("prague", "hop", "dssync"),
        worlds=(4, 8),
        absent=(VICTIM,),
        stage=stages.killed,
    ),
    "unplugged": Fault(
        "rank 1's host loses its link in a loop of all_reduce",
        acts.loop_for_ever,
        acts.join_on_hosts,
        r"rank 1 has been silent[^;]*",
        worlds=(2, 4),
        absent=(VICTIM,),
        stage=stages.cable(rate=None, down_s=None),
    ),
    "flap": Fault(
        f"the link of rank 1's host is down for {_FLAP_S:g} s in a loop of all_reduce of {acts.LOOP_S:g} s",
        acts.loop,
        acts.join_on_hosts,
        worlds=(2, 4),
        stage=stages.cable(rate=None, down_s=_FLAP_S),
    ),
    "slow": Fault(
        "an all_reduce of 40 MB over links of 15 Mb/s",
        acts.reduce_slowly,
        acts.join_on_hosts,
        worlds=(2, 4),
        stage=stages.cable(rate="15mbit", down_s=0),
    ),
    "stuck": Fault(
        "rank 1 lives and does not call the next all_reduce",
        acts.ReduceButFor(VICTIM),
        acts.join,
        r"rank 1 has not called \w+",
        absent=(VICTIM,),
    ),
    "absent": Fault(
        "rank 1 never joins the group", acts.never_join, None, r"ranks \[1\] did not join", absent=(VICTIM,)
    ),
    "numel": Fault("rank 1 reduces 12 elements, the others 10", acts.numel, acts.join, "make different calls"),
    "dtype": Fault("rank 1 reduces int32, the others float32", acts.dtype, acts.join, "make different calls"),
    "reduction": Fault("rank 1 reduces by max, the others by sum", acts.reduction, acts.join, "make different calls"),
    "root": Fault(
        "rank 1 broadcasts from rank 1, the others from rank 0", acts.root, acts.join, "make different calls"
    ),
    "order": Fault(
        'rank 1 exchanges two calls of equal shape; ours with call_check="lines"',
        acts.order,
        acts.join,
        "make different calls",
        options={"call_check": "lines"},
    ),
    "abort": Fault(
        "rank 1 waits for an all_reduce that rank 0 does not call, and another of its threads calls abort()",
        acts.ReduceButFor(0, abort=True),
        acts.join,
        "rank 1 called abort",
        absent=(0,),
        begin_s=0.5,
    ),
    "destroy": Fault(
        "all but rank 0 destroy the group with an all_reduce pending that rank 0 does not call",
        acts.destroy,
        acts.join,
        absent=(0,),
    ),
    "again": Fault(
        f"{acts.GROUPS} times: init_process_group, new_group, destroy_process_group",
        acts.again_and_again,
        None,
        worlds=(2, 4),
    ),
    "store": Fault(
        "the store's server is killed in a loop of all_reduce of 5 s",
        acts.loop,
        acts.join_by_server,
        worlds=(2, 4),
        stage=stages.store_killed,
    ),
    "descriptors": Fault(
        "rank 1 has no descriptors left when it joins the group",
        acts.join_without_descriptors,
        None,
        r"Too many open files|ranks \[1\] did not join",
    ),
    "ports": Fault(
        "no port is free when the group is made", acts.join_without_ports, None, "no TCP port is free", worlds=(1,)
    ),
    "fork": Fault("a forked child of each rank calls all_reduce", acts.fork, acts.join, worlds=(2, 4)),
}
