"""The reward of the work for Flow-Factory, which takes rewards by the name of a class."""

from __future__ import annotations

from typing import Any

from flow_factory.rewards.abc import PointwiseRewardModel, RewardModelOutput
from jpeg import kilobytes
from PIL import Image


class JpegReward(PointwiseRewardModel):  # type: ignore[misc]
    """Score images by the size of their JPEG file, as `jpeg` of flowrl and of Flow-GRPO."""

    def __call__(
        self, prompt: list[str], image: list[Image.Image] | None = None, **more: Any
    ) -> Any:
        """Return -kB / 500 of each image."""
        return RewardModelOutput(rewards=[-kilobytes(one) / 500 for one in image or []])
