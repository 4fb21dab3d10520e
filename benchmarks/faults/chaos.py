"""Does training survive? Eight workers on eight hosts train digits while faults come every few seconds.

Every few seconds one worker is killed, or stopped for three seconds, or its cable is pulled until the others have gone
on without it (hosts are namespaces, lab/net/netlab.py). A worker that is gone is replaced by a newcomer on its host
(``torchext.join_running_job``). All train with ``on_peer_failure="continue"`` and meet for an exact average now and
then, at whose end newcomers are let in. Beside it an undisturbed run of the same kind.

What must hold: nobody hangs (a worker ends within a minute of the end, or when it is told that it was given up),
all replicas of an exact average are equal bit for bit, no exact average that was formed without a fault differs from
the mean of what went into it, and the accuracy is that of the undisturbed run within a hundredth.

    python benchmarks/faults/chaos.py
    python benchmarks/faults/chaos.py --contenders hop --minutes 1 --seed 3
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.net.netlab import NetLab
from lab.run import cli
from lab.run.machine import describe_machine

WORKERS = 8
FEWEST = 6  # that train when a fault is made, so that those left are more than half
STOP_S = 3.0
LEAVE_S = 60.0  # for the end of training, and of a worker that was given up
PORT = 29500
STORE = "import sys, time, torch.distributed as d; s = d.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True,"
STORE += " wait_for_workers=False); print('up', flush=True); time.sleep(1e6)"
STOP = "import sys, torch.distributed as d; s = d.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False)"
STOP += "; s.set('stop', '1')"
SETTINGS = {"steps": 30, "step_s": 0.06, "batch": 16, "lr": 0.05, "workers": WORKERS}


@dataclass
class Worker:
    """A process, and what it has written down."""

    host: int
    process: subprocess.Popen[bytes]
    log: Path
    started: float
    newcomer: bool
    fault: str = ""

    def events(self) -> list[dict[str, Any]]:
        """All complete lines of its log."""
        if not self.log.exists():
            return []
        lines = self.log.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def trains(self) -> bool:
        """It is one of the group."""
        return self.process.poll() is None and any(event["event"] == "in" for event in self.events())


@dataclass
class Run:
    """The workers of one run, dead ones too."""

    lab: NetLab
    folder: Path
    backend: str
    workers: list[Worker] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)

    def start(self, host: int, rank: int | None) -> Worker:
        """A worker of the first ones, or (rank None) a newcomer."""
        name = f"{len(self.workers)}"
        log, settings = self.folder / f"{name}.log", self.folder / f"{name}.json"
        place = {"host": self.lab.address(WORKERS), "port": PORT, "rank": rank, "log": str(log)}
        settings.write_text(json.dumps(SETTINGS | place | {"backend": self.backend}))
        paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | self.lab.environment(host) | {"PYTHONPATH": os.pathsep.join(paths)}
        with (self.folder / f"{name}.out").open("wb") as output:
            process = self.lab.popen(
                host,
                [sys.executable, "-m", "lab.faults.chaos_worker", str(settings)],
                env=environment | {"OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        worker = Worker(host, process, log, time.monotonic(), rank is None)
        self.workers.append(worker)
        return worker

    def training(self) -> list[Worker]:
        """Those that are in the group and have no fault."""
        return [worker for worker in self.workers if not worker.fault and worker.trains()]

    def failed(self) -> list[Worker]:
        """Those that ended by themselves without being told to."""
        return [w for w in self.workers if not w.fault and w.process.poll() not in (None, 0)]

    def gone_on_without(self, since: float) -> bool:
        """Whether the others have made a group without somebody since then."""
        return any(
            event["event"] == "goes on" and event["t"] > since and "lost rank" in event["text"]
            for worker in self.training()
            for event in worker.events()
        )


def _wait(condition: Any, limit: float) -> bool:
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _fault(run: Run, kind: str, victim: Worker) -> None:
    """Makes a fault and waits until it is over: the worker gone and replaced, or going on."""
    began = time.monotonic()
    record = {"t": began, "kind": kind, "host": victim.host, "workers": len(run.training())}
    run.faults.append(record)
    if kind == "stopped":
        victim.process.send_signal(signal.SIGSTOP)
        time.sleep(STOP_S)
        victim.process.send_signal(signal.SIGCONT)
        return
    victim.fault = kind
    if kind == "killed":
        victim.process.kill()
    else:
        run.lab.set_link(victim.host, up=False)
    record["survived"] = _wait(lambda: run.gone_on_without(began), 40)
    if kind == "cut off":
        run.lab.set_link(victim.host, up=True)
        if not _wait(lambda: victim.process.poll() is not None, LEAVE_S):
            run.hangs.append(f"worker {run.workers.index(victim)}, cut off, did not end")
            victim.process.kill()
    victim.process.wait()
    run.start(victim.host, None)


def _run(backend: str, seconds: float, interval: float, seed: int, kinds: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch, NetLab(WORKERS + 1, fallback=False) as lab:
        run = Run(lab, Path(scratch), backend)
        store = lab.popen(
            WORKERS, [sys.executable, "-c", STORE, lab.address(WORKERS), str(PORT)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert store.stdout is not None and store.stdout.readline() == "up\n"
            for rank in range(WORKERS):
                run.start(rank, rank)
            if not _wait(lambda: len(run.training()) == WORKERS or run.failed(), 120) or run.failed():
                raise SystemExit(_outputs(run))
            begin = time.monotonic()
            chance = random.Random(seed)
            while kinds and time.monotonic() - begin < seconds and not run.failed():
                time.sleep(interval * chance.uniform(0.5, 1.5))
                if _wait(lambda: len(run.training()) >= FEWEST, 60):
                    _fault(run, chance.choice(kinds), chance.choice(run.training()))
                    print(f"{time.monotonic() - begin:6.1f} s  {run.faults[-1]}", flush=True)
            time.sleep(max(0.0, begin + seconds - time.monotonic()))
            _wait(lambda: len(run.training()) == WORKERS, 60)
            lab.run(WORKERS, [sys.executable, "-c", STOP, lab.address(WORKERS), str(PORT)], check=True)
            for number, worker in enumerate(run.workers):
                if not _wait(lambda worker=worker: worker.process.poll() is not None, LEAVE_S):
                    run.hangs.append(f"worker {number} did not end")
            return _report(run, begin, time.monotonic())
        finally:
            for process in [store, *(worker.process for worker in run.workers)]:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.wait()


def _outputs(run: Run) -> str:
    texts = []
    for number, worker in enumerate(run.workers):
        if worker.process.poll() not in (None, 0):
            ends = [event for event in worker.events() if event["event"] == "error"]
            texts.append(f"worker {number}: {ends} {worker.log.with_suffix('.out').read_text()[-1500:]}")
    return "\n".join(texts) or "chaos: the workers did not come together"


def _report(run: Run, begin: float, end: float) -> dict[str, Any]:
    """What came of it, from everybody's log."""
    logs = [worker.events() for worker in run.workers]
    for fault in run.faults:
        later = [other["t"] for other in run.faults if other["t"] > fault["t"]]
        until = min(later, default=end)
        window = [event for log in logs for event in log if fault["t"] < event["t"] < until]
        found = [e["t"] - fault["t"] for e in window if e["event"] == "failure" and "newcomers" not in e["reason"]]
        back = [e["t"] - fault["t"] for e in window if e["event"] == "goes on" and "lost rank" in e["text"]]
        fault["detected_s"] = [round(min(found), 3), round(max(found), 3)] if found else None
        fault["training_again_s"] = round(max(back), 3) if back else None
    meetings: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for log in logs:
        for event in log:
            if event["event"] == "met":
                meetings[event["digest"]].append(event)
    wrong = []
    checked = 0
    for digest, events in meetings.items():
        workers = {event["workers"] for event in events}
        # One that was killed on its way out of the average has written nothing; two groups there cannot be.
        if len(workers) != 1 or len(events) > workers.copy().pop() or 2 * len(events) <= max(workers):
            wrong.append(f"{digest}: {len(events)} replicas of {workers}")
        if len(events) == max(workers) and all(event["calm"] for event in events):
            checked += 1
            for place, after in enumerate(events[0]["after"]):
                mean = statistics.fmean(event["own"][place] for event in events)
                if abs(mean - after) > 1e-5 * max(1.0, abs(mean)):
                    wrong.append(f"{digest}: projection {place} is {after}, the mean was {mean}")
    ends = [event for log in logs for event in log if event["event"] == "end"]
    errors = [
        {"worker": number, "fault": worker.fault, **{k: event[k] for k in ("kind", "text")}}
        for number, (worker, log) in enumerate(zip(run.workers, logs, strict=True))
        for event in log
        if event["event"] == "error"
    ]
    joining = _joining(run)
    faults = [{key: value for key, value in f.items() if key != "t"} | {"at_s": f["t"] - begin} for f in run.faults]
    return {
        "seconds": round(end - begin, 1),
        "accuracy": ends[0]["accuracy"] if ends else None,
        "workers_at_the_end": len(ends),
        "replicas_equal_at_the_end": len({event["digest"] for event in ends}) == 1,
        # Of the job: what its workers have done between two averages. Rounds that nobody finished are not counted.
        "iterations": SETTINGS["steps"] * len(meetings),
        "gradients": SETTINGS["steps"] * sum(map(len, meetings.values())),
        "exact_averages": len(meetings),
        "exact_averages_compared_with_the_mean": checked,
        "wrong": wrong,
        "hangs": run.hangs,
        "unexpected_errors": [error for error in errors if not error["fault"]],
        "errors_of_those_given_up": [error for error in errors if error["fault"]],
        "newcomers": len(joining),
        "joining_s": _spread(joining),
        "faults": faults,
        "timeline": sorted(
            (round(event["t"] - begin, 2), event["workers"], round(event["loss"], 4))
            for events in meetings.values()
            for event in events[:1]
        ),
    }


def _joining(run: Run) -> list[float]:
    """Seconds from the start of each newcomer's process until it trains."""
    return [
        event["t"] - worker.started
        for worker in run.workers
        if worker.newcomer
        for event in worker.events()
        if event["event"] == "in"
    ]


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def _summary(result: dict[str, Any]) -> dict[str, Any]:
    """By kind of fault: how many, and how soon it was found and got over."""
    summary = {}
    for kind in sorted({fault["kind"] for fault in result["faults"]}):
        of_kind = [fault for fault in result["faults"] if fault["kind"] == kind]
        summary[kind] = {
            "faults": len(of_kind),
            "detected_s": _spread([fault["detected_s"][0] for fault in of_kind if fault["detected_s"]]),
            "training_again_s": _spread([fault["training_again_s"] for fault in of_kind if fault["training_again_s"]]),
        }
    return summary


def _draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for name, result in runs.items():
        times, workers, losses = zip(*result["timeline"], strict=True)
        above.step(times, workers, where="post", label=name)
        below.plot(times, losses, ".", markersize=3, label=name)
    colours = {"killed": "C3", "stopped": "C1", "cut off": "C4"}
    shown = set()
    for fault in runs["chaos"]["faults"]:
        kind = fault["kind"]
        label = None if kind in shown else kind
        shown.add(kind)
        above.axvline(fault["at_s"], color=colours[kind], alpha=0.5, linewidth=1, label=label)
    above.set_ylabel("workers that train")
    below.set_ylabel("training loss of one")
    below.set_xlabel("s")
    above.legend(ncols=5, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs both, writes ``chaos.json`` and its plot (``chaos_hop.json``, ...); status 1 if something did not hold."""
    parser = cli.parser(__doc__ or "", contenders="prague", repeats=1)
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults")
    parser.add_argument("--undisturbed", type=float, default=2.0, help="minutes of the run without faults")
    parser.add_argument("--interval", type=float, default=6.0, help="seconds between faults, in the mean")
    parser.add_argument("--kinds", default="killed,stopped,cut off")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.quick:
        args.minutes, args.undisturbed = 0.5, 0.2
    kinds = cli.names(args.kinds)
    name = "chaos" if args.contenders == "prague" else f"chaos_{args.contenders}"
    runs = {
        "chaos": _run(args.contenders, 60 * args.minutes, args.interval, args.seed, kinds),
        "undisturbed": _run(args.contenders, 60 * args.undisturbed, args.interval, args.seed, []),
    }
    chaos, calm = runs["chaos"], runs["undisturbed"]
    accuracies = chaos["accuracy"], calm["accuracy"]
    holds = {
        "nobody hangs": not chaos["hangs"],
        "no error where there was no fault": not chaos["unexpected_errors"],
        "no wrong number": not chaos["wrong"] and chaos["replicas_equal_at_the_end"],
        "accuracy within 1 %": None not in accuracies and accuracies[0] >= accuracies[1] - 0.01,
    }
    result = {
        "name": name,
        "script": cli.script_line(),
        "conditions": SETTINGS | {"backend": args.contenders, "interval_s": args.interval, "seed": args.seed},
        "machine": describe_machine(),
        "holds": holds,
        "by_kind": _summary(chaos),
        "runs": runs,
    }
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    _draw(runs, args.results / f"{name}.png")
    for kind, run in runs.items():
        shown = ("seconds", "accuracy", "iterations", "exact_averages", "exact_averages_compared_with_the_mean")
        print(kind, {key: run[key] for key in (*shown, "wrong", "hangs", "unexpected_errors", "joining_s")})
    print(json.dumps(_summary(chaos), indent=1))
    print(holds)
    raise SystemExit(0 if all(holds.values()) else 1)


if __name__ == "__main__":
    main()
