"""Semi-supervised Bayesian GANs: several generators against a discriminator that also knows the classes (section 5.3)."""

from torchrex.vision.bayesian_gan.losses import gan_losses, gan_terms
from torchrex.vision.bayesian_gan.nets import BayesianGAN, Discriminator, Generators

__all__ = ["BayesianGAN", "Discriminator", "Generators", "gan_losses", "gan_terms"]
