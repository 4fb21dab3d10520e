"""Seeds of generators that are made for one purpose each, and must not draw alike."""

from __future__ import annotations

__all__ = ["mixed_seed"]

_ALL = 2**64 - 1


def mixed_seed(*numbers: int) -> int:
    """A seed, 0..2^64 - 1, of which all bits depend on all numbers and on their order: splitmix64 after each.

    Torch's generator for the CPU begins with the lower 32 bits only, so sums and products of the numbers would not do.
    """
    state = 0
    for number in numbers:
        state = (state ^ number & _ALL) + 0x9E3779B97F4A7C15 & _ALL
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _ALL
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _ALL
        state ^= state >> 31
    return state
