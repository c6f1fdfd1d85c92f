"""The surrogate: it learns the reward as a model of images."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.companions._common import Betas, Companion, mean_square, rows_of
from flowrl.algorithms.likelihoods._queries import Interval, Queries
from flowrl.algorithms.losses._groups import (
    centre_of,
    check_positive,
    counted,
    of_scored,
    velocity_error,
    whole_groups,
)
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import interpolate, wide
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, LossInput, Rollout


class preference(Companion):
    """The surrogate: learn which images of a prompt are better, as a model of images (section
    `surrogate`).

    It is `dgpo` on the states of the trajectory. d is the mean squared error of the velocity where
    a step's end, taken as if it were clean, is noised; ``w = sigmoid(S)`` without a gradient, ``S =
    beta sum_i A_i (d_i - d_ref_i) / G`` over the G scored images of a prompt at one step. The loss
    is ``w A d + anchor (d - d_ref)^2``, of which an image without a score has the second part
    alone. A row's d has no gradient if ``exp(d_slow - d)`` has left 1 ± `clip` on the side that A
    pushes to (slow = a copy of the surrogate that follows it), or if it is better than d_ref in
    that sense and ``(d - d_ref)^2 > far``. Later steps count more, ``k / K`` for the k-th of K with
    weigh "ramp".

    Source: TDM-R1 (2603.07700), as in Flow-Factory 1593258: lr 3e-4, beta 10, clip 1e-3, far 0.05,
    anchor 0.001; the copy has decay ``min(start + slope n, limit)`` after n updates. **Differs:**
    there k counts from 2 where it should from 1, so that weights are 2/K to (K+1)/K: weigh
    "published".

    Metrics: `error`, d; `gap`, d - d_ref; `weight`, w; `clip_frac` and `far_frac`, 1 where a row is
    stopped; `distance`, mean (v - v_ref)^2.

    Ours: with weigh "last" it learns from finished images alone, which are what the reward judged.
    `interval` draws their noise levels otherwise than the policy's steps: "reverse" = up to pure
    noise; none is below `least`. With `shared` the images of a prompt have one level and noise, as
    `dgpo` has them. `kl` is the weight of mean (v - v_ref)^2. It begins as the teacher, or with the
    weights `begin`, which another method may have trained; these are named as in `train.start`.

    Raises: ConfigError for numbers outside their ranges, or a group that is torn over network
    calls.
    """

    looks_at = ("ref", "slow")

    def __init__(
        self,
        *,
        lr: float = 3e-4,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 1e-4,
        updates: int = 1,
        alone: int = 0,
        iterations: int | None = None,
        beta: float = 10.0,
        clip: float = 1e-3,
        far: float = 0.05,
        anchor: float = 1e-3,
        max_advantage: float = 5.0,
        weigh: Literal["ramp", "even", "published", "last"] = "ramp",
        interval: Interval | None = None,
        least: float = 0.0,
        shared: bool = False,
        kl: float = 0.0,
        start: float = 0.001,
        slope: float = 0.001,
        limit: float = 0.3,
        begin: str = "",
    ) -> None:
        super().__init__("surrogate", lr, betas, weight_decay, updates, alone, iterations)
        check_positive("surrogate", beta=beta, clip=clip, far=far, max_advantage=max_advantage)
        if not 0 <= least < 1:
            raise ConfigError(f"surrogate: expected 0 <= least < 1, a noise level, got {least}")
        if min(anchor, slope, kl) < 0 or not 0 <= start <= limit <= 1:
            raise ConfigError(
                "surrogate: expected anchor >= 0, kl >= 0, slope >= 0 and 0 <= start <= limit <= "
                f"1, got {anchor=}, {kl=}, {slope=}, {start=}, {limit=}"
            )
        self.beta, self.clip, self.far, self.anchor = beta, clip, far, anchor
        self.max_advantage, self.weigh = max_advantage, weigh
        self.interval, self.least, self.shared, self.kl = interval, least, shared, kl
        self.copy = (start, slope, limit)
        self.begin = begin

    def slow_decay(self, updates: int) -> float:
        """Return how slowly its copy follows after so many updates."""
        start, slope, limit = self.copy
        return min(start + slope * updates, limit)

    def rows(self, rollout: Rollout, nodes: Tensor, rng: torch.Generator) -> Tensor:
        """Return all steps, or those that ended in a finished image."""
        step = rollout.tree.step[nodes]
        return nodes[step == step.max()] if self.weigh == "last" else nodes

    def batch(
        self,
        rollout: Rollout,
        advantage: Tensor,
        nodes: Tensor,
        streams: NodeStreams,
        queries: Queries,
    ) -> Batch:
        """Noise the ends of steps [B] as if they were clean -> Batch with `target` = eps - x."""
        interval = self.interval or queries.interval
        queries = queries._replace(interval=interval, least=self.least)
        level, eps = queries.draw(rollout, nodes, streams, shared=self.shared)
        state = wide(rollout.x[nodes])
        x = interpolate(state, eps, level)
        return rows_of(rollout, advantage, nodes, x, level, eps - state, torch.zeros_like(level))

    def loss(self, data: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss [B] and metrics [B]."""
        index = whole_groups("surrogate", data)
        a = data.batch.advantage.detach().double()
        a = a.clamp(-self.max_advantage, self.max_advantage)
        d = velocity_error(data, data.now)
        ref, slow = (velocity_error(data, data.under[name]).detach() for name in ("ref", "slow"))
        # how much better the group is than the teacher's
        score = self.beta * centre_of(index, a * (d.detach() - ref), counted(data, index))
        weight = score.sigmoid()
        # no gradient for what has moved far enough
        ratio, good = (slow - d.detach()).exp(), a > 0
        stopped = torch.where(good, ratio > 1 + self.clip, ratio < 1 - self.clip)
        better = torch.where(good, d.detach() < ref, d.detach() > ref)
        away = better & ((d.detach() - ref).square() > self.far)
        pushed = torch.where(stopped | away, d.detach(), d)
        loss = of_scored(data, weight * a * pushed) + self.anchor * (d - ref).square()
        distance = mean_square(data.now.mean - data.under["ref"].mean)
        loss = loss + self.kl * distance
        metrics = {"error": d.detach(), "gap": d.detach() - ref, "weight": weight}
        metrics |= {"distance": distance.detach()}
        metrics |= {"clip_frac": stopped.double(), "far_frac": away.double()}
        return loss * self._step_weight(data.batch.step), metrics

    def _step_weight(self, step: Tensor) -> Tensor:
        """Return the weight [B] of steps that began after `step` others."""
        if self.weigh in ("even", "last"):
            return torch.ones_like(step).double()
        steps = step.max() + 1
        return (step.double() + (2 if self.weigh == "published" else 1)) / steps
