"""Runs a function on every host of a network lab."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Rank, run_ranks
from namespaces import enter

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from lab.net import netlab  # noqa: E402

__all__ = ["netlab", "run_on"]

DEADLINE = 90.0


def run_on(lab: netlab.NetLab, body: Callable[..., Any], *args: Any) -> list[Any]:
    """What the ranks of `body` return, one on each host; they form their group by `rank.init`."""
    hosts = [(lab.namespace(host), f"host{host}", lab.environment(host)) for host in range(lab.hosts)]
    return run_ranks(_on_host, lab.hosts, hosts, body, args, deadline=DEADLINE)


def _on_host(
    rank: Rank, hosts: list[tuple[str, str, dict[str, str]]], body: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    namespace, name, environment = hosts[rank.rank]
    enter(namespace, name)
    os.environ.update(environment)
    return body(rank, *args)
