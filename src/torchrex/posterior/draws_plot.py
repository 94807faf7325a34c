"""The picture of draws: density and trace of each coordinate, readable in grey."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrex.errors import InvalidArgumentError, MissingDependencyError
from torchrex.posterior.arviz_export import coordinate_titles

if TYPE_CHECKING:
    from torchrex.posterior.draws import Draws


def plot_draws(
    draws: Draws, names: Sequence[str] | None, *, axes: Any, most: int, most_chains: int
) -> Any:
    """See `Draws.plot`."""
    titles = coordinate_titles(names, draws.values.shape[2])[:most]
    if draws.n_draws == 0 or not titles:
        raise InvalidArgumentError(
            f"there is nothing to plot: {draws.n_draws} draws of {len(titles)} coordinates"
        )
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise MissingDependencyError(
            "drawing needs matplotlib: pip install 'torchrex[plots]'"
        ) from None
    if axes is None:
        height = 1.0 + 1.7 * len(titles)
        _, axes = plt.subplots(
            len(titles), 2, figsize=(10, height), squeeze=False, constrained_layout=True
        )
    axes = np.asarray(axes)
    if axes.size != 2 * len(titles):
        raise InvalidArgumentError(
            f"axes must be {len(titles)} x 2, one row for each coordinate, got {axes.size} axes"
        )
    axes = axes.reshape(len(titles), 2)
    shown, stride = min(most_chains, draws.n_chains), max(1, draws.n_draws // 2000)
    size = 1.5 if draws.n_draws > 200 else 4.0
    for k, (density, trace) in enumerate(axes):
        values = draws.values[:, :, k].detach().cpu().double().numpy()
        edges = np.histogram_bin_edges(
            values, bins=min(60, max(10, round(2 * draws.n_draws ** (1 / 3))))
        )
        density.hist(
            values.ravel(),
            edges,
            density=True,
            color="0.8",
            label=f"{draws.n_chains:,} chains together",
        )
        for chain in range(shown):
            # A line style beside the colour: readable in grey.
            style = {
                "color": f"C{chain % 10}",
                "linestyle": ("-", "--", "-.", ":")[chain % 4],
                "linewidth": 1.0,
            }
            heights, _ = np.histogram(values[chain], edges, density=True)
            density.stairs(
                heights, edges, label=None if chain else f"each alone ({shown} shown)", **style
            )
            # Dots, because lines between modes would cover everything.
            trace.plot(
                draws.steps[::stride],
                values[chain, ::stride],
                ".",
                color=style["color"],
                markersize=size,
                alpha=0.6,
            )
        density.set_xlabel(titles[k])
        density.set_ylabel("density")
        trace.set_ylabel(titles[k])
    axes[-1, 1].set_xlabel("steps")
    if draws.n_chains > 1:
        axes[0, 0].legend(fontsize=8, frameon=False)
        axes[0, 0].margins(y=0.3)  # room for the legend
    of = "" if shown == draws.n_chains else f" of the first {shown} chains"
    axes[0, 0].set_title(f"{draws.n_chains:,} chains x {draws.n_draws:,} draws", fontsize=10)
    axes[0, 1].set_title(f"draws{of}" if stride == 1 else f"one draw in {stride}{of}", fontsize=10)
    return axes
