"""What must be known of a run that began with a descent by Adam: from where on temperatures,
learning rates and swaps hold.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchrex.experiments.gan import GanConfig
from torchrex.report.doctor_words import number
from torchrex.report.findings import Finding
from torchrex.report.runs import LoadedRun


def check_warm_start(run: LoadedRun) -> Iterable[Finding]:
    """A note and no fault: Adam knows no temperature and tests no swap, and SGHMC begins at another
    learning rate.
    """
    settings = run.settings
    if not isinstance(settings, GanConfig) or settings.warm_start < 1 or run.ladder is None:
        return
    first, begins = settings.lr_of_mean, settings.lr_of_mean * settings.decay(settings.warm_start)
    numbers = {
        "warm_start": settings.warm_start,
        "n_steps": settings.n_steps,
        "lr_of_adam": first,
        "lr_of_sghmc": begins,
    }
    swaps = " and without swaps, as they should" if run.correction_factor is not None else ""
    words = (
        f"The first {settings.warm_start:,} of {settings.n_steps:,} steps descend by Adam, without noise{swaps}: temperatures "
        f"hold after them alone. On rung 0 Adam begins at learning rate {number(first)} (of the mean loss), SGHMC at "
        f"{number(begins)}."
    )
    yield Finding("note", "warm start", words, numbers)
