"""Score videos with VideoAlign (VideoReward, 2501.13918): a Qwen2-VL, trained on preferences among
generated videos."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch

from .._backbones.clip import positive
from .._backbones.qwen2_vl import (
    FACTOR,
    ScoringQwen,
    check_prompt,
    check_prompts,
    check_tokens,
    conversation,
    load_config,
    load_processor,
    text_of,
    words_of,
)
from .._common.scorer import in_batches, pick_device, pick_dtype
from .checkpoint import DIMENSIONS, WHO, read_folder, read_settings, read_state

MARKS = [f"<|{name}_reward|>" for name in DIMENSIONS]
LEAST_PIXELS = 128 * FACTOR * FACTOR  # of a frame; smaller ones are enlarged
PAIR = 2  # frames that the network sees as one
FEWEST, MOST = 4, 768  # frames that are shown


class videoalign:
    """Score videos [L, T, 3, H, W], each against its own prompt -> [L] float32:
    ``vq VQ + mq MQ + ta TA``, z-scores of visual quality, motion quality and text alignment.

    KwaiVGI/VideoAlign at 1140ffd: the hidden states at three tokens of one prompt, and a linear
    head; each token's own dimension counts. With all weights 1 the score is its "Overall";
    DanceGRPO (2505.07818) takes VQ or MQ alone. `path`: folder or hub repository with
    `model_config.json` and `checkpoint-STEP`. `base`: the Qwen2-VL that was tuned, folder or hub
    id; empty: the one that the settings name. `fps`: frames a second of the videos that come in. Of
    these as many are shown as the settings say. Raises ModelError for a folder of another layout.

    **Differs:** the public code reads compressed files; here frames go in as they are made, so that
    scores differ by what compression changes.
    """

    judges_videos = True
    judges_singly = True

    def __init__(
        self,
        *,
        path: str = "KwaiVGI/VideoReward",
        base: str = "",
        vq: float = 1.0,
        mq: float = 1.0,
        ta: float = 1.0,
        fps: float = 16.0,
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 4,
    ) -> None:
        # options are checked before files are read
        if not all(map(math.isfinite, (vq, mq, ta))) or not (vq or mq or ta):
            raise ConfigError(f"{WHO}: expected weights vq, mq, ta, not all 0, got {vq, mq, ta}")
        self.weights = (vq, mq, ta)
        self.batch, self.fps = int(positive(batch, "batch", WHO)), positive(fps, "fps", WHO)
        self.device, kind = pick_device(device, WHO), pick_dtype(dtype, WHO)
        # the folder's settings, and the processor of the model that was tuned
        folder = read_folder(path)
        self.settings = read_settings(folder)
        source = base or self.settings.base
        self.processor, self.marks = load_processor(source, MARKS, WHO)
        config = load_config(source, WHO)
        # its weights, which also say how many tokens it knows: the marks have to be among them
        state, file = read_state(folder, self.settings, source)
        words, where = words_of(state, f"{WHO}: {file}"), f"{WHO}: {file}"
        check_tokens(words, self.processor, where)
        linear = nn.Linear(config.text_config.hidden_size, self.settings.outputs, bias=False)
        self.network = ScoringQwen(config, linear, words)
        self.network.fill(state, where, kind)
        self.network.to(self.device)

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a prompt with a token of the model's own, before the first image is made."""
        check_prompt(str(record.get("prompt", "")), self.processor, where)

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each video. Raises DataError for images, a NaN or another number of prompts."""
        scores = self.dimensions(batch) @ torch.tensor(self.weights)
        return scores.to(batch.images.device)

    def dimensions(self, batch: RewardBatch) -> Tensor:
        """Return the z-scores VQ, MQ, TA of each video [L, 3] float32, on the CPU."""
        videos = batch.images
        if videos.dim() != 5 or videos.shape[2] != 3:
            raise DataError(f"{WHO}: expected videos [L, T, 3, H, W], got {list(videos.shape)}")
        check_prompts(batch.prompts, len(videos), self.processor, WHO)
        if not bool(videos.isfinite().all()):
            raise DataError(f"{WHO}: a video to be scored holds NaN or infinity")
        if not len(videos):
            return torch.zeros(0, 3)
        raw = in_batches(self._score, videos, batch.prompts, size=self.batch)
        return (raw - torch.tensor(self.settings.means)) / torch.tensor(self.settings.stds)

    def _score(self, videos: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the raw scores of some videos [B, 3]."""
        # of all frames those that the model would be shown, made as small as it wants them
        chosen = shown_frames(
            videos.shape[1], self.fps, fps=self.settings.fps, frames=self.settings.frames
        )
        frames = fitted(videos[:, chosen], self.settings.pixels)
        # the question that it was trained with, about each prompt
        texts = []
        for prompt in prompts:
            text = text_of("videoalign", prompt)
            texts.append(conversation(self.processor, "video", text))
        inputs = self.processor(
            text=texts,
            videos=list(frames),
            padding=True,
            return_tensors="pt",
            do_resize=False,
            do_sample_frames=False,
        )
        # scores [B, 3 marks, outputs]: with 3 outputs each mark has its own
        said: Tensor = self.network(inputs.to(self.device), self.marks)
        return said.diagonal(dim1=1, dim2=2) if self.settings.outputs == 3 else said[:, :, 0]


def shown_frames(count: int, given: float, *, fps: float, frames: int | None) -> list[int]:
    """Return which of `count` frames, `given` a second, are shown: `frames` of them, or `fps` a
    second, evenly from the first to the last. Raises DataError for fewer than two.

    An odd number that is more than there are is as published: all frames, whose last is doubled.
    """
    if count < PAIR:
        raise DataError(f"{WHO}: expected videos of at least {PAIR} frames, got {count}")
    if frames is not None:
        wanted: float = frames
    else:
        most = min(MOST, count) // PAIR * PAIR
        wanted = min(max(count / given * fps, FEWEST), most)
    number = min(round(wanted / PAIR) * PAIR, count)
    places = torch.linspace(0, count - 1, number).round().long()
    found: list[int] = places.tolist()
    return found


def fitted(videos: Tensor, most: int) -> Tensor:
    """Round videos [B, T, 3, H, W] to 8 bits and resize their frames to at most `most` pixels,
    sides multiples of 28, as the public code does -> uint8.

    By torchvision's first functions, which compute in float32 and round at the end. Its second
    ones resize bytes by another kernel: on noise a pixel may be 20 levels off.
    """
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as tv
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    height, width = smart_resize(
        *videos.shape[-2:], factor=FACTOR, min_pixels=LEAST_PIXELS, max_pixels=most
    )
    levels = (videos.float().clamp(0, 1) * 255).round().to(torch.uint8)
    resized: Tensor = tv.resize(
        levels.flatten(0, 1), [height, width], InterpolationMode.BICUBIC, antialias=True
    )
    return resized.unflatten(0, levels.shape[:2])
