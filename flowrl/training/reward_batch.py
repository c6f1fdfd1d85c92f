"""What a rollout runs on, and its images together with their prompts' records."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.nodes import cond_of, leaf_sigmas
from flowrl.algorithms.rollout.plan_steps import read_sigma_grid
from flowrl.core.reward_traits import sees_latents
from flowrl.core.types import Latents, Plan, RewardBatch, Rollout
from flowrl.evaluation.sources import sources_of
from flowrl.training.setup import Setup


def sigma_grid(run: Setup, plan: Plan) -> Tensor:
    """Return the sigmas [S+1] that a plan is run on: the model's own, or what the plan reads off
    them."""
    size = (run.config.image.height, run.config.image.width)
    if plan.sigma_grid is None:
        return run.model.sigmas(len(plan.noise), *size)
    return read_sigma_grid(run.model.sigmas(plan.sigma_grid.steps, *size), plan.sigma_grid)


def reward_batch(run: Setup, ro: Rollout, images: Tensor, rows: list[int]) -> RewardBatch:
    """Put images [L, 3, H, W] of a rollout's leaves together with their prompts."""
    group = ro.tree.group[ro.leaf]
    index = [rows[g] for g in group.tolist()]
    sigma = leaf_sigmas(ro, run.method.plan(run.iteration).tail).cpu()
    return prompted(run, images, group, index)._replace(sigma=sigma)


def with_latents(run: Setup, ro: Rollout, batch: RewardBatch) -> RewardBatch:
    """Show the latents of a rollout's leaves, the states that estimates among them are of, and what
    they are conditioned on, if a reward asks for them."""
    if not any(sees_latents(reward) for reward in run.rewards.values()):
        return batch
    # an estimate belongs to the node above it, a finished image to itself
    estimate, states = batch.sigma > 0, None
    if bool(estimate.any()):
        above = ro.tree.parent[ro.leaf]
        states = ro.x[torch.where(estimate.to(above.device), above, ro.leaf)]
    return batch._replace(latents=Latents(ro.x[ro.leaf], cond_of(ro, ro.leaf), states))


def prompted(run: Setup, images: Tensor, group: Tensor, index: list[int]) -> RewardBatch:
    """Put images [L, 3, H, W] together with the training prompts `index` [L]."""
    records = [run.train_set.records[row] for row in index]
    prompts = [record["prompt"] for record in records]
    sources = sources_of(run.train_set, index, run.size)
    return RewardBatch(images, prompts, group, records, torch.zeros(len(records)), sources)
