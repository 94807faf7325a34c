"""The entry point: first of all Ctrl-C is taken care of, then the rest is loaded. Nothing is
imported here that takes time.
"""

import signal

from torchrex.cli.leave import leave


def main() -> None:
    """The `torchrex` command."""
    ours = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # not where it is ignored, or another's
    if ours:
        signal.signal(signal.SIGINT, leave)
    try:
        from torchrex.cli.exits import call
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    call()
