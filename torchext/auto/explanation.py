"""Says in words which way of synchronising gradients was chosen, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence

from torchext.auto.candidates import Candidate
from torchext.auto.link_model import LinkModel
from torchext.auto.step_profile import Profile

__all__ = ["described", "explanation", "table"]

_HEAD = ("predicted", "exposed", "way", "exact", "why not")


def explanation(profile: Profile, link: LinkModel, candidates: Sequence[Candidate]) -> str:
    """What was measured, and a line for each candidate."""
    derived = "" if all(entry.measured for entry in link.tables.values()) else ", derived from another network"
    # Without the copies of gradients that DDP makes.
    compute = min(candidate.compute_seconds for candidate in candidates if candidate.exact and candidate.possible)
    head = (
        f"{link.world_size} ranks on {link.hosts} host{'s' * (link.hosts > 1)}, links of "
        f"{link.bytes_per_second / 1e6:.4g} MB/s ({link.backend}{derived}), {link.latency_seconds * 1e3:.2g} ms a hop; "
        f"compute {_milliseconds(compute)} a step, {profile.gradient_bytes / 1e6:.1f} MB of gradients in "
        f"{len(profile.parameters)} tensors; calibration repeats within {100 * link.spread:.0f} %"
    )
    return f"{head}\n{table(profile, candidates)}"


def table(profile: Profile, candidates: Sequence[Candidate]) -> str:
    """A line for each candidate."""
    rows = [_HEAD]
    for candidate in candidates:
        times = ("-", "-")
        if candidate.possible:
            times = _milliseconds(candidate.step_seconds), _milliseconds(candidate.exposed_seconds)
        price = "" if candidate.exact else f"rho {candidate.rho:.3g}; "
        exact = "yes" if candidate.exact else "no"
        rows.append((*times, described(profile, candidate), exact, price + candidate.reason))
    width = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return "\n".join(
        f"  {row[0]:>{width[0]}}  {row[1]:>{width[1]}}  {row[2]:<{width[2]}}  {row[3]:<{width[3]}}  {row[4]}"
        for row in rows
    )


def described(profile: Profile, candidate: Candidate) -> str:
    """A candidate in a few words."""
    if candidate.way == "hop":
        return f"hop, {candidate.partners} neighbour{'s' * (candidate.partners > 1)}"
    if not candidate.exact:
        return f"{candidate.way}, groups of {candidate.partners}"
    if candidate.way == "factors":
        return "rows of layers"
    if candidate.form == "default":
        return "DDP, default buckets"
    name = "DDP" if candidate.way == "ddp" else f"dear, {candidate.form}"
    if candidate.transport not in ("", "ring"):
        name += f", {candidate.transport}"
    if candidate.factor_layers:
        count = len(candidate.factor_layers)
        name += f", {count} layer{'s' * (count > 1)} as rows"
    sizes = [sum(profile.parameters[position].nbytes for position in bucket) / 1e6 for bucket in candidate.buckets]
    if not sizes:
        return name if candidate.way == "dear" or not candidate.possible else f"{name}, buckets of its own"
    if len(sizes) == 1:
        return f"{name}, 1 bucket of {sizes[0]:.2g} MB"
    return f"{name}, {len(sizes)} buckets {min(sizes):.2g} .. {max(sizes):.2g} MB"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
