"""Score images against their prompts with ImageReward: BLIP, trained on human rankings."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.types import RewardBatch

from ._backbones.blip import LENGTH, load
from ._common.pixels import normalise, shortest
from ._common.scorer import (
    find_file,
    first_line,
    in_batches,
    pick_device,
    pick_dtype,
    read_weights,
    to_pil,
)

WHO = "rewards.image_reward"


class image_reward:
    """Score images [L, 3, H, W] in [0, 1], each against its own prompt -> [L] float32, about -2
    to 2.

    Xu et al. 2023 (2304.05977); THUDM/ImageReward, ImageReward/ImageReward.py. Preprocessing:
    bicubic to a short side of 224, centre crop, CLIP's mean and std. Texts are cut at 35 tokens.
    **Differs:** different prompts go through as one batch, and only image i with prompt i is
    computed: the public code takes one prompt at a time. Loading is strict but for tensors known to
    be unused. Images are rounded to 8 bits first, as a saved file would be.

    `path`: hub repository, folder with ImageReward.pt, or file. `tokenizer`: hub repository or
    folder of bert-base-uncased. Raises ModelError for a file of another layout or a vocabulary of
    another size.
    """

    judges_singly = True

    def __init__(
        self,
        *,
        path: str = "THUDM/ImageReward",
        tokenizer: str = "google-bert/bert-base-uncased",
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 32,
    ) -> None:
        if batch < 1:
            raise ConfigError(f"{WHO}: batch: expected at least 1, got {batch}")
        self.device, self.dtype = pick_device(device, WHO), pick_dtype(dtype, WHO)
        self.batch = batch
        file = find_file(path, "ImageReward.pt", WHO)
        net = load(read_weights(file, WHO), f"{WHO}: {file}")
        self._tokenizer = _tokenizer(tokenizer, words=net.sizes.words)
        self._side = net.sizes.image
        self._net = net.to(self.device, self.dtype)
        self._net.mlp.float()  # the public code leaves half precision before the head

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image with its own prompt, `batch` of them at a time."""
        if len(batch.prompts) != len(batch.images):
            raise DataError(
                f"{WHO}: expected a prompt per image, got {len(batch.prompts)} for "
                f"{len(batch.images)}"
            )
        scores = in_batches(self._score, to_pil(batch.images), batch.prompts, size=self.batch)
        return scores.to(batch.images.device)

    def _score(self, images: list[Image.Image], prompts: list[str]) -> Tensor:
        pixels = normalise(torch.stack([shortest(image, self._side) for image in images]))
        text = self._tokenizer(
            prompts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
        ).to(self.device)
        return self._net(
            pixels.to(self.device, self.dtype), text["input_ids"], text["attention_mask"]
        )


def _tokenizer(path: str, *, words: int) -> Any:
    """Load BERT's tokenizer and add BLIP's two marks behind its words. Raises ModelError if `words`
    do not come out."""
    from transformers import BertTokenizer

    # offline, misspelt, no vocabulary: one message with the ways out
    try:
        tokenizer = BertTokenizer.from_pretrained(path)
    except Exception as error:
        raise ModelError(
            f"{WHO}: tokenizer: {path!r} is neither a folder with BERT's vocabulary nor a hub "
            f"repository that can be fetched now: {first_line(error)}. Check the spelling and the "
            "network, or give a folder"
        ) from error
    # BLIP's marks
    tokenizer.add_special_tokens({"bos_token": "[DEC]"})
    tokenizer.add_special_tokens({"additional_special_tokens": ["[ENC]"]})
    if len(tokenizer) != words:
        raise ModelError(
            f"{WHO}: tokenizer: expected {words} tokens with [DEC] and [ENC], as the weights have, "
            f"got {len(tokenizer)} from {path!r}; use bert-base-uncased's"
        )
    return tokenizer
