"""Image classification: a small ResNet, meters, a schedule, evaluation on all ranks, the best checkpoint.

torchrun --nproc-per-node 2 image_resnet.py FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES, EPOCHS = 3, 3


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        return self.act(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.GELU())
        self.layers = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


class Meter:
    """A mean over this rank's samples, and over all ranks' after ``all_reduce``."""

    def __init__(self, name: str) -> None:
        self.name, self.total, self.count = name, 0.0, 0

    def update(self, value: float, count: int) -> None:
        self.total += value * count
        self.count += count

    def all_reduce(self) -> None:
        both = torch.tensor([self.total, self.count], dtype=torch.float64)
        dist.all_reduce(both)
        self.total, self.count = both[0].item(), int(both[1].item())

    def __str__(self) -> str:
        return f"{self.name} {self.total / max(1, self.count):.3f}"


def images(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    pictures = torch.randn(count, 3, 8, 8, generator=generator)
    pictures[torch.arange(count), labels] += 1.0
    return TensorDataset(pictures, labels)


def train(loader: DataLoader, model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer) -> Meter:
    losses, right = Meter("loss"), Meter("accuracy")
    model.train()
    for pictures, labels in loader:
        output = model(pictures)
        loss = criterion(output, labels)
        right.update((output.argmax(1) == labels).float().mean().item(), len(labels))
        losses.update(loss.item(), len(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@torch.no_grad()
def validate(loader: DataLoader, model: nn.Module) -> Meter:
    right = Meter("accuracy")
    model.eval()
    for pictures, labels in loader:
        right.update((model(pictures).argmax(1) == labels).float().mean().item(), len(labels))
    right.all_reduce()
    return right


def main(folder: Path) -> nn.Module:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(ResNet())
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    # attach here: model, optimizer
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * EPOCHS)
    data, held_out = images(48, 1), images(24, 2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    validation = DataLoader(held_out, batch_size=6, sampler=DistributedSampler(held_out, shuffle=False))
    best, first, last = -1.0, 0, folder / "last.pt"
    if last.exists():
        saved = torch.load(last)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first = saved["epoch"] + 1
    for epoch in range(first, first + EPOCHS):
        sampler.set_epoch(epoch)
        losses = train(loader, model, criterion, optimizer)
        losses.all_reduce()
        accuracy = validate(validation, model)
        scheduler.step()
        value = accuracy.total / accuracy.count
        state = {
            "epoch": epoch,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        if rank == 0:
            print(f"epoch {epoch}: {losses}, {accuracy}")
            torch.save(state, last)
            if value > best:
                torch.save(state, folder / "best.pt")
        best = max(best, value)
        dist.barrier()
    dist.destroy_process_group()
    return model.module


if __name__ == "__main__":
    main(Path(sys.argv[1]))
