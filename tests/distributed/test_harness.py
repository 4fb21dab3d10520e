"""What the harness promises to the other tests."""

from __future__ import annotations

import socket
import sys
from math import isnan
from pathlib import Path

import torch
from harness import Rank, free_port, run_ranks
from largest import largest


def body_ports(rank: Rank) -> list[int]:
    ports = []
    for _ in range(100):
        ports.append(free_port())
        with socket.create_server(("127.0.0.1", ports[-1])):
            assert free_port() != ports[-1]
    return ports


def test_ports_are_of_one_process_and_of_nobody_by_chance() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = [set(ports) for ports in run_ranks(body_ports, 3)]
    assert len(set().union(*found)) == sum(len(ports) for ports in found)
    if first > 10304 or last < 65408:  # a block is left
        assert not any(first <= port <= last for ports in found for port in ports)


def body_imported(rank: Rank) -> bool:
    return "rank_imports" in sys.modules


def test_ranks_begin_with_what_the_fork_server_has_imported() -> None:
    assert run_ranks(body_imported, 1) == [True]


def test_the_largest_of_some_figures_is_nan_where_one_is() -> None:
    nan = float("nan")
    assert largest(0.0, torch.tensor(2.0)) == largest([1, 2.0]) == 2.0
    assert all(isnan(largest(values)) for values in ([0.0, nan], (nan, 0.0), {"a": 1.0, "b": nan}.values()))
    assert isnan(largest(0.0, torch.tensor(nan)))
