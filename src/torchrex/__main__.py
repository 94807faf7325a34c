"""`python -m torchrex` is the `torchrex` command."""

from torchrex.cli import main

main()
