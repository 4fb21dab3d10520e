"""The backend ``torchext``: checkpoints across the decision, and calls between it and the switch."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from harness import Rank
from largest import largest
from rows import values_in_turn
from test_live_choice import BEFORE, EXACT, adamw, at_once, chosen
from test_live_decision import Pair, train_on

SAVED = (3, BEFORE, BEFORE + 4)  # in plain DDP's steps; decided and not yet switched; by dear
LAST = BEFORE + 8


def checkpoint(pair: Pair) -> dict[str, Any]:
    """Collective."""
    with pair.sync.averaged() as module:
        told = {"model": module.state_dict(), "optimizer": pair.nets[0][1].state_dict(), "sync": pair.sync.state_dict()}
        return copy.deepcopy(told)


def restore(pair: Pair, saved: dict[str, Any]) -> None:
    saved, again = copy.deepcopy(saved), copy.deepcopy(saved)  # an optimizer goes on with the tensors that it loads
    pair.ddp.module.load_state_dict(saved["model"])
    pair.nets[0][1].load_state_dict(saved["optimizer"])
    pair.sync.load_state_dict(saved["sync"])
    pair.twin.load_state_dict(again["model"])
    pair.nets[1][1].load_state_dict(again["optimizer"])


def body_checkpoints(rank: Rank, form: str) -> dict[str, float]:
    rank.init("torchext", pg_options=at_once(form))
    worst = {}
    with chosen("dear", form):
        pair, saved = Pair(adamw), {}
        for step in range(LAST):
            if step in SAVED:
                saved[step] = checkpoint(pair)
                assert saved[step]["sync"] == {"version": 1, "steps": step}
            train_on(pair, step)
        worst["one run"] = pair.apart()
        model = copy.deepcopy(pair.ddp.module.state_dict())
        pair.sync.detach()
        for at in SAVED:
            for taken in (0, BEFORE, BEFORE + 2):  # steps of the run that loads it
                other = Pair(adamw)
                for step in range(taken):
                    train_on(other, 50 + step)
                restore(other, saved[at])
                for step in range(at, LAST):
                    train_on(other, step)
                own = f"of {at} after {taken}"
                worst[own] = other.apart()
                assert other.sync.stats()["steps"] == LAST
                resumed = other.ddp.module.state_dict()
                worst[f"{own}, beside the first run"] = largest(
                    float((resumed[name] - value).abs().max()) for name, value in model.items()
                )
                other.sync.detach()
    dist.destroy_process_group()
    return worst


FORMS = ("replicated", "sharded")


def test_a_checkpoint_goes_on_in_another_phase() -> None:
    for form, ranks in values_in_turn({form: (body_checkpoints, form) for form in FORMS}, 2, deadline=240).items():
        for worst in ranks:
            assert largest(worst.values()) < EXACT, (form, worst)


def body_between(rank: Rank, form: str) -> list[float]:
    rank.init("torchext", pg_options=at_once(form))
    worst = []
    with chosen("dear", form):
        for detaches in (False, True):
            pair = Pair(adamw)
            for step in range(BEFORE):
                train_on(pair, step)
            sync = pair.choice()
            assert sync.stats() == {"steps": BEFORE, "mode": "allreduce", "decided": True}
            assert (sync.plan is not None, sync.dear) == (True, None)
            sync.synchronize()
            sync.wait()
            assert float(sync.clip_grad_norm_(float("inf"))) > 0
            if detaches:
                worst.append(pair.apart())
                sync.detach()
            for step in range(BEFORE, BEFORE + 4):
                train_on(pair, step)
            if not detaches:
                assert sync.stats()["mode"] == "dear"
                worst.append(pair.apart())
                sync.detach()
            worst.append(pair.apart_now())
    dist.destroy_process_group()
    return worst


def test_calls_between_decision_and_switch() -> None:
    for form, ranks in values_in_turn({form: (body_between, form) for form in FORMS}, 2).items():
        for worst in ranks:
            assert largest(worst) < EXACT, (form, worst)
