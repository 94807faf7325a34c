"""Experiments of the paper and of our own: configs, recipes, run folders."""

from torchrex.experiments.config import (
    Column,
    ExperimentConfig,
    RunOptions,
    dumps,
    override,
    to_json,
)
from torchrex.experiments.density import DensityConfig
from torchrex.experiments.folder import Run, RunFolder, RunResult
from torchrex.experiments.recipes import get_recipe, recipes
from torchrex.experiments.runner import run_group, run_recipe, run_together

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
