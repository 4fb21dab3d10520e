"""Ways of synchronising gradients with their predicted steps: the search over a profile and a link model."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from torchext import _C
from torchext.auto.link_model import LinkModel, search_tables
from torchext.auto.step_profile import ParameterProfile, Profile
from torchext.base.plain import plain

__all__ = [
    "INEXACT",
    "Candidate",
    "checked_allow",
    "core_of",
    "row_layers",
    "search",
    "search_profile",
    "simulate",
]

INEXACT = ("prague", "dssync", "hop")
_ALLOWED = ("exact", *INEXACT)
_HOP_GRAPH = "ring-based"  # HopOptions' default
_MOST_RANKS = 4096
_OPTIMIZER_COPIES = 1.5  # two are read and one is written, where a copy reads one and writes one


@dataclass(frozen=True)
class Candidate:
    """One way of synchronising gradients, and what a training step takes with it by prediction.

    Args:
        way: ``"ddp"``, ``"dear"``, ``"prague"``, ``"dssync"`` or ``"hop"``. ``"factors"``, never possible, says why no
            layer's rows travel.
        form: Of ``ddp``: ``"default"`` or ``"program"``, the buckets that are best by prediction. Of ``dear``:
            ``"sharded"`` or ``"replicated"``. Else the order of compute and average.
        partners: Of an inexact way: members of a group; of ``hop`` the neighbours that a rank sends to.
        buckets: Of an exact way: positions in ``Profile.parameters``, buckets in the order in which they leave.
        step_seconds: Of one training step, with the work of the plainest optimizer.
        compute_seconds: Of forward and backward pass on the slowest rank.
        exposed_seconds: Of the step, what compute waits for communication.
        extra_bytes: Memory for buckets, beside gradients.
        exact: Whether every rank gets the averaged gradients of plain DDP, up to rounding.
        rho: Of an inexact way: the share of the variance between the ranks' models that one average leaves.
        possible: Where it is False there are no times.
        chosen: Of the candidates of one search one is.
        reason: ``"chosen"``, or why not.
        factor_layers: Names of layers whose rows travel in place of their gradients, which are in no bucket.
        transport: Of ``dear``: ``"ring"`` or ``"hierarchical"``, as ``DeAROptions`` takes it.
    """

    way: str
    form: str
    partners: int
    buckets: tuple[tuple[int, ...], ...]
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    extra_bytes: float
    exact: bool
    rho: float
    possible: bool
    chosen: bool
    reason: str
    factor_layers: tuple[str, ...] = ()
    transport: str = ""


def simulate(
    profile: Profile, link: LinkModel, *, world_size: int | None = None, allow: Sequence[str] = ("exact",)
) -> list[Candidate]:
    """Predicts the step of every way of synchronising gradients, also for networks that are not there. Offline.

    Args:
        profile: Of the model: :func:`profile`, or :meth:`Profile.load`.
        link: Of the network: :func:`calibrate`, :meth:`LinkModel.load`, :meth:`LinkModel.scaled`.
        world_size: Ranks, 2 to 4096, each with a link of its own; None: as many as were measured.
        allow: ``"exact"``, and inexact ways to list beside: ``"prague"``, ``"dssync"``, ``"hop"``.

    Returns:
        The candidates: exact ones by step time, then those that are not possible, then inexact ones. The chosen one
        is exact.

    Raises:
        TypeError: ``profile`` or ``link`` is something else.
        ValueError: A world size or a name in ``allow`` that cannot be.
    """
    _check_inputs("torchext.auto.simulate", profile, link)
    allow = checked_allow("torchext.auto.simulate", allow)
    world_size = plain(world_size)
    if world_size is not None:
        if isinstance(world_size, bool) or not isinstance(world_size, int) or not 2 <= world_size <= _MOST_RANKS:
            raise ValueError(
                f"torchext.auto.simulate: world_size must be a whole number from 2 to {_MOST_RANKS}, got {world_size!r}"
            )
        if world_size != link.world_size:
            link = link.with_ranks(world_size)
    return search(profile, link, listed=[way for way in INEXACT if way in allow], allow=allow)


def search(
    profile: Profile,
    link: LinkModel,
    *,
    listed: Sequence[str],
    allow: Sequence[str],
    choose: str = "auto",
    spare_bytes: float = 0.0,
    refused: dict[str, str] | None = None,
    without_rows: Sequence[str] = (),
) -> list[Candidate]:
    """The candidates of a profile on a network.

    Args:
        profile: Of the model.
        link: Of the network, with as many ranks as are meant.
        listed: Inexact ways that are listed.
        allow: Of these, which may be chosen.
        choose: ``"auto"``, or one of these.
        spare_bytes: Memory for what a way takes beside parameters, gradients and optimizer; 0: no limit.
        refused: What cannot be -> why; ``"dear"``, ``"dear sharded"``, ``"dear hierarchical"`` and so on.
        without_rows: Names of layers whose rows cannot travel.
    """
    options = _C.SearchOptions(
        inexact=[_inexact_way(way, link.world_size) for way in listed],
        choose="exact" if choose == "auto" else choose,
        spread=link.spread,
        spare_nbytes=spare_bytes,
        refused=refused or {},
    )
    found = _C.search_strategies(search_profile(profile, link, without_rows), search_tables(link), options)
    layers = list(_layers(profile))
    # Where there is no such layer nobody asks why.
    return [_candidate(core, allow, layers) for core in found if core.way != "factors" or layers]


def checked_allow(caller: str, allow: Sequence[str]) -> tuple[str, ...]:
    """What is allowed, ``"exact"`` always among it.

    Raises:
        ValueError: A name that is none; with the nearest.
    """
    names = (allow,) if isinstance(allow, str) else tuple(allow)
    for name in names:
        if name not in _ALLOWED:
            near = difflib.get_close_matches(str(name), _ALLOWED, n=1)
            raise ValueError(
                f"{caller}: allow must be of {', '.join(map(repr, _ALLOWED))}, got {name!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
    return tuple(name for name in _ALLOWED if name in {"exact", *names})


def search_profile(profile: Profile, link: LinkModel, without_rows: Sequence[str] = ()) -> _C.StepProfile:
    """The profile as the search takes it, with the work of the plainest optimizer.

    That one reads parameters and gradients, and writes parameters. What others do besides is in no profile.

    Args:
        profile: Of the model.
        link: Says how fast a rank copies.
        without_rows: Names of layers whose rows cannot travel.
    """
    copied = _OPTIMIZER_COPIES * profile.gradient_bytes
    kinds: dict[str, int] = {}
    layers = _layers(profile)
    layer_of = {f"{_prefix(name)}{kind}": at for at, name in enumerate(layers) for kind in ("weight", "bias")}
    return _C.StepProfile(
        forward_seconds=profile.forward_seconds,
        backward_seconds=profile.backward_seconds,
        gradients=[
            _C.Gradient(
                nbytes=parameter.nbytes,
                ready_seconds=parameter.ready_seconds,
                first_use=parameter.first_use,
                kind=kinds.setdefault(parameter.dtype, len(kinds)),
                layer=layer_of.get(parameter.name, -1),
            )
            for parameter in profile.parameters
        ],
        optimizer_seconds=copied / link.copy_bytes_per_second if link.copy_bytes_per_second > 0 else 0.0,
        layers=[
            _C.LayerRows(
                kind=weight.kind,
                rows=0 if name in without_rows else weight.rows,
                height=weight.shape[0],
                width=weight.shape[1],
                element_bytes=8 if weight.dtype == "torch.float64" else 4,  # rows of narrower types travel as float32
            )
            for name, weight in layers.items()
        ],
        step_samples=profile.step_seconds,
    )


def row_layers(profile: Profile) -> list[str]:
    """Names of the layers whose rows may travel, as far as the profile knows."""
    return list(_layers(profile))


def core_of(profile: Profile, candidate: Candidate) -> _C.Candidate:
    """An exact candidate of that profile as the simulator takes it."""
    layers = [at for at, name in enumerate(_layers(profile)) if name in candidate.factor_layers]
    return _C.Candidate(
        way=candidate.way,
        form=candidate.form,
        algorithm=candidate.transport,
        buckets=candidate.buckets,
        factor_layers=layers,
    )


def _layers(profile: Profile) -> dict[str, ParameterProfile]:
    """Linear layers and embeddings, and their weights."""
    return {
        parameter.name.removesuffix("weight").removesuffix("."): parameter
        for parameter in profile.parameters
        if parameter.kind in ("linear", "embedding") and parameter.name.rpartition(".")[2] == "weight"
    }


def _prefix(layer: str) -> str:
    return f"{layer}." if layer else ""


def _candidate(core: _C.Candidate, allow: Sequence[str], layers: Sequence[str]) -> Candidate:
    reason = core.reason
    if not core.exact and not core.chosen and core.possible:
        reason = f"choose={core.way!r} takes it" if core.way in allow else "not allowed (allow=...)"
    return Candidate(
        way=core.way,
        form=core.form,
        partners=core.partners,
        buckets=tuple(map(tuple, core.buckets)),
        step_seconds=core.step_seconds,
        compute_seconds=core.compute_seconds,
        exposed_seconds=core.exposed_reduce_seconds + core.exposed_gather_seconds,
        extra_bytes=core.extra_nbytes,
        exact=core.exact,
        rho=core.rho,
        possible=core.possible,
        chosen=core.chosen,
        reason=reason,
        factor_layers=tuple(layers[at] for at in core.factor_layers),
        transport=core.algorithm,
    )


def _inexact_way(way: str, world_size: int) -> _C.InexactWay:
    """With the options that the way has by default."""
    if way == "hop":
        weights = _C.hop_weights(_HOP_GRAPH, world_size)
        neighbours = max(
            sum(weight > 0 for to, weight in enumerate(row) if to != own) for own, row in enumerate(weights)
        )
        return _C.InexactWay(way=way, order="parallel", partners=neighbours, rho=_C.mixing_rho(weights))
    # As ProcessGroupPrague and ProcessGroupDSSync choose the size of groups.
    return _C.InexactWay(way=way, order="cta", partners=4 if world_size >= (8 if way == "prague" else 16) else 2)


def _check_inputs(caller: str, profile: object, link: object) -> None:
    for value, kind in ((profile, Profile), (link, LinkModel)):
        if not isinstance(value, kind):
            raise TypeError(f"{caller} takes a torchext.auto.{kind.__name__}, got {type(value).__name__}")
