"""Small helpers of all reports: pooling seeds and printing a number with its error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def pool_seeds(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics averaged over seeds; a `_se` beside a metric is pooled as the error of that average."""
    metrics = [result["metrics"] for result in results]
    pooled = {}
    for name in metrics[0]:
        values = [m[name] for m in metrics if m.get(name) is not None]
        if not values:
            continue
        if name.endswith("_se"):
            pooled[name] = math.sqrt(sum(v * v for v in values)) / len(values)
        else:
            pooled[name] = sum(values) / len(values)
    return pooled


def value_and_error(row: dict[str, Any], name: str, *, scale: float = 1.0) -> str:
    """`0.410(2)`: the error applies to the last digit shown."""
    value, error = row.get(name), row.get(f"{name}_se")
    if value is None:
        return ""
    value *= scale
    if not error or not math.isfinite(error):
        return f"{value:.4g}"
    error *= scale
    decimals = max(0, -math.floor(math.log10(error)))
    return f"{value:.{decimals}f}({math.ceil(error * 10**decimals - 0.5)})"
