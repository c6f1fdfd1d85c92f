"""Best-of-n: of every n images of a prompt the one that a reward puts first."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from flowrl.core.errors import ConfigError


def chooser(best_by: str, headline: str, rewards: Mapping[str, object]) -> str:
    """Return the reward that chooses. Raises ConfigError if there is none of that name."""
    name = best_by or headline
    if name not in rewards:
        raise ConfigError(
            f"eval.best_by: expected the name of a reward, one of {', '.join(rewards)}, got "
            f"{name!r}"
        )
    return name


def best_places(scores: np.ndarray, n: int) -> np.ndarray:
    """Return the places [P, S] of the best of every n neighbours in scores [P, S n].

    The first of equals is taken. NaN = not scored is never chosen where another was scored.
    """
    ranked = np.where(np.isnan(scores), -np.inf, scores).reshape(len(scores), -1, n)
    return ranked.argmax(-1) + np.arange(ranked.shape[1]) * n


def best_rows(scores: Tensor, images: int, n: int) -> Tensor:
    """Return the places of the best of every n scores [prompts * images * n], prompt by prompt."""
    table = scores.reshape(-1, images * n).numpy()
    first = np.arange(len(table))[:, None] * images * n
    return torch.from_numpy(best_places(table, n) + first).flatten()


def keep_best(
    rows: list[int], broken: Tensor, scores: Mapping[str, Tensor], by: str, images: int, n: int
) -> tuple[list[int], Tensor, dict[str, Tensor]]:
    """Keep the best of every n images by the reward `by`: their prompts, whether they are broken,
    and their scores."""
    chosen = best_rows(scores[by], images, n)
    kept = {name: values[chosen] for name, values in scores.items()}
    return [rows[place] for place in chosen.tolist()], broken[chosen], kept
