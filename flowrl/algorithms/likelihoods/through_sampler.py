"""Likelihoods of methods that follow the reward's own gradient through the sampler: no log-prob,
but images that know where they came from. They belong to losses of
`flowrl.algorithms.losses.reward_gradient`.

Most run Euler steps on the grid of the rollout, from its initial noises, so the images that are
trained are those that were scored if the plan is `ode` with order 1. Source of each: its class.
`checkpoint` computes the network once more in the backward pass instead of storing it; memory then
grows by one latent per step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flowrl.algorithms.forest import clean_latents, cond_of, initial_noise
from flowrl.core.devices import repeated
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import interpolate, per_sample, wide
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, Eval, FlowModel, Rollout, Transition, Unrolled

SIDES = ("denoise", "inverse", "both")


class _FromRoots:
    """Sample the images of a rollout's initial noises again."""

    trains: Literal["roots"] = "roots"
    rows_per_state = 1
    keeps: frozenset[str] = frozenset()
    checkpoint = True

    def paths(self, streams: list[torch.Generator], steps: int) -> tuple[Tensor, Tensor]:
        """Say which of `steps` steps carry a gradient, for as many rows as streams -> open [B, S]
        bool, last [B]."""
        raise NotImplementedError

    def batch(
        self, rollout: Rollout, advantage: Tensor, nodes: Tensor, streams: NodeStreams
    ) -> Batch:
        """Collect initial noises [B], each with steps of its own stream -> Batch of B."""
        opened, last = self.paths(streams.of(nodes), len(rollout.sigmas) - 1)
        path = Unrolled(rollout.sigmas, opened, last, self.checkpoint)
        return _roots_batch(rollout, advantage, nodes, path)

    def evaluate(self, model: FlowModel, batch: Batch, transition: Transition) -> Eval:
        """Sample the images -> Eval with `images`; the transition plays no part."""
        return _evaluate_unrolled(model, batch)


class draft(_FromRoots):
    """Differentiate through the last `last` steps; 0 = all. DRaFT and DRaFT-K (2309.17400).

    Raises: ConfigError for a negative number, or more steps than the plan has.
    """

    def __init__(self, *, last: int = 1, checkpoint: bool = True) -> None:
        if last < 0:
            raise ConfigError(f"likelihood draft: expected last >= 0 (0 = all steps), got {last}")
        self.last, self.checkpoint = last, checkpoint

    def paths(self, streams: list[torch.Generator], steps: int) -> tuple[Tensor, Tensor]:
        """Open the last steps of every row -> open [B, S], last [B]. Raises ConfigError for a plan
        with fewer steps."""
        if self.last > steps:
            raise ConfigError(
                f"likelihood draft: last={self.last} steps carry a gradient, but the plan has "
                f"{steps}; lower it, or give plan.steps more"
            )
        first = steps - self.last if self.last else 0
        opened = (torch.arange(steps) >= first).expand(len(streams), steps)
        return opened, torch.full((len(streams),), steps - 1)


class align_prop(_FromRoots):
    """Differentiate from a random step K on: every velocity before it is cut off. AlignProp
    (2310.03739) as in the authors' code, where one K counts for a whole rollout.

    Args:
        draw: uniform: K from 0 to S - 1; gaussian: a normal number of `mean` and `std`, as shares
            of the S steps, cut to a whole number; fixed: the whole number below ``mean S``. A K
            outside 1 ... S - 1 is drawn again.
        mean, std: of gaussian. The code has 42 and 5 of 50 steps; fixed is 49 of 50.

    **Differs:** the code draws one K per batch, flowrl one per image.

    Raises: ConfigError for a mean outside (0, 1), a std that is negative, a fixed K outside
    1 ... S - 1, or a plan of one step.
    """

    def __init__(
        self,
        *,
        draw: Literal["uniform", "gaussian", "fixed"] = "gaussian",
        mean: float = 0.84,
        std: float = 0.1,
        checkpoint: bool = True,
    ) -> None:
        if not 0 < mean < 1 or not std >= 0:
            raise ConfigError(
                "likelihood align_prop: mean and std are shares of the steps, expected "
                f"0 < mean < 1 and std >= 0, got {mean=}, {std=}"
            )
        self.draw, self.mean, self.std, self.checkpoint = draw, mean, std, checkpoint

    def paths(self, streams: list[torch.Generator], steps: int) -> tuple[Tensor, Tensor]:
        """Open the steps from K on -> open [B, S], last [B]. Raises ConfigError for a plan of one
        step."""
        if steps < 2:
            raise ConfigError("likelihood align_prop: needs a plan of at least 2 steps, got 1")
        first = torch.tensor([self._first(stream, steps) for stream in streams])
        opened = torch.arange(steps) >= first[:, None]
        return opened, torch.full((len(streams),), steps - 1)

    def _first(self, stream: torch.Generator, steps: int) -> int:
        """Draw K from 1 to steps - 1."""
        if self.draw == "fixed":
            # always the same K, so one outside the steps cannot be drawn again
            k = int(self.mean * steps)
            if not 1 <= k < steps:
                raise ConfigError(
                    f"likelihood align_prop: mean={self.mean:g} of {steps} steps is step {k}, but "
                    f"K must be from 1 to {steps - 1}"
                )
            return k
        # draw until it fits; bounded, so that a mean far outside ends in a message
        for _ in range(1000):
            if self.draw == "uniform":
                k = int(torch.randint(steps, (1,), generator=stream))
            else:
                normal = float(torch.randn((), generator=stream))
                k = int(steps * (self.mean + self.std * normal))
            if 1 <= k < steps:
                return k
        raise ConfigError(
            f"likelihood align_prop: mean={self.mean:g} and std={self.std:g} of {steps} steps give "
            f"hardly any K from 1 to {steps - 1}; widen std"
        )


class align_prop_each(_FromRoots):
    """Differentiate through a random set of steps: at every step i a fresh K from 0 to S - 1 is
    drawn, and the velocity is cut off if i < K. AlignProp (2310.03739) as TRL had it.

    Step i carries a gradient with probability (i + 1) / S; it is no prefix that is cut off, the
    latent's own part of the gradient goes through all steps after the first open one. **Differs:**
    TRL draws for a whole batch, flowrl for each image.
    """

    def __init__(self, *, checkpoint: bool = True) -> None:
        self.checkpoint = checkpoint

    def paths(self, streams: list[torch.Generator], steps: int) -> tuple[Tensor, Tensor]:
        """Open each step by chance -> open [B, S], last [B]."""
        drawn = [torch.randint(steps, (steps,), generator=stream) for stream in streams]
        opened = torch.arange(steps) >= torch.stack(drawn)
        return opened, torch.full((len(streams),), steps - 1)


class refl(_FromRoots):
    """Stop at a random step m of first ... last, and differentiate through its x0 estimate alone.
    ReFL (2304.05977), its code: steps 30 to 39 of 40.

    Args:
        first, last: the range of m, counted from 0; last 0 = the plan's last step.

    Raises: ConfigError for a range that is none, or one outside the plan's steps.
    """

    def __init__(self, *, first: int = 0, last: int = 0, checkpoint: bool = True) -> None:
        if first < 0 or last < 0:
            raise ConfigError(
                f"likelihood refl: first and last count steps from 0, got {first=}, {last=}"
            )
        self.first, self.last, self.checkpoint = first, last, checkpoint

    def paths(self, streams: list[torch.Generator], steps: int) -> tuple[Tensor, Tensor]:
        """Open the step that each row stops at -> open [B, S], last [B]. Raises ConfigError unless
        `first` and `last` are steps of the plan."""
        last = self.last or steps - 1
        if not self.first <= last < steps:
            raise ConfigError(
                f"likelihood refl: first={self.first} and last={last} must be steps of the plan, "
                f"0 to {steps - 1}, in this order"
            )
        drawn = [torch.randint(self.first, last + 1, (1,), generator=g) for g in streams]
        stop = torch.cat(drawn)
        return torch.arange(steps) == stop[:, None], stop


class draft_lv:
    """Noise the finished image anew to the last level, `draws` times, and differentiate through the
    last step from there: DRaFT-LV (2309.17400), whose gradient is the mean over the draws.

    Costs no sampling but the rollout's. Args: draws: the paper's figures have 2 (second hand).

    Raises: ConfigError for draws below 1.
    """

    trains: Literal["leaves"] = "leaves"
    keeps: frozenset[str] = frozenset()

    def __init__(self, *, draws: int = 2, checkpoint: bool = True) -> None:
        if draws < 1:
            raise ConfigError(f"likelihood draft_lv: expected draws >= 1, got {draws}")
        self.rows_per_state, self.checkpoint = draws, checkpoint

    def batch(
        self, rollout: Rollout, advantage: Tensor, nodes: Tensor, streams: NodeStreams
    ) -> Batch:
        """Noise each leaf [N] `draws` times, from its own stream -> Batch of N * draws rows."""
        node = repeated(nodes, self.rows_per_state)
        x0 = clean_latents(rollout, node)
        shape = (self.rows_per_state, *x0.shape[1:])
        noises = [torch.randn(shape, generator=stream) for stream in streams.of(nodes)]
        # the last level of the grid, and one step to its end
        sigma = rollout.sigmas[-2].expand(len(node))
        x = interpolate(x0, torch.cat(noises).to(x0, non_blocking=True), sigma)
        opened = torch.ones(len(node), 1, dtype=torch.bool)
        last = torch.zeros(len(node), dtype=torch.int64)
        path = Unrolled(rollout.sigmas[-2:], opened, last, self.checkpoint)
        return _unrolled_batch(rollout, advantage, node, x, sigma, path)

    def evaluate(self, model: FlowModel, batch: Batch, transition: Transition) -> Eval:
        """Sample the images -> Eval with `images`; the transition plays no part."""
        return _evaluate_unrolled(model, batch)


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
        made = _unrolled_batch(rollout, advantage, node, x, start, path)
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
        v = _called(batch, model.velocity, x, batch.sigma, batch.cond).to(x.dtype)
        ahead = x + per_sample(batch.sigma_next - batch.sigma, x) * v
        end = per_sample(batch.sigma_next, x)
        x0 = (ahead - end * batch.target) / (1 - end)
        zero = torch.zeros(len(x), device=x.device)
        return Eval(zero, x0, zero, images=_called(batch, model.decode, x0))


def _roots_batch(rollout: Rollout, advantage: Tensor, nodes: Tensor, unrolled: Unrolled) -> Batch:
    """Collect initial noises [B] that run through the sampler as `unrolled` says -> Batch of B."""
    sigma = rollout.sigmas[:1].expand(len(nodes))
    x = rollout.x[nodes]
    return _unrolled_batch(rollout, advantage, nodes, x, sigma, unrolled)


def _unrolled_batch(
    rollout: Rollout, advantage: Tensor, nodes: Tensor, x: Tensor, sigma: Tensor, unrolled: Unrolled
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


def _evaluate_unrolled(model: FlowModel, batch: Batch) -> Eval:
    """Sample the batch's images -> Eval with images [B, 3, H, W] and mean = x0; log-prob 0."""
    x0 = _sampled(model, batch)
    images = _called(batch, model.decode, x0)
    zero = torch.zeros(len(x0), device=x0.device)
    return Eval(zero, x0, zero, images=images)


def _sampled(model: FlowModel, batch: Batch) -> Tensor:
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
            made = _called(batch, _velocity, model, batch, x, opened, k)
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


def _called(batch: Batch, function: Callable[..., Tensor], *values: object) -> Tensor:
    """Call a network with a gradient; its activations are stored, or computed again in the backward
    pass where the batch's steps say so."""
    if batch.unrolled is None or not (batch.unrolled.again and torch.is_grad_enabled()):
        return function(*values)
    made: Tensor = checkpoint(function, *values, use_reentrant=False)
    return made
