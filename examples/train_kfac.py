"""Train a small network on scikit-learn's handwritten digits with K-FAC: an SGD script with one changed import.

    python examples/train_kfac.py                                  # one process
    torchrun --nproc-per-node 2 examples/train_kfac.py             # plain DDP on Gloo
    torchrun --nproc-per-node 2 examples/train_kfac.py --optimizer sgd

The data are 1,797 real images that come inside scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext.optim import PADKFAC, SPDKFAC


def main() -> None:
    """Trains until the mean loss of an epoch is below the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=["spd", "pad", "sgd"], default="spd")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--damping", type=float, default=0.03)
    parser.add_argument("--target", type=float, default=0.02, help="mean training loss of an epoch")
    parser.add_argument("--epochs", type=int, default=60, help="at most")
    parser.add_argument("--plan", action="store_true", help="print who computes and sends what")
    args = parser.parse_args()

    torch.set_num_threads(1)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank, size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)

    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    if distributed:
        model = DistributedDataParallel(model)
    if args.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    else:
        kind = SPDKFAC if args.optimizer == "spd" else PADKFAC
        optimizer = kind(model, lr=args.lr, momentum=0.9, damping=args.damping)

    batch, started = 128 // size, time.perf_counter()
    for epoch in range(args.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        total, steps = torch.zeros(()), 0
        for start in range(0, len(images) - 128 + 1, 128):
            rows = order[start + rank * batch : start + (rank + 1) * batch]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            total, steps = total + loss.detach(), steps + 1
        mean = total / steps
        if distributed:
            dist.all_reduce(mean)
            mean /= size
        if rank == 0:
            print(f"epoch {epoch + 1:3d}  loss {float(mean):.4f}  {time.perf_counter() - started:.2f} s", flush=True)
        if float(mean) < args.target:
            break
    else:
        raise SystemExit(f"the loss did not reach {args.target} in {args.epochs} epochs")
    if rank == 0 and args.plan and not isinstance(optimizer, torch.optim.SGD):
        print(optimizer.plan())  # type: ignore[attr-defined]
    if distributed:
        dist.barrier()
        time.sleep(0.1)  # see train_digits.py: threads of Gloo let go of tensors before Python ends
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
