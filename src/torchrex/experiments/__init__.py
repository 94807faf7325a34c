"""Experiments of the paper and of our own: configs, recipes, run folders."""

from torchrex.experiments.recipes import get_recipe, recipes
from torchrex.experiments.run_folder import RunFolder
from torchrex.experiments.runner import run_recipe

__all__ = ["RunFolder", "get_recipe", "recipes", "run_recipe"]
