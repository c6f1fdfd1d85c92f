"""Advantages against what a prompt's images were worth in earlier iterations.

Each is a class that is made once and called once an iteration. A call changes nothing; `update`
takes the iteration's rewards into the memory, which checkpoints keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.algorithms.forest import subtree_mean
from flowrl.algorithms.prompt_memory import PromptMemory
from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree


class history_norm(PromptMemory):
    """Normalise a reward [L] by the last rewards of its prompt, from all iterations -> advantage
    per node [V] float32.

    ``(r - mean) / (std + eps)`` over the prompt's last `buffer` rewards, this iteration's among
    them; a prompt that has fewer than `least` takes mean and std of the whole batch. std is biased.
    Images of a prompt need not come together, so `train.group` may be 1. NaN = not scored: never
    remembered, advantage 0.

    Source: DDPO (2305.13301), per-prompt statistics; its code: buffer 16 or 32, least 16, eps 1e-6.
    **Differs:** the code keeps the reward's dtype, in which whole numbers are cut off.

    Raises: ConfigError for buffer < 1, least < 1 or above buffer, or eps not above 0.
    """

    def __init__(self, *, buffer: int = 32, least: int = 16, eps: float = 1e-6) -> None:
        if not (1 <= least <= buffer and eps > 0):
            raise ConfigError(
                "history_norm: expected 1 <= least <= buffer and eps > 0, got "
                f"{buffer=}, {least=}, {eps=}"
            )
        super().__init__({"rewards": buffer})
        self.buffer, self.least, self.eps = buffer, least, eps

    def __call__(
        self, reward: Tensor, leaf: Tensor, tree: Tree, *, prompts: Sequence[str] = ()
    ) -> Tensor:
        """Normalise each reward; prompts [L]: the text of each leaf."""
        value, place = reward.double(), self.places(prompts).to(reward.device)
        scored = ~value.isnan()
        if not bool(scored.any()):
            return torch.zeros(len(tree.parent), device=reward.device)
        batch = value[scored]
        advantage = torch.full_like(value, torch.nan)
        for prompt in place.unique().tolist():
            mine = place == prompt
            seen = self._seen(prompt, value[mine & scored])
            seen = batch if len(seen) < self.least else seen
            spread = seen.std(correction=0)
            advantage[mine] = (value[mine] - seen.mean()) / (spread + self.eps)
        return subtree_mean(advantage, leaf, tree).nan_to_num().float()

    def update(self, reward: Tensor, leaf: Tensor, tree: Tree, *, prompts: Sequence[str]) -> None:
        """Remember the rewards [L] of an iteration."""
        value, place = reward.double().cpu(), self.places(prompts)
        for prompt in place.unique().tolist():
            new = value[place == prompt]
            seen = self._seen(prompt, new[~new.isnan()])
            self.kept["rewards"][prompt, : len(seen)] = seen

    def _seen(self, prompt: int, new: Tensor) -> Tensor:
        """Return the last rewards of a prompt with the new ones [n], oldest first -> [m]."""
        old = self.kept["rewards"][prompt].to(new)
        return torch.cat([old[~old.isnan()], new])[-self.buffer :]
