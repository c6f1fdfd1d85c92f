"""The rewards of leaves, prompt by prompt: means, medians and spreads that leave out what was not
scored."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree


class Groups:
    """Rewards of leaves [L] in float64, and which prompt's each is."""

    def __init__(self, reward: Tensor, leaf: Tensor, tree: Tree) -> None:
        """Number the prompts of rewards [L] of the leaves [L] from 0; NaN = not scored."""
        self.value = reward.double()
        self.scored = ~self.value.isnan()
        self.group = torch.unique(tree.group[leaf], return_inverse=True)[1]
        size = int(self.group.max()) + 1
        self._zeros = self.value.new_zeros(size)
        self.count = self._zeros.index_add(0, self.group, self.scored.double())

    def total(self, values: Tensor) -> Tensor:
        """Sum values [L] of scored leaves -> [G]."""
        return self._zeros.index_add(0, self.group, torch.where(self.scored, values, 0.0))

    def mean(self) -> Tensor:
        """Average the rewards of each prompt -> [G]; NaN where none was scored."""
        return self.total(self.value) / self.count

    def centred(self) -> Tensor:
        """Return each reward minus its prompt's mean [L]; exactly 0 where all are equal."""
        low = self._zeros + torch.inf
        known = torch.where(self.scored, self.value, torch.inf)
        low = low.scatter_reduce(0, self.group, known, "amin")
        above = self.value - low[self.group]
        return above - (self.total(above) / self.count)[self.group]

    def std(self, ddof: int) -> Tensor:
        """Return the standard deviation of each prompt [G]; 0 where there are too few rewards."""
        squares = self.total(self.centred().square())
        spread = (squares / (self.count - ddof).clamp_min(1)).sqrt()
        return torch.where(self.count > ddof, spread, 0.0)

    def median(self, values: Tensor) -> Tensor:
        """Return the lower median of each prompt's values, for each leaf [L]."""
        known = torch.where(self.scored, values, torch.inf)
        # leaves in the order of prompts, and of values within a prompt
        order = known.argsort(stable=True)
        order = order[self.group[order].argsort(stable=True)]
        size = torch.bincount(self.group)
        first = size.cumsum(0) - size
        middle = first + ((self.count.long() - 1) // 2).clamp_min(0)
        found = known[order[middle]]
        return torch.where(self.count > 0, found, torch.nan)[self.group]


def check_unit(who: str, values: Tensor) -> None:
    """Raise ConfigError for rewards outside [0, 1]."""
    if len(values) and not (values.min() >= 0 and values.max() <= 1):
        raise ConfigError(
            f"{who}: expected rewards from 0 to 1, got {values.min().item():.4g} to "
            f"{values.max().item():.4g}; use another credit, or map the reward to [0, 1]"
        )


def sample_std(values: Tensor) -> Tensor:
    """Return the standard deviation of values [n] with n - 1, []; 0 of a single one."""
    return values.std(correction=1) if len(values) > 1 else values.new_zeros(())
