"""The reward of the work for Flow-Factory, which takes rewards by the name of a class."""

from __future__ import annotations

import io
from typing import Any

from flow_factory.rewards.abc import PointwiseRewardModel, RewardModelOutput
from PIL import Image


def kilobytes(image: Image.Image) -> float:
    """Return the size of an image as JPEG."""
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=95)
    return file.tell() / 1000


class JpegReward(PointwiseRewardModel):  # type: ignore[misc]
    """Score images by the size of their JPEG file, as `jpeg` of flowrl and of Flow-GRPO."""

    def __call__(
        self, prompt: list[str], image: list[Image.Image] | None = None, **more: Any
    ) -> Any:
        """Return -kB / 500 of each image."""
        return RewardModelOutput(rewards=[-kilobytes(one) / 500 for one in image or []])
