"""Replica exchange in plain PyTorch, as a competent user writes it: baselines of module_step.py.

Replicas come one after the other. Model and images are channels-last, the forward pass is in
bfloat16 by autocast, updates are `_foreach` calls, and nothing waits for the device: the swap is
decided there. The same functions run eagerly, compiled, or as CUDA graphs (`reduce-overhead`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FRICTION, PRECISION = 0.1, 25.0
NOISE_VARIANCE, F0 = 1e3, 3e5  # of an energy, and the correction factor
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


class Images(NamedTuple):
    """Training data on the device."""

    padded: Tensor  # (n, 40, 40, 3) of bytes
    labels: Tensor
    mean: Tensor
    std: Tensor

    @staticmethod
    def random(n: int, device: str) -> Images:
        """Random ones: the time of a step does not depend on what they show."""
        generator = torch.Generator(device).manual_seed(0)
        given: dict[str, Any] = {"device": device, "generator": generator}
        padded = torch.randint(0, 256, (n, 40, 40, 3), dtype=torch.uint8, **given)
        labels = torch.randint(10, (n,), **given)
        return Images(padded, labels, *scales(device))


def scales(device: str) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the colours, in bytes."""
    mean, std = (torch.tensor(values, device=device) * 255 for values in (MEAN, STD))
    return mean, std


class Ladder(NamedTuple):
    temperatures: list[float]
    lrs: list[float]

    @staticmethod
    def of(rungs: int, lr: float) -> Ladder:
        return Ladder([0.01 * (1 + 4 * k) for k in range(rungs)], [lr] * rungs)


# The parts of a step, on the device alone


def crop_flip_normalise(padded: Tensor, random: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Images (n, 40, 40, 3) of bytes to (n, 3, 32, 32) in channels-last form: cut out at a random
    place, half of them mirrored.
    """
    place = torch.arange(32, device=padded.device)
    down, right = (random[0] * 9).long(), (random[1] * 9).long()
    rows = down[:, None] + place
    columns = right[:, None] + torch.where(random[2][:, None] < 0.5, 31 - place, place)
    image = torch.arange(len(padded), device=padded.device)[:, None, None]
    cropped = padded[image, rows[:, :, None], columns[:, None, :]].float()
    return ((cropped - mean) / std).permute(0, 3, 1, 2)


def select(images: Images, batch: int) -> tuple[Tensor, Tensor]:
    device = images.labels.device
    index = torch.randint(len(images.labels), (batch,), device=device)
    random = torch.rand(3, batch, device=device)
    x = crop_flip_normalise(images.padded[index], random, images.mean, images.std)
    return x, images.labels[index]


def energy_of(model: nn.Module, x: Tensor, y: Tensor, n_data: int) -> Tensor:
    """Summed over all data, without the prior."""
    with torch.autocast(x.device.type, torch.bfloat16):
        return n_data * F.cross_entropy(model(x), y)


def update(
    parameters: Sequence[Tensor],
    velocities: Sequence[Tensor],
    gradients: Sequence[Tensor],
    rates: Tensor,
) -> None:
    """SGHMC with a Gaussian prior, in place; `rates` begins with the lr and the noise's std."""
    kick = [torch.randn_like(parameter) for parameter in parameters]
    torch._foreach_mul_(kick, rates[1])
    drift = torch._foreach_add(gradients, parameters, alpha=PRECISION)
    torch._foreach_mul_(drift, rates[0])
    torch._foreach_mul_(velocities, 1 - FRICTION)
    torch._foreach_sub_(velocities, drift)
    torch._foreach_add_(velocities, kick)
    torch._foreach_add_(parameters, velocities)


def swap(
    energies: Sequence[Tensor],
    replica_at: Tensor,
    partner: Tensor,
    temperatures: Tensor,
    lrs: Tensor,
    rates: Tensor,
) -> None:
    """Test pairs of rungs, and give every replica the rates of its rung, in place.

    `partner` is the other rung of each rung's pair, or the rung itself.
    """
    energy = torch.stack(list(energies))[replica_at]
    gap = 1 / temperatures - 1 / temperatures[partner]
    log_ratio = gap * (energy - energy[partner]) - gap.square() * NOISE_VARIANCE / F0
    rung = torch.arange(len(partner), device=partner.device)
    uniform = torch.rand(len(partner), device=partner.device)[torch.minimum(rung, partner)]
    now_at = torch.where(uniform.log() < log_ratio, replica_at[partner], replica_at)
    replica_at.copy_(now_at)
    rates[now_at, 0] = lrs
    rates[now_at, 1] = (2 * FRICTION * lrs * temperatures).sqrt()


class Functions(NamedTuple):
    select: Callable[..., tuple[Tensor, Tensor]]
    energy_of: Callable[..., Tensor]
    update: Callable[..., None]
    swap: Callable[..., None]


PLAIN = Functions(select, energy_of, update, swap)


@cache
def compiled(mode: str) -> Functions:
    """Compiled once for all loops: replicas of one network share a form."""
    return Functions(*(torch.compile(part, mode=mode, dynamic=False) for part in PLAIN))


class Seen(NamedTuple):
    """What the last replica saw and computed at a step."""

    x: Tensor
    y: Tensor
    energy: Tensor
    gradients: tuple[Tensor, ...]


class PlainLoop:
    """Replicas with identical first weights and the state of their samplers."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        images: Images,
        batch: int,
        ladder: Ladder,
        functions: Functions,
    ) -> None:
        device = images.labels.device
        self.models = [
            model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
            for model in models
        ]
        self.parameters = [list(model.parameters()) for model in self.models]
        self.velocities = [[torch.zeros_like(p) for p in each] for each in self.parameters]
        self.images, self.batch, self.functions = images, batch, functions
        self.n_steps = 0
        n = len(models)
        self.replica_at = torch.arange(n, device=device)
        self.ladder = Ladder(*(torch.tensor(each, device=device) for each in ladder))
        self.partners = [torch.tensor(pairs_of(n, parity), device=device) for parity in (0, 1)]
        # A row for each replica, of 512 bytes: CUDA graphs copy what is not aligned.
        self.rates = torch.zeros(n, 128, device=device)
        self.rates[:, 0] = self.ladder.lrs
        self.rates[:, 1] = (2 * FRICTION * self.ladder.lrs * self.ladder.temperatures).sqrt()
        self.rates_of = self.rates.unbind(0)
        # CUDA graphs read these where they are; they would copy other inputs at each step.
        kept = (*images, self.replica_at, *self.ladder, *self.partners, self.rates, *self.rates_of)
        for tensor in (*kept, *(each for state in self.velocities for each in state)):
            torch._dynamo.mark_static_address(tensor)

    def step(self) -> Seen:
        """One step of all replicas; for CUDA graphs what it returns is valid until the next."""
        torch.compiler.cudagraph_mark_step_begin()
        functions = self.functions
        x, y = functions.select(self.images, self.batch)
        energies: list[Tensor] = []
        for model, parameters, velocities, rates in zip(
            self.models, self.parameters, self.velocities, self.rates_of, strict=True
        ):
            energy = functions.energy_of(model, x, y, len(self.images.labels))
            gradients = torch.autograd.grad(energy, parameters)
            energies.append(energy.detach())
            with torch.no_grad():
                functions.update(parameters, velocities, gradients, rates)
        partner = self.partners[self.n_steps % 2]
        functions.swap(
            energies,
            self.replica_at,
            partner,
            self.ladder.temperatures,
            self.ladder.lrs,
            self.rates,
        )
        self.n_steps += 1
        return Seen(x, y, energies[-1], gradients)

    def advance(self, n_steps: int) -> None:
        for _ in range(n_steps):
            self.step()

    def finite(self) -> bool:
        return all(bool(p.isfinite().all()) for each in self.parameters for p in each)


def pairs_of(rungs: int, parity: int) -> list[int]:
    """The partner of each rung: pairs begin at even rungs, or at odd ones."""
    other = [rung + 1 if rung % 2 == parity else rung - 1 for rung in range(rungs)]
    return [each if 0 <= each < rungs else rung for rung, each in enumerate(other)]
