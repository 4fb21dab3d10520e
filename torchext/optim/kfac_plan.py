"""A plan to print."""

from __future__ import annotations

from typing import Any

__all__ = ["KFACPlan"]


class KFACPlan:
    """Who computes and sends what, and what it costs; ``print`` it, or read ``as_dict``."""

    def __init__(self, plan: dict[str, Any], stats: dict[str, Any]) -> None:
        self.as_dict: dict[str, Any] = plan
        self._stats = stats

    def __str__(self) -> str:
        plan = self.as_dict
        lines = [
            f"K-FAC, strategy {plan['strategy']}, {plan['ranks']} rank(s)",
            f"  all-reduce  {_line(plan['all_reduce'])}",
            f"  broadcast   {_line(plan['broadcast'])}",
            *([] if plan["sharing"] is None else [f"  memory      {_line(plan['sharing'])}"]),
            f"  inversion   {1e6 * plan['inversion'][0]:.1f} us + {1e12 * plan['inversion'][1]:.3g} ps * dim^3",
            f"  {'layer':<24} {'factor':<12} {'exchange':<12} {'inverted by':<12} {'used by':<9} run",
        ]
        for factor in plan["factors"]:
            dim = f"{factor['side']} {factor['dim']}" + (f" x {factor['count']}" if factor["count"] > 1 else "")
            owner = "all" if factor["owner"] < 0 else f"rank {factor['owner']}"
            used = "all" if factor["workers"] == plan["ranks"] else f"{factor['workers']} rank(s)"
            exchange = factor["exchange"] if plan["ranks"] > 1 else "-"
            lines.append(f"  {factor['layer']:<24} {dim:<12} {exchange:<12} {owner:<12} {used:<9} {factor['run']}")
        if plan["split_directions"]:
            lines.append("  directions are split by columns: every rank computes a share of each")
        if plan["row_layers"]:
            lines.append(
                f"  directions of {plan['row_layers']} Linear layers are made of gathered rows, but in updates of the "
                "inverses"
            )
        if plan["tiles"]:
            lines.append('  directions of larger layers are made by AMX in 16 bits (direction_precision="high")')
        updates, steps = max(self._stats["inverse_updates"], 1), max(self._stats["steps"], 1)
        rows = [
            ("exchange of factors", "predicted_exchange_seconds", self._stats["exchange_wait_seconds"] / updates),
            ("inversion", "predicted_invert_seconds", self._stats["invert_seconds"] / updates),
            (
                "distribution",
                "predicted_distribute_seconds",
                self._stats["distribute_seconds"] / updates,
            ),
            ("directions, a step", "predicted_gradients_seconds", None),
            ("preconditioning, a step", "predicted_precondition_seconds", self._stats["precondition_seconds"] / steps),
        ]
        lines.append("  times in ms: predicted; measured here (waiting that is left after overlap)")
        for name, key, measured in rows:
            predicted = "-" if key is None else f"{1e3 * plan[key]:.3f}"
            lines.append(f"  {name:<24} {predicted:>10} {'-' if measured is None else f'{1e3 * measured:.3f}':>10}")
        return "\n".join(lines)

    __repr__ = __str__


def _line(cost: tuple[float, float]) -> str:
    rate = f"{1 / (1e9 * cost[1]):.2f} GB/s" if cost[1] > 0 else "unlimited"
    return f"{1e6 * cost[0]:.1f} us + bytes / {rate}"
