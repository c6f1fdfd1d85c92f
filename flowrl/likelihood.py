"""What "log-prob" means: evaluate a batch under the weights that are in the model now."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.flow import wide
from flowrl.transitions import gaussian_log_prob
from flowrl.types import Batch, Eval, FlowModel, Transition


def reverse(model: FlowModel, batch: Batch, transition: Transition) -> Eval:
    """Score the stored x_next under the sampler's own Gaussian step, v evaluated anew at the stored x.

    Right after the rollout ``log_prob == batch.old_log_prob``: to the bit where network calls have the same rows,
    else to float32 rounding. Gradients flow through v only. Source: DDPO (2305.13301) eq. 6, Flow-GRPO (2505.05470).
    """
    x = wide(batch.x)
    v = _velocity(model, batch)
    mean, std = transition(x, v, batch.sigma, batch.sigma_next, batch.level)
    return Eval(gaussian_log_prob(batch.target, mean, std), mean, std, v)


def _velocity(model: FlowModel, batch: Batch) -> Tensor:
    """Evaluate v [B, *] once per distinct parent: siblings of a fork were drawn from one state."""
    parents, index = torch.unique(batch.parent, return_inverse=True)
    x = wide(batch.x)
    if len(parents) == len(x):
        return model.velocity(x, batch.sigma, batch.cond)
    row = torch.arange(len(x), device=index.device)
    first = torch.full_like(parents, len(x)).scatter_reduce(0, index, row, "amin")
    cond = {name: value[first] for name, value in batch.cond.items()}
    return model.velocity(x[first], batch.sigma[first], cond)[index]
