"""Run folders that no run has made, with numbers that the test chooses."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from torchrex.runs.config import dumps


def header(recipe, seed, **more):
    """The result.json of a finished run without numbers; `more` replaces or adds."""
    about = {
        "date": "2026-01-02T03:04:05+00:00",
        "wall_seconds": 1.5,
        "device": "CPU",
        "versions": {"torch": "2"},
    }
    return {
        "recipe": recipe,
        "seed": seed,
        "status": "finished",
        "metrics": {},
        "swaps": [],
        **about,
        **more,
    }


def write_json(folder: Path, config, result) -> Path:
    """Any config and any result in a new folder; without a result.json if `result` is None."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(dumps(config))
    if result is not None:
        (folder / "result.json").write_text(dumps(result))
    return folder


def write_run(root: Path, config, seed=0, **more) -> Path:
    """A run of `config` in the folder that its recipe and seed name."""
    return write_json(
        root / config.recipe / f"seed={seed}", config, header(config.recipe, seed, **more)
    )


def write_run_on_gpu(root: Path, config, seed=0, *, swaps=0, **more) -> Path:
    """A run such as tables are made of: 90 s on a GPU, a day for each seed, `swaps` swaps in at
    least 100 tests of each pair of rungs.
    """
    n = max(100, swaps)
    pair = {"pair": [0, 1], "proposed": n, "accepted": swaps, "acceptance_rate": swaps / n}
    pairs = [pair] * (config.n_rungs - 1)
    about = {"date": f"2026-01-0{seed + 1}T00:00:00+00:00", "wall_seconds": 90.0, "device": "a GPU"}
    return write_run(root, config, seed, swaps=pairs, **about, **more)


def outcome(path: Path):
    """All of a finished run that does not depend on the clock, a picture byte for byte."""
    result, picture = json.loads((path / "result.json").read_text()), path / "samples.png"
    assert result["status"] == "finished", result
    metrics = {k: v for k, v in result["metrics"].items() if not k.startswith("seconds_per_")}
    return {
        "metrics": metrics,
        **{name: result[name] for name in ("swaps", "curves")},
        "trace": load_file(path / "trace.safetensors"),
        "samples.png": picture.read_bytes() if picture.exists() else None,
    }
