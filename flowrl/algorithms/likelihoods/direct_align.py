"""Reward gradients at any noise level: where the noise is known, one step tells the image."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.likelihoods._unroll import called, unrolled_batch
from flowrl.algorithms.nodes import clean_latents, initial_noise
from flowrl.core.errors import ConfigError
from flowrl.core.host_copies import repeated
from flowrl.core.noise_path import interpolate, per_sample, wide
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, Eval, FlowModel, Rollout, Transition, Unrolled

SIDES = ("denoise", "inverse", "both")


class direct_align:
    """Noise the finished image with noise that is remembered, take one step, and take the noise out
    again: ``x0' = (x + (s' - s) v - s' e) / (1 - s')``. The velocity carries the gradient.

    Direct-Align, the likelihood of SRPO (2509.06942; Tencent-Hunyuan/SRPO 81e5898). What the
    network got wrong in a short step is all that can be wrong in the image, so even very noisy
    states give a sharp one, where the x0 estimate of `refl` blurs.

    A level s' is drawn uniformly between `low` and `high`; the step ends there. It comes from
    ``s' + d`` (denoise) or ``s' - d`` (inverse), with ``d`` = `jump` of the interval, less near its
    ends. `both` gives each image two rows, to the same level. `query` is the place of a row's
    cleaner end in the interval, 0 at `low` and 1 at `high`, for loss `relative_ascent`.

    Args:
        high, low: published: 0.9643 and 0.75, steps 5 and 25 of a 50-step grid of shift 3.
        jump: published: 100 of the interval's 1000 parts.
        noise: initial = what the image was sampled from (published); fresh = drawn anew.
        margin: the levels next to both ends that are never drawn, as a share of the interval;
            published: 5 of 1000.

    **Differs:** all images of an update start from one noise in the code, here each prompt has its
    own; its steps end on a grid of 1000 parts.

    Raises: ConfigError unless 0 <= low < high <= 1, 0 < jump <= 1 and 0 <= margin < 0.5, or for a
    step that could end at pure noise.
    """

    trains: Literal["leaves"] = "leaves"
    keeps: frozenset[str] = frozenset()
    draws_steps = True  # at levels that a model may not know

    def __init__(
        self,
        *,
        high: float = 0.9643,
        low: float = 0.75,
        jump: float = 0.1,
        sides: Literal["denoise", "inverse", "both"] = "denoise",
        noise: Literal["initial", "fresh"] = "initial",
        margin: float = 0.005,
        checkpoint: bool = True,
    ) -> None:
        if not (0 <= low < high <= 1 and 0 < jump <= 1 and 0 <= margin < 0.5):
            raise ConfigError(
                "likelihood direct_align: expected 0 <= low < high <= 1, 0 < jump <= 1 and "
                f"0 <= margin < 0.5, got {low=}, {high=}, {jump=}, {margin=}"
            )
        if high == 1 and margin == 0:
            raise ConfigError(
                "likelihood direct_align: a step that ends at pure noise tells nothing of the "
                "image; expected high < 1 or margin > 0"
            )
        if sides not in SIDES or noise not in ("initial", "fresh"):
            raise ConfigError(
                "likelihood direct_align: expected sides denoise, inverse or both, and noise "
                f"initial or fresh, got {sides=}, {noise=}"
            )
        self.high, self.low, self.jump, self.margin = high, low, jump, margin
        self.sides, self.noise, self.checkpoint = sides, noise, checkpoint
        self.rows_per_state = 2 if sides == "both" else 1

    def batch(
        self, rollout: Rollout, advantage: Tensor, nodes: Tensor, streams: NodeStreams
    ) -> Batch:
        """Noise each leaf [N] for one step, or one from each side -> Batch of N or 2 N rows, leaf
        after leaf; `target` is the noise, `sigma_next` the level that the image is told at."""
        node = repeated(nodes, self.rows_per_state)
        x0 = clean_latents(rollout, node)
        # each leaf has a level, and noise, from its own stream
        levels, fresh = [], []
        for stream in streams.of(nodes):
            levels.append(torch.rand(1, generator=stream, dtype=torch.float64))
            if self.noise == "fresh":
                fresh.append(torch.randn(1, *x0.shape[1:], generator=stream))
        start, end, place = self._steps(torch.cat(levels))
        if self.noise == "fresh":
            eps = torch.cat(fresh).repeat_interleave(self.rows_per_state, 0)
            eps = eps.to(x0, non_blocking=True)
        else:
            eps = initial_noise(rollout, node).to(x0.dtype)
        start, end, place = (
            value.float().to(x0.device, non_blocking=True) for value in (start, end, place)
        )
        # one step, for the count of network calls
        opened = torch.ones(len(node), 1, dtype=torch.bool)
        path = Unrolled(
            rollout.sigmas[-2:], opened, torch.zeros(len(node), dtype=torch.int64), self.checkpoint
        )
        x = interpolate(x0, eps, start)
        made = unrolled_batch(rollout, advantage, node, x, start, path)
        side = (end > start).long()
        return made._replace(sigma_next=end, target=eps, query=place, step=side)

    def _steps(self, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn numbers in [0, 1) [N] into steps -> their start, end, and the place of the cleaner
        of both in the interval, a row for each side."""
        width = self.high - self.low
        end = self.margin + (1 - 2 * self.margin) * drawn
        far = torch.minimum(torch.full_like(end, self.jump), torch.minimum(end, 1 - end))
        starts = {"denoise": [end + far], "inverse": [end - far]}
        start = torch.stack(starts.get(self.sides, [end + far, end - far]), 1).flatten()
        end = end.repeat_interleave(self.rows_per_state)
        places = torch.minimum(start, end)
        return self.low + width * start, self.low + width * end, places

    def evaluate(self, model: FlowModel, batch: Batch, transition: Transition) -> Eval:
        """Take the step -> Eval with images [B, 3, H, W] and mean = x0'; log-prob 0. The transition
        plays no part."""
        x = wide(batch.x)
        v = called(batch, model.velocity, x, batch.sigma, batch.cond).to(x.dtype)
        ahead = x + per_sample(batch.sigma_next - batch.sigma, x) * v
        end = per_sample(batch.sigma_next, x)
        x0 = (ahead - end * batch.target) / (1 - end)
        zero = torch.zeros(len(x), device=x.device)
        return Eval(zero, x0, zero, images=called(batch, model.decode, x0))
