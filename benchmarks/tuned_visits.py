"""Does the model behind `tune` predict the visits of a run? Problems of the gallery, at the number
of examples of a run there.

A visit is an arrival at rung 0 of a replica, which counts by how likely it has forgotten at the hot
end where it was. Predicted visits are those of the lengths and the slowness that tuning measured.
On the period the spread of the answer between runs is measured too, on 64 runs of an eighth of the
examples. On the teacher the tuned ladder is compared with one made by hand.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from pathlib import Path
from typing import Any

import torch

import torchrex as tr
from record import surroundings, write
from torchrex.experiments.gallery import GUESSED_RUNGS, Problem, problems
from torchrex.rng import derive_seed
from torchrex.tuning.model import Lengths, Setting
from torchrex.tuning.rounds import _Tuning
from tuned_exchange import mean_and_error, renewed_visits

SETTINGS = {  # rungs, swap batch, interval
    "period": [(7, 800, 10), (19, 800, 10)],
    "clusters": [(14, 3_000, 20), (19, 3_000, 20), (26, 3_000, 20), (36, 3_000, 20)],
    "teacher-long": [(44, 600, 20)],
    "clusters-15": [],  # only what tuning finds
    "clusters-25": [],
    "dynamics": [],
}
SHARE = {"period": 1 / 8, "clusters": 1.0, "teacher-long": 1.0}  # of the examples of a run
RUNS = {"period": 64, "clusters": 8, "teacher-long": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write; keeps others")
    parser.add_argument("--problems", nargs="+", default=list(SETTINGS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torchrex").setLevel(logging.ERROR)
    results = json.loads(args.out.read_text())["results"] if args.out.exists() else {}
    for name in args.problems:
        results[name] = measured(name)
        write(args.out, {**surroundings(__file__, "torch", "torchrex"), "results": results})


def measured(name: str) -> dict[str, Any]:
    entry = problems()[f"gallery/{name}"]
    problem = entry.make()
    target = problem.target
    examples = entry.n_steps * target.batch_size
    tuned, lengths = tuned_with_lengths(problem, entry.n_steps)
    found: dict[str, Any] = {
        "tuned": f"{tuned.ladder.n_rungs} rungs, {tuned.rules}",
        "relaxation": lengths.relaxation,
        "slowness": lengths.slowness,
    }

    def tell(
        method: str, ladder: tr.Ladder, thin: int, predicted: float | None, **rules: Any
    ) -> None:
        size, interval = rules.get("swap_batch") or 0, rules.get("swap_interval", 1)
        a_step = ladder.n_rungs * (target.batch_size + size / interval)
        n_steps = int(SHARE[name] * examples / a_step)
        draws = tr.sample(
            target, ladder=ladder, n_steps=n_steps, n_runs=RUNS[name], thin=thin, seed=11,
            compiled=True, **rules,
        )  # fmt: skip
        half = draws.values[:, draws.n_draws // 2 :: max(1, draws.n_draws // 400)]
        each = problem.estimate(half)
        found[method] = {
            "examples": SHARE[name] * examples,
            "runs": RUNS[name],
            "predicted visits": None if predicted is None else SHARE[name] * predicted,
            "visits": mean_and_error(renewed_visits(draws.replica_at, thin / lengths.relaxation)),
            "arrivals from the hot end": mean_and_error(renewed_visits(draws.replica_at, math.inf)),
            "acceptance": [float(f(draws.acceptance_rate)) for f in (torch.min, torch.mean)],
            "answer": mean_and_error(each.double()),
            "spread of the answer": float(each.std()),
            "in right modes": mean_and_error(problem.found(half)),
        }
        print(name, method, found[method], flush=True)

    for each in SETTINGS[name]:
        setting = Setting(*each)
        ladder = tr.Ladder.for_likelihood(
            lengths.temperatures(setting), problem.lr, prior_variance=target.prior_variance
        )
        rungs, size, interval = setting
        tell(
            f"{rungs} rungs, {size:,} examples every {interval} steps", ladder, interval,
            examples / lengths.examples_a_visit(setting),
            tempering="likelihood", swap_batch=size, swap_interval=interval,
        )  # fmt: skip
    if name == "teacher-long":
        by_hand = tr.Ladder.geometric(1.0, problem.hot, 44, lrs=problem.lr)
        rules = {"swap_batch": 600, "swap_interval": 20}
        tell("by hand, 600 examples every 20 steps", by_hand, 20, None, **rules)
        tell("by hand, naive", by_hand, 20, None, correction_factor=math.inf)
    return found


def tuned_with_lengths(problem: Problem, n_steps: int) -> tuple[tr.Tuned, Lengths]:
    """As in the gallery, and what the prediction is made from."""
    seen: list[Lengths] = []
    verdict = _Tuning.verdict

    def note(tuning: _Tuning, lengths: Lengths, setting: Setting) -> str:
        seen.append(lengths)
        return verdict(tuning, lengths, setting)

    _Tuning.verdict = note  # type: ignore[method-assign]
    try:
        tuned = tr.tune(
            problem.target, lr=problem.lr, n_steps=n_steps // (2 * GUESSED_RUNGS), n_runs=8,
            seed=derive_seed(0, "gallery.tune"), show=False,
        )  # fmt: skip
    finally:
        _Tuning.verdict = verdict  # type: ignore[method-assign]
    return tuned, seen[-1]


if __name__ == "__main__":
    main()
