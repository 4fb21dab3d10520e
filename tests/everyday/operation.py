"""One operation of a training loop, as data, and the table of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from setups import EXACT, Setup


@dataclass(frozen=True)
class Op:
    name: str
    options: tuple[tuple[str, str], ...] = ()

    def get(self, name: str, default: str = "") -> str:
        return dict(self.options).get(name, default)

    def plainer(self) -> Iterator[Op]:
        """Itself with one option less."""
        for k in range(len(self.options)):
            yield Op(self.name, self.options[:k] + self.options[k + 1 :])


@dataclass(frozen=True)
class Operation:
    lines: Callable[[Setup, Op], list[str]]
    keeps: Callable[[Op], int]
    slot: str  # where in a step it stands
    needs: Callable[[Setup], bool] = lambda setup: True

    def features(self, op: Op) -> set[str]:
        return {op.name, *(f"{op.name} {name}={value}" for name, value in op.options)}


OPERATIONS: dict[str, Operation] = {}


def text(name: str, slot: str, source: str, keeps: int = EXACT, needs: Callable[[Setup], bool] | None = None) -> None:
    """An operation that is always the same lines."""
    lines = source.strip("\n").split("\n")
    OPERATIONS[name] = Operation(lambda setup, op: list(lines), lambda op: keeps, slot, needs or (lambda setup: True))
