"""One thread for small tensors: threads that share out microseconds of work spend their time
waiting for each other.

On a busy machine two threads took 30 s for a run that takes one thread 1 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 2**16  # numbers in the ensemble


@contextmanager
def few_threads(size: int) -> Iterator[None]:
    """Run the body on one thread if the ensemble has few numbers; the setting of before is
    restored.
    """
    before = torch.get_num_threads()
    if size > SMALL or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
