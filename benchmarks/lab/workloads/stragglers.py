"""Straggler patterns of the benchmarks say which worker is slow, and when.

A pattern is data: the factor of a step depends on (seed, rank, step) alone, so that both contenders of a
comparison, in every repeat, meet exactly the same slow steps.
"""

from __future__ import annotations

from dataclasses import dataclass

_MASK = (1 << 64) - 1


def _uniform(seed: int, rank: int, step: int) -> float:
    """Returns a number in [0, 1) that looks independent for each triple (three rounds of splitmix64)."""
    state = seed & _MASK
    for word in (rank, step, 0x9E3779B97F4A7C15):
        state = (state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return (state >> 11) / float(1 << 53)


@dataclass(frozen=True)
class Stragglers:
    """How many times longer than nominal the compute of a step takes.

    Attributes:
        name: As ``parse`` reads it.
        factor_when_slow: At least 1.
        slow_rank: The one that is always slow, or None.
        probability: Of any rank's step being slow.
        seed: Of the random pattern.
    """

    name: str
    factor_when_slow: float = 1.0
    slow_rank: int | None = None
    probability: float = 0.0
    seed: int = 0

    def factor(self, rank: int, step: int) -> float:
        """Returns the factor of ``step`` on ``rank``."""
        if rank == self.slow_rank:
            return self.factor_when_slow
        if self.probability and _uniform(self.seed, rank, step) < self.probability:
            return self.factor_when_slow
        return 1.0


def parse(text: str, world_size: int, *, seed: int = 0) -> Stragglers:
    """Reads a pattern.

    Args:
        text: ``none``; ``one:5`` (the last rank is always 5 times slower: rank 0 carries the store and the
            generator in every run, slow or not); ``random:6`` (each step of each rank is 6 times slower with
            probability 1/n).
        world_size: n.
        seed: Of the random pattern.
    """
    kind, _, factor_text = text.partition(":")
    if text == "none":
        return Stragglers("none")
    try:
        factor = float(factor_text)
    except ValueError:
        factor = 0.0
    if kind not in ("one", "random") or factor < 1:
        raise ValueError(f"stragglers: {text!r} is neither none, nor one:K or random:K with a factor K >= 1")
    if kind == "one":
        return Stragglers(text, factor, slow_rank=world_size - 1)
    return Stragglers(text, factor, probability=1 / world_size, seed=seed)
