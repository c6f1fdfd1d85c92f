"""PickScore: which of several images of a prompt people would pick, from a CLIP-H tuned on
Pick-a-Pic."""

from __future__ import annotations

from torch import Tensor

from flowrl.core.types import RewardBatch

from ._backbones.clip import TransformersClip, cosines, positive
from ._common.scorer import pick_device, pick_dtype

WHO = "rewards.pickscore"


class pickscore:
    """Score images [L, 3, H, W] by ``scale * cosine(image, prompt) / divide`` -> [L] float32.

    `scale` null is the model's own exp(logit_scale): the published score, about 18 to 24 with the
    public weights, whose softmax over several images of a prompt is the probability that each is
    picked. Pick-a-Pic (2305.01569), yuvalkirstain/PickScore. The flow_grpo family sets `divide` 26;
    Pref-GRPO and the DiffusionDPO utilities take the bare cosine, `scale` 1. `processor` is the
    folder or hub repository of the tokenizer and the image settings. Raises ConfigError,
    ModelError, DataError.
    """

    judges_singly = True

    def __init__(
        self,
        *,
        path: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        scale: float | None = None,
        divide: float = 1.0,
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 32,
    ) -> None:
        self.batch = int(positive(batch, "batch", WHO))
        divide = positive(divide, "divide", WHO)
        factor = None if scale is None else positive(scale, "scale", WHO)
        where, kind = pick_device(device, WHO), pick_dtype(dtype, WHO)
        self.towers = TransformersClip(path, processor, device=where, dtype=kind, who=WHO)
        self.factor = (self.towers.scale if factor is None else factor) / divide

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image against its own prompt."""
        scores = self.factor * cosines(self.towers, batch, size=self.batch, who=WHO)
        return scores.to(batch.images.device)
