"""The network of the benchmark lab: what it limits, and that nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from lab_benchmarks import BENCHMARKS, eventually, needs_namespaces, netlab, reaper


def measures(low: float, high: float, measure: Callable[[], float]) -> bool:
    """Whether one of five measurements is within the limits: what queues while a busy machine stalls spoils some."""
    return any(low < measure() < high for _ in range(5))


def namespaces_of(pid: int) -> list[str]:
    return reaper.namespaces(f"{reaper.PREFIX}-{pid}-")


@needs_namespaces
def test_a_lab_stands_inside_its_block_and_is_gone_after_it() -> None:
    with netlab.NetLab(2, rate="100mbit") as lab:
        assert len(namespaces_of(os.getpid())) == 3
        name = lab.run(1, ["cat", "/proc/sys/kernel/hostname"], capture_output=True, text=True, check=True)
        assert name.stdout.strip() == "host1"
    assert namespaces_of(os.getpid()) == []
    lab.close()


@needs_namespaces
def test_a_lab_is_gone_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), netlab.NetLab(2):
        _ = 1 / 0
    assert namespaces_of(os.getpid()) == []


@needs_namespaces
def test_labs_of_one_process_stand_side_by_side() -> None:
    with netlab.NetLab(2), netlab.NetLab(1):
        assert len(namespaces_of(os.getpid())) == 5
    assert namespaces_of(os.getpid()) == []


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_lab_is_gone_after_a_signal(number: signal.Signals) -> None:
    script = (
        f"import signal, sys, time; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        # A shell's background job ignores it, and so would everything below.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from lab.net.netlab import NetLab\n"
        "with NetLab(2) as lab:\n"
        "    inside = lab.popen(0, ['sleep', '600'])\n"
        "    print(inside.pid, flush=True)\n"
        # Not one long sleep: a signal between the look for signals and the system call does not end that.
        "    while True: time.sleep(0.1)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert owner.stdout is not None
        inside = int(owner.stdout.readline())
        assert len(namespaces_of(owner.pid)) == 3
        owner.send_signal(number)
        owner.wait(timeout=60)
        assert eventually(lambda: namespaces_of(owner.pid) == [])
        assert eventually(lambda: reaper.start_time(inside) is None)
    finally:
        owner.kill()
        owner.wait()


@needs_namespaces
def test_a_new_lab_removes_what_a_dead_owner_left() -> None:
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    orphan = f"{reaper.tag_of(gone.pid, 0)}-h0"
    subprocess.run(["ip", "netns", "add", orphan], check=True)
    try:
        with netlab.NetLab(1):
            assert orphan in reaper.namespaces()  # its owner lives
        gone.communicate(b"\n", timeout=30)
        with netlab.NetLab(1):
            assert orphan not in reaper.namespaces()
    finally:
        gone.kill()
        gone.wait()
        reaper.remove(orphan)


@needs_namespaces
def test_links_are_limited() -> None:
    with netlab.NetLab(3, rate="100mbit") as lab:
        assert measures(60e6, 110e6, lambda: lab.measure_rate(0, 1, seconds=0.5))


@needs_namespaces
def test_the_uplink_limits_racks_and_not_their_insides() -> None:
    with netlab.NetLab(4, rate="200mbit", racks=2, uplink="20mbit") as lab:
        assert [lab.rack(host) for host in range(4)] == [0, 0, 1, 1]
        assert measures(10e6, 25e6, lambda: lab.measure_rate(0, 2, seconds=0.5))
        assert measures(50e6, 220e6, lambda: lab.measure_rate(0, 1, seconds=0.5))


def test_hosts_are_dealt_in_blocks_or_one_at_a_time() -> None:
    lab = netlab.NetLab(5, racks=2, interleaved=True)
    assert [lab.rack(host) for host in range(5)] == [0, 1, 0, 1, 0]
    assert [netlab.NetLab(5, racks=2).rack(host) for host in range(5)] == [0, 0, 0, 1, 1]


def test_without_root_the_lab_is_loopback_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with netlab.NetLab(2) as lab:
        assert not lab.emulated
        assert lab.environment(1)["GLOO_SOCKET_IFNAME"] == "lo"
        assert lab.command(1, ["true"]) == ["true"]
        assert lab.describe()["network"] == "loopback"
        assert lab.measure_rate(seconds=0.1, skip_s=0.05) > 0
    assert "not root" in capsys.readouterr().out
    with pytest.raises(netlab.NetLabError, match="not root"):
        netlab.NetLab(2, fallback=False)


@pytest.mark.parametrize(("text", "bits"), [("1gbit", 1e9), ("250mbit", 250e6), ("1.5kbit", 1500.0), ("7bit", 7.0)])
def test_rates(text: str, bits: float) -> None:
    assert netlab.parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "1", "0mbit", "-1gbit", "1gbyte", "fast"])
def test_bad_rates(text: str) -> None:
    with pytest.raises(ValueError, match="rate"):
        netlab.NetLab(2, rate=text)


@pytest.mark.parametrize("name", ["eth0", "txlab-x-1-0-h0", "txlab-1", "other-1-2-3"])
def test_names_of_others_are_never_orphans(name: str) -> None:
    assert reaper.owner_is_alive(name)


@needs_namespaces
def test_links_without_a_limit() -> None:
    with netlab.NetLab(2, rate=None) as lab:
        assert lab.measure_rate(seconds=0.3, skip_s=0.1) > 1e8
        assert lab.describe()["rate"] is None


@needs_namespaces
def test_tcp_is_the_same_on_every_machine() -> None:
    with netlab.NetLab(2) as lab:
        for host in range(2):
            said = lab.run(host, ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"], capture_output=True, text=True)
            assert said.stdout.strip() == lab.describe()["congestion_control"] == "reno"
