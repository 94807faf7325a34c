"""What a run leaves behind: draws of rung 0 and how the ladder behaved."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from torchrex.errors import RunFolderError

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
