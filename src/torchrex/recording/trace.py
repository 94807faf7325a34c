"""How the ladder behaved: every k-th step of energies, variances and rungs, and all swaps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrex import notebook
from torchrex.errors import InvalidArgumentError, require_whole
from torchrex.exchange import StepInfo

THINNED = ("energy", "noise_variance", "correction", "replica_at")


def count_swaps(accepted: Tensor, proposed: Tensor) -> list[dict[str, Any]]:
    """The swaps of each pair as in result.json, from counts (pairs,)."""
    return [
        {
            "pair": [pair, pair + 1],
            "proposed": tested,
            "accepted": made,
            "acceptance_rate": made / tested if tested else None,
        }
        for pair, (made, tested) in enumerate(
            zip(accepted.tolist(), proposed.tolist(), strict=True)
        )
    ]


class Trace:
    """Records StepInfo of consecutive steps: every `every`-th step, and the swaps of all steps."""

    def __init__(self, every: int = 1) -> None:
        require_whole("every", every, 1)
        self.every = every
        self.n_steps = 0
        names = ("steps", *THINNED, "swap_steps", "swap_pairs")
        self._parts: dict[str, list[Tensor]] = {name: [] for name in names}
        self._counts: dict[str, Tensor] = {}  # `accepted` and `proposed`, (pairs,)

    def record(self, infos: StepInfo) -> None:
        """Take in one step, or several stacked along a first axis; the last axis has size 1."""
        if infos.energy.ndim == 2:
            infos = StepInfo(*(values[None] for values in infos))
        n = len(infos.energy)
        accepted = infos.accepted[..., 0].cpu()
        for name, tests in (("accepted", accepted), ("proposed", infos.proposed[..., 0].cpu())):
            self._counts[name] = self._counts.get(name, 0) + tests.sum(0)
        steps = torch.arange(self.n_steps, self.n_steps + n)
        when, pair = accepted.nonzero(as_tuple=True)
        rows = slice(-self.n_steps % self.every, n, self.every)
        kept = {name: getattr(infos, name)[rows, ..., 0].cpu() for name in THINNED}
        kept |= {"steps": steps[rows], "swap_steps": steps[when], "swap_pairs": pair}
        for name, values in kept.items():
            self._parts[name].append(values)
        self.n_steps += n

    def tensors(self) -> dict[str, Tensor]:
        """`steps` (k,), `energy` and `replica_at` (k, rungs), `noise_variance` and `correction`
        (k, pairs); every swap as `swap_steps` and `swap_pairs`; `accepted` and `proposed` (pairs,).
        """
        if not self._counts:
            return {}
        self._parts = {name: [torch.cat(parts)] for name, parts in self._parts.items()}
        return {**{name: parts[0] for name, parts in self._parts.items()}, **self._counts}

    def swaps(self) -> list[dict[str, Any]]:
        """For each pair of rungs: proposed, accepted and the rate."""
        return count_swaps(**self._counts) if self._counts else []

    def state_dict(self) -> dict[str, Any]:
        return {"every": self.every, "n_steps": self.n_steps, "tensors": self.tensors()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of a trace with the same `every`."""
        if state["every"] != self.every:
            raise InvalidArgumentError(f"the state is of every={state['every']}, not {self.every}")
        tensors = state["tensors"]
        names = ("accepted", "proposed") if tensors else ()
        self._counts = {name: tensors[name].clone() for name in names}
        self._parts = {name: [tensors[name]] if name in tensors else [] for name in self._parts}
        self.n_steps = int(state["n_steps"])

    def _repr_html_(self) -> str:
        sigma2, rows = self.tensors().get("noise_variance", torch.empty(0, 0)), []
        for swaps in self.swaps():
            (cold, hot), rate = swaps["pair"], swaps["acceptance_rate"]
            counts = (f"{swaps['accepted']:,}", f"{swaps['proposed']:,}")
            share = "" if rate is None else f"{100 * rate:.3g} %"
            newest = f"{float(sigma2[-1, cold]):.4g}" if len(sigma2) else ""
            rows.append((f"{cold} – {hot}", *counts, share, newest))
        head = ("rungs", "swaps accepted", "proposed", "rate", "sigma2 now")
        kept = "all" if self.every == 1 else f"one in {self.every:,}"
        table = [notebook.table(head, rows)] if rows else []
        return notebook.panel("Trace", f"{self.n_steps:,} steps, {kept} kept", *table)

    def __repr__(self) -> str:
        return f"Trace({self.n_steps:,} steps, every={self.every})"
