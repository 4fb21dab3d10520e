"""A network and a model that were not measured: what tests predict with."""

from __future__ import annotations

from torchext.auto import LinkModel, OperationTable, ParameterProfile, Profile

SIZES = tuple(4096 * 4**power for power in range(7))


def ring_link(ranks: int = 4, latency: float = 1e-3, rate: float = 125e6, spread: float = 0.0) -> LinkModel:
    """A ring on which every time is the formula's."""
    hops = ranks - 1

    def half(nbytes: int) -> float:
        return hops * latency + hops / ranks * nbytes / rate

    return LinkModel(
        backend="gloo",
        device="cpu",
        host_of=tuple(range(ranks)),
        tables={
            "all_reduce": OperationTable(tuple((size, 2 * half(size)) for size in SIZES), spread),
            "reduce_scatter": OperationTable(tuple((size, half(size)) for size in SIZES)),
            "all_gather": OperationTable(tuple((size, half(size)) for size in SIZES)),
            "p2p": OperationTable(tuple((size, latency + size / rate) for size in SIZES)),
            "rows": OperationTable(tuple((size // ranks, half(size)) for size in SIZES)),
        },
        latency_seconds=latency,
        bytes_per_second=rate,
        copy_bytes_per_second=8e9,
        operations_per_second=50e9,
    )


def growing_profile(layers: int = 12, megabytes: float = 40.0, compute: float = 0.3) -> Profile:
    """Layers that grow with depth, forward and backward 1 to 2."""
    whole = sum(range(1, layers + 1))
    forward, backward = compute / 3, 2 * compute / 3
    return Profile(
        parameters=tuple(
            ParameterProfile(
                name=f"{layer}.weight",
                shape=(int(megabytes * 1e6 / 4 * (layer + 1) / whole),),
                dtype="torch.float32",
                nbytes=4 * int(megabytes * 1e6 / 4 * (layer + 1) / whole),
                ready_seconds=backward * (layers - layer) / layers,
                first_use=layer + 1,
            )
            for layer in reversed(range(layers))
        ),
        forward_seconds=(0.0, *[forward / layers] * layers),
        backward_seconds=backward,
        step_seconds=((compute, compute), (compute, compute)),
        parameter_bytes=int(megabytes * 1e6),
    )
