"""What stands in a job's store for a newcomer: anybody's, so that anything may come."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore

from torchext.elastic.newcomers import REQUESTS_A_LOOK, NewcomerAdmission, Request
from torchext.options import PragueOptions


def request_of(module: nn.Module) -> Request:
    return Request.of("prague", PragueOptions(), module, [torch.optim.SGD(module.parameters(), lr=0.1)])


JOB = request_of(nn.Linear(3, 2))
GOOD = json.loads(json.dumps(asdict(JOB)))


def changed(**fields: Any) -> bytes:
    return json.dumps(GOOD | fields).encode()


def test_what_another_worker_has_written() -> None:
    assert Request.parse(changed()).difference(JOB) == ""
    assert "optimizer is Adam" in Request.parse(changed(optimizer="Adam")).difference(JOB)


TENSOR = ["weight", "float32", [2, 3], [3, 1]]
STRANGE: list[tuple[bytes, str]] = [
    (b"", "not JSON"),
    (b"hello", "not JSON"),
    (b"\xff\xfe\x00", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"[1]", r"request is \[1\]"),
    (b"null", "request is None"),
    (b"{}", "its version is None"),
    (changed(version="9.9"), "its version is '9.9'"),
    (changed(version=[9]), r"its version is \[9\]"),
    (changed(version="9.9", compression="none"), "its version is '9.9'"),
    (changed(compression="none"), "other fields than the job's: 'compression'"),
    (json.dumps({k: v for k, v in GOOD.items() if k != "groups"}).encode(), "other fields than the job's: 'groups'"),
    (changed(backend=3), "3 for backend"),
    (changed(options=None), "None for options"),
    (changed(model=[1, 2]), r"\[1, 2\] for model"),
    (changed(model={}), r"\{\} for model"),
    (changed(model=[TENSOR[:3]]), "for model"),
    (changed(model=[[*TENSOR[:3], "31"]]), "for model"),
    (changed(model=[[*TENSOR[:3], [1.5]]]), "for model"),
    (changed(groups=5), "5 for groups"),
    (changed(groups=["weight"]), r"\['weight'\] for groups"),
    (changed(groups=[[1]]), r"\[\[1\]\] for groups"),
    (changed(optimizer=["x" * 10**6]), r"x\.\.\. for optimizer"),
]


@pytest.mark.parametrize(("text", "why"), STRANGE, ids=range(len(STRANGE)))
def test_what_is_no_request(text: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Request.parse(text)
    root = HashStore()
    store, admission = PrefixStore("torchext/newcomers", root), NewcomerAdmission(root, JOB)
    number = store.add("count", 1)
    store.set(f"{number}/request", text.decode("latin-1"))
    assert admission.newcomers() == []
    assert store.get(f"{number}/heard/1")  # refused, with the reason
    # The next one is looked at as ever.
    number = store.add("count", 1)
    store.set(f"{number}/request", changed().decode())
    store.set(f"{number}/here/1", "1")
    assert admission.newcomers() == [number]


def test_any_count() -> None:
    root = HashStore()
    store, admission = PrefixStore("torchext/newcomers", root), NewcomerAdmission(root, JOB)
    store.add("count", 2**40)
    store.set(f"{REQUESTS_A_LOOK}/request", changed().decode())
    store.set(f"{REQUESTS_A_LOOK}/here/1", "1")
    assert admission.newcomers() == [REQUESTS_A_LOOK]
