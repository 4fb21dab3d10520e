"""Options of "dssync" that are refused, alone or for the size of the group, and groups that have their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import torchext


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"group_size": 1}, r"group_size must be 0 or at least 2, got 1"),
        ({"group_size": -2}, r"group_size must be in \[0, \d+\], got -2"),
        ({"schedule": "rack"}, r'schedule must be one of auto, grid, random, topology; got "rack"'),
        ({"order": "both"}, r'order must be one of atc, cta; got "both"'),
        ({"sync_period": 0}, r"sync_period must be in \[1, \d+\], got 0"),
        ({"seed": -1}, r"seed must be in \[0, \d+\], got -1"),
        ({"schedule": "grid", "racks": [0, 1]}, r'racks is for schedule "topology", got "grid"'),
        ({"schedule": "topology", "racks": [0, 1], "host_bandwidth": -1.0}, r"must be 0 or more and finite, got -1"),
        ({"schedule": "topology", "racks": [0, 1], "host_bandwidth": 1.0}, r"given together.*got 1 and 0"),
        ({"schedule": "topology", "host_bandwidth": 1.0, "uplink_bandwidth": 1.0}, r"need racks"),
    ],
    ids=str,
)
def test_an_option_out_of_range(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        torchext.DSSyncOptions(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"group_size": 4}, r"group_size must be at most 1, the group's ranks, got 4"),
        ({"schedule": "topology", "racks": [0, 1]}, r"an entry for each of the 1 ranks, got 2"),
    ],
    ids=str,
)
def test_an_option_that_does_not_fit_the_group(options: dict[str, Any], text: str) -> None:
    kind = torchext.DSSyncOptions(**options)
    with pytest.raises(ValueError, match=text):
        dist.init_process_group("dssync", store=HashStore(), rank=0, world_size=1, pg_options=kind)
    assert not dist.is_initialized()


def test_a_group_beside_the_world_has_options_of_its_own() -> None:
    options = torchext.DSSyncOptions(racks=[3])
    dist.init_process_group("dssync", store=HashStore(), rank=0, world_size=1, pg_options=options)
    try:
        child = dist.new_group([0], backend="dssync")
        assert torchext.backend_of(child).options.racks == []
        assert list(torchext.backend_of().options.racks) == [3]
    finally:
        dist.destroy_process_group()
