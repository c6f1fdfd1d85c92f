"""HPSv2 and HPSv2.1: how people would like an image of a prompt, from an open_clip ViT-H/14 tuned
on HPD v2."""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch

from ._backbones.clip import OpenClip, cosines, positive
from ._common.pixels import letterbox
from ._common.scorer import pick_device, pick_dtype

WHO = "rewards.hpsv2"
FILES = {"v2.0": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}


class hpsv2:
    """Score images [L, 3, H, W] by the cosine with their prompt -> [L] float32, about 0.2 to
    0.34.

    HPS v2 (2306.09341), tgxs002/HPSv2; papers print 100 times the value. `version` picks the file
    in the folder or hub repository `path`; where `path` is a file, that file is read. The long side
    becomes 224, the rest is black *before* the normalisation. `antialias` false resizes as HPSv2's
    code did with torchvision before 0.17. **Differs:** computes in float32 where HPSv2's code runs
    under float16 autocast on CUDA. Raises ConfigError, ModelError, DataError.
    """

    judges_singly = True

    def __init__(
        self,
        *,
        path: str = "xswu/HPSv2",
        version: Literal["v2.0", "v2.1"] = "v2.1",
        architecture: str = "ViT-H-14",
        antialias: bool = True,
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 32,
    ) -> None:
        if version not in FILES:
            raise ConfigError(
                f"{WHO}: version: expected one of {', '.join(FILES)}, got {version!r}"
            )
        self.batch = int(positive(batch, "batch", WHO))
        self.towers = OpenClip(
            path,
            architecture,
            prepare=partial(letterbox, antialias=antialias),
            device=pick_device(device, WHO),
            dtype=pick_dtype(dtype, WHO),
            who=WHO,
            files=[FILES[version]],
        )

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image against its own prompt."""
        return cosines(self.towers, batch, size=self.batch, who=WHO).to(batch.images.device)
