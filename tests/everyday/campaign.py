"""Many random scripts in a row: what became of them, counted by form, and every wrong one shrunk."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import forms
from comparisons import Case, judge, smallest
from generator import random_script
from pool import Pool, open_pool


class Campaign:
    """Counts of a run: outcomes by form, refusals by their words, features by how many scripts had them."""

    def __init__(self, say: Callable[[str], None], *, shrink: bool, waits: bool = False) -> None:
        self._say, self._shrink, self._waits = say, shrink, waits
        self._lock = threading.Lock()
        self.scripts = 0
        self.references: Counter[str] = Counter()
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.refusals: Counter[str] = Counter()
        self.features: Counter[str] = Counter()
        self.wrong: list[dict[str, Any]] = []

    def run(self, seeds: Iterable[int], only: Sequence[str] = forms.FORMS, jobs: int = 1) -> None:
        """Runs the seeds' scripts; each job has two ranks of its own."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for seed in seeds:
            waiting.put(seed)
        errors: list[BaseException] = []
        threads = [threading.Thread(target=self._work, args=(waiting, only, errors)) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _work(self, waiting: queue.SimpleQueue[int], only: Sequence[str], errors: list[BaseException]) -> None:
        try:
            with open_pool() as pool:
                while not errors:
                    try:
                        seed = waiting.get_nowait()
                    except queue.Empty:
                        return
                    script = random_script(seed)
                    if self._waits:
                        script = dataclasses.replace(script, setup=dataclasses.replace(script.setup, waits=True))
                    self._add(pool, judge(pool, script, only))
        except BaseException as error:  # goes on in the thread that waits
            errors.append(error)

    def _add(self, pool: Pool, case: Case) -> None:
        seed = case.script.seed
        reports = [
            {"seed": seed, "form": form, "kind": comparison.kind, "report": self._report(pool, case, form)}
            for form, comparison in case.wrong.items()
        ]
        with self._lock:
            self.scripts += 1
            self.references[case.reference.kind] += 1
            if case.reference.kind == "ran":
                self.features.update(case.script.features())
            else:
                self._say(f"seed {seed}: plain DDP itself: {case.reference.kind} {case.reference.detail[:300]}")
            for form, comparison in case.comparisons.items():
                self.outcomes[form][comparison.kind] += 1
                if comparison.kind == "refused":
                    self.refusals[f"{form}: {comparison.detail[:200]}"] += 1
            self.wrong += reports
            for report in reports:
                self._say(report["report"])

    def _report(self, pool: Pool, case: Case, form: str) -> str:
        """What is wrong, and by which lines."""
        comparison = case.comparisons[form]
        script = smallest(pool, case, form) if self._shrink and comparison.kind != "now and then" else case.script
        return f"seed {case.script.seed} on {form}: {comparison.kind} {comparison.detail}\n{script.source()}"

    def as_json(self) -> dict[str, Any]:
        return {
            "scripts": self.scripts,
            "plain_ddp": dict(self.references),
            "outcomes": {form: dict(sorted(counts.items())) for form, counts in self.outcomes.items()},
            "refusals": dict(self.refusals.most_common()),
            "features": dict(sorted(self.features.items())),
            "wrong": self.wrong,
        }

    def table(self) -> str:
        """Outcomes by form."""
        lines = [
            f"{form:16} " + ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
            for form, counts in self.outcomes.items()
        ]
        return "\n".join([*lines, f"{self.scripts} scripts, {len(self.wrong)} wrong outcomes"])
