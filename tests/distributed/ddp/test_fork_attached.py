"""A forked child of a process with an attached model: it ends as any other, and what would talk to peers raises."""

from __future__ import annotations

from pathlib import Path

import pytest
from case_choice import quick_on
from interpreters import run_script

pytestmark = pytest.mark.sanitize

SCRIPT = """
import datetime, gc, os, signal, sys, time
import torch, torch.distributed as dist
import torchext

backend, folder = sys.argv[1:]
rank = int(os.environ["RANK"])
dist.init_process_group(backend, store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=20))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
sync = torchext.attach(model, optimizer)

def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

def averaged():
    with sync.averaged():
        pass

def collect():
    global model, optimizer, sync
    del model, optimizer, sync
    gc.collect()
    dist.destroy_process_group()
    gc.collect()

def another():
    dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.FileStore(folder + "/children", 2), rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=10))
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()

def forward():
    model(torch.ones(2, 4))

if backend == "prague":
    torchext.backend_of().partial_all_reduce(torch.ones(3), [0, 1]).wait()
for _ in range(3):
    step()
sync.synchronize()
for acts in ((forward, step, averaged, sync.synchronize, sync.detach), (collect,), (another,)):
    child = os.fork()
    if child == 0:
        for act in acts:
            try:
                act()
            except BaseException as error:
                explained = "cannot be used in its forked child" in str(error)
                print(act.__name__, type(error).__name__, explained, flush=True)
            else:
                print(act.__name__, "returned", flush=True)
        sys.exit(0)
    ended, limit = (0, 0), time.monotonic() + 20
    while not ended[0] and time.monotonic() < limit:
        ended = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
    print("child", f"ended with {ended[1]}" if ended[0] else "hangs", flush=True)
for _ in range(3):
    step()
sync.detach()
dist.destroy_process_group()
print("parent ended", flush=True)
"""


@pytest.mark.parametrize("backend", quick_on("prague", "dear"))
def test_a_forked_child_ends_and_its_parent_trains_on(backend: str, tmp_path: Path) -> None:
    for ended in run_script(tmp_path, SCRIPT, 2, backend, str(tmp_path)):
        assert ended.code == 0, ended
        said = [line for line in ended.out.splitlines() if line]
        refused = [f"{name} DistBackendError True" for name in ("averaged", "synchronize", "detach")]
        if backend == "torchext":  # plain DDP still, which has nothing to synchronize
            refused = [f"{name} returned" for name in ("averaged", "synchronize", "detach")]
        acted = ["forward returned", "step DistBackendError True", *refused]
        over = "child ended with 0"
        alone = ["collect returned", over, "another returned", over]  # a group of the children, beside the model
        assert said == [*acted, over, *alone, "parent ended"], ended
