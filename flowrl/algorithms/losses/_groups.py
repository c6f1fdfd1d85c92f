"""What the losses that compare the images of a prompt share."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.losses._common import numbered
from flowrl.core.devices import refuse_if
from flowrl.core.errors import ConfigError
from flowrl.core.types import Eval, LossInput


def centre_of(index: Tensor, values: Tensor, weight: Tensor | None = None) -> Tensor:
    """Average values [B] over rows of one index, by weight -> of each row [B]."""
    weight = torch.ones_like(values) if weight is None else weight
    return total(index, weight * values) / total(index, weight)


def total(index: Tensor, values: Tensor) -> Tensor:
    """Add values [B] up over rows of one index -> of each row [B]."""
    return torch.zeros_like(values).index_add(0, index, values)[index]


def counted(data: LossInput, index: Tensor) -> Tensor:
    """Return the weights [B] float64 of a mean over rows of one index: 1 where a row was scored,
    else 0; all 1 where no row of the index was, whose mean nobody uses."""
    ones = torch.ones(len(index), dtype=torch.float64, device=index.device)
    if data.scored is None:
        return ones
    scored = data.scored.double()
    return torch.where(total(index, scored) > 0, scored, ones)


def of_scored(data: LossInput, loss: Tensor) -> Tensor:
    """Return a loss [B] with 0 in the rows that were not scored."""
    return loss if data.scored is None else torch.where(data.scored, loss, 0.0)


def velocity_error(data: LossInput, under: Eval, *, normalize: bool = False) -> Tensor:
    """Return the mean squared error of a velocity [B], float64, or that over its mean size."""
    gap = (under.mean - data.batch.target).double().flatten(1)
    error = gap.square().mean(1)
    return error / gap.detach().abs().mean(1).clamp_min(1e-5) if normalize else error


def whole_groups(who: str, data: LossInput) -> Tensor:
    """Number the rows [B] of one prompt and one draw. Raises ConfigError for a group that is torn
    over network calls, or that a selection has thinned out."""
    if data.segment is None or data.siblings is None:
        raise ConfigError(
            f"{who}: compares all images of a prompt, so these must be in one network call; set "
            "segment={fn: prompt}"
        )
    # rows of a group in this call, beside how many of it are trained at all
    index = numbered(data.segment, data.batch.step)
    count = total(index, torch.ones(len(index), device=index.device))
    _refuse_torn(who, count.long(), data.siblings)
    return index


def _refuse_torn(who: str, count: Tensor, whole: Tensor) -> None:
    """Raise ConfigError where a group has fewer rows than it should, [B] each."""

    # the message is made only where the check fails, since it reads numbers off the device
    def torn() -> ConfigError:
        here, there = int(count.min()), int(whole.max())
        return ConfigError(
            f"{who}: a prompt's group is torn: {here} of its {there} images are in this network "
            "call; set segment={fn: prompt}, and leave out selections that drop images"
        )

    refuse_if((count != whole).any(), torn)


def check_alike(
    who: str,
    data: LossInput,
    index: Tensor,
    need: str = "all images of a prompt must have the same time and noise",
    mend: str = "likelihood.shared=true",
) -> None:
    """Raise ConfigError, with what is needed and what to set, unless the rows of one group [B] have
    one time."""
    sigma = data.batch.sigma
    high = torch.full_like(sigma, -1).scatter_reduce(0, index, sigma, "amax")[index]
    wrong = ConfigError(f"{who}: {need}; set {mend}")
    refuse_if((high != sigma).any(), lambda: wrong)


def check_positive(who: str, **numbers: float) -> None:
    """Raise ConfigError for a number that is not above 0."""
    for name, number in numbers.items():
        if not number > 0:
            raise ConfigError(f"{who}: expected {name} > 0, got {number}")
