"""What a run leaves behind: draws of rung 0 and how the ladder behaved."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from torchrex import notebook
from torchrex.errors import InvalidArgumentError, MissingDependencyError, RunFolderError
from torchrex.posterior.arviz_export import coordinate_labels, draws_to_datatree, to_arviz

if TYPE_CHECKING:
    from xarray import DataTree

TENSORS = ("values", "steps", "noise_variance", "replica_at", "energy", "accepted", "proposed")


@dataclass(repr=False)
class Draws:
    """Draws of rung 0 and the traces kept with them. Axes are in ArviZ order: chains (independent runs), then draws."""

    values: Tensor  # (chains, draws, dim)
    steps: Tensor  # (draws,): after how many steps each was taken
    noise_variance: Tensor  # (draws, pairs, chains): sigma2 trace
    replica_at: Tensor  # (draws, rungs, chains): who stood on each rung
    energy: Tensor  # (draws, rungs, chains): energy estimates per rung
    accepted: Tensor  # (pairs, chains): swaps made over all steps
    proposed: Tensor  # (pairs, chains): swaps tested over all steps
    n_steps: int
    status: str = "finished"  # or "interrupted", "failed"
    settings: dict[str, Any] = field(default_factory=dict)  # how the draws came about, for printing

    @property
    def n_chains(self) -> int:
        return self.values.shape[0]

    @property
    def n_draws(self) -> int:
        return self.values.shape[1]

    @property
    def acceptance_rate(self) -> Tensor:
        """Accepted over proposed for each pair, over all chains: (pairs,)."""
        return self.accepted.sum(1) / self.proposed.sum(1)

    def after(self, step: int) -> Draws:
        """The draws after the first `step` steps (burn-in left out); the swap counts stay those of the whole run."""
        kept = self.steps > step
        return Draws(
            self.values[:, kept],
            self.steps[kept],
            self.noise_variance[kept],
            self.replica_at[kept],
            self.energy[kept],
            self.accepted,
            self.proposed,
            self.n_steps,
            self.status,
            self.settings,
        )

    def mean(self) -> Tensor:
        """Mean of every coordinate over all draws, (dim,)."""
        return self.values.double().mean((0, 1))

    def std(self) -> Tensor:
        """Standard deviation of every coordinate over all draws, (dim,)."""
        return self.values.double().flatten(0, 1).std(0)

    def standard_error(self) -> Tensor:
        """Standard error of the mean from the spread between chains, (dim,); NaN for one chain."""
        means = self.values.double().mean(1)
        return means.std(0) / math.sqrt(self.n_chains) if self.n_chains > 1 else torch.full_like(means[0], math.nan)

    def summary(self, *, most: int = 10) -> str:
        """A small table: coordinates with mean, sd and standard error, then the swaps of every pair."""
        if self.n_draws == 0:
            return f"no draws: {self.status} after {self.n_steps} steps"
        table = Table()
        for column in ("coordinate", "mean", "sd", "se of mean"):
            table.add_column(column, justify="right")
        mean, std, error = self.mean().tolist(), self.std().tolist(), self.standard_error().tolist()
        for k in range(min(most, len(mean))):
            table.add_row(str(k), f"{mean[k]:.4g}", f"{std[k]:.4g}", f"{error[k]:.2g}")
        if len(mean) > most:
            table.add_row("...", f"{len(mean) - most} more", "", "")
        swaps = Table(title="swaps")
        for column in ("rungs", "accepted", "proposed", "rate", "noise variance"):
            swaps.add_column(column, justify="right")
        for pair, rate in enumerate(self.acceptance_rate.tolist()):
            swaps.add_row(
                f"{pair} - {pair + 1}",
                f"{int(self.accepted[pair].sum()):,}",
                f"{int(self.proposed[pair].sum()):,}",
                f"{100 * rate:.3g} %",
                f"{float(self.noise_variance[-1, pair].mean()):.4g}",
            )
        console = Console(width=80, color_system=None)
        with console.capture() as captured:
            console.print(f"{self.n_chains:,} chains x {self.n_draws:,} draws, {self.n_steps:,} steps, {self.status}")
            console.print(table)
            if len(self.accepted):
                console.print(swaps)
        return captured.get().rstrip()

    def to_datatree(self, names: Sequence[str] | None = None) -> DataTree:
        """An xarray DataTree in ArviZ's schema (see `arviz_export.py`); `names` are those of the coordinates of `x`.

        `.to_netcdf(path)` and `.to_zarr(path, consolidated=False)` of the tree write it, `xarray.open_datatree(path)` reads it.
        """
        return draws_to_datatree(self, names)

    def to_arviz(self, names: Sequence[str] | None = None) -> Any:
        """What the functions of the installed ArviZ take: `az.summary(draws.to_arviz())`."""
        return to_arviz(self.to_datatree(names))

    def plot(self, names: Sequence[str] | None = None, *, axes: Any = None, most: int = 8, most_chains: int = 8) -> Any:
        """Density (left) and trace (right) of each of the first `most` coordinates; returns the axes, (coordinates, 2).

        The grey area is the histogram of all chains; lines and dots are single chains, the first `most_chains` of them, so that
        chains which stay in different modes are seen. `axes` are your own, of the same shape. Long traces show every k-th draw.
        """
        labels = coordinate_labels(names, self.values.shape[2])[:most]
        if self.n_draws == 0 or not labels:
            raise InvalidArgumentError(f"there is nothing to plot: {self.n_draws} draws of {len(labels)} coordinates")
        try:
            import matplotlib.pyplot as plt
        except ImportError:
            raise MissingDependencyError("drawing needs matplotlib: pip install 'torchrex[plots]'") from None
        if axes is None:
            height = 1.0 + 1.7 * len(labels)
            _, axes = plt.subplots(len(labels), 2, figsize=(10, height), squeeze=False, constrained_layout=True)
        axes = np.asarray(axes)
        if axes.size != 2 * len(labels):
            raise InvalidArgumentError(f"axes must be {len(labels)} x 2, one row for each coordinate, got {axes.size} axes")
        axes = axes.reshape(len(labels), 2)
        shown, stride = min(most_chains, self.n_chains), max(1, self.n_draws // 2000)
        size = 1.5 if self.n_draws > 200 else 4.0
        for k, (density, trace) in enumerate(axes):
            values = self.values[:, :, k].detach().cpu().double().numpy()
            edges = np.histogram_bin_edges(values, bins=min(60, max(10, round(2 * self.n_draws ** (1 / 3)))))
            density.hist(values.ravel(), edges, density=True, color="0.8", label=f"{self.n_chains:,} chains together")
            for chain in range(shown):
                # A line style beside the colour: readable in grey.
                style = {"color": f"C{chain % 10}", "linestyle": ("-", "--", "-.", ":")[chain % 4], "linewidth": 1.0}
                heights, _ = np.histogram(values[chain], edges, density=True)
                density.stairs(heights, edges, label=None if chain else f"each alone ({shown} shown)", **style)
                # Dots, because lines between modes would cover everything.
                trace.plot(self.steps[::stride], values[chain, ::stride], ".", color=style["color"], markersize=size, alpha=0.6)
            density.set_xlabel(f"x[{labels[k]}]")
            density.set_ylabel("density")
            trace.set_ylabel(f"x[{labels[k]}]")
        axes[-1, 1].set_xlabel("steps")
        if self.n_chains > 1:
            axes[0, 0].legend(fontsize=8, frameon=False)
            axes[0, 0].margins(y=0.3)  # room for the legend
        of = "" if shown == self.n_chains else f" of the first {shown} chains"
        axes[0, 0].set_title(f"{self.n_chains:,} chains x {self.n_draws:,} draws", fontsize=10)
        axes[0, 1].set_title(f"draws{of}" if stride == 1 else f"one draw in {stride}{of}", fontsize=10)
        return axes

    def _repr_html_(self) -> str:
        """For notebooks: the first ten coordinates and the swaps, without style sheets or scripts."""
        title = f"{self.n_chains:,} chains × {self.n_draws:,} draws × {self.values.shape[2]:,} dim"
        parts = []
        if self.n_draws:
            columns = zip(self.mean().tolist(), self.std().tolist(), self.standard_error().tolist(), strict=True)
            rows = [(str(k), f"{mean:.4g}", f"{std:.4g}", f"{error:.2g}") for k, (mean, std, error) in enumerate(columns)]
            more = [("…", f"{len(rows) - 10:,} more", "", "")] if len(rows) > 10 else []
            parts.append(notebook.table(("coordinate", "mean", "sd", "se of mean"), rows[:10] + more))
        swaps = [
            (f"{pair} – {pair + 1}", f"{made:,}", f"{tested:,}", f"{100 * made / tested:.3g} %" if tested else "")
            for pair, (made, tested) in enumerate(zip(self.accepted.sum(1).tolist(), self.proposed.sum(1).tolist(), strict=True))
        ]
        if swaps:
            parts.append(notebook.table(("rungs", "swaps accepted", "proposed", "rate"), swaps))
        if self.settings:
            settings = ", ".join(f"{name}: {value}" for name, value in self.settings.items())
            parts.append(notebook.details("settings", settings))
        return notebook.panel("Draws", f"{title}, {self.n_steps:,} steps, {self.status}", *parts)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file."""
        from safetensors.torch import save_file

        meta = {"n_steps": self.n_steps, "status": self.status, "settings": self.settings}
        save_file({name: getattr(self, name).contiguous() for name in TENSORS}, str(path), {"torchrex": json.dumps(meta)})

    @staticmethod
    def load(path: str | Path) -> Draws:
        """Read what `save` wrote. Nothing in the file is executed."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="pt") as file:
                meta = json.loads((file.metadata() or {})["torchrex"])
                tensors = {name: file.get_tensor(name) for name in TENSORS}
            return Draws(**tensors, **meta)
        except FileNotFoundError:
            raise RunFolderError(f"there is no file {path}") from None
        except OSError as error:
            raise RunFolderError(f"cannot read {path} ({error}); give the draws.safetensors file itself") from None
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            raise RunFolderError(f"{path} does not hold torchrex draws ({error}); was it written by Draws.save?") from None

    def __repr__(self) -> str:
        rates = ", ".join(f"{100 * rate:.3g} %" for rate in self.acceptance_rate.tolist())
        swaps = f", swaps accepted {rates}" if rates else ""
        return f"Draws({self.n_chains} chains x {self.n_draws} draws x {self.values.shape[2]} dim{swaps}, {self.status})"


class DrawRecorder:
    """Collects draws block by block: thins what grows with the steps, sums what does not."""

    def __init__(self, n_steps: int, *, thin: int, burn_in: int) -> None:
        self.thin, self.burn_in = thin, burn_in
        self.n_seen = 0
        self._capacity = max(0, (n_steps - burn_in) // thin)
        self._kept = 0
        self._store: dict[str, Tensor] = {}
        self._accepted: Tensor | None = None
        self._proposed: Tensor | None = None

    def record(self, info: Any) -> None:
        """Take in the StepInfo of consecutive steps, stacked along the first axis."""
        n = len(info.position)
        accepted, proposed = info.accepted.sum(0), info.proposed.sum(0).expand(info.accepted.shape[1:])
        self._accepted = accepted if self._accepted is None else self._accepted + accepted
        self._proposed = proposed if self._proposed is None else self._proposed + proposed
        # The draw after step k (counted from 1) is kept if k - burn_in is a positive multiple of thin.
        first = max(self.burn_in + self.thin, self.n_seen + 1)
        first += (self.burn_in - first) % self.thin
        rows = slice(first - self.n_seen - 1, n, self.thin)
        fields = {
            "values": info.position,
            "noise_variance": info.noise_variance,
            "replica_at": info.replica_at,
            "energy": info.energy,
        }
        steps = torch.arange(self.n_seen + 1, self.n_seen + n + 1)[rows]
        for name, values in {**fields, "steps": steps}.items():
            if name not in self._store:
                dtype = torch.int16 if name == "replica_at" else values.dtype
                self._store[name] = torch.empty((self._capacity, *values.shape[1:]), dtype=dtype)
            kept = steps if name == "steps" else values[rows]
            self._store[name][self._kept : self._kept + len(steps)] = kept
        self._kept += len(steps)
        self.n_seen += n

    def draws(self, status: str, settings: dict[str, Any]) -> Draws | None:
        """What was recorded so far, or None if not a single step was."""
        if self._accepted is None or self._proposed is None:
            return None
        kept = {name: tensor[: self._kept] for name, tensor in self._store.items()}
        return Draws(
            values=kept.pop("values").movedim(1, 0).contiguous(),
            accepted=self._accepted.cpu(),
            proposed=self._proposed.cpu(),
            n_steps=self.n_seen,
            status=status,
            settings=settings,
            **kept,
        )
