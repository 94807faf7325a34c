"""Do anchors, or windows of even-odd swaps, beat swap batches at equal cost?

Both are prototypes here, behind the public interfaces. Energies with anchors (control variates,
Deng et al. 2021): a is where a replica was at the latest renewal, every m steps, and

    L~(b) = L(a) + N/n sum_i [l_i(b) - l_i(a)]

on the n examples of the step's own batch or of a swap batch. Windowed even-odd swaps (DEO*, Deng et
al. 2023): in a window of W tests only the even pairs are tested, in the next one the odd pairs, and
a pair that has swapped rests until its window ends. Without this rest it is a plain pairing.

The cost counts every evaluation of an example, with or without a gradient. A replica evaluates in a
step, with a test every K steps:

    n                      tests on the step's own batch
    n + M / K              a swap batch of M
    n + n / K + N / m      anchors, on the step's own batch, whose l_i(b) are there anyway
    n + 2 M / K + N / m    anchors, on a swap batch of M

    law: Gaussian ladders with exact energies: the variance of rung 0 over the right one, and
         visits to rung 0 from the hot end per million steps of a replica
    logistic: regression on 100,000 data, batch 256, temperatures 1 to 10: s and acceptance of pairs
         on one ladder at equal cost; then visits per million batches of 256, each way at its best
         settings, which are those of a first look, measured again with another seed
         (labels, and renewed ones, where only the hot end forgets)
    clusters: the mixture of 8 clusters of tuned_exchange.py: runs at the global mode in the end
    digits: a small network; s of a pair along a run without swaps, from the terms of all examples

Reduced, to take about 20 minutes on a free core: a first look has 4e7 examples a run, the second
1.6e8 (tuned_exchange.py: 3e8 and 9e8); the clusters 1e7 (2e8), rungs to 300 and no second look.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchrex as tr
from record import surroundings, write
from torchrex.exchange import Pairing, StepInfo, count_trips, rung_of
from torchrex.experiments.digits import DigitsConfig, digits
from torchrex.targets import DeviceLoader, Energy, Noise, laplace, simulate_logistic
from tuned_exchange import clusters, renewed_visits

FIRST, SECOND, CLUSTERS = 4e7, 1.6e8, 1e7  # examples of one run
LAW_STEPS = 4_000
RUNS = {"law": 500, "logistic": 8, "clusters": 32, "digits": 4}


@dataclass(frozen=True)
class Windowed(Pairing):
    """The even pairs for `window` attempts, then the odd pairs."""

    window: int

    def propose(
        self, generator: torch.Generator, attempts: Tensor, n_pairs: int, n_runs: int
    ) -> Tensor:
        pairs = torch.arange(n_pairs, device=attempts.device)
        return (pairs % 2 == (attempts // self.window)[:, None] % 2)[:, None, :, None]


class Anchored(tr.TallPosterior):
    """Energies for swaps with an anchor for each replica of each run; gradients as ever.

    The terms are l_i(b) - l_i(a) + L(a) / N, so that their mean times N is L~(b), and the paired
    variance of their differences is that of the test.
    """

    def __init__(self, target: tr.TallPosterior, n_rungs: int, n_runs: int, *, own: bool) -> None:
        vars(self).update(vars(target))
        self.own = own  # tests on the step's own batch?
        self.anchor = torch.zeros(n_rungs, n_runs, target.dim)
        self.level = torch.zeros(n_rungs, n_runs)  # L(a) / N

    def renew(self, position: Tensor) -> None:
        self.anchor.copy_(position)
        for run in range(position.shape[1]):  # one at a time, which is kinder to the memory
            terms = super().energy(position[:, run], {}).per_example
            assert terms is not None
            self.level[:, run] = terms.double().mean(-1).float()

    def draw_swap_batch(
        self, generator: torch.Generator, n: int, shape: tuple[int, ...], size: int
    ) -> Noise:
        return {"compared": super().draw_swap_batch(generator, n, shape, size)["index"]}

    def energy(self, position: Tensor, noise: Noise) -> Energy:
        if "compared" not in noise:
            return super().energy(position, noise)
        index = {"index": noise["compared"]}
        return self._anchored(super().energy(position, index), index)

    def energy_and_gradient(self, position: Tensor, noise: Noise) -> tuple[Energy, Tensor]:
        energy, gradient = super().energy_and_gradient(position, noise)
        return (self._anchored(energy, noise) if self.own else energy), gradient

    def _anchored(self, energy: Energy, noise: Noise) -> Energy:
        before = super().energy(self.anchor, noise).per_example
        assert energy.per_example is not None
        assert before is not None
        terms = energy.per_example - before + self.level[..., None]
        total = len(self.data[0]) * terms.mean(-1) + energy.prior
        return Energy(total, terms, prior=energy.prior)


class Way(NamedTuple):
    """One way to test swaps."""

    rungs: int
    interval: int = 1  # K
    size: int = 0  # M; 0 is the step's own batch
    renew: int = 0  # m; 0 is no anchors
    window: int = 1
    rests: bool = True

    @property
    def kind(self) -> str:
        energies = f"{'anchors, ' if self.renew else ''}{'swap' if self.size else 'own'} batch"
        rests = "" if self.rests else ", no rest"
        return energies + (f", windows{rests}" if self.window > 1 else "")

    def __str__(self) -> str:
        words = [f"{self.rungs} rungs", f"{self.size:,} examples" if self.size else "own batch"]
        words += [f"every {self.interval}"]
        words += [f"anchors every {self.renew}"] if self.renew else []
        words += [f"windows of {self.window}"] if self.window > 1 else []
        return ", ".join(words + ([] if self.rests or self.window == 1 else ["no rest"]))

    def examples_a_step(self, target: tr.Target) -> float:
        """Of one replica."""
        n, n_data = target.batch_size or 1, target.n_data or 0
        if not self.renew:
            return n + self.size / self.interval
        return n + (2 * self.size or n) / self.interval + n_data / self.renew

    def rules(self) -> dict[str, Any]:
        """Pairs of a parity are tested in every other window, so that a rest as long as a window,
        which begins anywhere in it, ends before their next one.
        """
        rules: dict[str, Any] = {"swap_interval": self.interval, "pairing": Windowed(self.window)}
        if self.window > 1 and self.rests:
            rules["swap_rest"] = self.window * self.interval
        return {**rules, "swap_batch": self.size} if self.size else rules


class Seen(NamedTuple):
    """Of one way, over independent runs."""

    n_steps: int
    restarts: Tensor  # (runs,)
    renewed: Tensor  # (runs,), see `renewed_visits`
    acceptance: float
    s: Tensor  # (pairs,)
    square: Tensor  # (runs,): mean square of rung 0 over steps and coordinates
    values: Tensor  # (runs, draws, dim): of rung 0


def seen(
    target: tr.Target,
    ladder: tr.Ladder,
    way: Way,
    n_steps: int,
    start: Tensor,
    *,
    relaxation: float,
    seed: int,
) -> Seen:
    """Run it, with anchors that are renewed between stretches of steps."""
    n_rungs, n_runs = start.shape[:2]
    if way.renew:
        assert isinstance(target, tr.TallPosterior)
        target = Anchored(target, n_rungs, n_runs, own=not way.size)
    ensemble = tr.TensorEnsemble.start(target, n_rungs=n_rungs, n_runs=n_runs, initial=start)
    run = tr.DensityExchange(ensemble, ladder, seed=seed, compiled=True, **way.rules())
    now = run.ensemble
    if isinstance(now.target, Anchored):
        now.target.renew(now.position)
    path, values, thin = [], [], max(1, n_steps // 200)
    accepted, proposed, square = 0.0, 0.0, torch.zeros(n_runs)
    variance, tests = torch.zeros(n_rungs - 1, dtype=torch.float64), 0
    for info in run.advance(
        n_steps, every=way.renew or max(1, 1_000 // way.interval * way.interval)
    ):
        first = run.n_steps - len(info.energy)
        if way.renew and run.n_steps % way.renew == 0:
            now = run.ensemble
            assert isinstance(now.target, Anchored)
            now.target.renew(now.position)
        tested = slice(-first % way.interval, None, way.interval)
        info = StepInfo(*(each[tested] if k else each for k, each in enumerate(info)))
        path.append(info.replica_at.to(torch.int8, copy=True))
        accepted += float(info.accepted.sum())
        proposed += float(info.proposed.expand_as(info.accepted).sum())
        square += info.position.square().mean(-1).sum(0)
        values.append(info.position[-(first + 1) % thin :: thin].clone())
        variance += info.noise_variance.double().mean(-1).sum(0)
        tests += len(info.energy)
    gap = (1.0 / torch.tensor(ladder.temperatures, dtype=torch.float64)).neg().diff()
    joined = torch.cat(path)
    restarts = [count_trips(rung_of(each))[0].sum(0) for each in joined.split(1, 2)]
    return Seen(
        n_steps,
        torch.cat(restarts).double(),
        renewed_visits(joined, way.interval / relaxation),
        accepted / max(1.0, proposed),
        gap * (2.0 * variance / tests).sqrt(),
        square / n_steps,
        torch.cat(values).transpose(0, 1),
    )


def visits_of(
    seen: Seen, rungs: int, examples_a_step: float, relaxation: float
) -> dict[str, dict[str, float]]:
    """Per million examples: `visits` as in tuned_exchange.py, where a cycle is that of labels and
    the relaxation, and `renewed` visits.

        visits = 1e6 / (R c) * R / (R n / r + relaxation)

    with r restarts in n steps of cost c. Standard errors are those over the runs.
    """
    r, n = mean_of(seen.restarts), seen.n_steps
    below, scale = rungs * n + relaxation * r["mean"], 1e6 / examples_a_step
    visits = {"mean": scale * r["mean"] / below, "se": scale * rungs * n / below**2 * r["se"]}
    return {"visits": visits, "renewed": mean_of(scale / (rungs * n) * seen.renewed)}


def mean_of(per_run: Tensor) -> dict[str, float]:
    return {"mean": float(per_run.mean()), "se": float(per_run.std() / math.sqrt(len(per_run)))}


# law


def law() -> list[dict[str, Any]]:
    """Four dimensions, relaxation 20 steps: a ladder whose pairs swap often, and a wide one.

    The energy that swaps compare has the variance of the discrete moves, T / (1 - lr / 2), so that
    without a bias of the swaps the ratio is 1 at any lr. Replicas start from their rungs' laws.
    """
    lr, dim, n_runs, rows = 0.05, 4, RUNS["law"], []
    target = tr.LogDensity(
        lambda x: -0.5 * (1.0 - lr / 2.0) * x.square().sum(-1), dim, gradient=lambda x: -x
    )
    for rungs, hot in ((6, 10.0), (12, 1e6)):
        ladder = tr.Ladder.geometric(1.0, hot, rungs, lrs=lr)
        scale = (torch.tensor(ladder.temperatures) / (1.0 - lr / 2.0)).sqrt().view(-1, 1, 1)
        normals = torch.randn(rungs, n_runs, dim, generator=torch.Generator().manual_seed(0))
        for way in (
            Way(rungs, interval, window=window, rests=rests)
            for interval in (1, 5, 20, 100)
            for window in (1, 2, 4, 16)
            for rests in ((True, False) if window == 2 else (True,))
        ):
            found = seen(
                target, ladder, way, LAW_STEPS, scale * normals, relaxation=1.0 / lr, seed=1
            )
            rows.append(
                {
                    "way": str(way), "hot": hot, **way._asdict(), "acceptance": found.acceptance,
                    "variance_ratio": mean_of(found.square.double() * (1.0 - lr / 2.0)),
                    **visits_of(found, rungs, 1.0, 1.0 / lr),
                }
            )  # fmt: skip
            print("law", rows[-1], flush=True)
    return rows


# logistic

LR = 0.004 / 100_000


def spaced(rungs: int, noise: float, hot: float = 10.0) -> tr.Ladder:
    """Temperatures from 1 in equal steps of heat and noise together, which for a regular model are
    d (1 + 2 noise / T) (d log T)^2, with `noise` N/n (1 - n/N) for n of N examples.
    """
    logs = torch.linspace(0.0, math.log(hot), 10_001, dtype=torch.float64)
    rate = (1.0 + 2.0 * noise * (-logs).exp()).sqrt()
    passed = torch.cat(
        [torch.zeros(1, dtype=torch.float64), (0.5 * (rate[1:] + rate[:-1])).cumsum(0)]
    )
    wanted = passed[-1] * torch.linspace(0, 1, rungs, dtype=torch.float64)[1:-1]
    inner = logs[torch.searchsorted(passed, wanted)].exp().tolist()
    return tr.Ladder([1.0, *inner, hot], LR)


class Logistic:
    """The target, and the ladder and the start of each way on it."""

    def __init__(self) -> None:
        features, labels, _ = simulate_logistic(100_000, 4, seed=0)
        self.target = tr.logistic_regression(features, labels, prior_precision=1.0, batch_size=256)
        self.mode, self.covariance = laplace(self.target)
        self.relaxation = float((self.covariance.diagonal() / LR).mean())

    def ladder(self, way: Way) -> tr.Ladder:
        """Anchors leave of the noise 2 (1 - exp(-t / relaxation)) after t steps, half of m on
        average.
        """
        size = way.size or self.target.batch_size
        noise = 100_000 / size * (1.0 - size / 100_000)
        if way.renew:
            noise *= 2.0 * -math.expm1(-0.5 * way.renew / self.relaxation)
        return spaced(way.rungs, noise)

    def seen(self, ladder: tr.Ladder, way: Way, examples: float, *, seed: int) -> Seen:
        """Replicas start from the Laplace approximation at the temperatures of their rungs."""
        generator = torch.Generator().manual_seed(seed)
        normals = torch.randn(way.rungs, RUNS["logistic"], 4, generator=generator).double()
        hot = torch.tensor(ladder.temperatures, dtype=torch.float64).sqrt().view(-1, 1, 1)
        start = self.mode + hot * (normals @ torch.linalg.cholesky(self.covariance).T)
        n_steps = int(examples / (way.rungs * way.examples_a_step(self.target)))
        return seen(
            self.target, ladder, way, n_steps, start.float(), relaxation=self.relaxation, seed=seed
        )

    def measured(
        self, way: Way, examples: float, *, seed: int, ladder: tr.Ladder | None = None
    ) -> dict[str, Any]:
        began = time.monotonic()
        ladder = self.ladder(way) if ladder is None else ladder
        found = self.seen(ladder, way, examples, seed=seed)
        cost = way.examples_a_step(self.target) / 256
        factor = torch.linalg.cholesky(self.covariance)
        away = torch.linalg.solve_triangular(
            factor, (found.values.double() - self.mode).mT, upper=False
        )
        row = {
            "way": str(way), "kind": way.kind, **way._asdict(), "batches a step": cost,
            "n_steps": found.n_steps, "restarts": int(found.restarts.sum()),
            **visits_of(found, way.rungs, cost, self.relaxation),
            "acceptance": found.acceptance, "s": [float(s) for s in found.s],
            "variance_ratio": mean_of(away.square().mean((1, 2))),
            "seconds": time.monotonic() - began,
        }  # fmt: skip
        print("logistic", row, flush=True)
        return row


GRID = [  # of the first look
    *(Way(rungs) for rungs in (32, 44, 60, 90)),
    *(Way(rungs, 20, 5_000) for rungs in (8, 12)),
    *(Way(rungs, 50, 20_000) for rungs in (4, 6, 8)),
    *(Way(4, 20, size) for size in (10_000, 20_000)),
    Way(4, 100, 50_000),
    *(Way(rungs, 200, 100_000) for rungs in (3, 4)),
    *(Way(rungs, renew=300) for rungs in (4, 6, 8, 12)),
    *(Way(rungs, renew=1_000) for rungs in (8, 12, 20, 32)),
    *(Way(rungs, 20, 1_000, 300) for rungs in (4, 6, 8)),
    *(Way(rungs, window=window) for rungs in (32, 60) for window in (2, 4)),
    *(Way(rungs, 50, 20_000, window=window) for rungs in (4, 6) for window in (2, 4)),
]
FIXED = [  # about 1,000 examples more a step, and the step's own batch without them
    Way(6),
    Way(6, 1, 1_000),
    Way(6, 10, 10_000),
    Way(6, 100, 100_000),
    Way(6, 1, renew=134),
    Way(6, 10, renew=103),
    Way(6, 10, 1_000, renew=125),
]


def logistic() -> dict[str, Any]:
    problem = Logistic()
    geometric = tr.Ladder.geometric(1.0, 10.0, 6, lrs=LR)
    fixed = [problem.measured(way, FIRST, seed=1, ladder=geometric) for way in FIXED]
    look = {way: problem.measured(way, FIRST, seed=1) for way in GRID}
    best: dict[tuple[str, str], Way] = {}
    for count in ("visits", "renewed"):
        for way in sorted(look, key=lambda way: -look[way][count]["mean"]):
            best.setdefault((way.kind, count), way)
    again = [problem.measured(way, SECOND, seed=2) for way in dict.fromkeys(best.values())]
    return {"fixed": fixed, "first look": list(look.values()), "again": again}


# clusters

MIXTURE = [
    Way(16, 20, 2_000),
    Way(16, 5, renew=50),
    Way(16, 50, 2_000),
    Way(16, renew=50),
    Way(16, 20, 2_000, window=2),
    Way(16, 5, renew=20),
    Way(16),
]


def mixture() -> list[dict[str, Any]]:
    problem = clusters()

    def measured(way: Way, n_runs: int, *, seed: int) -> dict[str, Any]:
        began, generator = time.monotonic(), torch.Generator().manual_seed(seed)
        start = 8.0 * torch.randn(way.rungs, n_runs, problem.target.dim, generator=generator)
        ladder = tr.Ladder.geometric(1.0, 300.0, way.rungs, lrs=5e-5)
        cost = way.examples_a_step(problem.target)
        n_steps = int(CLUSTERS / (way.rungs * cost))
        found = seen(problem.target, ladder, way, n_steps, start, relaxation=math.inf, seed=seed)
        score = problem.score(found.values)
        row = {
            "way": str(way), "kind": way.kind, **way._asdict(), "examples a step": cost,
            "n_steps": n_steps, "runs": n_runs,
            "at the global mode": mean_of((score < 0.05).double()),
            "behind": mean_of(score.double()), "restarts": float(found.restarts.mean()),
            "acceptance": found.acceptance, "s": [float(s) for s in found.s],
            "seconds": time.monotonic() - began,
        }  # fmt: skip
        print("clusters", row, flush=True)
        return row

    return [measured(way, RUNS["clusters"], seed=1) for way in MIXTURE]


# digits


def network() -> list[dict[str, Any]]:
    """s and the expected acceptance of two replicas of digits/independent, temperatures 0.1 and
    0.1025, at the steps of the last 50 epochs, with tests and anchors of the cost that is stated.
    The noise is that of n different examples of N, and known from the terms of all.
    """
    config = DigitsConfig("digits/independent", (0.1, 0.1025), swaps=False)
    data, _ = digits()
    n_data, n, epoch = len(data[1]), config.batch_size, config.steps_per_epoch
    gap = 1.0 / 0.1 - 1.0 / 0.1025
    ways = {  # examples of a test, K, m
        "own batch": (n, 1, 0),
        "anchors every epoch, own batch": (n, 1, epoch),
        "swap batch, 129 every step": (129, 1, 0),
        "swap batch, 644 every 5": (644, 5, 0),
        "swap batch, 1,288 every 10": (1_288, 10, 0),
        "anchors every epoch, own batch every 10": (n, 10, epoch),
        "swap batch, 713 every 10": (713, 10, 0),
        "swap batch, all every 18": (n_data, 18, 0),
    }
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for seed in range(RUNS["digits"]):
        run = config.exchange(seed, torch.device("cpu"))
        loader = DeviceLoader(data, n, seed=seed)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        before = torch.zeros(2, n_data, dtype=torch.float64)
        for _ in run.advance(config.n_steps, loader, every=1):
            if run.n_steps < config.n_steps // 2:
                continue
            energy = run.energies(data)
            assert energy.per_example is not None
            terms = energy.per_example.double().view(2, n_data)
            cold, hot = energy.total.double().view(2).tolist()
            if run.n_steps % epoch == 0:
                before = terms
            for name, (size, interval, renew) in ways.items():
                if run.n_steps % interval:
                    continue
                now = terms - before if renew else terms
                scale = n_data**2 / size * (1.0 - size / n_data)
                s = gap * math.sqrt(scale * float((now[0] - now[1]).var()))
                expected = float(tr.expected_acceptance(gap * (cold - hot), s))
                found[name].append((s * s, expected))
        for name, each in found.items():
            mean_square, mean = torch.tensor(each).mean(0).tolist()
            rows[name].append((math.sqrt(mean_square), mean))
    listed = []
    for name, each in rows.items():
        size, interval, renew = ways[name]
        own = size == n
        cost = n + (n_data / renew if renew else 0.0)
        cost += (n if renew else 0) / interval if own else size / interval
        noise, accepted = torch.tensor(each, dtype=torch.float64).unbind(1)
        listed.append(
            {
                "way": name, "examples a step": cost, "tests every": interval,
                "s": mean_of(noise), "acceptance": mean_of(accepted),
            }
        )  # fmt: skip
        print("digits", listed[-1], flush=True)
    return listed


PARTS = {"digits": network, "law": law, "logistic": logistic, "clusters": mixture}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "swap_energies.json"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torchrex").setLevel(logging.ERROR)  # biased rules and dead pairs are results
    results = json.loads(options.out.read_text())["results"] if options.out.exists() else {}
    for part in options.parts:  # the others stay as they are
        results[part] = PARTS[part]()
        made = surroundings(__file__, "torch", "torchrex")
        write(options.out, {**made, "results": results})


if __name__ == "__main__":
    main()
