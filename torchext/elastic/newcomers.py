"""Newcomers and a running job find each other: :class:`Newcomer` and :class:`NewcomerAdmission`, the job's side.

Their messages are in the job's store, which a worker of another version can reach, or any program. So what stands there
is checked field by field, and what cannot be understood is refused as what does not fit is: it is no error of the
job's.

A newcomer leaves a request with what it trains, and waits. The job's first worker looks
for requests whenever all workers meet for an exact average, refuses those that do not fit, with the reason, and makes
sure that the others still wait: one that was killed meanwhile must not be waited for. Then all workers form a group
with the newcomers in it (``membership.py``). Should the first worker die before it has answered, the next one
asks the newcomer again whether it waits; one that was taken for dead makes a new request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store

from torchext._version import __version__

__all__ = ["Newcomer", "NewcomerAdmission", "Request", "root_of"]

ANSWER = timedelta(seconds=1)  # for a newcomer that waits to say that it does
REQUESTS = 5  # of a newcomer that is slow to say so
REQUESTS_A_LOOK = 1024  # that the job's first worker reads: the count in the store is anybody's

_PREFIX = "torchext/newcomers"
_PAUSE = 0.02


def root_of(store: Store) -> Store:
    """The store below all prefixes: the one that processes outside the group can reach."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


@dataclass(frozen=True)
class Request:
    """What a newcomer brings, which must be what the workers have."""

    backend: str
    options: str
    optimizer: str
    """Its class; of several one after the other."""
    model: list[tuple[str, str, list[int], list[int]]]
    """Name, dtype, shape and strides of each parameter and buffer: averages run over memory, in its order."""
    groups: list[list[str]]
    """The parameters of each of the optimizers' groups, whose state goes by their places; "" for one of others."""
    version: str = __version__

    @classmethod
    def of(cls, backend: str, options: Any, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Request:
        tensors = [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _strides(tensor))
            # Not state_dict(), which has get_extra_state() and lacks buffers that are not persistent.
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        ]
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        groups = [[names.get(id(p), "") for p in group["params"]] for own in optimizers for group in own.param_groups]
        # The timeout may come with init_process_group as well; newcomers take the job's.
        options = repr(options).rpartition(", timeout=")[0] + ")"  # which the job tells
        return cls(backend, options, ", ".join(type(own).__name__ for own in optimizers), tensors, groups)

    @classmethod
    def parse(cls, text: bytes) -> Request:
        """What a newcomer has left, which may be anything.

        Raises:
            ValueError: This version understands no such request; says why, to go on behind "this worker does not fit".
        """
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its request is not JSON ({error})") from error
        if not isinstance(given, dict):
            raise ValueError(f"its request is {_cut(given)}, where an object is expected")
        version = given.get("version")
        if version != __version__:
            raise ValueError(f"its version is {_cut(version)}, the job's is {__version__!r}")
        if unlike := sorted(_FORMS.keys() ^ given.keys()):
            raise ValueError(f"its request has other fields than the job's: {', '.join(map(_cut, unlike))}")
        for name, is_formed in _FORMS.items():
            if not is_formed(given[name]):
                raise ValueError(f"its request has {_cut(given[name])} for {name}")
        return cls(**given)

    def difference(self, job: Request) -> str:
        """Why a worker with this request cannot join ``job``; empty if it can."""
        for what in ("version", "backend", "options", "optimizer"):
            its, ours = getattr(self, what), getattr(job, what)
            if its != ours:
                return f"its {what} is {its}, the job's is {ours}"
        for its, ours in zip(self.model, job.model, strict=False):
            if list(its) != list(ours):
                return f"its model has {_tensor(its)} where the job's has {_tensor(ours)}"
        if len(self.model) != len(job.model):
            return f"its model has {len(self.model)} tensors, the job's has {len(job.model)}"
        its, ours = ([len(group) for group in request.groups] for request in (self, job))
        if its != ours:
            return f"its optimizer has groups of {_listed(its)} parameters, the job's has groups of {_listed(ours)}"
        for number, groups in enumerate(zip(self.groups, job.groups, strict=True)):
            for place, (its, ours) in enumerate(zip(*groups, strict=True)):
                if its != ours:
                    where = f"at place {place} of group {number}"
                    return f"its optimizer has {_parameter(its)} {where}, where the job's has {_parameter(ours)}"
        return ""


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(is_formed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_formed, value))


def _is_tensor(entry: Any) -> bool:
    forms = (_is_text, _is_text, _are_sizes, _are_sizes)
    return isinstance(entry, list) and len(entry) == len(forms) and all(f(v) for f, v in zip(forms, entry, strict=True))


_are_sizes = _list_of(lambda value: isinstance(value, int))

# The fields of a Request as they stand in JSON.
_FORMS: dict[str, Callable[[Any], bool]] = {
    "backend": _is_text,
    "options": _is_text,
    "optimizer": _is_text,
    "model": _list_of(_is_tensor),
    "groups": _list_of(_list_of(_is_text)),
    "version": _is_text,
}


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))


def _parameter(name: str) -> str:
    return name or "a parameter that is not the model's"


def _strides(tensor: torch.Tensor) -> list[int]:
    # A dimension of one element is nowhere in memory's order, whatever stride it has.
    return [stride if size > 1 else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def _tensor(entry: Any) -> str:
    name, dtype, shape, strides = entry
    return f"{name} ({dtype}, {tuple(shape)}, strides {tuple(strides)})"


class NewcomerAdmission:
    """The job's side; only its first worker looks for requests."""

    def __init__(self, store: Store, job: Request) -> None:
        self._store = PrefixStore(_PREFIX, root_of(store))
        self._job = job
        self._first = 1  # those below are done,
        self._done: set[int] = set()  # and these

    def newcomers(self) -> list[int]:
        """The requests of those that fit and wait, which must be answered with :meth:`admit`."""
        waiting = {}
        count = self._store.add("count", 0)
        for number in range(self._first, min(count, self._first + REQUESTS_A_LOOK - 1) + 1):
            if number in self._done or not self._store.check([f"{number}/request"]):
                continue
            self._done.add(number)
            call = self._calls(number) + 1
            if call > 1 and self._is_settled(number, call - 1):
                continue
            difference = self._difference(number)
            self._store.set(f"{number}/heard/{call}", difference)
            if not difference:
                waiting[number] = call
        while self._first in self._done:
            self._done.remove(self._first)
            self._first += 1
        return [number for number, call in waiting.items() if self._waits(number, call)]

    def _difference(self, number: int) -> str:
        """Why the newcomer cannot join; empty if it can."""
        try:
            return Request.parse(self._store.get(f"{number}/request")).difference(self._job)
        except ValueError as error:
            return str(error)

    def admit(self, number: int, answer: dict[str, Any]) -> None:
        """Tells a newcomer where the workers' keys are."""
        self._store.set(f"{number}/answer", json.dumps(answer))

    def _calls(self, number: int) -> int:
        """How many first workers have heard a request; more than one if they died before they answered."""
        call = 0
        while self._store.check([f"{number}/heard/{call + 1}"]):
            call += 1
        return call

    def _is_settled(self, number: int, call: int) -> bool:
        refused = bool(self._store.get(f"{number}/heard/{call}"))
        return refused or self._store.check([f"{number}/answer"])

    def _waits(self, number: int, call: int) -> bool:
        try:
            self._store.wait([f"{number}/here/{call}"], ANSWER)
        except RuntimeError:  # DistStoreError, or what a FileStore raises
            self._store.set(f"{number}/answer", json.dumps(None))  # one that was only slow asks anew
            return False
        return True


class Newcomer:
    """The newcomer's side.

    Args:
        store: The job's.
        backend: Name of the job's backend.
        options: The job's, as each of its workers passed them.
        timeout: For the workers to come to an exact average.
    """

    def __init__(self, store: Store, backend: str, options: Any, timeout: timedelta) -> None:
        self.store = store
        self.backend = backend
        self.options = options
        self.group: ProcessGroup | None = None  # that of one, in which the model is built
        self._timeout = timeout

    def ask(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[int, dict[str, Any]]:
        """Waits until the workers let this one in; returns the request's number and the answer of the job's side.

        Raises:
            ValueError: This worker trains something else; says what differs.
            torch.distributed.DistStoreError: No worker answered in time.
        """
        store = PrefixStore(_PREFIX, root_of(self.store))
        request = Request.of(self.backend, self.options, module, optimizers)
        for _ in range(REQUESTS):
            number = store.add("count", 1)
            store.set(f"{number}/request", json.dumps(asdict(request)))
            answer = self._answer(store, number)
            if answer is not None:
                return number, answer
        raise dist.DistStoreError(
            f"torchext.join_running_job: the workers heard this one {REQUESTS} times, and each time it took more than"
            f" {ANSWER.total_seconds():g} s to say that it still waits; is its way to the store so slow?"
        )

    def _answer(self, store: Store, number: int) -> dict[str, Any] | None:
        """To a request; None: this one was thought dead."""
        limit, call = self._timeout, 1
        while self._wait(store, [f"{number}/answer", f"{number}/heard/{call}"], limit) == 1:
            difference = store.get(f"{number}/heard/{call}").decode()
            if difference:
                raise ValueError(f"torchext.join_running_job: this worker does not fit the running job: {difference}")
            store.set(f"{number}/here/{call}", "1")
            limit = max(self._timeout, timedelta(seconds=30))
            call += 1  # should the worker that has heard this die, the next one calls
        answer: dict[str, Any] | None = json.loads(store.get(f"{number}/answer"))
        return answer

    def _wait(self, store: Store, keys: list[str], limit: timedelta) -> int:
        """The place of the first key that is there."""
        # Short waits: one inside the store cannot be interrupted from the keyboard.
        deadline = time.monotonic() + limit.total_seconds()
        while True:
            for place, key in enumerate(keys):
                if store.check([key]):
                    return place
            if time.monotonic() > deadline:
                raise dist.DistStoreError(
                    f"torchext.join_running_job: no worker let this one in within {limit.total_seconds():g} s. They do "
                    "when all"
                    " meet, in synchronize() or averaged(); were they attached with on_peer_failure='continue', and is"
                    " this the job's store?"
                )
            time.sleep(_PAUSE)
