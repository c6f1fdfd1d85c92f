"""What the engine holds while it samples: the samples in flight, the nodes that are kept, and how
the network and the random streams are asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.algorithms.transitions import euler, gaussian_log_prob
from flowrl.core.errors import ConfigError
from flowrl.core.host_copies import remember
from flowrl.core.noise_path import wide, x0_from
from flowrl.core.types import Cond, FlowModel, Gaussian, Plan, Rollout, Tree


class Sampling(NamedTuple):
    """What does not change during one sampling pass. Each prompt always owns an equal, consecutive
    share of rows."""

    model: FlowModel
    cond: Cond
    sigmas: list[float]
    generators: list[torch.Generator]
    shape: tuple[int, ...]
    micro_batch: int | None
    store: torch.dtype
    device: torch.device
    plan: Plan
    keep_mean: bool
    history: bool  # keep the last x0 estimate, for steps of second order


class Memory(NamedTuple):
    """What SA-Solver keeps of a step: the state that it began with, the x0 estimate there, and the
    noise that was drawn."""

    x: Tensor  # [F, *]
    x0: Tensor  # [F, *]
    noise: Tensor | None  # [F, *]


class Frontier(NamedTuple):
    """The frontier: the samples that are still being denoised."""

    x: Tensor  # [F, *]
    # [F] int64 on the host: the last stored node above, or at, x; [F * copies] before the first
    # draw
    node: Tensor
    stored: bool  # x is that node itself, not an ODE run past it
    v: Tensor | None = None  # velocity at x where a preview has already paid for it
    past: Tensor | None = (
        None  # [F, *] x0 estimate of the step before, where steps of second order are to come
    )
    copies: int = 1  # samples that are still one: each row of x, v and past stands for so many
    memory: Memory | None = None  # of the step before, with SA-Solver


class Blocks:
    """Nodes that were made together, block after block."""

    def __init__(self) -> None:
        self.rows: list[tuple[Tensor, ...]] = []
        self.count = 0


class ForestBuilder:
    """Collect nodes block by block; a node's id is its place in the concatenation. `group_ids` [G]:
    the prompts of its trees.

    Clean nodes, at the end of the grid, are leaves and stand behind all others: nothing is below
    them, and their latents can be dropped once they are decoded.
    """

    def __init__(self, run: Sampling, group_ids: Tensor) -> None:
        self.run, self.group_ids = run, group_ids.long().cpu()
        self.inner, self.clean = Blocks(), Blocks()

    def add(
        self,
        x: Tensor,
        parent: Tensor,
        step: int,
        made: tuple[Tensor, Tensor, Tensor] | None = None,
        mean: Tensor | None = None,
        copies: int = 1,
    ) -> Tensor:
        """Store x [F, *] under parent [F]; `made` = (std, log_prob, noise_scale) of the draw. ->
        ids [F] on the host; those of clean nodes count from the first of these.

        With `copies` each row is stored so many times, under parent [F * copies] -> ids [F *
        copies].
        """
        # clean nodes are numbered apart from the others: they end up behind them
        blocks = self.clean if step == len(self.run.sigmas) - 1 else self.inner
        x = apart(x, copies)
        size = len(x)
        zero = torch.zeros(size, device=x.device)
        # prompts own equal, consecutive shares of the rows; a node without a draw has zeros
        group = self.group_ids.repeat_interleave(size // len(self.group_ids))
        std, log_prob, noise_scale = made or (zero, zero, zero)
        numbers = (std.float(), log_prob.double(), noise_scale.float())
        latents = (
            x.to(self.run.store),
            *([x.float() if mean is None else mean.float()] * self.run.keep_mean),
        )
        # twin: the first of a row's copies; block: which call of this made the nodes
        ids = torch.arange(blocks.count, blocks.count + size)
        twin = blocks.count + (ids - blocks.count) // copies * copies
        block = torch.full((size,), len(blocks.rows))
        blocks.rows.append(
            (twin, block, parent, torch.full((size,), step), group, *numbers, *latents)
        )
        blocks.count += size
        return ids

    def rollout(self, leaf: list[Tensor], sigmas: Tensor) -> Rollout:
        """Join the blocks to a Rollout with the leaves `leaf`, ids of clean nodes in parts, and the
        grid sigmas [S+1]."""
        device = self.run.device
        # clean nodes behind the others
        shift = (self.inner.count, len(self.inner.rows))
        clean = [
            (twin + shift[0], block + shift[1], *rest) for twin, block, *rest in self.clean.rows
        ]
        columns = zip(*self.inner.rows, *clean, strict=True)
        joined = (_sent(torch.cat(column), device) for column in columns)
        twin, block, parent, step, group, std, log_prob, noise_scale, x, *kept = joined
        tree = Tree(parent, step, std, group)
        groups, leaves, mean = (
            _sent(self.group_ids, device),
            _sent(torch.cat(leaf) + shift[0], device),
            kept[0] if kept else None,
        )
        return Rollout(
            tree,
            x,
            log_prob,
            noise_scale,
            leaves,
            _sent(sigmas, device),
            self.run.cond,
            groups,
            mean,
            twin,
            block,
        )


def _sent(rows: Tensor, device: torch.device) -> Tensor:
    """Put rows on the device; what was on the host is known there still."""
    there = rows.to(device, non_blocking=True)
    return remember(there, rows) if rows.device.type == "cpu" else there


def apart(rows: Tensor, copies: int) -> Tensor:
    """Repeat each row [F, *] for the samples that it stands for -> [F * copies, *]."""
    return rows.repeat_interleave(copies, 0) if copies > 1 else rows


def x0_estimate(run: Sampling, x: Tensor, v: Tensor, k: int) -> Tensor | None:
    """Estimate the clean latents [F, *] at step k, where steps of second order are to come."""
    return x0_from(x, v, sigma_rows(run, len(x), k)) if run.history else None


def velocity(run: Sampling, x: Tensor, k: int) -> Tensor:
    """Evaluate the network at x [F, *] and step k, in calls of at most `micro_batch` rows."""
    size, chunk = len(x), run.micro_batch or len(x)
    row = torch.arange(size, device=run.device) // (size // len(run.generators))
    parts = zip(
        *(torch.split(rows, chunk) for rows in (x, sigma_rows(run, size, k), row)), strict=True
    )
    v = [
        run.model.velocity(xs, ss, {name: value[at] for name, value in run.cond.items()})
        for xs, ss, at in parts
    ]
    return torch.cat(v).to(x.dtype)


def log_prob_of_draws(run: Sampling, x: Tensor, gaussian: Gaussian) -> Tensor:
    """Return the log-prob of draws x [F, *] -> [F]."""
    # in the micro-batches of training, because a reduction over dimensions may depend on the batch
    # in its last bit
    parts = zip(
        *(torch.split(rows, run.micro_batch or len(x)) for rows in (x, *gaussian)), strict=True
    )
    return torch.cat([gaussian_log_prob(*part) for part in parts])


def euler_step(run: Sampling, x: Tensor, v: Tensor, k: int, k_next: int) -> Tensor:
    """Take the ODE step from place k of the grid to place k_next -> [F, *]."""
    return euler(x, v, sigma_rows(run, len(x), k), sigma_rows(run, len(x), k_next))


def sigma_rows(run: Sampling, size: int, k: int) -> Tensor:
    """Return the sigma of step k for `size` rows -> [size]."""
    return torch.full((size,), run.sigmas[k], device=run.device)


def _noise(run: Sampling, size: int) -> Tensor:
    shape = (size // len(run.generators), *run.shape)
    dtype = torch.promote_types(run.store, torch.float32)
    parts = [torch.randn(shape, generator=g, device=g.device, dtype=dtype) for g in run.generators]
    return torch.cat(parts).to(run.device, non_blocking=True)


def sibling_noise(run: Sampling, size: int, branch: int) -> Tensor:
    """Draw the noise of `branch` children of each of `size` nodes -> [size * branch, *]."""
    if branch == 1 or run.plan.share == 0:
        noise = _noise(run, size * branch)
        return noise if branch == 1 or run.plan.stretch == 1 else noise * run.plan.stretch
    common, own = _noise(run, size), _noise(run, size * branch)
    share = run.plan.share
    return (
        math.sqrt(share) * common.repeat_interleave(branch, 0) + math.sqrt(1 - share) * own
    ) * run.plan.stretch


def initial_latents(run: Sampling, group_size: int) -> Tensor:
    """Draw `group_size` initial latents per prompt -> [G * group_size, *]. Raises ConfigError."""
    if group_size < 1:
        raise ConfigError(
            f"a rollout needs at least 1 root per prompt, got group_size={group_size}"
        )
    x = _noise(run, len(run.generators) * group_size)
    if hasattr(run.model, "initial_noise"):
        x = run.model.initial_noise(x, _cond_of_rows(run, len(x)))
    return rounded(run, x * noise_std(run.sigmas))


def given_latents(run: Sampling, noise: Tensor) -> Tensor:
    """Make initial latents of noise of std 1 [R, *], as `initial_latents` does of what it draws."""
    return rounded(run, noise * noise_std(run.sigmas))


def learned_noise(run: Sampling, x: Tensor, copies: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Score initial noise x [R, *] where the model learns it -> what a draw has, with std 0."""
    if not hasattr(run.model, "initial_log_prob"):
        return None
    log_prob = run.model.initial_log_prob(x / noise_std(run.sigmas), _cond_of_rows(run, len(x)))
    zero = torch.zeros(len(x) * copies, device=x.device)
    return zero, apart(log_prob, copies), zero


def noise_std(sigmas: Sequence[float]) -> float:
    """Return the std of initial noise on a grid: 1 at sigma 1. Below it there is no pure noise: a
    variance-preserving model starts from N(0, 1) in its own coordinates."""
    return math.hypot(1 - sigmas[0], sigmas[0])


def _cond_of_rows(run: Sampling, size: int) -> Cond:
    """Copy each prompt's conditioning for its share of `size` rows -> {name: [size, ...]}."""
    row = torch.arange(size, device=run.device) // (size // len(run.generators))
    return {name: value[row] for name, value in run.cond.items()}


def rounded(run: Sampling, x: Tensor) -> Tensor:
    """Round latents [F, *] to the dtype in which they are stored -> [F, *] in the dtype of the
    arithmetic."""
    return wide(x.to(run.store))
