"""Every layer type and option of K-FAC against the definitions, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kfac_reference import Reference, same, written
from torch import Tensor, nn

from torchext.optim import KFACPreconditioner

pytestmark = pytest.mark.usefixtures("path")

Made = tuple[nn.Module, Callable[[], Tensor]]


def rand(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, dtype=torch.float64)


LAYERS: dict[str, Callable[[], Made]] = {
    "linear": lambda: (nn.Linear(5, 3), rand(7, 5)),
    "linear without bias": lambda: (nn.Linear(5, 3, bias=False), rand(7, 5)),
    "linear, one output": lambda: (nn.Linear(4, 1), rand(7, 4)),
    "linear, larger than a panel": lambda: (nn.Linear(70, 2), rand(40, 70)),
    "linear on a sequence": lambda: (nn.Linear(5, 3), rand(4, 6, 5)),
    "linear on a grid": lambda: (nn.Linear(3, 2), rand(3, 2, 4, 3)),
    "linear, transposed input": lambda: (nn.Linear(5, 3), lambda: rand(5, 7)().T),
    "linear, strided input": lambda: (nn.Linear(5, 3), lambda: rand(7, 10)()[:, ::2]),
    "linear, expanded input": lambda: (nn.Linear(5, 3), lambda: rand(1, 5)().expand(7, 5)),
    "conv1d": lambda: (nn.Conv1d(2, 3, 3), rand(4, 2, 9)),
    "conv1d, stride and padding": lambda: (nn.Conv1d(2, 3, 4, stride=3, padding=2), rand(4, 2, 11)),
    "conv2d": lambda: (nn.Conv2d(2, 3, 3), rand(3, 2, 6, 5)),
    "conv2d, padding": lambda: (nn.Conv2d(2, 3, 3, padding=1), rand(3, 2, 6, 5)),
    "conv2d, padding wider than the input": lambda: (nn.Conv2d(1, 2, 2, padding=4), rand(2, 1, 2, 3)),
    "conv2d, stride 2": lambda: (nn.Conv2d(2, 3, (3, 2), stride=2, padding=(1, 0)), rand(3, 2, 7, 6)),
    "conv2d, stride wider than the kernel": lambda: (nn.Conv2d(2, 3, 1, stride=3), rand(3, 2, 7, 8)),
    "conv2d, same": lambda: (nn.Conv2d(2, 3, 3, padding="same"), rand(3, 2, 5, 5)),
    "conv2d, same with an even kernel": lambda: (nn.Conv2d(2, 3, (2, 4), padding="same"), rand(3, 2, 5, 6)),
    "conv2d, valid": lambda: (nn.Conv2d(2, 3, 2, padding="valid"), rand(3, 2, 4, 4)),
    "conv2d, dilation": lambda: (nn.Conv2d(2, 3, 3, dilation=(2, 1), padding=2), rand(3, 2, 7, 6)),
    "conv2d, same and dilation": lambda: (nn.Conv2d(2, 2, 2, dilation=3, padding="same"), rand(3, 2, 6, 6)),
    "conv2d, groups": lambda: (nn.Conv2d(4, 6, 3, groups=2, padding=1), rand(3, 4, 5, 5)),
    "conv2d, depthwise": lambda: (nn.Conv2d(3, 3, 3, groups=3, padding=1), rand(3, 3, 5, 5)),
    "conv2d, depthwise with a multiplier": lambda: (nn.Conv2d(2, 4, 2, groups=2, bias=False), rand(3, 2, 4, 4)),
    "conv2d, circular": lambda: (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), rand(3, 2, 5, 5)),
    "conv2d, reflect": lambda: (nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="reflect"), rand(3, 2, 5, 5)),
    "conv2d, replicate": lambda: (nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), rand(3, 2, 5, 5)),
    "conv2d, circular and same": lambda: (
        nn.Conv2d(2, 3, 3, padding="same", padding_mode="circular"),
        rand(3, 2, 5, 5),
    ),
    "conv2d, channels last": lambda: (
        nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),
        lambda: rand(3, 2, 5, 5)().to(memory_format=torch.channels_last),
    ),
    # From 8 channels on, with images large enough, A is made of correlations instead of patches.
    "conv2d, correlated": lambda: (nn.Conv2d(8, 3, 3, padding=1), rand(3, 8, 9, 12)),
    "conv2d, correlated, one row of places": lambda: (nn.Conv2d(8, 3, (1, 3), padding=(0, 1)), rand(3, 8, 6, 12)),
    "conv2d, correlated, one column of places": lambda: (nn.Conv2d(9, 2, (4, 1), bias=False), rand(3, 9, 24, 6)),
    "conv2d, correlated, valid": lambda: (nn.Conv2d(8, 3, 3), rand(2, 8, 24, 20)),
    "conv2d, correlated, half padded": lambda: (nn.Conv2d(8, 3, 5, padding=(2, 1)), rand(2, 8, 18, 16)),
    "conv2d, correlated, padding wider than the kernel": lambda: (nn.Conv2d(8, 2, 3, padding=4), rand(2, 8, 10, 9)),
    "conv2d, correlated, same": lambda: (nn.Conv2d(8, 3, (2, 4), padding="same"), rand(3, 8, 11, 12)),
    "conv2d, correlated, circular": lambda: (
        nn.Conv2d(8, 3, 3, padding=1, padding_mode="circular"),
        rand(2, 8, 24, 20),
    ),
    "conv2d, correlated, channels last": lambda: (
        nn.Conv2d(8, 3, 3, padding=1).to(memory_format=torch.channels_last),
        lambda: rand(3, 8, 10, 10)().to(memory_format=torch.channels_last),
    ),
    "conv3d": lambda: (nn.Conv3d(2, 2, (2, 3, 2), stride=(1, 2, 1), padding=1), rand(2, 2, 4, 5, 4)),
    "embedding": lambda: (nn.Embedding(6, 3), lambda: torch.randint(0, 6, (8,))),
    "embedding of sequences": lambda: (nn.Embedding(6, 3), lambda: torch.randint(0, 6, (4, 5))),
    "embedding with padding": lambda: (nn.Embedding(6, 3, padding_idx=2), lambda: torch.randint(0, 6, (4, 5))),
}


def loss_of(output: Tensor) -> Tensor:
    """A mean over samples that is neither linear nor quadratic."""
    return (output.sin() + output.pow(3) / 3).flatten(1).sum(1).mean()


@pytest.mark.parametrize("method", ["inverse", "eigen"])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_three_steps_against_the_definition(make: Callable[[], Made], method: str) -> None:
    torch.manual_seed(0)
    module, inputs = make()
    module = module.double()
    reference = Reference([module], method=method, damping=0.01, kl_clip=1e-3, lr=0.1)
    kfac = KFACPreconditioner(module, method=method, damping=0.01, kl_clip=1e-3, inverse_update_steps=1)
    for _ in range(3):
        module.zero_grad()
        loss_of(module(inputs())).backward()
        expected = reference.directions()[module]
        assert kfac.step(lr=0.1)
        same(written(module), expected)


@pytest.mark.parametrize("shape", [(5,), (4, 6, 5)], ids=["one sample", "reduce"])
def test_sequences(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 3).double()
    reference = Reference([module], sequences="reduce")
    kfac = KFACPreconditioner(module, sequences="reduce", kl_clip=None, inverse_update_steps=1)
    batch = rand(*shape)()
    output = module(batch)
    (output.sin().sum() if len(shape) == 1 else loss_of(output)).backward()
    if len(shape) == 1:  # an input without a batch is a batch of one
        inputs, gradients = reference.seen[module][0]
        reference.seen[module][0] = (inputs[None], gradients[None])
    expected = reference.directions()[module]
    kfac.step()
    same(written(module), expected)


@pytest.mark.parametrize("shape", [(0, 6, 5), (0, 2, 3, 5)])
def test_an_empty_batch_of_sequences_says_nothing(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(5, 3).double() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    batch = rand(4, *shape[1:])()
    for module, empty in zip(modules, (False, True), strict=True):
        kfac = KFACPreconditioner(module, sequences="reduce", kl_clip=None, inverse_update_steps=1)
        if empty:
            module(torch.zeros(shape, dtype=torch.float64)).sum().backward()
            module.zero_grad()
        loss_of(module(batch)).backward()
        assert kfac.step()
    same(written(modules[1]), written(modules[0]), 1e-12)


def test_a_linear_on_a_sequence_is_a_convolution_with_a_kernel_of_one() -> None:
    torch.manual_seed(0)
    linear, conv = nn.Linear(4, 3).double(), nn.Conv1d(4, 3, 1).double()
    with torch.no_grad():
        conv.weight.copy_(linear.weight[:, :, None])
        conv.bias.copy_(linear.bias)  # type: ignore[union-attr]
    batch = rand(5, 4, 6)()
    for module, inputs in ((linear, batch.transpose(1, 2)), (conv, batch)):
        kfac = KFACPreconditioner(module, inverse_update_steps=1)
        loss_of(module(inputs)).backward()
        kfac.step()
    same(written(linear), written(conv), 1e-12)


@pytest.mark.parametrize("size", [(2, 4), (8, 12)], ids=["patches", "correlated"])
def test_an_unbatched_image_is_a_batch_of_one(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    channels, width = size
    modules = [nn.Conv2d(channels, 3, 3, padding=1).double() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    image = rand(channels, width, width)()
    for module, inputs in zip(modules, (image, image[None]), strict=True):
        kfac = KFACPreconditioner(module, inverse_update_steps=1)
        module(inputs).sin().sum().backward()
        kfac.step()
    same(written(modules[0]), written(modules[1]), 1e-12)


@pytest.mark.parametrize(
    "make",
    [LAYERS[n] for n in ("linear", "conv2d, stride 2", "conv2d, correlated")],
    ids=["linear", "conv", "correlated"],
)
def test_float32_is_float64_to_rounding(make: Callable[[], Made]) -> None:
    torch.manual_seed(0)
    module, inputs = make()
    reference = Reference([module.float()], damping=0.1)
    kfac = KFACPreconditioner(module, damping=0.1, kl_clip=None, inverse_update_steps=1)
    loss_of(module(inputs().float())).backward()
    expected = reference.directions()[module]
    kfac.step()
    same(written(module), expected, 1e-4)


def test_correlations_need_no_memory_for_patches() -> None:
    module, batch = nn.Conv2d(8, 4, 3, padding=1).double(), rand(4, 8, 32, 32)()
    kfac = KFACPreconditioner(module, inverse_update_steps=1, _queued=False)
    loss_of(module(batch)).backward()
    kfac.step()
    patches = 8 * (8 * 9 + 1) * batch.numel() // 8
    assert kfac.stats()["memory_bytes"] < patches / 4


def test_the_scale_of_kfac_pytorch() -> None:
    """A smaller by T^3, G by N^2 T^2 for convolutions; G by N^2 for Linear: the same direction for another damping."""
    for module, batch, positions in (
        (nn.Conv2d(2, 3, 3), rand(5, 2, 6, 5)(), 12),
        (nn.Linear(4, 3), rand(5, 4)(), 1),
    ):
        module = module.double()
        torch.manual_seed(0)
        scale = 5**2 * positions**5
        found = []
        for options in (
            {"damping": 0.01},
            {"damping": 0.01 / scale, "factor_scaling": "kfac-pytorch"},
        ):
            kfac = KFACPreconditioner(
                module, kl_clip=None, method="eigen", factor_decay=0.0, inverse_update_steps=1, **options
            )
            module.zero_grad()
            loss_of(module(batch)).backward()
            kfac.step()
            kfac.remove()
            found.append(written(module) / scale ** len(found))
        same(found[1], found[0])


def test_patches_are_made_some_samples_at_a_time() -> None:
    """94 MB of them are more than the queued path makes at once."""
    torch.manual_seed(0)
    module, batch = nn.Conv2d(4, 2, 3, padding=1).double(), rand(20, 4, 128, 128)()
    found = []
    for queued in (False, True):
        kfac = KFACPreconditioner(module, inverse_update_steps=1, _queued=queued)
        module.zero_grad()
        loss_of(module(batch)).backward()
        kfac.step()
        kfac.remove()
        found.append(written(module))
    same(found[1], found[0], 1e-12)
