"""Does K-FAC reach a training loss sooner, in seconds, than tuned SGD with momentum and tuned AdamW?

scikit-learn's digits (1,797 images), 2 processes over Gloo, batch 64 a process; the MLP 64-256-256-10, a CNN, and a
ResNet-8 with batch normalization. Each optimizer is tuned over a grid of 48 settings: learning rates, and SGD's
momentum and Nesterov's kind of it, AdamW's betas, or K-FAC's damping and momentum. All are tried with two seeds, and
the six that need the fewest steps with four more (an optimizer's settings differ in nothing else that takes time, and
steps have no noise but the seeds'); the best of these then runs against the others' in turn, with seeds that have not
been used. K-FAC updates factors and inverses once an epoch, which has 14 steps. The target is reached at the first step
at which the mean loss of the last 14, over both processes, is below it. Everything is in the time, K-FAC's construction
too.

    python benchmarks/kfac/kfac_wall_time.py
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
import torch.distributed as dist
from lab.report.plot import draw
from lab.report.results import Report
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank
from lab.workloads.kfac_models import make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext.optim import KFAC

CONTENDERS = "sgd,adamw,spd,pad"
MODELS = ("mlp", "cnn", "resnet8")
TARGET_LOSS = 0.02
BATCH = 64
EPOCH = 14  # steps: the last images of an order, fewer than a whole batch, wait for the next
HALF = EPOCH // 2  # from one point of a curve to the next
Setting = dict[str, Any]
GRIDS: dict[str, dict[str, list[Any]]] = {
    # Around the best of all three models: what wins on the edge of a grid is not tuned.
    "sgd": {
        "lr": [0.05, 0.1, 0.2, 0.3, 0.4, 0.6],
        "momentum": [0.6, 0.7, 0.8, 0.9],
        "nesterov": [False, True],
    },
    "adamw": {
        "lr": [2e-3, 4e-3, 6e-3, 8e-3, 1.6e-2, 3.2e-2],
        "beta1": [0.8, 0.9],
        "beta2": [0.9, 0.95, 0.99, 0.999],
    },
    "kfac": {
        "lr": [0.03, 0.06, 0.1, 0.15, 0.2, 0.3],
        "damping": [0.01, 0.03, 0.05, 0.1],
        "momentum": [0.4, 0.6],
    },
}
QUICK_GRIDS: dict[str, dict[str, list[Any]]] = {
    "sgd": {"lr": [0.1], "momentum": [0.9]},
    "adamw": {"lr": [2e-3], "beta1": [0.9], "beta2": [0.999]},
    "kfac": {"lr": [0.1], "damping": [0.1], "momentum": [0.6]},
}
# Seeds of a round of tuning, and how many settings are left after it.
ROUNDS: tuple[tuple[tuple[int, ...], int], ...] = (((101, 102), 6), ((103, 104, 105, 106), 1))
TUNING_EPOCHS = 20  # that a setting has at most, in tuning


def build(contender: str, model: nn.Module, setting: Setting) -> Any:
    if contender == "sgd":
        return torch.optim.SGD(model.parameters(), **setting)
    if contender == "adamw":
        return torch.optim.AdamW(
            model.parameters(), lr=setting["lr"], betas=(setting["beta1"], setting["beta2"]), weight_decay=0.0
        )
    return KFAC(
        model,
        strategy=contender,
        martens_decay=True,
        kl_clip=0.1,
        factor_update_steps=EPOCH,
        inverse_update_steps=EPOCH,
        **setting,
    )


def run(rank: Rank, contender: str, model: str, setting: Setting, seed: int, limit: int) -> dict[str, Any]:
    """Trains for `limit` epochs at most: the seconds and steps to the target, and a curve of (seconds, loss)."""
    from sklearn.datasets import load_digits

    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    ddp = DistributedDataParallel(make_model(model, seed=seed))
    gc.collect()  # what the run before has left
    dist.barrier()
    started = time.perf_counter()
    optimizer = build(contender, ddp, setting)
    whole = BATCH * rank.world_size
    seconds: list[float] = []
    losses: list[float] = []
    curve: list[tuple[float, float]] = []
    for epoch in range(limit):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        of_epoch = torch.zeros(EPOCH)
        for step, start in enumerate(range(0, EPOCH * whole, whole)):
            rows = order[start + rank.rank * BATCH : start + (rank.rank + 1) * BATCH]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            of_epoch[step] = loss.detach()
            seconds.append(time.perf_counter() - started)
        dist.all_reduce(of_epoch)  # whether to go on is asked once an epoch, of all ranks
        losses += (of_epoch / rank.world_size).tolist()
        for last in range(max(EPOCH, EPOCH * epoch + 1), len(losses) + 1):
            at, mean = round(seconds[last - 1], 4), statistics.fmean(losses[last - EPOCH : last])
            reached = mean < TARGET_LOSS
            if reached or last % HALF == 0:
                curve.append((at, round(mean, 5)))
            if reached:
                return {"reached": True, "seconds": at, "steps": last, "curve": curve}
        if not mean < 100:
            break
    return {"reached": False, "seconds": seconds[-1], "steps": len(losses), "curve": curve}


def settings_of(contender: str, grids: dict[str, dict[str, list[Any]]]) -> list[Setting]:
    grid = grids.get(contender, grids["kfac"])
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def tune(rank: Rank, contender: str, model: str, tried: Sequence[Setting]) -> dict[str, Any]:
    """Returns every setting's runs, and the setting that gets there with every seed and takes the fewest steps."""
    runs: list[list[dict[str, Any]]] = [[] for _ in tried]

    def badness(index: int) -> tuple[bool, float]:
        missed = not all(entry["reached"] for entry in runs[index])
        return missed, statistics.fmean(entry["steps"] for entry in runs[index])

    left = list(range(len(tried)))
    for seeds, kept in ROUNDS:
        for index in left:
            for seed in seeds:
                runs[index].append(run(rank, contender, model, tried[index], seed, TUNING_EPOCHS))
                if not runs[index][-1]["reached"]:
                    break
        left = sorted(left, key=badness)[:kept]  # the same on all ranks, as the losses are
    grid = [
        {
            **setting,
            "reached": not badness(index)[0],
            "seconds": statistics.fmean(entry["seconds"] for entry in runs[index]),
            "steps": [entry["steps"] for entry in runs[index]],
        }
        for index, setting in enumerate(tried)
    ]
    return {"grid": grid, "best": tried[left[0]]}


def ranks(rank: Rank) -> dict[str, Any]:
    """Tunes, then runs the winners in turn."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    settings = rank.settings
    with rank.process_group("gloo"):
        for model in settings["models"]:
            tuned = settings["tuned"].get(model) or {
                contender: tune(rank, contender, model, settings_of(contender, settings["grids"]))
                for contender in settings["contenders"]
            }
            runs: dict[str, list[Any]] = {contender: [] for contender in settings["contenders"]}
            for seed in range(1, settings["repeats"] + 1):
                for contender in runs:
                    best = tuned[contender]["best"]
                    runs[contender].append(run(rank, contender, model, best, seed, settings["epochs"]))
            found[model] = {"tuned": tuned, "runs": runs}
    return found


def curves(found: dict[str, Any]) -> Callable[[Any], None]:
    """Draws loss against seconds, every run."""

    def draw_them(axes: Any) -> None:
        for (model, result), style in zip(found.items(), ("-", "--", ":"), strict=False):
            for index, (name, runs) in enumerate(result["runs"].items()):
                for number, entry in enumerate(runs):
                    label = f"{name}, {model}" if number == 0 else None
                    axes.plot(*zip(*entry["curve"], strict=True), style, color=f"C{index}", alpha=0.6, label=label)
        axes.axhline(TARGET_LOSS, color="black", linewidth=0.8)
        axes.set(xlabel="s", ylabel="mean training loss of 14 steps", yscale="log")
        axes.legend(fontsize="x-small")

    return draw_them


def main() -> None:
    """Runs the launch and writes the results."""
    parser = cli.parser(__doc__ or "", contenders=CONTENDERS, repeats=45)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--update", action="store_true", help="keep the other models of the results that are there")
    parser.add_argument("--tuned", type=Path, help="an earlier results file whose tuning is taken; no further one")
    parser.add_argument("--epochs", type=int, default=60, help="of a run against the others, at most")
    args = parser.parse_args()
    settings: dict[str, Any] = {
        "models": cli.names(args.models),
        "contenders": cli.names(args.contenders),
        "repeats": 1 if args.quick else args.repeats,
        "epochs": args.epochs,
        "grids": QUICK_GRIDS if args.quick else GRIDS,
    }
    earlier = json.loads(args.tuned.read_text())["cases"] if args.tuned else []
    tuned = {case["case"]: case["notes"]["tuned"] for case in earlier}
    results = launch("kfac_wall_time:ranks", ranks=2, settings={**settings, "tuned": tuned}, deadline_s=3000)
    report = Report(
        "kfac_wall_time",
        script=cli.script_line(),
        unit=f"s to a loss of {TARGET_LOSS:g}",
        reference="sgd",
        higher_is_better=False,
        conditions={**settings, "batch": BATCH, "processes": 2, "updates": EPOCH, "target_loss": TARGET_LOSS},
    )
    for model, found in results[0].items():
        figures = {name: [run["seconds"] for run in runs] for name, runs in found["runs"].items()}
        # A run that never gets there has no time; its optimizer is left out, and said to be.
        missed = {name for name, runs in found["runs"].items() if not all(run["reached"] for run in runs)}
        checks = {name: {"error": 0.0, "tolerance": 0.0} for name in figures}
        for name in missed:
            print(f"{model} {name}: not every run reached {TARGET_LOSS:g}")
            del figures[name]
        report.add(model, figures, checks=checks, target=1.0, notes={**found, "missed": sorted(missed)})
        for name, runs in found["runs"].items():
            print(f"{model} {name}: best {found['tuned'][name]['best']}, steps {[run['steps'] for run in runs]}")
    if args.update:
        report.keep(args.results / f"{report.name}.json")
    shown = {case.name: case.notes for case in report.cases}
    report.write(args.results, picture=lambda made, path: draw(made, path, extra=curves(shown)))


if __name__ == "__main__":
    main()
