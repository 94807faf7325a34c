"""Experiments of the paper and of our own: configs, recipes, run folders."""

from torchrex.experiments.config import Column, ExperimentConfig, RunOptions
from torchrex.experiments.recipes import get_recipe, recipes
from torchrex.experiments.run_folder import RunFolder
from torchrex.experiments.runner import run_recipe

__all__ = [
    "Column",
    "ExperimentConfig",
    "RunFolder",
    "RunOptions",
    "get_recipe",
    "recipes",
    "run_recipe",
]
