"""Fits with Lightning; the script's one mark of torchext is the backend's name (and its options)."""

from __future__ import annotations

import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from reporting import begin, is_average, name_of, numbers, report, spread
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BACKEND = ""
EVERY = 3


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
        self.losses: list[float] = []
        self.spreads: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.spreads.append(spread(dict(self.net.named_parameters())))

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


class Manual(Net):
    def __init__(self, optimizers: int) -> None:
        super().__init__()
        self.automatic_optimization, self.number = False, optimizers

    def training_step(self, batch: Any, index: int) -> None:
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        loss = self.loss(batch)
        self.losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        if self.number == 1:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]


class Watch(lightning.Callback):
    """Reads each file of the middle of an epoch back, before the models that it is of have changed."""

    def __init__(self) -> None:
        self.distances: list[float] = []
        self.spreads: list[float] = []
        self.steps = 0

    def on_train_batch_start(self, trainer: Any, module: Net, batch: Any, index: int) -> None:
        path = Path(BACKEND, f"mid/step={trainer.global_step}.ckpt")
        if path.exists():
            saved = torch.load(path, weights_only=False)["state_dict"]
            self.distances.append(is_average(saved, module.state_dict()))
            self.spreads.append(spread(dict(module.named_parameters())))
        attached = getattr(trainer.strategy.model, "_torchext_synchronizer", None)
        if attached is not None:
            self.steps = attached.stats()["steps"]


def report_on(**cases: Any) -> None:
    report(**{BACKEND: cases})


def loader(seed: int, rows: int = 64) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :2].sin()), batch_size=4, num_workers=0)


def trainer(epochs: int, callbacks: list[Any] | None = None, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=name_of(BACKEND)),
        max_epochs=epochs,
        callbacks=callbacks,
        **{"enable_checkpointing": bool(callbacks), "logger": False, "enable_progress_bar": False, **options},
        enable_model_summary=False,
    )


def told(module: Net) -> dict[str, Any]:
    same = spread(dict(module.named_parameters()))
    return {"losses": module.losses, "model": numbers(module), "validated": module.spreads, "spread": same}


def fit() -> None:
    module, watch = Net(), Watch()
    saves = ModelCheckpoint(f"{BACKEND}/mid", "{step}", every_n_train_steps=EVERY, save_top_k=-1)
    best = ModelCheckpoint(f"{BACKEND}/best", "{epoch}", monitor="val", save_top_k=-1, save_last=True)
    first = trainer(2, [watch, saves, best], gradient_clip_val=0.5)
    first.fit(module, loader(1), loader(2))
    logged = {name: float(value) for name, value in first.callback_metrics.items()}
    last = torch.load(best.last_model_path, weights_only=False)
    held = max(float((last["state_dict"][name] - value).abs().max()) for name, value in module.state_dict().items())
    tested = first.test(module, loader(4), verbose=False)
    report_on(
        fit={**told(module), "logged": logged, "files": watch.distances, "apart": watch.spreads, "steps": watch.steps},
        last={"distance": held, "step": last["global_step"]},
        test=tested,
        backend=dist.get_backend(),
        optimizer=[float(state["exp_avg"].double().sum()) for state in last["optimizer_states"][0]["state"].values()],
        kept=[type(callback).__name__ for callback in first.callbacks],
        patched="save_checkpoint" in vars(first),
    )
    again = Net()
    watch = Watch()
    trainer(3, [watch]).fit(again, loader(1), loader(2), ckpt_path=f"{BACKEND}/best/epoch=1.ckpt", weights_only=False)
    report_on(resumed={**told(again), "steps": watch.steps})
    first.fit_loop.max_epochs = 3
    second = Net()
    first.fit(second, loader(1), loader(2))
    report_on(twice=told(second))


def manual() -> None:
    for number in (1, 2):
        module, watch = Manual(number), Watch()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(1, [watch], limit_train_batches=5, enable_checkpointing=False).fit(module, loader(1), loader(2))
        said = [str(warning.message) for warning in caught if "plain DDP" in str(warning.message)]
        report_on(**{f"manual {number}": {**told(module), "steps": watch.steps, "said": said}})


def fails() -> None:
    """A fit that ends with an error in the middle of validation, on all ranks."""

    class Failing(Net):
        def validation_step(self, batch: Any, index: int) -> None:
            if self.losses:
                raise KeyError("in validation")

    module = Failing()
    broken = trainer(1, limit_train_batches=3, enable_checkpointing=False)
    try:
        broken.fit(module, loader(1), loader(2))
    except KeyError as error:
        report_on(failed={"error": str(error), "patched": "save_checkpoint" in vars(broken)})


if __name__ == "__main__":
    torch.set_num_threads(1)
    anew = [pickle.loads(pickle.dumps(callback)) for callback in trainer(1).callbacks if "Torchext" in repr(callback)]
    report(start={"callbacks": [type(callback).__name__ for callback in anew], "imported": "torchext" in sys.modules})
    for BACKEND in sys.argv[1].split(","):
        begin(BACKEND, initialize=False)
        fit()
        manual()
        fails()
        dist.destroy_process_group()
