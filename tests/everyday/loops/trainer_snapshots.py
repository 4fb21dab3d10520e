"""A Trainer class with snapshots: what was begun goes on where it was left.

torchrun --nproc-per-node 2 trainer_snapshots.py FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS = 2


class Points(Dataset):
    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.data = [(torch.rand(20, generator=generator), torch.rand(1, generator=generator)) for _ in range(size)]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data[index]


class Trainer:
    def __init__(self, model: nn.Module, loader: DataLoader, save_every: int, snapshot: Path) -> None:
        self.rank = dist.get_rank()
        self.loader, self.save_every, self.snapshot = loader, save_every, snapshot
        self.epochs_run = 0
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        # attach here: self.model, self.optimizer
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        if snapshot.exists():
            self._load_snapshot()

    def _load_snapshot(self) -> None:
        saved = torch.load(self.snapshot)
        self.model.module.load_state_dict(saved["MODEL_STATE"])
        self.optimizer.load_state_dict(saved["OPTIMIZER_STATE"])
        self.scheduler.load_state_dict(saved["SCHEDULER_STATE"])
        self.epochs_run = saved["EPOCHS_RUN"]

    def _save_snapshot(self, epoch: int) -> None:
        state = {
            "MODEL_STATE": self.model.module.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "SCHEDULER_STATE": self.scheduler.state_dict(),
            "EPOCHS_RUN": epoch + 1,
        }
        if self.rank == 0:
            torch.save(state, self.snapshot)
        dist.barrier()

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch: int) -> None:
        self.loader.sampler.set_epoch(epoch)
        losses = [self._run_batch(source, targets) for source, targets in self.loader]
        print(f"[{self.rank}] epoch {epoch}: {len(losses)} steps, loss {sum(losses) / len(losses):.4f}")

    def train(self, epochs: int) -> None:
        for epoch in range(self.epochs_run, self.epochs_run + epochs):
            self._run_epoch(epoch)
            self.scheduler.step()
            if (epoch + 1) % self.save_every == 0:
                self._save_snapshot(epoch)


def main(folder: Path) -> nn.Module:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1))
    data = Points(64)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    trainer = Trainer(model, loader, 2, folder / "snapshot.pt")
    trainer.train(EPOCHS)
    dist.barrier()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]))
