"""The likelihood of images: how well the velocity fits leaves that are noised anew."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.likelihoods._times import Times
from flowrl.algorithms.likelihoods._weights import Weight, by_size, weighted
from flowrl.algorithms.nodes import clean_latents, cond_of
from flowrl.core.errors import ConfigError
from flowrl.core.host_copies import on_host, repeated
from flowrl.core.noise_path import interpolate, wide
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, Eval, FlowModel, Rollout, Transition


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
        self.times = Times(times, draws, shift, low, high, first, last, with_first, exponent)
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
            log_prob = -by_size(gap, batch.sigma.double())
        else:
            log_prob = -weighted(error, batch.sigma.double(), self.weight, self.power)
        return Eval(log_prob, v, torch.zeros_like(error), v)
