"""Likelihoods of methods that follow the reward's own gradient through the sampler: no log-prob,
but images that know where they came from. They belong to losses of
`flowrl.algorithms.losses.reward_gradient`.

All run Euler steps on the grid of the rollout, from its initial noises, so the images that are
trained are those that were scored if the plan is `ode` with order 1. Source of each: its class.
`checkpoint` computes the network once more in the backward pass instead of storing it; memory then
grows by one latent per step.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.likelihoods._unroll import evaluate_unrolled, roots_batch, unrolled_batch
from flowrl.algorithms.nodes import clean_latents
from flowrl.core.errors import ConfigError
from flowrl.core.host_copies import repeated
from flowrl.core.noise_path import interpolate
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, Eval, FlowModel, Rollout, Transition, Unrolled


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
        return roots_batch(rollout, advantage, nodes, path)

    def evaluate(self, model: FlowModel, batch: Batch, transition: Transition) -> Eval:
        """Sample the images -> Eval with `images`; the transition plays no part."""
        return evaluate_unrolled(model, batch)


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
        return unrolled_batch(rollout, advantage, node, x, sigma, path)

    def evaluate(self, model: FlowModel, batch: Batch, transition: Transition) -> Eval:
        """Sample the images -> Eval with `images`; the transition plays no part."""
        return evaluate_unrolled(model, batch)
