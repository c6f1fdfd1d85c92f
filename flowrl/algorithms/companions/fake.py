"""The fake model: it knows what the policy generates."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.companions._common import Betas, Companion, mean_square, rows_of
from flowrl.algorithms.likelihoods._queries import Queries, noised_again, steps_to
from flowrl.algorithms.losses._groups import check_positive
from flowrl.algorithms.selection._change import one_of_each
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import per_sample, wide, x0_from
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, LossInput, Rollout


class score(Companion):
    """The fake model: learn the score of what the policy generates (section `fake`).

    Each stored step's x0 estimate is noised again to a level above the step's end, as `generated`
    does, and fitted there: ``r min(SNR, snr) mean((x0_F - x0)^2)`` with ``SNR = ((1 - s) / s)^2``.
    Since part of the noise is the state's own, rows are weighted by the ratio of densities ``r =
    exp(mean fresh^2 / 2 - mean noise^2 / 2)``, within 1 / `ratio` and `ratio`.

    It learns from every step of an image, or with steps "one" from one of them, drawn anew.

    Source: TDM (2503.06674), as in Flow-Factory 1593258: lr 3e-4, betas (0, 0.999), 5 updates per
    iteration for TDM and 1 for TDM-R1; every step. The authors' code (Luo-Yihong/TDM 81b019f) draws
    one step of each image.

    Raises: ConfigError for numbers outside their ranges.
    """

    def __init__(
        self,
        *,
        lr: float = 3e-4,
        betas: Betas = (0.0, 0.999),
        weight_decay: float = 1e-4,
        updates: int = 1,
        alone: int = 0,
        iterations: int | None = None,
        snr: float = 5.0,
        ratio: float = 20.0,
        steps: Literal["all", "one"] = "all",
    ) -> None:
        super().__init__("fake", lr, betas, weight_decay, updates, alone, iterations)
        check_positive("fake", snr=snr)
        if not ratio >= 1:
            raise ConfigError(f"fake: expected ratio >= 1, got {ratio}")
        self.snr, self.ratio, self.steps = snr, ratio, steps

    def rows(self, rollout: Rollout, nodes: Tensor, rng: torch.Generator) -> Tensor:
        """Return all steps, or one of each image."""
        return nodes if self.steps == "all" else one_of_each(rollout, nodes, rng)

    def batch(
        self,
        rollout: Rollout,
        advantage: Tensor,
        nodes: Tensor,
        streams: NodeStreams,
        queries: Queries,
    ) -> Batch:
        """Noise the x0 estimates of the steps to nodes [B] again -> Batch with `target` = x0 and
        `old_log_prob` = log of the ratio of densities."""
        # a step without noise is a straight line: its ends say what the policy saw
        levels = steps_to(rollout, nodes)
        start, end = (level.to(nodes.device, non_blocking=True) for level in levels)
        before = wide(rollout.x[rollout.tree.parent[nodes]])
        v = (before - wide(rollout.x[nodes])) / per_sample(start - end, before)
        x0 = x0_from(before, v, start)
        level, fresh = queries.draw(rollout, nodes, streams)
        x, noise = noised_again(x0, x0 + v, end, level, fresh)
        ratio = (mean_square(fresh) - mean_square(noise)) / 2
        return rows_of(rollout, advantage, nodes, x, level, x0, ratio)

    def loss(self, data: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss [B] and metrics [B]: `error`, of the x0 estimate."""
        batch = data.batch
        gap = x0_from(batch.x, data.now.mean, batch.sigma) - batch.target
        error, most = mean_square(gap), math.log(self.ratio)
        level = batch.sigma.double()
        snr = ((1 - level) / level).square().clamp_max(self.snr)
        ratio = batch.old_log_prob.double().clamp(-most, most).exp()
        return ratio * snr * error, {"error": error.detach()}
