"""The type of the fixture `python`: runs a fresh interpreter with the arguments given."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Python = Callable[..., "subprocess.CompletedProcess[str]"]
