"""What a terminal does to a picture on it when it becomes narrower: it breaks the lines that no
longer fit into several rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console, RenderableType
from rich.segment import Segment


def reflows(environ: Mapping[str, str]) -> bool:
    """Does the terminal break lines? Nearly all do; xterm and GNU screen cut them off, and then
    every line is one row still.
    """
    return "TMUX" in environ or not environ.keys() & {"XTERM_VERSION", "STY"}


def extra_rows(console: Console, picture: RenderableType, *, drawn_for: int, width: int) -> int:
    """How many rows more than lines a picture takes, if it was drawn for one width and the terminal
    has another now.
    """
    lines = console.render_lines(picture, console.options.update_width(drawn_for), pad=False)
    lengths = map(Segment.get_line_length, lines)
    return sum(max(0, length - 1) // width for length in lengths)
