"""The benchmark lab itself: what a figure rests on. No bound on time is tight; a busy machine must not fail them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from lab import emulated, launch, netlab, reaper, results, stragglers, training  # noqa: E402

needs_namespaces = pytest.mark.skipif(
    netlab.missing() is not None, reason=f"no network namespaces can be made: {netlab.missing()}"
)


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def measures(low: float, high: float, measure: Callable[[], float]) -> bool:
    """Whether one of five measurements is within the limits: what queues while a busy machine stalls spoils some."""
    return any(low < measure() < high for _ in range(5))


def namespaces_of(pid: int) -> list[str]:
    return reaper.namespaces(f"{reaper.PREFIX}-{pid}-")


# --- the network -------------------------------------------------------------------------------------------------


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
        "from lab.netlab import NetLab\n"
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


# --- emulated compute --------------------------------------------------------------------------------------------


def small_model(forward_ms: float = 0.0, backward_ms: float = 0.0) -> emulated.EmulatedModel:
    return emulated.EmulatedModel(layers=3, parameter_bytes=4000, forward_ms=forward_ms, backward_ms=backward_ms)


def test_a_step_takes_the_time_it_should() -> None:
    overhead = emulated.measure_overhead(small_model(20.0, 40.0), steps=5)
    assert 59.0 < overhead.step_ms < 400.0
    assert overhead.target_ms == 60.0


def test_a_straggler_takes_its_factor() -> None:
    model = small_model(10.0, 10.0)
    model.clock.factor = 3.0
    assert emulated.measure_overhead(model, steps=3).step_ms > 59.0


def test_gradients_flow_and_a_step_moves_the_parameters() -> None:
    model = small_model()
    model.set_gradient(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.zeros(1)).sum().backward()
        optimizer.step()
    assert sum(weight.numel() for weight in model.parameters()) == 1000
    for weight in model.parameters():
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, -0.15).detach())


def test_gradients_accumulate() -> None:
    model = small_model()
    for _ in range(4):
        model(torch.zeros(1)).sum().backward()
    for weight in model.parameters():
        assert weight.grad is not None
        assert (weight.grad == 4).all()


def test_a_gradient_that_was_written_into_is_whole_again() -> None:
    model = small_model()
    for _ in range(3):
        model.zero_grad()
        model(torch.zeros(1)).sum().backward()
        for weight in model.parameters():
            assert weight.grad is not None
            assert (weight.grad == 1).all()
            weight.grad.fill_(7)  # as DDP does with its average


@pytest.mark.parametrize("growth", [0.0, 1.0, 5.0])
def test_layer_sizes_add_up(growth: float) -> None:
    sizes = emulated.layer_sizes(7, 100_003, growth)
    assert sum(sizes) == 100_003
    assert sizes[-1] / sizes[0] == pytest.approx(1 + growth, rel=0.01)


def test_bad_models_are_refused() -> None:
    with pytest.raises(ValueError, match="layers=0"):
        emulated.EmulatedModel(layers=0, parameter_bytes=4, forward_ms=1, backward_ms=1)


# --- stragglers --------------------------------------------------------------------------------------------------


def test_one_straggler() -> None:
    pattern = stragglers.parse("one:5", 8)
    assert [pattern.factor(rank, 3) for rank in range(8)] == [1.0] * 7 + [5.0]


def test_random_stragglers_have_the_right_share_and_repeat() -> None:
    pattern = stragglers.parse("random:6", 8, seed=3)
    factors = [[pattern.factor(rank, step) for step in range(4000)] for rank in range(8)]
    assert {factor for row in factors for factor in row} == {1.0, 6.0}
    for row in factors:  # exact numbers, not luck: the pattern is a function of the seed
        assert sum(factor == 6.0 for factor in row) / len(row) == pytest.approx(1 / 8, abs=0.02)
    assert factors[0] != factors[1]
    again = stragglers.parse("random:6", 8, seed=3)
    assert factors[5] == [again.factor(5, step) for step in range(4000)]
    other = stragglers.parse("random:6", 8, seed=4)
    assert factors[5] != [other.factor(5, step) for step in range(4000)]


@pytest.mark.parametrize("text", ["", "two:5", "one", "one:x", "one:0.5", "random"])
def test_bad_patterns(text: str) -> None:
    with pytest.raises(ValueError, match="stragglers"):
        stragglers.parse(text, 4)


# --- results -----------------------------------------------------------------------------------------------------


def test_ratios_are_paired() -> None:
    ratio = results.paired_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert ratio.values == (2.0, 3.0, 1.0)
    assert (ratio.median, min(ratio.values), max(ratio.values)) == (2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="paired"):
        results.paired_ratio([1.0], [1.0, 2.0])


def test_contenders_run_in_turn() -> None:
    order: list[str] = []
    values = results.in_turn({name: (lambda name=name: order.append(name)) for name in "AB"}, 3)
    assert order == ["A", "B"] * 3
    assert {name: len(got) for name, got in values.items()} == {"A": 3, "B": 3}


def test_nothing_is_timed_unchecked() -> None:
    checks = results.Checks()
    with pytest.raises(results.UncheckedError, match="without a check"):
        checks.require("ours")
    for error in (0.2, float("nan")):
        with pytest.raises(results.UncheckedError, match="wrong"):
            checks.confirm("ours", error, 0.1)
    checks.confirm("ours", 0.05, 0.1)
    checks.require("ours")


@pytest.mark.parametrize(("higher_is_better", "ratio"), [(True, 2.0), (False, 0.5)])
def test_a_report_is_written(tmp_path: Path, higher_is_better: bool, ratio: float) -> None:
    report = results.Report(
        "name", script="python x.py", unit="ms", reference="a", higher_is_better=higher_is_better, conditions={"n": 2}
    )
    figures = {"a": [1.0, 2.0], "b": [2.0, 4.0]}
    good = {"error": 0.0, "tolerance": 0.1}
    with pytest.raises(results.UncheckedError, match="no check of b"):
        report.add("case", figures, checks={"a": good})
    report.add("case", figures, checks={"a": good, "b": good}, target=1.5)
    path = report.write(tmp_path)
    written = json.loads(path.read_text())
    assert written["cases"][0]["ratios"]["b"]["values"] == [ratio, ratio]
    assert {"cpu", "cores", "torch", "date", "load_average", "commit"} <= written["machine"].keys()
    assert (tmp_path / "name.png").stat().st_size > 1000


def test_progress_counts_parts_of_a_step() -> None:
    ends = [10.0, 11.0, 13.0]
    assert [training.progress(ends, moment) for moment in (10.0, 10.5, 11.0, 12.0, 13.0)] == [0.0, 0.5, 1.0, 1.5, 2.0]
    with pytest.raises(ValueError, match="outside"):
        training.progress(ends, 14.0)


# --- launching ---------------------------------------------------------------------------------------------------

RANKS = """
import socket, time
import torch, torch.distributed as dist

def total(rank):
    seen = []
    for session in range(2):
        with rank.process_group("gloo"):
            value = torch.tensor([float(rank.rank + session)])
            dist.all_reduce(value)
            seen.append(value.item())
    return {"seen": seen, "host": socket.gethostname(), "setting": rank.settings["x"]}

def fail(rank):
    if rank.rank == 1:
        raise RuntimeError("rank one gave up")
    time.sleep(600)
"""

HANGING_RANKS = """
import os, subprocess, sys, time

def hang(rank):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.path.join(rank.settings["folder"], str(rank.rank)), "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(600)
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "some_ranks.py").write_text(RANKS)
    (tmp_path / "hanging_ranks.py").write_text(HANGING_RANKS)
    return tmp_path


def test_launch_returns_what_the_ranks_return(scripts: Path) -> None:
    got = launch.launch("some_ranks:total", ranks=3, settings={"x": 5}, deadline_s=200, folder=scripts)
    assert [one["seen"] for one in got] == [[3.0, 6.0]] * 3
    assert {one["setting"] for one in got} == {5}


@needs_namespaces
def test_launch_inside_a_lab(scripts: Path) -> None:
    with netlab.NetLab(2, rate="100mbit") as lab:
        got = launch.launch("some_ranks:total", ranks=4, settings={"x": 5}, deadline_s=200, lab=lab, folder=scripts)
    assert [one["host"] for one in got] == ["host0", "host0", "host1", "host1"]
    assert [one["seen"] for one in got] == [[6.0, 10.0]] * 4


def test_a_failing_rank_ends_the_launch_with_its_output(scripts: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(launch.LaunchError, match="rank one gave up"):
        launch.launch("some_ranks:fail", ranks=2, deadline_s=300, folder=scripts)
    assert time.monotonic() - begin < 200


def test_the_deadline_kills_ranks_and_their_children(scripts: Path) -> None:
    with pytest.raises(launch.LaunchError, match=r"ranks \[0, 1\] still ran"):
        launch.launch("hanging_ranks:hang", ranks=2, settings={"folder": str(scripts)}, deadline_s=15, folder=scripts)
    pids = [int(pid) for rank in (0, 1) for pid in (scripts / str(rank)).read_text().split()]
    assert eventually(lambda: all(reaper.start_time(pid) is None for pid in pids))


def test_a_window_of_ddp_counts_and_checks() -> None:
    settings = {
        "contenders": ["ddp"],
        "options": {},
        "workload": {"layers": 2, "parameter_bytes": 8000, "forward_ms": 5.0, "backward_ms": 5.0},
        "stragglers": "one:3",
        "seed": 0,
        "repeats": 2,
        "warmup_s": 0.2,
        "window_s": 0.6,
    }
    got = launch.launch("lab.training:ranks", ranks=2, settings=settings, deadline_s=200)
    rates = training.gradients_per_second(got, 0.6)["ddp"]
    assert len(rates) == 2
    assert all(1 < rate <= 2 / 0.0299 for rate in rates)  # two workers, no step shorter than the straggler's 30 ms
    assert got[0]["checks"]["ddp"]["error"] < 1e-4
    assert training.summarize(got)["ddp"]["largest_error"] < 1e-4
