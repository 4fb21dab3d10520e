"""A backend's options for the workers that go on, when some are lost or have joined."""

from __future__ import annotations

from typing import Any

import pytest

import torchext

RING = [[0.6, 0.4, 0, 0], [0, 0.6, 0.4, 0], [0, 0, 0.6, 0.4], [0.4, 0, 0, 0.6]]
JUMPS = {"staleness": 3, "max_iteration_gap": 4, "max_jump": 4}
BACKUP = {"backup_workers": 1, "max_iteration_gap": 4}

# Made for four workers; those that go on, by their ranks; what differs then.
FITTED: list[tuple[Any, dict[str, Any], list[int], dict[str, Any]]] = [
    (torchext.PragueOptions, {"order": "atc", "group_size": 4}, [0, 1, 3], {"group_size": 3}),
    (torchext.PragueOptions, {"order": "atc", "group_size": 4}, [2], {"group_size": 0}),
    (torchext.PragueOptions, {"order": "atc", "group_size": 4}, [0, 1, 2, 3, 4], {}),
    (torchext.PragueOptions, {"generator": "random", "seed": 3}, [1], {}),
    (torchext.PragueOptions, {"generator": "static"}, [0, 2, 3], {}),
    (torchext.DSSyncOptions, {"schedule": "random", "order": "atc"}, [2, 3], {}),
    (torchext.DSSyncOptions, {"group_size": 4}, [0, 1, 3], {"group_size": 0}),
    (torchext.DSSyncOptions, {"schedule": "topology", "racks": [0, 1, 0, 1]}, [0, 1, 3], {"racks": [0, 1, 1]}),
    (torchext.HopOptions, {"order": "serial"}, [1, 2, 3], {}),
    (torchext.HopOptions, BACKUP, [0, 2, 3], {}),
    (torchext.HopOptions, BACKUP, [3], {"backup_workers": 0}),
    (torchext.HopOptions, BACKUP | {"max_jump": 4}, [3], {"backup_workers": 0, "max_jump": 0}),
    (torchext.HopOptions, JUMPS, [0, 1, 3], {}),
    (torchext.HopOptions, {"weights": RING}, [0, 1, 2], {"weights": None}),
    (torchext.HopOptions, {"weights": RING}, [0, 1, 2, 3, 4], {"weights": None}),
    (torchext.HopOptions, {"graph": "double-ring"}, [0, 1, 2], {"graph": "ring-based"}),
]


@pytest.mark.parametrize(("kind", "given", "members", "differing"), FITTED)
def test_options_fit_those_that_go_on(
    kind: Any, given: dict[str, Any], members: list[int], differing: dict[str, Any]
) -> None:
    options = kind(**given)
    before = repr(options)
    assert repr(options._fitted(members)) == repr(kind(**given | differing))
    assert repr(options) == before
