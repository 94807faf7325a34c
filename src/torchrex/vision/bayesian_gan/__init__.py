"""Semi-supervised Bayesian GANs: several generators against a discriminator that also knows the
classes (section 5.3).
"""

from torchrex.vision.bayesian_gan.batches import WithLabelled, to_unit_range
from torchrex.vision.bayesian_gan.losses import gan_losses, gan_terms, supervised_losses
from torchrex.vision.bayesian_gan.nets import BayesianGAN, Discriminator, Generators
from torchrex.vision.bayesian_gan.pictures import sample_grid, variety

__all__ = [
    "BayesianGAN",
    "Discriminator",
    "Generators",
    "WithLabelled",
    "gan_losses",
    "gan_terms",
    "sample_grid",
    "supervised_losses",
    "to_unit_range",
    "variety",
]
