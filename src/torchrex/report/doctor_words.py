"""How the doctor writes numbers: one rounding for each kind, so that a number looks the same
wherever it is said.
"""

from __future__ import annotations

import math

SMALLEST = 1e-6  # a rate below it is not told apart from less
LARGE = ((1e9, "billion"), (1e6, "million"))  # what nobody counts the digits of


def number(value: float, digits: int = 4) -> str:
    """Four significant digits: 0.1025, 9.957, 150,000, 1.138 billion, 2.556e-6."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = float(f"{value:.{digits}g}")
    if abs(value) < 1e-4 or abs(rounded) >= 1e12:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for unit, name in LARGE:
        if abs(rounded) >= unit:
            return f"{rounded / unit:g} {name}"
    return f"{rounded:,.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{rounded:g}"


def about(value: float) -> str:
    """Two significant digits, for what is advised or estimated roughly."""
    return number(value, 2)


def percent(rate: float) -> str:
    """Three significant digits of a rate; what is too small to matter is said to be so."""
    if 0 < rate < SMALLEST:
        return f"less than {100 * SMALLEST:g} %"
    return f"{number(100 * rate, 3)} %"


def measured(value: float, error: float) -> str:
    """A value with its standard error, both to two digits of the error: 1.052 +- 0.0061 has no
    digit that means nothing.
    """
    if not (math.isfinite(error) and error > 0):
        return f"{number(value)} (its error is not known)"
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:,.{decimals}f} +- {error:,.{decimals}f}"


def times(count: float) -> str:
    """never, once, twice, 3 times; what is no whole number is a mean over chains: 2.5 times on
    average.
    """
    rare: dict[float, str] = {0: "never", 1: "once", 2: "twice"}
    return rare.get(count) or f"{_count(count)} times{'' if count == int(count) else ' on average'}"


def several(count: float, thing: str) -> str:
    """1 round trip, 5 round trips."""
    return f"{_count(count)} {thing}{'' if count == 1 else 's'}"


def _count(count: float) -> str:
    return (
        f"{count:,.0f}" if count == int(count) or count >= 100 else f"{count:#.2g}".rstrip(".")
    )  # 1.0 is not quite 1
