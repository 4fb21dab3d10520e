"""Writes the tables of docs/results.md from benchmarks/results: ``python tools/result_tables.py``.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; NAME is a file of benchmarks/results. Options
follow behind bars: ``contenders: a; b`` shows these alone, ``over: a`` takes ratios over another contender than the
file does, ``times`` shows times over the reference's where the file has speeds, ``rows`` gives each contender a row of
its own. Several files, with commas between, make one table.
``--check`` writes nothing and fails where the page differs, or where a file of results has no table.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
# A trace for a viewer, and what has a page of its own.
WITHOUT_TABLE = {"dear_timeline_trace", "fault_table"}
# The targets are set for ours.
_PEERS = {"ddp", "zero", "fsdp2"}
_MARKED = re.compile(r"(<!-- table: ([^\n]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def spread(values: Sequence[float]) -> str:
    """Median, and the least and the most of the repeats where there are several."""
    around = f" [{number(min(values))}, {number(max(values))}]" if len(values) > 1 else ""
    return number(statistics.median(values)) + around


def source(result: dict[str, Any]) -> str:
    """Where the figures are from: script, machine, torch, commit and day, of each case where these differ."""
    machines = [case.get("machine", result["machine"]) for case in result.get("cases", [])] or [result["machine"]]
    cpus = {f"{machine['cpu'].replace('(R)', '').replace(' Processor', '')}" for machine in machines}
    commits = sorted({machine["commit"] for machine in machines})
    days = sorted({machine["date"][:10] for machine in machines})
    device = result.get("conditions", {}).get("device", "cpu")
    host = f"{', '.join(sorted(cpus))}, {machines[0]['cores']} cores" + (f", {device}" if device != "cpu" else "")
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    script = re.search(r"(\w+\.py)", result["script"])
    name = script[1] if script else result["script"]
    return f"`{name}`, {host}, torch {machines[0]['torch']}, {when}, commit {', '.join(commits)}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def ratios(result: dict[str, Any], case: dict[str, Any], contender: str, options: dict[str, str]) -> list[float] | None:
    """Ratios of a contender, repeat by repeat; None where the case does not have both sides."""
    figures, reference = case["figures"], options.get("over", result["reference"])
    if contender not in figures or reference not in figures or contender == reference:
        return None
    pairs = zip(figures[contender]["values"], figures[reference]["values"], strict=True)
    upwards = result["higher_is_better"] or "times" in options
    return [mine / other if upwards else other / mine for mine, other in pairs]


def paired(result: dict[str, Any], options: dict[str, str]) -> list[str]:
    """The table of a Report (benchmarks/lab/report/results.py)."""
    reference, unit = options.get("over", result["reference"]), result["unit"]
    cases = [case for case in result["cases"] if reference in case["figures"]]
    every = list(dict.fromkeys(name for case in cases for name in case["figures"] if name != reference))
    shown = [name.strip() for name in options["contenders"].split(";")] if "contenders" in options else every
    if missing := [name for name in shown if name not in every]:
        raise SystemExit(f"result_tables: {options['name']} has no contender {', '.join(missing)}; it has {every}")
    aims = {case["case"]: _aim(case["target"], options) for case in cases}
    with_aims = any(aims.values()) and reference == result["reference"]
    last = ["asked for"] if with_aims else []
    meaning = "time over" if "times" in options else "over"
    rows = []
    if "rows" in options:
        head = ["case", "contender", unit, f"{meaning} `{reference}`", *last]
        for case in cases:
            for name in (reference, *shown):
                if name in case["figures"]:
                    ratio = ratios(result, case, name, options)
                    cells = [f"`{name}`", spread(case["figures"][name]["values"]), spread(ratio) if ratio else ""]
                    aim = aims[case["case"]] if name.split()[0] not in _PEERS else ""
                    rows.append([case["case"], *cells, *([aim] if with_aims else [])])
    else:
        head = ["case", f"`{reference}`, {unit}", *(f"`{name}`, {meaning} it" for name in shown), *last]
        for case in cases:
            found = [ratios(result, case, name, options) for name in shown]
            cells = [spread(ratio) if ratio else "" for ratio in found]
            median = number(statistics.median(case["figures"][reference]["values"]))
            rows.append([case["case"], median, *cells, *([aims[case["case"]]] if with_aims else [])])
    return table(head, rows)


def _aim(target: float | None, options: dict[str, str]) -> str:
    if target is None:
        return ""
    return number(1 / target if "times" in options else target)


def digits_accuracy(result: dict[str, Any], _: dict[str, str]) -> list[str]:
    """Accuracy at equal samples, and how far apart the replicas were at the end."""
    rows = []
    for name, of in result["summary"].items():
        apart = of.get("last_consensus_distance")
        share = [f"{100 * of[key]:.1f}" for key in ("mean", "standard_deviation", "lowest", "highest")]
        accuracy = f"{share[0]} +- {share[1]} [{share[2]}, {share[3]}]"
        rows.append([f"`{name}`", accuracy, "" if apart is None else f"{apart:.4f}"])
    return table(["contender", "test accuracy, %", "distance of the replicas from their mean at the end"], rows)


def prague_time_to_accuracy(result: dict[str, Any], _: dict[str, str]) -> list[str]:
    """Seconds to an accuracy with a slow worker."""
    every = result["summary"]["seconds_to_target"]
    rows = [
        [f"`{name}`", spread(of["runs"]), number(every["gloo"]["median"] / of["median"])] for name, of in every.items()
    ]
    return table(["contender", f"seconds to {result['target']:.0%}", "medians: times sooner than `gloo`"], rows)


def embedding_quality(result: dict[str, Any], _: dict[str, str]) -> list[str]:
    """AUC and bytes; a name is the method and the share of the values that it keeps."""
    rows = []
    for case in result["cases"]:
        ((name, figure),) = case["figures"].items()
        auc = [f"{value:.3f}" for value in (statistics.fmean(figure["values"]), *sorted(figure["values"]))]
        notes = case["notes"]
        rows.append(
            [
                f"`{name}`",
                f"{auc[0]} [{auc[1]}, {auc[-1]}]",
                number(notes["value_saving"]),
                number(notes["all_bytes_saving"]),
            ]
        )
    return table(["contender", "AUC, mean of the seeds", "times fewer values", "times fewer bytes in all"], rows)


def everyday_scripts(result: dict[str, Any], _: dict[str, str]) -> list[str]:
    """How random training scripts ended beside plain DDP."""
    kinds = ["equal", "agrees", "refused"]
    others = sorted({kind for of in result["outcomes"].values() for kind in of} - set(kinds))
    rows = [
        [f"`{name}`", *(str(of.get(kind, 0)) for kind in kinds + others)] for name, of in result["outcomes"].items()
    ]
    return table(["backend", "equal to DDP", "replicas agree", "refused", *others], rows)


def ablation(result: dict[str, Any], _: dict[str, str]) -> list[str]:
    """What a step takes with or without a mechanism, over the reference's; a case a column."""
    cases, full = result["cases"], result["reference"]
    every = list(dict.fromkeys(name for case in cases for name in case["figures"] if name != full))
    rows = [[f"{full}, {result['unit']}", *(number(case["figures"][full]["median"]) for case in cases)]]
    for name in every:
        found = [case["figures"].get(name) for case in cases]
        rows.append([name, *(f"{of['ratio']:.2f}" if of else "" for of in found)])
    return table(["contender", *(case["case"] for case in cases)], rows)


def chaos(result: dict[str, Any], _: dict[str, str]) -> list[str]:
    """Training among faults."""
    run, calm, kinds = result["runs"]["chaos"], result["runs"]["undisturbed"], result["by_kind"]

    def seconds(kind: str) -> str:
        of = kinds[kind]["training_again_s"]
        return f"{number(of['median'])} [{number(of['min'])}, {number(of['max'])}]"

    row = [f"`{result['conditions']['backend']}`"]
    row += [", ".join(str(kinds[kind]["faults"]) for kind in ("killed", "cut off", "stopped")), str(run["newcomers"])]
    row += [str(run["exact_averages_compared_with_the_mean"])]
    row += [f"{100 * run['accuracy']:.1f}, {100 * calm['accuracy']:.1f}"]
    row += [
        ", ".join(number(of["iterations"] / of["seconds"]) for of in (run, calm)),
        seconds("killed"),
        seconds("cut off"),
    ]
    head = ["backend", "killed, cut off, stopped", "newcomers", "averages checked", "accuracy, undisturbed, %"]
    head += ["iterations/s, undisturbed", "s to train again after a kill", "after a cut"]
    return table(head, [row])


_OWN: dict[str, Callable[[dict[str, Any], dict[str, str]], list[str]]] = {
    "digits_accuracy": digits_accuracy,
    "prague_time_to_accuracy": prague_time_to_accuracy,
    "embedding_quality": embedding_quality,
    "everyday_scripts": everyday_scripts,
    "kfac_ablation": ablation,
    "chaos": chaos,
    "chaos_hop": chaos,
    "chaos_dssync": chaos,
}


def parse(marker: str) -> dict[str, str]:
    """The options of a marker, the file's name among them."""
    name, *parts = (part.strip() for part in marker.split("|"))
    options = {key.strip(): value.strip() for key, _, value in (part.partition(":") for part in parts)}
    if unknown := set(options) - {"contenders", "over", "times", "rows"}:
        raise SystemExit(f"result_tables: {name} has options that there are not: {', '.join(sorted(unknown))}")
    return {"name": name, **options}


def files(marker: str) -> list[str]:
    """The files that a marker names."""
    return [name.strip() for name in parse(marker)["name"].split(",")]


def render(marker: str, results: Path = RESULTS) -> str:
    """What stands between the markers."""
    lines: list[str] = []
    sources = []
    for name in files(marker):
        result = json.loads((results / f"{name}.json").read_text())
        made = _OWN.get(name, paired)(result, parse(marker))
        if lines and lines[:2] != made[:2]:
            raise SystemExit(f"result_tables: {name} has other columns than the files in front of it")
        lines += made[2:] if lines else made
        sources.append(source(result))
    return "\n".join(["", *lines, "", f"{'; '.join(sources)}.", ""])


def rewrite(text: str, results: Path = RESULTS) -> str:
    """The page with its tables made anew."""
    return _MARKED.sub(lambda found: found[1] + render(found[2], results) + found[3], text)


def without_table(text: str, results: Path = RESULTS) -> list[str]:
    """Files of results that no marker names."""
    named = {name for found in _MARKED.finditer(text) for name in files(found[2])}
    return sorted({path.stem for path in results.glob("*.json")} - named - WITHOUT_TABLE)


def main(arguments: Sequence[str]) -> int:
    """Writes the page, or checks it."""
    text = PAGE.read_text()
    wanted, name = rewrite(text), PAGE.relative_to(ROOT)
    found = [f"{name}: benchmarks/results/{stem}.json has no table" for stem in without_table(text)]
    if "--check" not in arguments:
        PAGE.write_text(wanted)
    elif wanted != text:
        found.append(f"{name}: its tables are not those of benchmarks/results; type: python tools/result_tables.py")
    print(*found, f"{len(_MARKED.findall(text))} tables, {len(found)} findings", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
