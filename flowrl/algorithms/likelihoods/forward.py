"""The likelihood of images: how well the velocity fits leaves that are noised anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.forest import clean_latents, cond_of
from flowrl.core.devices import on_host, repeated
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import interpolate, shift_sigmas, wide
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, Eval, FlowModel, Rollout, Transition

EDGE = 1e-6  # how near random times come to 0, the image itself, and to 1, pure noise


Weight = Literal["one", "sigma", "sigma2", "huber", "ghuber", "snr", "size", "epsilon"]


class forward:
    """Train leaves: ``log_prob = -w(L, sigma)``, ``L = mean((v - (eps - x0))^2)`` at fresh noise,
    up to a constant.

    This is the evidence bound that flow matching trains; weighted by advantages it is AWM
    (2509.25050), of pairs Diffusion-DPO (2311.12908). The sampler is free: a plan needs no noise.
    L and w are computed in float64 (AWM's code).

    Args:
        draws: times per leaf, each a row of the network.
        times: uniform = one in each of `draws` equal parts of [low, high]; logit_normal = the
            sigmoid of a standard normal number (SD3's training), one in each of `draws` parts of
            equal probability, kept within [low, high]; power_law = of a density t^exponent on [low,
            high], in parts of equal probability (RAM's code: exponent 1); grid = a random step of
            the rollout's grid in each of `draws` parts of the steps first ... last - 1 (parts as
            even as whole numbers allow), which are all of them where there are as many draws;
            any_steps = as grid, but any `draws` different ones of these steps, all choices equally
            likely (DGPO's code).
        shift: moves uniform, logit_normal and power_law times towards noise, as `shift_sigmas`; 1 =
            not.
        low, high: the range of uniform and power_law times before the shift, of logit_normal times
            after it, inside of (0, 1). None: no limit of its own; random times stay 1e-6 away from
            0 and 1. Those of a grid are the sampler's, whose first is 1 by design.
        exponent: of power_law, at least 0; 0 is uniform.
        first, last: of grid and any_steps, the steps that are drawn from; last 0 = to the end.
        with_first: of grid and any_steps, one of the draws is always step 0.
        weight: w = L, sigma L, sigma^2 L (one, sigma, sigma2), ``sigma (sqrt(L + e) - 1e-5)``
            (huber) or ``(sigma / power) ((L + e)^power - e^power)`` (ghuber), with e = 1e-10;
            ``(1 - sigma) / (sigma + 0.001) L`` (snr); the squared error of the x0 estimate over its
            mean absolute error, which has no gradient (size). EPG's code (2602.04663) has one,
            sigma2, snr and size. ``(1 - sigma)^2 L`` (epsilon) is the squared error of the noise
            that a network predicts: the loss of models that were trained to predict it.
        power: of ghuber. Its gradient is ``sigma (L + e)^(power - 1)`` times that of L: rows that
            fit well count more, so that all have about the same part in the gradient.
        shared: all images of a prompt get the same times and the same noise (pairs are then
            compared at one noise).
        shared_times: they get the same times, and each its own noise.

    **Differs:** AWM's code draws one set of times per micro-batch, flowrl one per image (per prompt
    with `shared` or `shared_times`), so that a gradient does not hang on a few times. Its times
    come from the scheduler's own steps, 1 at step 0, also where its sampler edits the grid;
    flowrl's are those of the grid that was sampled on. EPG's code divides size by the guidance that
    is trained with and one by its square, which is 1 in its recipe; here neither is divided.

    Raises: ConfigError for numbers outside their ranges, or more draws than steps to draw from.
    """

    trains: Literal["leaves"] = "leaves"
    keeps: frozenset[str] = frozenset()

    def __init__(
        self,
        *,
        draws: int = 1,
        times: Literal["uniform", "logit_normal", "power_law", "grid", "any_steps"] = "uniform",
        shift: float = 1.0,
        low: float | None = None,
        high: float | None = None,
        first: int = 0,
        last: int = 0,
        with_first: bool = False,
        exponent: float = 1.0,
        weight: Weight = "one",
        power: float = 0.25,
        shared: bool = False,
        shared_times: bool = False,
    ) -> None:
        if not 0 < power <= 1:
            raise ConfigError(f"likelihood forward: expected 0 < power <= 1, got {power=}")
        self.times = _Times(times, draws, shift, low, high, first, last, with_first, exponent)
        self.rows_per_state, self.weight, self.power, self.shared = draws, weight, power, shared
        self.shared_times = shared_times or shared

    @property
    def draws_levels(self) -> bool:
        """Say whether times are drawn anew, and not taken from the sampler's grid."""
        return self.times.kind not in ("grid", "any_steps")

    def batch(
        self, rollout: Rollout, advantage: Tensor, nodes: Tensor, streams: NodeStreams
    ) -> Batch:
        """Noise each leaf [N] `draws` times -> Batch of N * draws rows, leaf after leaf.

        Its own stream gives a leaf the times, then the noise. `step` numbers the draws of a leaf,
        the noisiest first. Other weights see the same batch, hence the same noise.
        """
        node = repeated(nodes, self.rows_per_state)
        x0 = clean_latents(rollout, node)
        # times and noise of each leaf, on the host
        grid = on_host(rollout.sigmas)
        sigmas, noises = [], []
        # times come before noise, so both have one stream where they are shared alike
        alike = self.shared_times == self.shared
        of_times = None if alike else streams.of(nodes, shared=True)
        for place, stream in enumerate(streams.of(nodes, shared=self.shared)):
            sigmas.append(self.times.draw(of_times[place] if of_times else stream, grid))
            noises.append(torch.randn(self.rows_per_state, *x0.shape[1:], generator=stream))
        sigma = torch.cat(sigmas).to(x0.device, non_blocking=True)
        eps = torch.cat(noises).to(x0, non_blocking=True)
        # a place on the straight path between them
        zero = torch.zeros_like(sigma)
        return Batch(
            x=interpolate(x0, eps, sigma),
            sigma=sigma,
            sigma_next=sigma,
            noise_scale=zero,
            target=eps - x0,
            old_log_prob=zero,
            advantage=advantage[node],
            node=node,
            parent=torch.arange(len(node), device=node.device),
            step=torch.arange(len(node), device=node.device) % self.rows_per_state,
            cond=cond_of(rollout, node),
        )

    def evaluate(self, model: FlowModel, batch: Batch, transition: Transition) -> Eval:
        """Score the velocity -> Eval with mean = v; the transition plays no part."""
        v = wide(model.velocity(batch.x, batch.sigma, batch.cond))
        gap = (v - batch.target).double()
        error = gap.square().flatten(1).mean(1)
        if self.weight == "size":
            log_prob = -_by_size(gap, batch.sigma.double())
        else:
            log_prob = -_weighted(error, batch.sigma.double(), self.weight, self.power)
        return Eval(log_prob, v, torch.zeros_like(error), v)


@dataclass(frozen=True)
class _Times:
    """A sampler of times, as `flowrl.algorithms.likelihoods.forward.forward` describes it. Raises
    ConfigError."""

    kind: Literal["uniform", "logit_normal", "power_law", "grid", "any_steps"]
    draws: int
    shift: float
    low: float | None  # None: just above 0
    high: float | None  # None: just below 1
    first: int
    last: int
    with_first: bool
    exponent: float = 1.0

    def __post_init__(self) -> None:
        if self.draws < 1 or not self.shift > 0:
            raise ConfigError(
                "likelihood forward: expected draws >= 1 and shift > 0, got "
                f"draws={self.draws}, shift={self.shift}"
            )
        if self.exponent < 0 or (self.exponent != 1 and self.kind != "power_law"):
            raise ConfigError(
                "likelihood forward: exponent belongs to times: power_law and is at least 0, got "
                f"exponent={self.exponent} with times: {self.kind}"
            )
        if self.first < 0 or self.last < 0:
            raise ConfigError(
                "likelihood forward: first and last count the sampler's steps from 0, got "
                f"first={self.first}, last={self.last}"
            )
        # these take the sampler's levels, the others draw their own: an option of the other side
        # would be ignored in silence
        steps = self.kind in ("grid", "any_steps")
        on_grid = (self.first, self.last, self.with_first) != (0, 0, False)
        # the config of an earlier run may have 0 and 1 written out
        ranged = self.low not in (None, 0) or self.high not in (None, 1)
        if (ranged or self.shift != 1) if steps else on_grid:
            raise ConfigError(
                "likelihood forward: first, last and with_first belong to times: grid and "
                "any_steps, low, high and shift to the others; got some of them with times: "
                f"{self.kind}"
            )
        low, high = self.range
        if not (steps or 0 < low < high < 1):
            raise ConfigError(
                "likelihood forward: times are noise levels between 0 (the image, nothing to "
                "predict) and 1 (pure noise), so 0 < low < high < 1 is needed, got low="
                f"{self.low}, high={self.high}; leave out the one that should be no limit"
            )

    @property
    def range(self) -> tuple[float, float]:
        """Return the lowest and the highest time."""
        low, high = self.low, self.high
        return EDGE if low is None else low, 1 - EDGE if high is None else high

    def draw(self, stream: torch.Generator, grid: Tensor) -> Tensor:
        """Draw the times of one leaf, descending -> [draws]; grid [S+1]: what it was sampled on."""
        if self.kind in ("grid", "any_steps"):
            return grid[self._steps(stream, len(grid) - 1)]
        # one number in each of `draws` equal parts of (0, 1), descending
        part = torch.arange(self.draws - 1, -1, -1)
        u = (part + torch.rand(self.draws, generator=stream)) / self.draws
        if self.kind == "logit_normal":
            normal = torch.special.ndtri(u.double()).float()
            return shift_sigmas(normal.sigmoid(), self.shift).clamp(*self.range)
        low, high = self.low or 0.0, self.high or 1.0
        if self.kind == "uniform":
            time = low + (high - low) * u
        else:  # where the density t^exponent has a share u below it
            power = self.exponent + 1
            low, high = low**power, high**power
            time = (low + (high - low) * u) ** (1 / power)
        # u can be 0, and rounding makes 1 of what is nearly 1
        return shift_sigmas(time, self.shift).clamp(EDGE, 1 - EDGE)

    def _steps(self, stream: torch.Generator, steps: int) -> Tensor:
        """Draw steps of a grid, ascending -> [draws] int64."""
        first, last = max(self.first, int(self.with_first)), self.last or steps
        parts = self.draws - self.with_first
        if last > steps or last - first < parts:
            raise ConfigError(
                f"likelihood forward: draws={self.draws} different times from the sampler's steps "
                f"{first} to {last - 1}, but it has steps 0 to {steps - 1}; lower draws, or give "
                "plan.steps more"
            )
        if self.kind == "any_steps":
            place = first + torch.randperm(last - first, generator=stream)[:parts].sort()[0]
            return torch.cat([torch.zeros(int(self.with_first), dtype=torch.int64), place])
        edges = [first + (last - first) * k // parts for k in range(parts + 1)] if parts else []
        low, width = torch.tensor(edges[:-1]), torch.tensor(edges).diff()
        place = low + (torch.rand(parts, generator=stream) * width).long()
        return torch.cat([torch.zeros(int(self.with_first), dtype=torch.int64), place.long()])


def _weighted(error: Tensor, sigma: Tensor, weight: Weight, power: float = 0.25) -> Tensor:
    """Return ``w(error, sigma)`` [B] of squared errors [B] as `forward` says, but for "size", which
    needs more: it raises ValueError. float64 wanted: in float32 ``error^power`` near 0 loses the
    difference of two policies."""
    tiny = 1e-10
    if weight == "snr":
        return (1 - sigma) / (sigma + 1e-3) * error
    if weight == "epsilon":
        return (1 - sigma) ** 2 * error
    if weight == "huber":
        return sigma * ((error + tiny).sqrt() - tiny**0.5)
    if weight == "ghuber":
        return sigma / power * ((error + tiny) ** power - tiny**power)
    if weight == "size":
        raise ValueError("weight size is made of the velocity itself: see _by_size")
    exponent = {"one": 0, "sigma": 1, "sigma2": 2}[weight]
    return sigma**exponent * error


def _by_size(gap: Tensor, sigma: Tensor) -> Tensor:
    """Return the squared error of the x0 estimate over its mean size, ``sigma mean(gap^2) / mean
    |gap|`` [B], of velocity errors gap [B, *]; the size is at least 1e-5 and has no gradient."""
    miss = gap.flatten(1) * sigma[:, None]
    size = miss.detach().abs().mean(1).clamp_min(1e-5)
    return miss.square().mean(1) / size
