"""Is a rung really at its temperature? Three thermometers.

All take tensors (..., chains, draws, dim) of one rung or of several. A finite learning rate makes
every one of them read high (on a quadratic of stiffness a, SGLD is at tau / (1 - lr * a / 2)), and
so does gradient noise that is not small against the injected noise. That is what they are for.

| thermometer   | valid for                           | with minibatch gradients | feels           |
|---------------|-------------------------------------|--------------------------|-----------------|
| kinetic       | any energy; samplers with momentum  | not needed               | fast directions |
| equipartition | any energy that grows without bound | yes, they enter linearly | slow directions |
| hypervirial   | any smooth one, needs the Laplacian | no, their variance adds  | stiff ones      |

Fast directions are soon in equilibrium; equipartition needs the slow ones to be, in all modes.
"""

from __future__ import annotations

from torch import Tensor

from torchrex.diagnostics.history import Estimate, mean_of
from torchrex.errors import InvalidArgumentError
from torchrex.samplers import Sampler


def kinetic_temperature(velocity: Tensor, *, lr: float, sampler: Sampler) -> Estimate:
    """Temperature from the variance of the velocities, (...).

        tau = <v^2> / (lr * velocity_std^2),    velocity_std^2 = 2 / (2 - friction) for SGHMC

    The factor is that of the discrete recursion as lr -> 0; without it friction 0.1 reads 5 % high.
    """
    if not sampler.velocity_std:
        raise InvalidArgumentError(f"{sampler!r} has no velocities; use equipartition_temperature")
    _require_axes(velocity)
    scale = lr * sampler.velocity_std**2
    if not scale > 0:
        raise InvalidArgumentError(f"the learning rate must be positive, got {lr}")
    return mean_of(velocity.double().square().mean(-1) / scale)


def equipartition_temperature(
    position: Tensor, gradient: Tensor, *, centre: Tensor | None = None
) -> Estimate:
    """Temperature from the work of the forces on the positions, (...): general equipartition.

        tau = <(x - c) . grad U> / dim        for ANY fixed point c

    The integral of div((x - c) exp(-U / tau)) vanishes if the density falls faster than
    1 / |x|^dim; U need not be quadratic, nor have one mode. c changes the error and not the mean.
    By default it is the mean of all draws, which makes the estimate low by a factor
    1 - 1 / (number of independent draws). Gradients must be those at the positions.
    """
    _require_axes(position, gradient)
    x = position.double()
    c = x.mean((-3, -2), keepdim=True) if centre is None else centre.double()
    return mean_of(((x - c) * gradient.double()).mean(-1))


def hypervirial_temperature(
    gradient: Tensor, laplacian: Tensor, *, other_gradient: Tensor | None = None
) -> Estimate:
    """Temperature from exact gradients and the Laplacian (chains, draws), (...) (Rugh 1997).

        tau = <|grad U|^2> / <laplacian U>

    Minibatch gradients make |g|^2 too large by their variance. Give a second, independent minibatch
    gradient at the same positions as `other_gradient`, and g . g' takes its place, which is
    unbiased.
    """
    other = gradient if other_gradient is None else other_gradient
    _require_axes(gradient, other)
    if laplacian.shape != gradient.shape[:-1]:
        raise InvalidArgumentError(
            f"the Laplacian is one number per draw, {tuple(gradient.shape[:-1])}, "
            f"got {tuple(laplacian.shape)}"
        )
    force, curvature = (gradient.double() * other.double()).sum(-1), laplacian.double()
    mean = curvature.mean((-2, -1))
    tau = force.mean((-2, -1)) / mean
    # To first order the ratio errs by the mean of (force - tau * curvature) / mean curvature.
    residual = mean_of(force - tau[..., None, None] * curvature)
    return Estimate(tau, residual.error / mean.abs())


def _require_axes(*tensors: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if any(len(shape) < 3 for shape in shapes) or len(set(shapes)) > 1:
        got = " and ".join(map(str, shapes))
        raise InvalidArgumentError(f"give equal shapes (..., chains, draws, dim), got {got}")
