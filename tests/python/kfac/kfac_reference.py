"""K-FAC by its definitions, in float64 and plain torch: sums over samples, Kronecker products, linear solves.

Slow and independent of the engine: patches come from a convolution with one-hot kernels, directions from solving with
the Kronecker product of the factors itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CONVOLUTIONS = {nn.Conv1d: functional.conv1d, nn.Conv2d: functional.conv2d, nn.Conv3d: functional.conv3d}


def patches(module: Any, inputs: Tensor, group: int) -> Tensor:
    """[N, positions, in]: what each output of a group sees."""
    channels = module.in_channels // module.groups
    size = channels * int(torch.tensor(module.kernel_size).prod())
    kernels = torch.eye(size, dtype=inputs.dtype).reshape(size, channels, *module.kernel_size)
    padding = module.padding
    if module.padding_mode != "zeros":
        inputs = functional.pad(inputs, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        padding = 0
    inputs = inputs[:, group * channels : (group + 1) * channels]
    seen = CONVOLUTIONS[type(module)](inputs, kernels, None, module.stride, padding, module.dilation)
    return seen.flatten(2).transpose(1, 2)


def samples(
    module: Any, inputs: Tensor, gradients: Tensor, sequences: str = "expand"
) -> list[tuple[Tensor, Tensor, int, int]]:
    """Of each group (a [R, in (+ 1)], g [R, out], N, T)."""
    count = inputs.shape[0]
    result = []
    for group in range(getattr(module, "groups", 1)):
        if isinstance(module, nn.Embedding):
            a = functional.one_hot(inputs.flatten(), module.num_embeddings).to(gradients.dtype)
            if module.padding_idx is not None:
                a[:, module.padding_idx] = 0
            g = gradients.reshape(-1, gradients.shape[-1])
        elif isinstance(module, nn.Linear):
            if sequences == "reduce" and inputs.dim() > 2:
                inputs = inputs.reshape(count, -1, inputs.shape[-1]).mean(1)
                gradients = gradients.reshape(count, -1, gradients.shape[-1]).sum(1)
            a, g = inputs.reshape(-1, inputs.shape[-1]), gradients.reshape(-1, gradients.shape[-1])
        else:
            a = patches(module, inputs, group).flatten(0, 1)
            width = gradients.shape[1] // module.groups
            g = gradients[:, group * width : (group + 1) * width].flatten(2).transpose(1, 2).flatten(0, 1)
        if getattr(module, "bias", None) is not None and module.bias.requires_grad:
            a = torch.cat([a, torch.ones(a.shape[0], 1, dtype=a.dtype)], 1)
        result.append((a, g, count, a.shape[0] // count))
    return result


def factors(a: Tensor, g: Tensor, count: int, positions: int) -> tuple[Tensor, Tensor]:
    """KFC's factors: A = (1/N) sum a a^T, G = (1/(N T)) sum (N g)(N g)^T."""
    scaled = count * g
    return a.T @ a / count, scaled.T @ scaled / (count * positions)


def direction(grad: Tensor, a: Tensor, g: Tensor, damping: float, method: str) -> Tensor:
    """V [out, in] of dW [out, in]."""
    if method == "eigen":
        curvature = torch.kron(g, a) + damping * torch.eye(grad.numel(), dtype=grad.dtype)
        return torch.linalg.solve(curvature, grad.flatten()).reshape(grad.shape)
    pi = torch.sqrt((a.trace() / a.shape[0]) / (g.trace() / g.shape[0]))
    damped_a = a + pi * damping**0.5 * torch.eye(a.shape[0], dtype=a.dtype)
    damped_g = g + damping**0.5 / pi * torch.eye(g.shape[0], dtype=g.dtype)
    return torch.linalg.solve(torch.kron(damped_g, damped_a), grad.flatten()).reshape(grad.shape)


class Reference:
    """Follows one model: capture() in front of forward passes, step() after backward ones."""

    def __init__(
        self,
        modules: list[nn.Module],
        *,
        damping: float = 0.003,
        decay: float = 0.95,
        method: str = "inverse",
        kl_clip: float | None = None,
        lr: float = 1.0,
        inverse_every: int = 1,
        sequences: str = "expand",
        martens: bool = False,
    ) -> None:
        self.modules, self.damping, self.decay, self.method = modules, damping, decay, method
        self.kl_clip, self.lr, self.inverse_every, self.sequences = kl_clip, lr, inverse_every, sequences
        self.martens = martens
        self.seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {module: [] for module in modules}
        self.running: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        self.inverted: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        self.steps = 0
        for module in modules:
            module.register_forward_hook(self._forward)

    def _forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        inputs = args[0].detach().clone()
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        output.register_hook(lambda grad: self.seen[module].append((inputs, grad.detach().double())))

    def directions(self) -> dict[nn.Module, Tensor]:
        """Updates, and returns V of each module as [out, in (+ 1)], clipped."""
        result = {}
        decay = min(1 - 1 / (self.steps + 1), self.decay) if self.martens else self.decay
        product = 0.0
        for module, pairs in self.seen.items():
            if pairs:
                inputs, gradients = (torch.cat(parts) for parts in zip(*pairs, strict=True))
                news = [factors(*group) for group in samples(module, inputs, gradients, self.sequences)]
                olds = self.running.get(module) or [(torch.eye(a.shape[0]), torch.eye(g.shape[0])) for a, g in news]
                self.running[module] = [
                    (decay * a + (1 - decay) * new_a, decay * g + (1 - decay) * new_g)
                    for (a, g), (new_a, new_g) in zip(olds, news, strict=True)
                ]
            pairs.clear()
        for module in self.modules:
            if self.steps % self.inverse_every == 0 and module in self.running:
                self.inverted[module] = self.running[module]
            weight = module.weight.grad.double()  # type: ignore[union-attr, operator]
            grad = weight.T if isinstance(module, nn.Embedding) else weight.flatten(1)
            bias = getattr(module, "bias", None)
            if bias is not None and bias.requires_grad:
                grad = torch.cat([grad, bias.grad.double()[:, None]], 1)
            blocks = grad.chunk(getattr(module, "groups", 1))
            found = torch.cat(
                [
                    direction(block, a, g, self.damping, self.method)
                    for block, (a, g) in zip(blocks, self.inverted[module], strict=True)
                ]
            )
            product += self.lr**2 * float((found * grad).sum())
            result[module] = found
        nu = 1.0 if self.kl_clip is None else min(1.0, (self.kl_clip / abs(product)) ** 0.5)
        self.steps += 1
        return {module: nu * found for module, found in result.items()}


def written(module: nn.Module) -> Tensor:
    """What the engine left in .grad, as [out, in (+ 1)]."""
    weight = module.weight.grad.double()  # type: ignore[union-attr, operator]
    grad = weight.T if isinstance(module, nn.Embedding) else weight.flatten(1)
    bias = getattr(module, "bias", None)
    return torch.cat([grad, bias.grad.double()[:, None]], 1) if bias is not None and bias.requires_grad else grad


def same(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    """Compares, relatively to the largest element."""
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"relative error {float(error):.2e}"
