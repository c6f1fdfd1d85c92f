"""The likelihood of images: how well the velocity fits leaves that are noised anew."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.nodes import cond_of
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import interpolate, shift_sigmas, wide
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, Eval, FlowModel, Rollout, Transition


class forward:  # noqa: N801 - configs name likelihoods in lower case
    """Train leaves: ``log_prob = -w(sigma) mean((v - (eps - x0))^2)`` at fresh noise, up to a
    constant.

    This is the evidence bound that flow matching trains; weighted by advantages it is AWM
    (2509.25050), of pairs Diffusion-DPO (2311.12908). The sampler is free: a plan needs no noise.

    Args:
        draws: times per leaf, each a row of the network.
        times: uniform = one in each of `draws` equal parts of (0, 1); logit_normal = the sigmoid of
            a standard normal number (SD3's training); grid = a random step of the rollout's grid.
        shift: moves uniform and logit_normal times towards noise, as `shift_sigmas`; 1 = not.
        weight: w = 1, sigma or sigma^2.
        shared: all images of a prompt get the same times and the same noise (pairs are then
            compared at one noise).
    """

    trains: Literal["leaves"] = "leaves"
    keeps: frozenset[str] = frozenset()

    def __init__(
        self,
        *,
        draws: int = 1,
        times: Literal["uniform", "logit_normal", "grid"] = "uniform",
        shift: float = 1.0,
        weight: Literal["one", "sigma", "sigma2"] = "one",
        shared: bool = False,
    ) -> None:
        if draws < 1 or not shift > 0:
            raise ConfigError(
                f"likelihood forward: expected draws >= 1 and shift > 0, got {draws=}, {shift=}"
            )
        self.evaluations, self.times, self.shift = draws, times, shift
        self.weight, self.shared = weight, shared

    def batch(
        self, rollout: Rollout, advantage: Tensor, nodes: Tensor, streams: NodeStreams
    ) -> Batch:
        """Noise each leaf [N] `draws` times -> Batch of N * draws rows, leaf after leaf.

        Its own stream gives a leaf the times, then the noise. `step` numbers the draws of a leaf,
        the noisiest first. Other weights see the same batch, hence the same noise.
        """
        node = nodes.repeat_interleave(self.evaluations)
        x0 = wide(rollout.x[node])
        # times and noise of each leaf, on the host
        sigmas, noises = [], []
        for stream in streams.of(nodes, shared=self.shared):
            sigmas.append(self._sigmas(stream, rollout.sigmas))
            noises.append(torch.randn(self.evaluations, *x0.shape[1:], generator=stream))
        sigma = torch.cat(sigmas).to(x0.device)
        eps = torch.cat(noises).to(x0)
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
            step=torch.arange(len(node), device=node.device) % self.evaluations,
            cond=cond_of(rollout, node),
        )

    def evaluate(self, model: FlowModel, batch: Batch, transition: Transition) -> Eval:
        """Score the velocity -> Eval with mean = v; the transition plays no part."""
        v = wide(model.velocity(batch.x, batch.sigma, batch.cond))
        error = (v - batch.target).square().flatten(1).mean(1)
        power = {"one": 0, "sigma": 1, "sigma2": 2}[self.weight]
        log_prob = -(batch.sigma.to(error.dtype) ** power) * error
        return Eval(log_prob, v, torch.zeros_like(error), v)

    def _sigmas(self, stream: torch.Generator, grid: Tensor) -> Tensor:
        """Draw the times of one leaf, descending -> [draws]."""
        count = self.evaluations
        if self.times == "grid":
            steps = grid[:-1].cpu()
            place = torch.randint(len(steps), (count,), generator=stream)
            return steps[place].sort(descending=True).values
        if self.times == "logit_normal":
            sigma = torch.randn(count, generator=stream).sigmoid().sort(descending=True).values
        else:
            part = torch.arange(count - 1, -1, -1)
            sigma = (part + torch.rand(count, generator=stream)) / count
        return shift_sigmas(sigma, self.shift)
