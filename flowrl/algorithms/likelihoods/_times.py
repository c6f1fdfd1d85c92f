"""At which noise levels an image is noised anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import shift_sigmas

EDGE = 1e-6  # how near random times come to 0, the image itself, and to 1, pure noise


@dataclass(frozen=True)
class Times:
    """A sampler of times, as `flowrl.algorithms.likelihoods.forward.forward` describes it. Raises
    ConfigError."""

    kind: Literal["uniform", "logit_normal", "power_law", "grid", "any_steps"]
    draws: int
    shift: float
    low: float | None  # None: just above 0
    high: float | None  # None: just below 1
    first: int
    last: int
    with_first: bool
    exponent: float = 1.0

    def __post_init__(self) -> None:
        if self.draws < 1 or not self.shift > 0:
            raise ConfigError(
                "likelihood forward: expected draws >= 1 and shift > 0, got "
                f"draws={self.draws}, shift={self.shift}"
            )
        if self.exponent < 0 or (self.exponent != 1 and self.kind != "power_law"):
            raise ConfigError(
                "likelihood forward: exponent belongs to times: power_law and is at least 0, got "
                f"exponent={self.exponent} with times: {self.kind}"
            )
        if self.first < 0 or self.last < 0:
            raise ConfigError(
                "likelihood forward: first and last count the sampler's steps from 0, got "
                f"first={self.first}, last={self.last}"
            )
        # these take the sampler's levels, the others draw their own: an option of the other side
        # would be ignored in silence
        steps = self.kind in ("grid", "any_steps")
        on_grid = (self.first, self.last, self.with_first) != (0, 0, False)
        # the config of an earlier run may have 0 and 1 written out
        ranged = self.low not in (None, 0) or self.high not in (None, 1)
        if (ranged or self.shift != 1) if steps else on_grid:
            raise ConfigError(
                "likelihood forward: first, last and with_first belong to times: grid and "
                "any_steps, low, high and shift to the others; got some of them with times: "
                f"{self.kind}"
            )
        low, high = self.range
        if not (steps or 0 < low < high < 1):
            raise ConfigError(
                "likelihood forward: times are noise levels between 0 (the image, nothing to "
                "predict) and 1 (pure noise), so 0 < low < high < 1 is needed, got low="
                f"{self.low}, high={self.high}; leave out the one that should be no limit"
            )

    @property
    def range(self) -> tuple[float, float]:
        """Return the lowest and the highest time."""
        low, high = self.low, self.high
        return EDGE if low is None else low, 1 - EDGE if high is None else high

    def draw(self, stream: torch.Generator, grid: Tensor) -> Tensor:
        """Draw the times of one leaf, descending -> [draws]; grid [S+1]: what it was sampled on."""
        if self.kind in ("grid", "any_steps"):
            return grid[self._steps(stream, len(grid) - 1)]
        # one number in each of `draws` equal parts of (0, 1), descending
        part = torch.arange(self.draws - 1, -1, -1)
        u = (part + torch.rand(self.draws, generator=stream)) / self.draws
        if self.kind == "logit_normal":
            normal = torch.special.ndtri(u.double()).float()
            return shift_sigmas(normal.sigmoid(), self.shift).clamp(*self.range)
        low, high = self.low or 0.0, self.high or 1.0
        if self.kind == "uniform":
            time = low + (high - low) * u
        else:  # where the density t^exponent has a share u below it
            power = self.exponent + 1
            low, high = low**power, high**power
            time = (low + (high - low) * u) ** (1 / power)
        # u can be 0, and rounding makes 1 of what is nearly 1
        return shift_sigmas(time, self.shift).clamp(EDGE, 1 - EDGE)

    def _steps(self, stream: torch.Generator, steps: int) -> Tensor:
        """Draw steps of a grid, ascending -> [draws] int64."""
        first, last = max(self.first, int(self.with_first)), self.last or steps
        parts = self.draws - self.with_first
        if last > steps or last - first < parts:
            raise ConfigError(
                f"likelihood forward: draws={self.draws} different times from the sampler's steps "
                f"{first} to {last - 1}, but it has steps 0 to {steps - 1}; lower draws, or give "
                "plan.steps more"
            )
        if self.kind == "any_steps":
            place = first + torch.randperm(last - first, generator=stream)[:parts].sort()[0]
            return torch.cat([torch.zeros(int(self.with_first), dtype=torch.int64), place])
        edges = [first + (last - first) * k // parts for k in range(parts + 1)] if parts else []
        low, width = torch.tensor(edges[:-1]), torch.tensor(edges).diff()
        place = low + (torch.rand(parts, generator=stream) * width).long()
        return torch.cat([torch.zeros(int(self.with_first), dtype=torch.int64), place.long()])
