"""Collecting draws while a run goes: memory is that of the draws that will be kept, however many
steps there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrex.posterior import Draws

FIELDS = ("values", "noise_variance", "replica_at", "energy", "steps")


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
        """Take in the StepInfo of consecutive steps, stacked along the first axis.

        All of it or nothing: what counts changes in the last line, so that steps whose recording
        was broken off by Ctrl-C can be recorded again.
        """
        n = len(info.position)
        accepted, proposed = (
            info.accepted.sum(0).cpu(),
            info.proposed.sum(0).expand(info.accepted.shape[1:]).cpu(),
        )
        if self._accepted is not None and self._proposed is not None:
            accepted, proposed = self._accepted + accepted, self._proposed + proposed
        # The draw after step k (counted from 1) is kept if k - burn_in is a positive multiple of
        # thin.
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
        kept_now, seen_now = self._kept + len(steps), self.n_seen + n
        self._accepted, self._proposed, self._kept, self.n_seen = (
            accepted,
            proposed,
            kept_now,
            seen_now,
        )

    def draws(self, status: str, settings: dict[str, Any]) -> Draws | None:
        """What was recorded so far, or None if not a single step was."""
        if self._accepted is None or self._proposed is None:
            return None
        kept = {name: tensor[: self._kept] for name, tensor in self._store.items()}
        return Draws(
            values=kept.pop("values").movedim(1, 0).contiguous(),
            accepted=self._accepted,
            proposed=self._proposed,
            n_steps=self.n_seen,
            status=status,
            settings=settings,
            **kept,
        )

    def state_dict(self) -> dict[str, Any]:
        """The draws so far; the rows are views, to be written before the next steps."""
        rows = {name: tensor[: self._kept] for name, tensor in self._store.items()}
        return {
            "n_seen": self.n_seen,
            "rows": rows,
            "accepted": self._accepted,
            "proposed": self._proposed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the steps of `state_dict()`, thinned alike; there may be more steps to come
        than there were then.
        """
        rows, n_seen = state["rows"], state["n_seen"]
        kept = max(0, n_seen - self.burn_in) // self.thin
        if (
            set(rows) != set(FIELDS)
            or any(len(tensor) != kept for tensor in rows.values())
            or kept > self._capacity
        ):
            raise ValueError(
                f"the rows of {n_seen} steps must be {kept} of each of {', '.join(FIELDS)}"
            )
        store = {
            name: torch.empty((self._capacity, *tensor.shape[1:]), dtype=tensor.dtype)
            for name, tensor in rows.items()
        }
        for name, tensor in rows.items():
            store[name][:kept] = tensor
        self._store, self._kept, self.n_seen = store, kept, n_seen
        self._accepted, self._proposed = state["accepted"], state["proposed"]
