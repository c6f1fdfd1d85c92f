"""A baseline between what a prompt was worth before and what its few images say now."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.algorithms.forest import subtree_mean
from flowrl.algorithms.prompt_memory import PromptMemory
from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree


class shrunken_mean(PromptMemory):
    """Subtract a baseline that leans on what the prompt was worth before, unless its images now
    contradict that -> advantage per node [V] float32; for groups of 4 and less.

    ``w mean + (1 - w) V``, ``w = D / (D + s)``, ``D = max(0, (mean - V)^2 - s)``, ``s = spread^2 /
    k``, the largest variance that a mean of k rewards can have. While mean and V differ by no more
    than that, the baseline is V. `spread` is half the range of the rewards: 0.5 for 0 to 1.

    V_0.5 (2603.10848), its shrinkage, as reading notes have it. Reconstruction: its V comes from a
    value model trained beforehand, here it is the running mean of the prompt's earlier visits, of
    which each new one counts `rate`; at a first visit the baseline is the mean. Its second part,
    more images for prompts in doubt, is not here.

    Raises: ConfigError unless spread > 0 and 0 < rate <= 1.
    """

    def __init__(self, *, spread: float = 0.5, rate: float = 0.5) -> None:
        if not (spread > 0 and 0 < rate <= 1):
            raise ConfigError(
                f"shrunken_mean: expected spread > 0 and 0 < rate <= 1, got {spread=}, {rate=}"
            )
        super().__init__({"value": 1})
        self.spread, self.rate = spread, rate

    def __call__(
        self, reward: Tensor, leaf: Tensor, tree: Tree, *, prompts: Sequence[str] = ()
    ) -> Tensor:
        """Compare each reward; prompts [L]: the text of each leaf."""
        out = torch.full_like(reward, torch.nan, dtype=torch.float64)
        for prompt, mine, values in self.visited(reward, prompts):
            out[mine] = values - self._baseline(prompt, values)
        return subtree_mean(out, leaf, tree).nan_to_num().float()

    def update(self, reward: Tensor, leaf: Tensor, tree: Tree, *, prompts: Sequence[str]) -> None:
        """Move what each prompt is worth by its rewards [L]; NaN = not scored."""
        for prompt, _, new in self.visited(reward.cpu(), prompts):
            old = float(self.kept["value"][prompt, 0])
            mean = float(new.mean())
            kept = mean if old != old else (1 - self.rate) * old + self.rate * mean
            self.kept["value"][prompt, 0] = kept

    def _baseline(self, prompt: int, new: Tensor) -> float:
        mean, before = float(new.mean()), float(self.kept["value"][prompt, 0])
        if before != before:
            return mean
        noise = self.spread**2 / len(new)
        apart = max(0.0, (mean - before) ** 2 - noise)
        weight = apart / (apart + noise)
        return weight * mean + (1 - weight) * before
