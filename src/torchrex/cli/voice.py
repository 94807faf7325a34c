"""Which of several processes speaks: one, as torchrun's environment tells it. Nothing is loaded for
that.
"""

import os


def is_main_process() -> bool:
    """What all of them met, the first one tells; what a single one met, the others tell."""
    return int(os.environ.get("WORLD_SIZE", "1")) < 2 or os.environ.get("RANK", "0") == "0"
