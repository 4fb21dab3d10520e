"""Training with transformers.Trainer and torchext's callback, on the backends that are its argument.

Without an argument it knows nothing of torchext, for torchext.run; the framework makes the group.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reporting import begin, is_average, numbers, report, spread
from safetensors.torch import load_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

UNTOUCHED = len(sys.argv) == 1


class Config(PretrainedConfig):
    model_type = "torchext-test"


class Net(PreTrainedModel):
    """A small language model with tied embeddings."""

    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.embed, self.mix, self.norm = nn.Embedding(16, 8), nn.GRU(8, 8, batch_first=True), nn.LayerNorm(8)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.norm(self.mix(self.embed(input_ids))[0]) @ self.embed.weight.T
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Watch(TrainerCallback):
    """Compares each saved file with the workers' models, and those among each other."""

    def __init__(self) -> None:
        self.saved: list[float] = []
        self.evaluated: list[float] = []
        self.apart: list[float] = []
        self.after: list[float] = []
        self.is_behind = False  # an evaluation, and no step since

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.apart.append(spread(dict(given["model"].named_parameters())))

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.is_behind:
            self.after.append(spread(dict(given["model"].named_parameters())))
        self.is_behind = False

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.is_behind = True
        self.evaluated.append(spread(dict(given["model"].named_parameters())))

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        dist.barrier()
        saved = load_file(Path(args.output_dir, f"checkpoint-{state.global_step}", "model.safetensors"))
        own = {name: value for name, value in given["model"].state_dict().items() if name in saved}
        self.saved.append(is_average(saved, own))


def callbacks() -> list[TrainerCallback]:
    if UNTOUCHED:
        return []
    from torchext.integrations.transformers import TorchextCallback

    return [TorchextCallback()]


def rows(seed: int, number: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(16, (number, 7), generator=generator).sort(dim=1).values
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]


def train(folder: str, resume: str | None = None, **options: Any) -> dict[str, Any]:
    torch.manual_seed(5)
    model, watch = Net(Config()), Watch()
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.02,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=7,
        **options,
    )
    trainer = Trainer(
        model, arguments, train_dataset=rows(1, 64), eval_dataset=rows(2, 16), callbacks=[*callbacks(), watch]
    )
    trainer.train(resume_from_checkpoint=resume)
    log = [
        {name: entry[name] for name in ("loss", "grad_norm", "learning_rate", "eval_loss") if name in entry}
        for entry in trainer.state.log_history
    ]
    best = 0.0
    if arguments.load_best_model_at_end:
        kept = load_file(Path(str(trainer.state.best_model_checkpoint), "model.safetensors"))
        best = max(float((kept[name] - value).abs().max()) for name, value in model.named_parameters())
    return {
        "best": best,
        "after": watch.after,
        "log": log,
        "model": numbers(model),
        "spread": spread(dict(model.named_parameters())),
        "saved": watch.saved,
        "evaluated": watch.evaluated,
        "apart": max(watch.apart),
        "attached": getattr(trainer.model_wrapped, "_torchext_synchronizer", None) is not None,
        "own state_dict": "state_dict" in vars(getattr(trainer.optimizer, "optimizer", trainer.optimizer)),
    }


def cases(backend: str) -> None:
    steps = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 3, "save_steps": 3}
    first = train(f"{backend}/steps", **steps)
    moments = torch.load(f"{backend}/steps/checkpoint-6/optimizer.pt", weights_only=False)["state"]
    first["optimizer"] = [float(state["exp_avg"].double().sum()) for state in moments.values()]
    report(**{backend: {"steps": first, "backend": dist.get_backend()}})
    resumed = train(f"{backend}/steps", f"{backend}/steps/checkpoint-6", **steps)
    best = train(
        f"{backend}/best",
        eval_strategy="epoch",
        save_strategy="best",
        metric_for_best_model="eval_loss",
        load_best_model_at_end=True,
        max_grad_norm=0.0,
        save_total_limit=1,
    )
    report(**{backend: {"resumed": resumed, "best": best}})


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    for name in ["untouched"] if UNTOUCHED else sys.argv[1].split(","):
        if not UNTOUCHED:
            begin(name, initialize=True)
        cases(name)
        dist.destroy_process_group()
