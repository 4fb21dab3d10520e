"""Options of "hop" that cannot be, and what options tell."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import torchext


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"graph": "star"}, r'HopOptions.graph must be one of ring-based, .*full; got "star"'),
        ({"order": "both"}, r'HopOptions.order must be one of parallel, serial; got "both"'),
        ({"max_iteration_gap": -1}, r"HopOptions.max_iteration_gap must be in \[0, \d+\], got -1"),
        ({"backup_workers": -1}, r"HopOptions.backup_workers must be in \[0, \d+\], got -1"),
        ({"staleness": -2}, r"HopOptions.staleness must be in \[0, \d+\], got -2"),
        ({"max_jump": -2}, r"HopOptions.max_jump must be in \[0, \d+\], got -2"),
        ({"jump_trigger": 0}, r"HopOptions.jump_trigger must be in \[1, \d+\], got 0"),
        (
            {"jump_trigger": 2, "staleness": 2},
            r"HopOptions.jump_trigger = 2: allowed 1 \(the default\) without max_jump",
        ),
        ({"backup_workers": 1}, r"HopOptions.max_iteration_gap = 0: allowed 1 or more with backup_workers = 1"),
        (
            {"backup_workers": 1, "staleness": 2, "max_iteration_gap": 3},
            r"HopOptions.staleness = 2: allowed 0 with backup_workers = 1",
        ),
        (
            {"max_jump": 4, "max_iteration_gap": 3},
            r"HopOptions.max_jump = 4: allowed 0 without backup_workers or staleness",
        ),
        ({"max_jump": 4, "staleness": 2}, r"HopOptions.max_iteration_gap = 0: allowed 1 or more with max_jump = 4"),
        ({"max_jump": 1, "staleness": 2, "max_iteration_gap": 3}, r"HopOptions.max_jump = 1: allowed 0 .* or 2"),
        ({"notify_ack": True, "max_iteration_gap": 2}, r"HopOptions.max_iteration_gap = 2: allowed 0 with notify_ack"),
        ({"notify_ack": True, "staleness": 2}, r"HopOptions.staleness = 2: allowed 0 with notify_ack"),
        ({"neighbours": []}, r"HopOptions.neighbours must have an entry for each rank, got"),
        ({"neighbours": [[1], [0]], "weights": [[1.0]]}, r"neighbours and weights are both given, for 2 and 1 ranks"),
        (
            {"neighbours": [[1], [0]], "graph": "full"},
            r'HopOptions.graph = "full": allowed without neighbours, which .*; leave one of them out',
        ),
        ({"weights": [[0.5, 0.5], [0.5, 0.5]], "graph": "ring"}, r'HopOptions.graph = "ring": allowed without weights'),
        ({"neighbours": [[1], [2], [1]]}, r"HopOptions.neighbours: .*strongly connected"),
        ({"neighbours": [[1], [2], [3]]}, r"HopOptions.neighbours: .*3"),
        ({"neighbours": [[1], [0, 0]]}, r"HopOptions.neighbours: .*0"),
        ({"weights": [[0.5, 0.5], [0.6, 0.4]]}, r"HopOptions.weights: .*1\.1"),
        ({"weights": [[0.5, 0.5]]}, r"HopOptions.weights: "),
        ({"weights": [[1.0, 0.0], [0.0, 1.0]]}, r"HopOptions.weights: .*strongly connected"),
        ({"weights": [[0.0, 1.0], [1.0, 0.0]]}, r"HopOptions.weights: .*0"),
        ({"weights": [[1.5, -0.5], [-0.5, 1.5]]}, r"HopOptions.weights: .*-0\.5"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        torchext.HopOptions(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_ig": 2}, "^HopOptions: no option max_ig: allowed graph, neighbours, "),
        ({"staleness": "4"}, r"^HopOptions: staleness must be an int, got '4' \(str\)$"),
        ({"graph": 3}, r"^HopOptions: graph must be a str, got 3 \(int\)$"),
        ({"neighbours": 5}, r"^HopOptions: neighbours must be a list of ranks for each rank, or None, got 5 \(int\)$"),
    ],
    ids=str,
)
def test_an_unknown_option_or_type(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        torchext.HopOptions(**options)


def test_options_tell_what_they_are() -> None:
    options = torchext.HopOptions(neighbours=[[1], [0]], staleness=2, timeout=timedelta(seconds=7))
    assert options.neighbours == [[1], [0]] and options.weights is None and options.staleness == 2
    assert torchext.HopOptions().graph == "ring-based"
