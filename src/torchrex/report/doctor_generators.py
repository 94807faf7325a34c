"""Do the generators of a GAN make more than one image each?"""

from __future__ import annotations

from collections.abc import Iterable

from torchrex.report.findings import Finding
from torchrex.report.runs import LoadedRun

COLLAPSED = 0.25  # variety of a generator below which its pictures look alike
ONE_IMAGE = 0.1  # by the pictures of table 3: at 0.05 every row is one image, at 0.15 and 0.23 some rows have two or three


def check_generators(run: LoadedRun) -> Iterable[Finding]:
    """For runs with generators: the variety of what one of them makes, where real images have 1."""
    variety = run.metrics.get("variety")
    if not isinstance(variety, int | float):
        return
    numbers = {"variety": variety, "collapsed_below": COLLAPSED}
    told = f"The images of one generator vary by {variety:.2f} of what real images do"
    if variety < COLLAPSED:
        makes = "nearly one image" if variety < ONE_IMAGE else "few different images"
        words = (
            f"{told}, less than {COLLAPSED:g}: each makes {makes}, as samples.png shows. The discriminator may be a "
            f"good classifier all the same; for varied images lower sampling_lr, the rate of SGHMC."
        )
        yield Finding("warning", "the generators have collapsed", words, numbers)
    else:
        yield Finding("fine", "generators", f"{told}.", numbers)
