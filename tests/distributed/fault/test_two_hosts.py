"""torchrun across two "hosts": two network namespaces joined by a cable (a veth pair), each with its own address."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

from processes import installed, require_averages, started, wait_all  # noqa: E402

# Not imported, which would take a second and more of each process of pytest.
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed")

DEADLINE = 240.0  # seconds for one run
PORT = 29400  # free for certain: a fresh namespace has all ports to itself


class Host(NamedTuple):
    namespace: str
    device: str
    address: str


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("the ip command (iproute2) is not installed")
    # The process id keeps two test runs on one machine apart; device names may have 15 characters.
    names = [f"tx{os.getpid()}{side}" for side in "ab"]
    pair = [Host(name, name, f"10.77.0.{number}") for number, name in enumerate(names, start=1)]
    with contextlib.ExitStack() as cleanup:
        for host in pair:
            try:
                ip("netns", "add", host.namespace)
            except RuntimeError as error:
                # Root inside a container without the privilege to make namespaces.
                pytest.skip(f"cannot make network namespaces: {error}")
            # Deleting a namespace deletes its end of the cable, and with it the other end.
            cleanup.callback(ip, "netns", "del", host.namespace)
        first, second = pair
        ip(*f"-n {first.namespace} link add {first.device} type veth peer name {second.device}".split())
        ip(*f"-n {first.namespace} link set {second.device} netns {second.namespace}".split())
        for host in pair:
            ip(*f"-n {host.namespace} addr add {host.address}/24 dev {host.device}".split())
            ip(*f"-n {host.namespace} link set {host.device} up".split())
            ip(*f"-n {host.namespace} link set lo up".split())
        yield pair


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), "prague"])
def test_trains_across_two_hosts(backend: str, hosts: list[Host], tmp_path: Path) -> None:
    # Asked of the interpreter that will run the script: this one may see the source folder, where nothing is built.
    if backend != "gloo" and not installed("torchext"):
        pytest.skip("torchext is not installed")
    log_file = tmp_path / "log.json"
    with contextlib.ExitStack() as stack:
        processes = []
        outputs = []
        for number, host in enumerate(hosts):
            outputs.append(stack.enter_context((tmp_path / f"host{number}.txt").open("w+")))
            command = ["ip", "netns", "exec", host.namespace, sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=two-hosts"]
            command += [f"--rdzv-endpoint={hosts[0].address}:{PORT}"]
            # Both namespaces share one host name, so torchrun cannot tell from it where the store lives.
            command += [f"--rdzv-conf=is_host={number == 0}", f"--local-addr={host.address}"]
            command += [str(EXAMPLES / "train_digits.py"), f"--backend={backend}", "--epochs=6"]
            command += [f"--log-file={log_file}", "--min-accuracy=0.95"]
            env = {"GLOO_SOCKET_IFNAME": host.device, "OMP_NUM_THREADS": "1"}
            processes.append(stack.enter_context(started(command, env=env, output=outputs[-1])))
        states = wait_all(processes, deadline=DEADLINE)
        texts = "\n".join((tmp_path / f"host{number}.txt").read_text() for number in range(2))
    assert states == [0, 0], f"exit statuses {states}:\n{texts}"
    log = json.loads(log_file.read_text())
    assert log["settings"]["world_size"] == 2
    require_averages(log["stats"])
    assert log["accuracy"] >= 0.95
