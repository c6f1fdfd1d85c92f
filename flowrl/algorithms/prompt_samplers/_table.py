"""What the samplers share: numbers per row of the training list, and rewards that are rates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.algorithms.prompt_memory import PromptMemory
from flowrl.core.abilities import PromptDraw, Visit
from flowrl.core.errors import ConfigError


class PromptTable(PromptMemory):
    """A float64 column [N] for each name, NaN where nothing is known, kept in checkpoints.

    Unlike a credit's, its rows are those of the list, equal texts included.
    """

    needs: frozenset[str] = frozenset()
    kind = "sampler"
    joins = False

    def __init__(self, *columns: str) -> None:
        super().__init__(dict.fromkeys(columns, 1))

    def start(self, prompts: list[str]) -> None:
        """Know nothing of any prompt."""
        super().start([f"{row} {text}" for row, text in enumerate(prompts)])

    def column(self, name: str) -> Tensor:
        """Return one column [N]; what is written into it is kept."""
        return self.kept[name][:, 0]

    def rates(self, visits: Sequence[Visit]) -> list[Visit]:
        """Return the visits with scored images. Raises ConfigError for a mean outside [0, 1]."""
        known = [visit for visit in visits if visit.images]
        for visit in known:
            if not -1e-6 <= visit.mean <= 1 + 1e-6:
                raise ConfigError(
                    f"sampler {type(self).__name__}: expected rewards from 0 to 1, whose mean is a "
                    f"rate of success, got a mean of {visit.mean:.4g}; map the reward to [0, 1] by "
                    "a transform, such as threshold, or take sampler variance_weighted"
                )
        return known


def check_share(who: str, name: str, value: float) -> None:
    """Raise ConfigError for a share outside [0, 1]."""
    if not 0 <= value <= 1:
        raise ConfigError(f"sampler {who}: expected {name} from 0 to 1, got {value}")


def drawn_by(weights: Tensor, count: int, draw: PromptDraw) -> list[int]:
    """Draw `count` rows with odds of weights [N], with replacement; all alike where none is above
    0."""
    if not count:
        return []
    odds = weights if bool((weights > 0).any()) else torch.ones_like(weights)
    found: list[int] = torch.multinomial(
        odds, count, replacement=True, generator=draw.generator
    ).tolist()
    return found
