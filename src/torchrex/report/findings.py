"""What a check finds about a run, with the numbers behind it, and how numbers are written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Severity = Literal["problem", "warning", "note", "fine"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note", "fine")
QUICK = "only a quick look"  # the title of a note that says what was left out to save time


@dataclass(frozen=True)
class Finding:
    """One thing to know about a run.

    A problem: do not trust the answer. A warning: perhaps do not, or work was wasted. A note: what
    is not known, or what was chosen. Fine: a check that was passed.
    """

    severity: Severity
    title: str
    words: str  # what it means and what to change
    numbers: dict[str, Any] = field(default_factory=dict)  # what it rests on


@dataclass(frozen=True)
class Diagnosis:
    """All findings about one run, the gravest first."""

    path: Path
    name: str
    status: str
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        return not self.of("problem") and not self.of("warning")

    @property
    def quick(self) -> bool:
        """Something was left out to save time, so that a full look may find more."""
        return any(finding.title == QUICK for finding in self.findings)

    def of(self, severity: Severity) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == severity]

    @property
    def verdict(self) -> str:
        """One line: how many problems and warnings, or that there are none."""
        if not self.healthy:
            kinds: tuple[Severity, ...] = ("problem", "warning")
            return " and ".join(several(n, kind) for kind in kinds if (n := len(self.of(kind))))
        if not any(finding.severity == "fine" or finding.numbers for finding in self.findings):
            return "there was nothing to check"
        return "nothing wrong was found" + (" in a quick look" if self.quick else "")


def tally(runs: Iterable[tuple[int, int]]) -> str:
    """How many runs have what, from the numbers of problems and warnings of each."""
    names = ("with problems", "with warnings alone", "with neither")
    found = Counter(0 if problems else 1 if warnings else 2 for problems, warnings in runs)
    return ", ".join(f"{found[k]:,} {name}" for k, name in enumerate(names) if found[k])


def number(value: float, digits: int = 4) -> str:
    """Four significant digits: 0.1025, 9.957, 150,000, 1.138 billion, 2.556e-6."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = float(f"{value:.{digits}g}")
    if abs(value) < 1e-4 or abs(rounded) >= 1e12:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if abs(rounded) >= unit:
            return f"{rounded / unit:g} {name}"
    return f"{rounded:,.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{rounded:g}"


def about(value: float) -> str:
    """Two significant digits, for advice and rough estimates."""
    return number(value, 2)


def percent(rate: float) -> str:
    return "less than 0.0001 %" if 0 < rate < 1e-6 else f"{number(100 * rate, 3)} %"


def measured(value: float, error: float) -> str:
    """A value with its standard error: 1.052(6)."""
    known = math.isfinite(error) and error > 0
    return value_and_error(value, error) if known else f"{number(value)} (its error is not known)"


def value_and_error(value: float | None, error: float | None) -> str:
    """`0.410(2)`: the error applies to the last digits shown; of 1,000 or more it is `5.0(4)e5`."""
    if value is None:
        return ""
    if not error or not math.isfinite(error):
        return f"{value:.4g}"
    if error >= 999.5:
        power = math.floor(math.log10(max(abs(value), error)))
        return f"{value_and_error(value / 10.0**power, error / 10.0**power)}e{power}"
    decimals = max(0, -math.floor(math.log10(error)))
    return f"{value:,.{decimals}f}({math.ceil(error * 10**decimals - 0.5)})"


def times(count: float) -> str:
    """never, once, twice, 3 times; a fraction is a mean over chains: 2.5 times on average."""
    rare: dict[float, str] = {0: "never", 1: "once", 2: "twice"}
    return rare.get(count) or f"{_count(count)} times{'' if count == int(count) else ' on average'}"


def several(count: float, thing: str) -> str:
    """1 round trip, 5 round trips."""
    return f"{_count(count)} {thing}{'' if count == 1 else 's'}"


def _count(count: float) -> str:  # 1.0 is not quite 1
    exact = count == int(count) or count >= 100
    return f"{count:,.0f}" if exact else f"{count:#.2g}".rstrip(".")
