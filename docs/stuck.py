"""README's picture: one chain that is stuck, one run of exchange that is not, the exact answer.

The problem is `gallery/period`: both may evaluate the same number of examples, and tuning counts.

    python docs/stuck.py        # minutes on one core; writes stuck.json, stuck.png and stuck.svg
    python docs/stuck.py --draw # the pictures alone, from stuck.json
"""

import json
import sys
from pathlib import Path

import torch

import torchrex
from torchrex.experiments.gallery import problems
from torchrex.experiments.period import ALIASES, FREQUENCY, exact_law, frequency, near, observations
from torchrex.report.plots import look, panels

KEPT = 500  # points of each path
HERE = Path(__file__).parent
PATHS = (("chain", "one chain (SGLD)", "SGLD"), ("exchange", "torchrex", "tuned"))


def measure() -> dict[str, object]:
    entry = problems()["gallery/period"]
    problem = entry.make()
    target = problem.target
    examples = float(entry.n_steps * target.batch_size)

    chain = torchrex.sample(
        target, temperatures=(1.0,), lr=problem.lr, n_steps=entry.n_steps, n_runs=1,
        thin=entry.n_steps // KEPT, seed=0,
    )  # fmt: skip
    tuned = torchrex.tune(target, lr=problem.lr, n_steps=entry.n_steps // 20, n_runs=1, seed=0)
    per_step = tuned.ladder.n_rungs * tuned.examples_a_step
    n_steps = int((examples - tuned.examples) / per_step)
    run = torchrex.sample(
        target, ladder=tuned, n_steps=n_steps, n_runs=1, thin=n_steps // KEPT, seed=0
    )
    found: dict[str, object] = {
        "problem": "gallery/period",
        "examples": examples,
        "tuning_examples": tuned.examples,
        "tuned": tuned.settings(),
        "versions": {"torchrex": torchrex.__version__, "torch": torch.__version__},
        "exact": problem.answer()[0],
    }
    for name, draws in (("chain", chain), ("exchange", run)):
        path = frequency(draws.values[0])
        found[name] = {
            "frequency": [round(float(f), 4) for f in path],
            "share_at_the_truth": float(near(path, 0).double().mean()),
        }
    return found


def draw(found: dict) -> None:
    grid, mass = exact_law(*observations(2_000))
    exact = [float(mass[near(grid, k)].sum()) for k in ALIASES]
    places = [FREQUENCY + k for k in ALIASES]
    begins = {"chain": 0.0, "exchange": found["tuning_examples"]}
    how = {"sharey": True, "width_ratios": (4, 4, 2)}
    with panels(HERE / "stuck.png", 1, 3, (7.5, 3.0), **how) as (_, (axes,)):
        for axis, (name, title, method) in zip(axes, PATHS, strict=False):
            path = torch.tensor(found[name]["frequency"])
            at = torch.linspace(begins[name], found["examples"], len(path) + 1)[1:] / 1e6
            axis.plot(at, path, ".", color=look(method).color, markersize=3)
            axis.set(title=title, xlabel="million examples", ylim=(0.0, 3.0))
            for place in places:
                axis.axhline(place, color="0.6", linewidth=1, zorder=0)
        axes[0].set_ylabel("frequency of the star (1 / day)")
        axes[2].barh(places, exact, height=0.06, color="0.7", label="exact")
        path = torch.tensor(found["exchange"]["frequency"])
        shares = [float(near(path, k).double().mean()) for k in ALIASES]
        axes[2].plot(shares, places, **look("tuned").points, fillstyle="none", label="torchrex")
        axes[2].legend(loc="lower right")
        axes[2].set(title="exact answer", xlabel="probability", xlim=(0.0, 1.0))


if __name__ == "__main__":
    if "--draw" not in sys.argv:
        (HERE / "stuck.json").write_text(json.dumps(measure(), indent=1) + "\n")
    draw(json.loads((HERE / "stuck.json").read_text()))
