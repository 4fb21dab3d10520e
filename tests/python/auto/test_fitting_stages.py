"""What auto.plan says of a model that one rank has no room for: which stages of a pipeline would have."""

from __future__ import annotations

from dataclasses import replace

from torchext.auto.fitting_stages import stages_that_fit
from torchext.auto.step_profile import ParameterProfile, Profile


def profile_of(*sizes: int) -> Profile:
    """Layers of so many bytes, each a weight and a bias of an eighth."""
    parameters = []
    for place, nbytes in enumerate(sizes):
        for name, part in (("weight", 7 * nbytes // 8), ("bias", nbytes // 8)):
            parameters.append(ParameterProfile(f"layer{place}.{name}", (part // 4,), "torch.float32", part, 0.0, place))
    backwards = tuple(reversed(parameters))  # as gradients come
    return Profile(backwards, (1.0,) * len(sizes), 1.0, ((2.0,),), parameter_bytes=sum(sizes))


def test_the_least_number_of_stages_that_divides_the_ranks() -> None:
    text = stages_that_fit(profile_of(800, 800, 800, 800), 8_000, 4, state_tensors=2)
    assert text.startswith("cut the model: a Placement of 2 stages on 2 ranks each has room beside activations, with ")
    assert "layer0.weight .. layer1.bias (6.25 KiB), layer2.weight .. layer3.bias (6.25 KiB); " in text
    assert "4 stages on 1 rank each" in stages_that_fit(profile_of(800, 800, 800, 800), 4_000, 4, state_tensors=2)
    assert "3 stages on 1 rank each" in stages_that_fit(profile_of(*[800] * 6), 7_000, 3, state_tensors=2)


def test_a_layer_that_fits_no_rank() -> None:
    for sizes, ranks in (((800, 8_000), 2), ((8_000,), 2), ((800, 800), 1)):
        text = stages_that_fit(profile_of(*sizes), 4_000, ranks, state_tensors=2)
        assert text == f"take more ranks: no pipeline over {ranks} has room"


def test_frozen_parameters_take_room_on_every_rank() -> None:
    frozen = replace(profile_of(800, 800), parameter_bytes=1_600 + 3_000)
    assert "2 stages" in stages_that_fit(profile_of(800, 800), 4_000, 2, state_tensors=2)
    assert "take more ranks" in stages_that_fit(frozen, 4_000, 2, state_tensors=2)
