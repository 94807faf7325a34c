"""What a check finds about a run: data, each finding with the numbers behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchrex.report.runs import LoadedRun

Severity = Literal["problem", "warning", "note", "fine"]
QUICK = "only a quick look"  # the title of a note that says what was left out to save time
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note", "fine")


@dataclass(frozen=True)
class Finding:
    """One thing to know about a run.

    A problem means that the answer of the run is not to be trusted, a warning that it may not be,
    or that work was wasted; a note says what cannot be told, or what was chosen; fine is a check
    that was passed.
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
        """Whether something was left out to save time, so that a full look may find more."""
        return any(finding.title == QUICK for finding in self.findings)

    def of(self, severity: Severity) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == severity]

    @property
    def verdict(self) -> str:
        """One line: how many problems and warnings, or that there are none."""
        if self.healthy:
            checked = any(
                finding.severity == "fine" or finding.numbers for finding in self.findings
            )
            found = (
                "nothing wrong was found in a quick look"
                if self.quick
                else "nothing wrong was found"
            )
            return found if checked else "there was nothing to check"
        counts = [(len(self.of(severity)), severity) for severity in ("problem", "warning")]
        return " and ".join(f"{n} {word}{'s' if n > 1 else ''}" for n, word in counts if n)


Check = Callable[[LoadedRun], Iterable[Finding]]
