"""A plugin module of rewards that are wrong on purpose, each in one way, and of some that are
right."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.core.errors import DataError
from flowrl.core.types import RewardBatch
from rewards.shapes import shapes

_right = shapes()
_calls = torch.Generator().manual_seed(0)


def red(batch: RewardBatch) -> Tensor:
    """Score by the mean red: right."""
    return batch.images[:, 0].mean((1, 2))


def contrast(batch: RewardBatch) -> Tensor:
    """Score by the std of the pixels: right, sees no words, and a NaN stays one."""
    return batch.images.flatten(1).std(1)


def sharp(batch: RewardBatch) -> Tensor:
    """Score by the share of pixels that equal their right neighbour: right; noise and blur lower
    it."""
    images = batch.images
    same = (images[..., 1:] == images[..., :-1]).all(1).float().mean((1, 2))
    return torch.where(images.flatten(1).isnan().any(1), torch.nan, same)


def centred(batch: RewardBatch) -> Tensor:
    """Subtract the batch's mean."""
    score = sharp(batch)
    return score - score.mean()


def placed(batch: RewardBatch) -> Tensor:
    """Prefer the images that come late."""
    return sharp(batch) + 0.01 * torch.arange(len(batch.images))


def sorted_(batch: RewardBatch) -> Tensor:
    """Hand the scores back in another order, as a gather with the wrong index does."""
    return sharp(batch).sort().values


def restless(batch: RewardBatch) -> Tensor:
    """Add chance."""
    return sharp(batch) + 0.01 * torch.rand(len(batch.images), generator=_calls)


def blind(batch: RewardBatch) -> Tensor:
    """Look at the words alone."""
    score = torch.tensor([float(len(prompt)) for prompt in batch.prompts])
    return torch.where(batch.images.flatten(1).isnan().any(1), torch.nan, score)


def deaf(batch: RewardBatch) -> Tensor:
    """Read the prompt and forget it."""
    assert len(batch.prompts) == len(batch.images)
    return sharp(batch)


def zero(batch: RewardBatch) -> Tensor:
    """Score what has no score with 0."""
    return sharp(batch).nan_to_num()


def eight_bits(batch: RewardBatch) -> Tensor:
    """Round to bytes, where a NaN becomes an ordinary number."""
    levels = (batch.images.clamp(0, 1) * 255).round().to(torch.uint8)
    return levels.float().flatten(1).std(1)


def infected(batch: RewardBatch) -> Tensor:
    """Give the NaN of one image to all."""
    score = sharp(batch)
    return torch.where(score.isnan().any(), torch.nan, score)


def squeezed(batch: RewardBatch) -> Tensor:
    """Lose the dimension of a batch of one."""
    return sharp(batch)[:, None].squeeze()


def hostile(batch: RewardBatch) -> Tensor:
    """Like what is wrong."""
    return -_right(batch)


def crashing(batch: RewardBatch) -> Tensor:
    """Fail on NaN, but not with an error of flowrl."""
    if bool(batch.images.isnan().any()):
        raise ValueError("no NaN please")
    return sharp(batch)


def picky(batch: RewardBatch) -> Tensor:
    """Refuse every image."""
    raise DataError(f"no images of {batch.prompts[0]!r} please")


def mute(batch: RewardBatch) -> Tensor:
    """Score nothing."""
    return torch.full((len(batch.images),), torch.nan)


def half(batch: RewardBatch) -> Tensor:
    """Leave images of two shapes unscored."""
    return torch.where(
        torch.tensor([len(m["include"]) > 1 for m in batch.meta]), torch.nan, _right(batch)
    )


def endless(batch: RewardBatch) -> Tensor:
    """Score infinity."""
    return torch.full((len(batch.images),), torch.inf)


def wins(batch: RewardBatch) -> Tensor:
    """Score by the share of the other images of the prompt that are no better: right, and needs
    whole groups."""
    score, group = _right(batch), batch.group
    rival = (group[:, None] == group[None]) & ~torch.eye(len(score), dtype=torch.bool)
    won = (score[:, None] > score[None]).float() + 0.5 * (score[:, None] == score[None]).float()
    return (won * rival).sum(1) / rival.sum(1)


class fresh:
    """A reward that is trained along and knows nothing yet: chance, but the same for the same
    image."""

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Hash the pixels."""
        return (batch.images.double().flatten(1).sum(1) * 1e4).sin().float()

    def update(self, batch: RewardBatch) -> dict[str, float]:
        """Learn nothing."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Have no state."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Have no state."""

    def trains_policy(self, iteration: int) -> bool:
        """Always."""
        return True


class scaled:
    """Score by `contrast` times `factor`."""

    def __init__(self, *, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score images [L, 3, H, W] -> [L]."""
        return self.factor * contrast(batch)
