"""`--budget`: how much time is left of 9m, 90s or 1.5h."""

from __future__ import annotations

import time

from torchrex.errors import ConfigError

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
LEAST = 1e-9  # seconds that are left of a budget that is used up: a run takes no less, and stops at its first chance


def seconds_of(budget: str) -> float | None:
    """The seconds of a time such as 9m; None for no budget."""
    if not budget:
        return None
    number, unit = (budget[:-1], budget[-1]) if budget[-1] in UNITS else (budget, "s")
    try:
        seconds = float(number) * UNITS[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--budget must be a time such as 9m, 90s or 1.5h, got {budget!r}")
    return seconds


class Clock:
    """How much is left of a budget, from now on."""

    def __init__(self, seconds: float | None) -> None:
        self.began, self.seconds = time.monotonic(), seconds

    def left(self) -> float | None:
        return (
            None
            if self.seconds is None
            else max(LEAST, self.seconds - (time.monotonic() - self.began))
        )
