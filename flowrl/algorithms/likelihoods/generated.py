"""The steps of a few-step model: what each of them generates, and how other models see it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.forest import cond_of
from flowrl.algorithms.likelihoods._queries import Interval, Queries, noised_again, steps_to
from flowrl.core.noise_path import wide, x0_from
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, Eval, FlowModel, Rollout, Transition


class generated:
    """Train every step of a few-step sampler without noise: each is taken again with a gradient,
    and other weights say what they make of its x0 estimate, noised again.

    There is no log-prob: it is 0. `mean` is the x0 estimate of the step under the trained weights;
    under others it is their x0 estimate at a level above the step's end, of the state noised again
    to it. The state's own noise stays part of it, so what is judged is the trajectory (TDM,
    2503.06674; TDM-R1, 2603.07700, as in Flow-Factory 1593258).

    Args:
        interval: trajectory = levels between the step's end and its start; reverse = up to pure
            noise.
        shift: levels are uniform once this time shift is undone (`source_uniform` there); 1 = not.

    Raises: ConfigError for a shift that is not positive, or with a plan that keeps no steps.
    """

    trains: Literal["steps"] = "steps"
    rows_per_state = 1
    keeps: frozenset[str] = frozenset()

    def __init__(self, *, interval: Interval = "trajectory", shift: float = 1.0) -> None:
        self.queries = Queries(interval, shift).check()

    def batch(
        self, rollout: Rollout, advantage: Tensor, nodes: Tensor, streams: NodeStreams
    ) -> Batch:
        """Collect the steps that ended in nodes [B] -> Batch of B; `target` is fresh noise, `query`
        the level to which it will be noised."""
        # the step is taken again from where it began, the state of the node above
        parent = rollout.tree.parent[nodes]
        levels = steps_to(rollout, nodes)
        start, end = (level.to(nodes.device, non_blocking=True) for level in levels)
        # where others judge what it generates: a level above its end, and noise to reach it
        level, fresh = self.queries.draw(rollout, nodes, streams)
        zero = torch.zeros_like(level)
        return Batch(
            x=rollout.x[parent],
            sigma=start,
            sigma_next=end,
            noise_scale=zero,
            target=fresh,
            old_log_prob=zero,
            advantage=advantage[nodes],
            node=nodes,
            parent=torch.arange(len(nodes), device=nodes.device),
            step=rollout.tree.step[parent],
            cond=cond_of(rollout, nodes),
            query=level,
        )

    def evaluate(self, model: FlowModel, batch: Batch, transition: Transition) -> Eval:
        """Take the step -> Eval with mean = its x0 estimate."""
        x = wide(batch.x)
        v = model.velocity(x, batch.sigma, batch.cond)
        return _estimate(x, v, batch.sigma)

    def judge(self, model: FlowModel, batch: Batch, now: Eval) -> Eval:
        """Ask a model about what `now` generated -> Eval with mean = its x0 estimate there."""
        assert batch.query is not None and now.v is not None
        x0, v = now.mean.detach(), now.v.detach()
        x, _ = noised_again(x0, x0 + v, batch.sigma_next, batch.query, batch.target)
        found = wide(model.velocity(x, batch.query, batch.cond))
        return _estimate(x, found, batch.query)


def _estimate(x: Tensor, v: Tensor, sigma: Tensor) -> Eval:
    zero = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    return Eval(zero, x0_from(x, wide(v), sigma), zero, wide(v))
