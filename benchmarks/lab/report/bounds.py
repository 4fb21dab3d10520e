"""Bounds say what no schedule can beat: the shortest steps of DeAR and of DDP on a link, from its measured rate.

A ring moves ``(n - 1) / n`` of the bytes over every link in a reduce-scatter, as much again in an all-gather, and an
all-reduce is one after the other. The bounds leave out what every message costs, and that layers cannot be cut: a layer
waits for all of its parameters, and its gradient is there when its backward is done. A step may be close to them, not
under them. The pipelines leave out only what messages cost: every layer is a bucket, and the link is free for it.
"""

from __future__ import annotations

from collections.abc import Sequence


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


def dear_pipeline_ms(forward_ms: float, backward_ms: float, half_ms: Sequence[float]) -> float:
    """Returns DeAR's step where each layer is a bucket and nothing but compute and the link takes time.

    Args:
        forward_ms: Of all layers, which take equally long.
        backward_ms: The same.
        half_ms: The reduce-scatter of each layer, first layer first; its all-gather takes as long.
    """
    forward, backward = forward_ms / len(half_ms), backward_ms / len(half_ms)
    gathered = [0.0] * len(half_ms)
    now, begin = 0.0, 0.0
    for _ in range(20):  # settles in a few steps
        begin = now
        for ready in gathered:
            now = max(now, ready) + forward
        link = now
        for half in reversed(half_ms):
            now += backward
            link = max(link, now) + half
        for layer, half in enumerate(half_ms):
            link += half
            gathered[layer] = link
    return now - begin


def ddp_pipeline_ms(forward_ms: float, backward_ms: float, half_ms: Sequence[float]) -> float:
    """Returns DDP's step where each layer is a bucket, as :func:`dear_pipeline_ms`."""
    now = link = forward_ms
    for half in reversed(half_ms):
        now += backward_ms / len(half_ms)
        link = max(link, now) + 2 * half
    return max(now, link)
