"""Is K-FAC's arithmetic on factors faster than the same in torch's own operators and torch.linalg?

Parts, each on the CPU or a GPU (--device), in float32:

    factor     samples [count, d] -> packed triangle of sum x x^T with a bias's 1
               torch: cat of ones, matmul, index_select by indices made beforehand. operator: torchext::packed_gram_
               (plain ATen on the CPU, cuBLAS and kernels around it on a GPU)
    unpack     packed triangles -> matrices. torch: index_select by indices made beforehand. operator: unpack_triangle
    update     step() of a model of equal Linear layers that makes all inverses and directions, no factors
               torch: cholesky and cholesky_inverse of each damped factor, two products a layer, the same KL clip.
               engine: torchext.optim. queued: what it does on a GPU (on a GPU the two are the same)

    python benchmarks/kfac/kfac_kernels.py
    python benchmarks/kfac/kfac_kernels.py --device cuda
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
from lab.report.results import Checks, Report, in_turn
from lab.run import cli
from torch import Tensor, nn

from torchext.optim import KFACPreconditioner

FACTORS = {
    f"{count} samples of {inner}": (count, inner) for count, inner in ((256, 128), (512, 512), (4096, 64), (2048, 1024))
}
UNPACKED = {"16 of 64": (16, 64), "1 of 1024": (1, 1024)}
MODELS = {"16 layers of 64": (16, 64), "4 layers of 512": (4, 512)}
DAMPING, KAPPA = 0.01, 1e-3
Calls = dict[str, Callable[[], Tensor]]


def upper_places(dim: int, device: str) -> Tensor:
    """Returns which elements of a flattened matrix its packed triangle has."""
    row, column = torch.triu_indices(dim, dim, device=device)
    return row * dim + column


def factor_calls(count: int, inner: int, device: str) -> Calls:
    """Returns the contenders; each gives the packed triangle."""
    samples = torch.randn(count, inner, device=device)
    dim = inner + 1
    places, ones = upper_places(dim, device), torch.ones(count, 1, device=device)
    packed = torch.empty(1, dim * (dim + 1) // 2, device=device)

    def by_torch() -> Tensor:
        x = torch.cat([samples, ones], 1)
        return (x.T @ x).flatten().index_select(0, places)

    def by_operator() -> Tensor:
        torch.ops.torchext.packed_gram_(packed, samples[None], False, True, False)
        return packed[0]

    return {"torch": by_torch, "operator": by_operator}


def unpack_calls(groups: int, dim: int, device: str) -> Calls:
    """Returns the contenders; each gives full matrices."""
    packed = torch.randn(groups, dim * (dim + 1) // 2, device=device)
    places = torch.empty(dim, dim, dtype=torch.int64, device=device)
    row, column = torch.triu_indices(dim, dim, device=device)
    places[row, column] = places[column, row] = torch.arange(packed.shape[1], device=device)
    flat = places.flatten()
    return {
        "torch": lambda: packed.index_select(1, flat).view(groups, dim, dim),
        "operator": lambda: torch.ops.torchext.unpack_triangle(packed, dim),
    }


class Update:
    """A model whose gradients and factors are set; step() makes inverses and directions of them."""

    def __init__(self, layers: int, dim: int, device: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(layers))).to(device)
        noise = [torch.randn(2 * dim, dim) for _ in range(2 * layers)]
        self.factors = [(x.T @ x / len(x)).to(device) for x in noise]  # G and A of the last layer first
        self.gradients = [torch.randn(dim, dim).to(device) for _ in range(layers)]
        places = upper_places(dim, "cpu")
        self.packed = [factor.cpu().flatten()[places] for factor in self.factors]

    def engine(self, queued: bool) -> Callable[[], Tensor]:
        """Returns a call that gives all directions."""
        kfac = KFACPreconditioner(self.model, damping=DAMPING, kl_clip=KAPPA, inverse_update_steps=1, _queued=queued)
        state = kfac.state_dict()
        state["factors"] = [(packed, None, None) for packed in self.packed]
        kfac.load_state_dict(state)

        def call() -> Tensor:
            for layer, gradient in zip(self.model, self.gradients, strict=True):
                layer.weight.grad.copy_(gradient)  # type: ignore[union-attr, operator]
            kfac.step(lr=0.1)
            return self.model[-1].weight.grad  # type: ignore[union-attr, return-value]

        return call

    def calls(self) -> Calls:
        """Returns the contenders; each gives the direction of the last layer."""
        for layer in self.model:
            layer.weight.grad = torch.zeros_like(layer.weight)  # type: ignore[arg-type, union-attr]

        def by_torch() -> Tensor:
            found, product = [], torch.zeros((), device=self.gradients[0].device)
            for layer, gradient in enumerate(self.gradients):
                g, a = self.factors[2 * (len(self.gradients) - 1 - layer) :][:2]
                pi = torch.sqrt(a.trace() / g.trace())
                inverses = []
                for factor, damping in ((g, DAMPING**0.5 / pi), (a, DAMPING**0.5 * pi)):
                    damped = factor.clone()
                    damped.diagonal().add_(damping)
                    inverses.append(torch.cholesky_inverse(torch.linalg.cholesky(damped)))
                direction = inverses[0] @ (gradient @ inverses[1])
                product += 0.01 * (direction * gradient).sum()
                found.append(direction)
            nu = torch.sqrt(KAPPA / product.abs()).clamp(max=1)
            return [nu * direction for direction in found][-1]

        calls = {"torch": by_torch, "queued": self.engine(queued=True)}
        if not self.gradients[0].is_cuda:
            calls["engine"] = self.engine(queued=False)
        return calls


def milliseconds(call: Callable[[], Tensor], calls: int, device: str) -> float:
    """Returns the time of one call, the median of several."""
    taken = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - started) * 1e3)
    return statistics.median(taken)


def main() -> None:
    """Checks and times every part."""
    parser = cli.parser(__doc__ or "", contenders="torch,operator,queued,engine", repeats=15)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    device = arguments.device
    repeats, calls = (2, 2) if arguments.quick else (arguments.repeats, 7)
    report = Report(
        "kfac_kernels" if device == "cpu" else "kfac_kernels_cuda",
        script=cli.script_line(),
        unit="ms",
        reference="torch",
        higher_is_better=False,
        conditions={"threads": torch.get_num_threads(), "calls a repeat": calls}
        | {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"},
    )
    torch.manual_seed(0)
    cases: dict[str, Calls] = {f"factor, {name}": factor_calls(*sizes, device) for name, sizes in FACTORS.items()}
    cases |= {f"unpack, {name}": unpack_calls(*sizes, device) for name, sizes in UNPACKED.items()}
    cases |= {f"update, {name}": Update(*sizes, device).calls() for name, sizes in MODELS.items()}
    wanted = set(cli.names(arguments.contenders))
    with torch.no_grad():
        for name, contenders in cases.items():
            expected = contenders["torch"]().double()
            checks = Checks()
            kept = {contender: call for contender, call in contenders.items() if contender in wanted}
            for contender, call in kept.items():
                error = (call().double() - expected).abs().max() / expected.abs().max()
                checks.confirm(contender, float(error), 1e-4)
                milliseconds(call, 2, device)
            figures = in_turn(
                {n: lambda c=c: milliseconds(c, calls, device) for n, c in kept.items()},  # type: ignore[misc]
                repeats,
            )
            report.add(name, figures, checks=checks.done)
    report.write(arguments.results)


if __name__ == "__main__":
    main()
