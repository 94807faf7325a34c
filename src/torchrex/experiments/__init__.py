"""Experiments of the paper and of our own: configs, recipes, how they run."""

from torchrex.experiments.density import DensityConfig
from torchrex.experiments.recipes import get_recipe, recipes
from torchrex.experiments.runner import run_group, run_recipe, run_together
from torchrex.runs import (
    Column,
    ExperimentConfig,
    Run,
    RunFolder,
    RunOptions,
    RunResult,
    dumps,
    override,
    to_json,
)

__all__ = [
    "Column",
    "DensityConfig",
    "ExperimentConfig",
    "Run",
    "RunFolder",
    "RunOptions",
    "RunResult",
    "dumps",
    "get_recipe",
    "override",
    "recipes",
    "run_group",
    "run_recipe",
    "run_together",
    "to_json",
]
