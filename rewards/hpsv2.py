"""HPSv2 and HPSv2.1: how people would like an image of a prompt, from an open_clip ViT-H/14 tuned
on HPD v2."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch

from ._backbones.clip import OpenClip, check_prompts, cosines, followed_cosines, positive
from ._common.pixels import letterbox, letterbox_tensors
from ._common.prompts import check_words, with_words
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
    under float16 autocast on CUDA.

    With `gradient` images are not rounded to 8 bits, and the score can be differentiated with
    respect to them. With `words` a prompt is read as "Word. prompt", each with one of them in turn:
    SRPO (2509.06942; Tencent-Hunyuan/SRPO 81e5898) compares the scores of two such lists.
    **Differs:** there a word serves a whole update, here it goes by the prompt's place in the
    batch. Raises ConfigError, ModelError, DataError.
    """

    judges_singly = True

    def __init__(
        self,
        *,
        path: str = "xswu/HPSv2",
        version: Literal["v2.0", "v2.1"] = "v2.1",
        architecture: str = "ViT-H-14",
        antialias: bool = True,
        gradient: bool = False,
        words: list[str] | None = None,
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 32,
    ) -> None:
        if version not in FILES:
            raise ConfigError(
                f"{WHO}: version: expected one of {', '.join(FILES)}, got {version!r}"
            )
        self.batch = int(positive(batch, "batch", WHO))
        self.differentiable, self.words = gradient, check_words(words, WHO)
        self.resize = partial(letterbox_tensors, antialias=antialias)
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
        """Score each image against its own prompt; with `gradient` the scores carry one."""
        batch = with_words(batch, self.words)
        if not self.differentiable:
            return cosines(self.towers, batch, size=self.batch, who=WHO).to(batch.images.device)
        check_prompts(batch, WHO)
        return self.follow(batch.images, batch.prompts).to(torch.float32)

    def follow(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Score images [N, 3, H, W] in [0, 1] without leaving torch -> [N], at least float32."""
        return followed_cosines(self.towers, images, prompts, resize=self.resize, size=self.batch)
