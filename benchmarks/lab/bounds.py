"""What no schedule can beat: the shortest steps of DeAR and of DDP on a link, from its measured rate.

A ring moves ``(n - 1) / n`` of the bytes over every link in a reduce-scatter, as much again in an all-gather, and an
all-reduce is one after the other. The bounds leave out what every message costs and the layers between whose gradients
communication cannot start; a step may be close to them, not under them.
"""

from __future__ import annotations


def reduce_scatter_ms(world_size: int, parameter_bytes: float, bits_per_second: float) -> float:
    """Returns the time of one reduce-scatter, or of one all-gather, of ``parameter_bytes`` over links of that rate."""
    if world_size < 1 or parameter_bytes < 0 or bits_per_second <= 0:
        raise ValueError(f"bounds: no link is like that: {world_size=}, {parameter_bytes=}, {bits_per_second=}")
    return (world_size - 1) / world_size * parameter_bytes * 8 / bits_per_second * 1e3


def dear_step_ms(forward_ms: float, backward_ms: float, half_ms: float) -> float:
    """Returns DeAR's bound: all-gather under forward and reduce-scatter under backward, ``half_ms`` each."""
    return max(forward_ms, half_ms) + max(backward_ms, half_ms)


def ddp_step_ms(forward_ms: float, backward_ms: float, half_ms: float) -> float:
    """Returns DDP's bound: the whole all-reduce, ``2 * half_ms``, under backward alone."""
    return forward_ms + max(backward_ms, 2 * half_ms)
