"""From advantages to the probability that an image is a good one."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from flowrl.core.errors import ConfigError

Labels = Literal["all", "positive_only", "negative_only", "one_only", "binary"]


def optimality(advantage: Tensor, max_advantage: float, labels: Labels = "all") -> Tensor:
    """Turn advantages [B] into the probability of being good, ``clip(A / (2 max) + 1/2, 0, 1)``.

    labels: positive_only and negative_only set the others to 0 first; one_only makes good ones 1
    and all others 0; binary takes the sign. The last two are then divided by max_advantage like any
    A, so that with 5 they are 0.6, 0.5 and 0.4 (DiffusionNFT's code). -> [B] float64. Raises
    ConfigError for other labels.
    """
    a = advantage.double().clamp(-max_advantage, max_advantage)
    if labels == "positive_only":
        a = a.clamp_min(0)
    elif labels == "negative_only":
        a = a.clamp_max(0)
    elif labels == "one_only":
        a = (a > 0).double()
    elif labels == "binary":
        a = a.sign()
    elif labels != "all":
        raise ConfigError(f"nft: labels must be one of {get_args(Labels)}, got {labels!r}")
    return (a / max_advantage / 2 + 0.5).clamp(0, 1)
