"""All recipes by name. A recipe is one complete frozen config.

After a change `python tests/recipe_index.py` writes what `torchrex list` shows.
"""

from __future__ import annotations

from torchrex.experiments.digits import digits_recipes
from torchrex.experiments.gallery import gallery_recipes
from torchrex.experiments.gan import gan_recipes
from torchrex.experiments.images import image_recipes
from torchrex.experiments.mixtures import figure1_recipes
from torchrex.experiments.tall import tall_recipes
from torchrex.experiments.theory import theory_recipes
from torchrex.names import require_recipe
from torchrex.runs.config import ExperimentConfig


def recipes() -> dict[str, ExperimentConfig]:
    return {
        **figure1_recipes(),
        **theory_recipes(),
        **tall_recipes(),
        **gallery_recipes(),
        **gallery_recipes(large=True),
        **digits_recipes(),
        **image_recipes(),
        **gan_recipes(),
    }


def get_recipe(name: str) -> ExperimentConfig:
    """The recipe of that name, or an error that names those it may have been meant for."""
    known = recipes()
    require_recipe(name, known)
    return known[name]
