"""Reward images of coloured shapes by their distance to the nearest right image: a soft form of the
shapes checker that can be differentiated."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.shapes.checker import validate
from flowrl.evaluation.suites.shapes.nearest_right import nearest_right


class soft_shapes:
    """Score images [L, 3, 64, 64] by their distance ``d = mean((image - right)^2)`` to `right`, a
    right image near this one: `form` "linear" is ``1 - d / width``, "gaussian" is
    ``exp(-d / width)``. Both are 1 at most.

    The linear one pulls hardest at images that are farthest from right; the Gaussian one at those
    that are half a width away, which are the ones that can become right.

    The checker of reward `shapes` reads the image. What it finds is given to what the record asks
    for in the cheapest way that keeps the relations; then the image is drawn anew: shapes and
    colours as asked, in their places, what is missing in free places, what is too much left out, a
    plain background. The gradient is that of the distance, with `right` held fixed.

    It judges every pixel, so unlike the checker it also pays for clean outlines. Records are
    GenEval's (Ghosh et al. 2023), as in `shapes`. Images are rounded to 8 bits first; the gradient
    goes past the rounding.

    Raises: ConfigError for another form or a width that is not above 0; DataError for images of
    another size or with a NaN, and for other records.
    """

    judges_singly = True
    differentiable = True

    def __init__(
        self, *, form: Literal["linear", "gaussian"] = "linear", width: float = 0.05
    ) -> None:
        if form not in ("linear", "gaussian"):
            raise ConfigError(
                f'rewards.soft_shapes: form must be "linear" or "gaussian", got {form!r}'
            )
        if not width > 0:
            raise ConfigError(f"rewards.soft_shapes: expected width > 0, got {width}")
        self.form, self.width = form, width

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record that cannot be judged, before the first image is made."""
        validate(record, where)

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image by its own record: -> [L] float32, differentiable."""
        if len(batch.meta) != len(batch.images):
            raise DataError(
                f"rewards.soft_shapes: {len(batch.images)} images need as many GenEval records, "
                f"got {len(batch.meta)}; use a prompt file in GenEval's JSONL schema"
            )
        # of 8 bits, as a PNG is; the gradient goes past the rounding
        images = batch.images.float()
        pixels = images.detach()
        levels = torch.where(pixels.isfinite(), (pixels.clamp(0, 1) * 255).round() / 255, pixels)
        right = nearest_right(levels.cpu(), batch.meta).to(images.device)
        error = (images + (levels - pixels) - right).square().flatten(1).mean(1)
        return 1 - error / self.width if self.form == "linear" else (-error / self.width).exp()
