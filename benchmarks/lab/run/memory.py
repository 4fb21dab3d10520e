"""Memory of a process, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


def own_bytes() -> int:
    """Returns the bytes of this process's pages that no other process shares."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def peak_bytes() -> int:
    """Returns the largest resident size since ``reset_peak``, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    """Starts a new peak."""
    Path("/proc/self/clear_refs").write_text("5")
