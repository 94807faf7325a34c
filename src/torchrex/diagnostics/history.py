"""What diagnostics read of a run: one record of tensors with axes in a fixed order (recorded steps,
rungs or pairs, chains).

Draws and traces thin what they keep. Means over recorded steps (acceptance expected from the
energies, noise level, occupancy) are right with any thinning. Counts of swaps are totals over all
steps. Round trips need every step: a trace lists every swap and so tells them exactly however it
was thinned, while thinned draws give a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError
from torchrex.exchange import Ladder
from torchrex.posterior import Draws


class Swaps(NamedTuple):
    """Every swap made, in the order in which they happened in each chain."""

    step: Tensor  # (n,)
    pair: Tensor  # (n,)
    chain: Tensor  # (n,)


@dataclass(frozen=True, repr=False)
class History:
    """How the ladder of a run behaved. Steps count from 0, and row i of every tensor belongs to
    step `steps[i]`.
    """

    steps: Tensor  # (k,): the recorded ones
    energy: Tensor  # (k, rungs, chains): estimates, as the swap tests of that step saw them, before the swaps
    replica_at: Tensor  # (k, rungs, chains): who stood there, after the swaps
    noise_variance: Tensor  # (k, pairs, chains): sigma2
    temperature: Tensor  # (k, rungs)
    accepted: Tensor  # (pairs, chains): over all steps
    proposed: Tensor  # (pairs, chains): over all steps
    n_steps: int  # all of them, recorded or not
    correction: Tensor | None = None  # (k, pairs, chains): gap * sigma2 / F, where known
    swaps: Swaps | None = None  # every one, where known

    def __post_init__(self) -> None:
        k, rungs, chains = self.energy.shape
        pairs = rungs - 1
        wanted: dict[str, tuple[int, ...]] = {
            "steps": (k,),
            "replica_at": (k, rungs, chains),
            "noise_variance": (k, pairs, chains),
            "temperature": (k, rungs),
            "accepted": (pairs, chains),
            "proposed": (pairs, chains),
            "correction": (k, pairs, chains),
        }
        for name, shape in wanted.items():
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise InvalidArgumentError(
                    f"with energies of shape (steps, rungs, chains) = {(k, rungs, chains)}, {name} must have shape {shape}, "
                    f"got {tuple(tensor.shape)}; is the ladder the one of this run?"
                )

    @classmethod
    def from_draws(
        cls, draws: Draws, ladder: Ladder, *, correction_factor: float | None = None
    ) -> History:
        """From the draws of `sample`. They do not record F: give it if it was a constant, and the
        corrections are known too.
        """
        steps = (
            draws.steps - 1
        )  # a draw is named by the steps done, a history by the index of the last of them
        temperature = temperatures_at(ladder, steps)
        correction = None
        if correction_factor is not None:
            if not correction_factor > 0:
                raise InvalidArgumentError(
                    f"the correction factor F must be positive, got {correction_factor}"
                )
            correction = (
                _gaps(temperature)[:, :, None] * draws.noise_variance.double() / correction_factor
            )
        return cls(
            steps=steps,
            energy=draws.energy,
            replica_at=draws.replica_at,
            noise_variance=draws.noise_variance,
            temperature=temperature,
            accepted=draws.accepted,
            proposed=draws.proposed,
            n_steps=draws.n_steps,
            correction=correction,
        )

    @classmethod
    def from_traces(
        cls, traces: Sequence[Mapping[str, Tensor]], ladder: Ladder, *, n_steps: int | None = None
    ) -> History:
        """From `Trace.tensors()` of one run, or of several with the same recorded steps, which
        become the chains.

        `n_steps` defaults to the last step recorded or swapped at; say how many there were if the
        trace was thinned.
        """
        if not traces or any("steps" not in trace for trace in traces):
            raise InvalidArgumentError(
                "there is nothing to read: give Trace.tensors() of a run that has made steps"
            )
        steps = traces[0]["steps"]
        for chain, trace in enumerate(traces):
            if not torch.equal(trace["steps"], steps):
                raise InvalidArgumentError(
                    f"trace {chain} has recorded {len(trace['steps'])} steps and not the {len(steps)} of trace 0; look at "
                    f"runs of different length or thinning one by one"
                )

        def side_by_side(name: str) -> Tensor:
            return torch.stack([trace[name] for trace in traces], dim=-1)

        swaps = Swaps(
            step=torch.cat([trace["swap_steps"] for trace in traces]),
            pair=torch.cat([trace["swap_pairs"] for trace in traces]),
            chain=torch.cat(
                [torch.full_like(trace["swap_steps"], chain) for chain, trace in enumerate(traces)]
            ),
        )
        last = int(torch.cat([steps, swaps.step]).max())
        return cls(
            steps=steps,
            energy=side_by_side("energy"),
            replica_at=side_by_side("replica_at"),
            noise_variance=side_by_side("noise_variance"),
            temperature=temperatures_at(ladder, steps),
            accepted=side_by_side("accepted"),
            proposed=side_by_side("proposed"),
            n_steps=last + 1 if n_steps is None else n_steps,
            correction=side_by_side("correction"),
            swaps=swaps,
        )

    @property
    def n_rungs(self) -> int:
        return self.energy.shape[1]

    @property
    def n_pairs(self) -> int:
        return self.n_rungs - 1

    @property
    def n_chains(self) -> int:
        return self.energy.shape[2]

    @property
    def has_every_step(self) -> bool:
        """Is the path of every replica known from the first recorded step on, by the rows or by the
        list of swaps?
        """
        return len(self.steps) > 0 and (
            self.swaps is not None or len(self.steps) == self.n_steps - int(self.steps[0])
        )

    @property
    def inverse_gap(self) -> Tensor:
        """(k, pairs): 1 / tau_cold - 1 / tau_hot."""
        return _gaps(self.temperature)

    @property
    def energy_difference(self) -> Tensor:
        """(k, pairs, chains): cold minus hot, as the swap test saw it; in double, for it is small
        against the energies.
        """
        return -self.energy.double().diff(dim=1)

    @property
    def correction_factor(self) -> Tensor | None:
        """(k, pairs, chains): F = gap * sigma2 / correction; infinite for the naive test, NaN where
        sigma2 = 0 leaves it open.
        """
        if self.correction is None:
            return None
        return (
            self.inverse_gap[:, :, None] * self.noise_variance.double() / self.correction.double()
        )

    def after(self, step: int) -> History:
        """The rows of steps >= `step` (burn-in left out); swaps and totals stay those of the whole
        run.
        """
        kept = self.steps >= step
        return replace(
            self,
            steps=self.steps[kept],
            energy=self.energy[kept],
            replica_at=self.replica_at[kept],
            noise_variance=self.noise_variance[kept],
            temperature=self.temperature[kept],
            correction=None if self.correction is None else self.correction[kept],
        )

    def __repr__(self) -> str:
        return f"History({self.n_rungs} rungs x {self.n_chains} chains, {len(self.steps):,} of {self.n_steps:,} steps recorded)"


def temperatures_at(ladder: Ladder, steps: Tensor) -> Tensor:
    """Temperatures of every rung at the given steps, annealing included: (k, rungs)."""
    base = torch.tensor(ladder.temperatures, dtype=torch.float64)
    anneal = ladder.anneal
    if anneal is None:
        return base.repeat(len(steps), 1)
    return (
        torch.tensor([anneal(step) for step in steps.tolist()], dtype=torch.float64)[:, None] * base
    )


def _gaps(temperature: Tensor) -> Tensor:
    return -(1.0 / temperature).diff(dim=1)
