"""How the ladder behaved: energies, variances and standings of every k-th step, and the swaps of
every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrex import notebook
from torchrex.errors import InvalidArgumentError
from torchrex.exchange import StepInfo

THINNED = ("energy", "noise_variance", "correction", "replica_at")


def count_swaps(accepted: Tensor, proposed: Tensor) -> list[dict[str, Any]]:
    """What result.json says of the swaps of each pair, from counts (pairs,)."""
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
    """Records StepInfo of consecutive steps; every `every`-th step is kept, swaps are counted and
    listed at all of them.
    """

    def __init__(self, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InvalidArgumentError(f"every must be a whole number >= 1, got {every!r}")
        self.every = every
        self.n_steps = 0
        self._parts: dict[str, list[Tensor]] = {
            name: [] for name in ("steps", *THINNED, "swap_steps", "swap_pairs")
        }
        self._accepted: Tensor | None = None
        self._proposed: Tensor | None = None

    def record(self, infos: StepInfo) -> None:
        """Take in one step, or some that are stacked along a first axis, of a run whose runs axis
        is 1.
        """
        if infos.energy.ndim == 2:
            infos = StepInfo(*(values[None] for values in infos))
        n = len(infos.energy)
        accepted, proposed = infos.accepted[..., 0].cpu(), infos.proposed[..., 0].cpu()
        self._accepted = (
            accepted.sum(0) if self._accepted is None else self._accepted + accepted.sum(0)
        )
        self._proposed = (
            proposed.sum(0) if self._proposed is None else self._proposed + proposed.sum(0)
        )
        steps = torch.arange(self.n_steps, self.n_steps + n)
        when, pair = accepted.nonzero(as_tuple=True)
        self._parts["swap_steps"].append(steps[when])
        self._parts["swap_pairs"].append(pair)
        rows = slice(-self.n_steps % self.every, n, self.every)
        self._parts["steps"].append(steps[rows])
        for name in THINNED:
            self._parts[name].append(getattr(infos, name)[rows, ..., 0].cpu())
        self.n_steps += n

    def tensors(self) -> dict[str, Tensor]:
        """`steps` (k,), `energy` and `replica_at` (k, rungs), `noise_variance` and `correction` (k,
        pairs); every swap made as `swap_steps` and `swap_pairs`; `accepted` and `proposed` (pairs,)
        over all steps.
        """
        if self._accepted is None or self._proposed is None:
            return {}
        for name, parts in self._parts.items():
            self._parts[name] = [torch.cat(parts)]
        kept = {name: parts[0] for name, parts in self._parts.items()}
        return {**kept, "accepted": self._accepted, "proposed": self._proposed}

    def swaps(self) -> list[dict[str, Any]]:
        """For each pair of rungs: proposed, accepted and the rate."""
        return (
            []
            if self._accepted is None or self._proposed is None
            else count_swaps(self._accepted, self._proposed)
        )

    def state_dict(self) -> dict[str, Any]:
        return {"every": self.every, "n_steps": self.n_steps, "tensors": self.tensors()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of a trace with the same thinning."""
        if state["every"] != self.every:
            raise InvalidArgumentError(
                f"the state keeps every {state['every']}th step, this trace every {self.every}th"
            )
        tensors = dict(state["tensors"])
        self._accepted, self._proposed = (
            tensors.pop("accepted", None),
            tensors.pop("proposed", None),
        )
        self._parts = {name: [tensors[name]] if name in tensors else [] for name in self._parts}
        self.n_steps = int(state["n_steps"])

    def _repr_html_(self) -> str:
        kept, rows = self.tensors(), []
        for swaps in self.swaps():
            pair, rate = swaps["pair"], swaps["acceptance_rate"]
            newest = (
                f"{float(kept['noise_variance'][-1, pair[0]]):.4g}"
                if len(kept["noise_variance"])
                else ""
            )
            share = "" if rate is None else f"{100 * rate:.3g} %"
            rows.append(
                (
                    f"{pair[0]} – {pair[1]}",
                    f"{swaps['accepted']:,}",
                    f"{swaps['proposed']:,}",
                    share,
                    newest,
                )
            )
        head = ("rungs", "swaps accepted", "proposed", "rate", "sigma2 now")
        told = (
            f"{self.n_steps:,} steps, {'all' if self.every == 1 else f'one in {self.every:,}'} kept"
        )
        return notebook.panel("Trace", told, *([notebook.table(head, rows)] if rows else []))

    def __repr__(self) -> str:
        return f"Trace({self.n_steps:,} steps, every={self.every})"
