"""Run the sampler once more, so that the image knows where it came from: Euler steps whose
velocities carry a gradient, or do not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flowrl.algorithms.nodes import cond_of
from flowrl.core.noise_path import per_sample, wide
from flowrl.core.types import Batch, Eval, FlowModel, Rollout, Unrolled


def roots_batch(rollout: Rollout, advantage: Tensor, nodes: Tensor, unrolled: Unrolled) -> Batch:
    """Collect initial noises [B] that run through the sampler as `unrolled` says -> Batch of B."""
    sigma = rollout.sigmas[:1].expand(len(nodes))
    x = rollout.x[nodes]
    return unrolled_batch(rollout, advantage, nodes, x, sigma, unrolled)


def unrolled_batch(
    rollout: Rollout,
    advantage: Tensor,
    nodes: Tensor,
    x: Tensor,
    sigma: Tensor,
    unrolled: Unrolled,
) -> Batch:
    """Put latents x [B, *] at sigma [B], which belong to nodes [B], in a batch."""
    # the loss reads images, not draws: what belongs to a draw is 0, each row is its own state
    zero = torch.zeros_like(sigma)
    row = torch.arange(len(nodes), device=nodes.device)
    return Batch(
        x=x,
        sigma=sigma,
        sigma_next=unrolled.sigmas[-1:].expand(len(nodes)),
        noise_scale=zero,
        target=x,
        old_log_prob=zero,
        advantage=advantage[nodes],
        node=nodes,
        parent=row,
        step=torch.zeros_like(row),
        cond=cond_of(rollout, nodes),
        unrolled=unrolled,
    )


def evaluate_unrolled(model: FlowModel, batch: Batch) -> Eval:
    """Sample the batch's images -> Eval with images [B, 3, H, W] and mean = x0; log-prob 0."""
    x0 = sampled(model, batch)
    images = called(batch, model.decode, x0)
    zero = torch.zeros(len(x0), device=x0.device)
    return Eval(zero, x0, zero, images=images)


def sampled(model: FlowModel, batch: Batch) -> Tensor:
    """Take Euler steps from x [B, *] to the end of the grid -> x0 [B, *].

    A row's velocity carries a gradient at the steps where it is open. At its last step a row jumps
    to the end. Open and other rows are two network calls, so what has no gradient costs no memory.
    """
    path = batch.unrolled
    assert path is not None
    x = wide(batch.x)
    for k in range(path.open.shape[1]):
        # rows that are still under way
        opened, shut = (rows.to(x.device, non_blocking=True) for rows in _rows(path, k))
        v = torch.zeros_like(x)
        if len(shut):
            with torch.no_grad():
                v = v.index_copy(0, shut, _velocity(model, batch, x, shut, k))
        if len(opened):
            made = called(batch, _velocity, model, batch, x, opened, k)
            v = v.index_copy(0, opened, made)
        # to the next place, or to the end
        ends = (path.last == k).to(x.device, non_blocking=True)
        there = torch.where(ends, path.sigmas[-1], path.sigmas[k + 1])
        x = x - per_sample(path.sigmas[k] - there, x) * v
    return x


def _rows(path: Unrolled, k: int) -> tuple[Tensor, Tensor]:
    """List the rows that take step k with a gradient, and those that take it without."""
    going = path.last >= k
    sides = (going & path.open[:, k], going & ~path.open[:, k])
    opened, shut = (side.nonzero().flatten() for side in sides)
    return opened, shut


def _velocity(model: FlowModel, batch: Batch, x: Tensor, rows: Tensor, k: int) -> Tensor:
    """Evaluate the network for some rows [R] of x at step k -> [R, *]."""
    assert batch.unrolled is not None
    sigma = batch.unrolled.sigmas[k].expand(len(rows))
    cond = {name: value[rows] for name, value in batch.cond.items()}
    return model.velocity(x[rows], sigma, cond).to(x.dtype)


def called(batch: Batch, function: Callable[..., Tensor], *values: object) -> Tensor:
    """Call a network with a gradient; its activations are stored, or computed again in the backward
    pass where the batch's steps say so."""
    if batch.unrolled is None or not (batch.unrolled.again and torch.is_grad_enabled()):
        return function(*values)
    made: Tensor = checkpoint(function, *values, use_reentrant=False)
    return made
