"""Score images against their prompts with HPSv3 (2508.03789): a Qwen2-VL, trained on human
preferences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor, nn

from flowrl.core.types import RewardBatch

from ._backbones.clip import positive
from ._backbones.qwen2_vl import (
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
from ._common.scorer import (
    find_file,
    in_batches,
    pick_device,
    pick_dtype,
    read_weights,
    to_pil,
)

WHO = "rewards.hpsv3"
FILE = "HPSv3.safetensors"
MARK = "<|Reward|>"
PIXELS = 256 * FACTOR * FACTOR  # of every image, about


class hpsv3:
    """Score images [L, 3, H, W], each against its own prompt -> [L] float32: the mean that HPSv3
    gives, about 10 to 16 for good images, without bounds.

    MizzenAI/HPSv3 at 72b7eba: Qwen2-VL-7B, the hidden state at the token `<|Reward|>`, and a head
    of three layers in float32, whose first output is the score. The second, a spread, is not used.
    Images are resized by PIL's bicubic filter to about 448 x 448 pixels, sides multiples of 28. The
    instruction is the published one (`rewards/_texts`). `path`: hub repository or folder with
    HPSv3.safetensors, or the file; it holds all weights. `processor`: folder or hub id of the
    Qwen2-VL whose config, tokenizer and image settings these belong to. Raises ModelError for a
    file of another layout. **Differs:** the public code is bfloat16 on a GPU; say `dtype: bfloat16`
    for that. Frequencies of positions stay in float32 there too.
    """

    judges_singly = True

    def __init__(
        self,
        *,
        path: str = "MizzenAI/HPSv3",
        processor: str = "Qwen/Qwen2-VL-7B-Instruct",
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 8,
    ) -> None:
        self.batch = int(positive(batch, "batch", WHO))
        self.device, kind = pick_device(device, WHO), pick_dtype(dtype, WHO)
        self.processor, self.marks = load_processor(processor, [MARK], WHO)
        config, file = load_config(processor, WHO), find_file(path, FILE, WHO)
        state, where = read_weights(file, WHO), f"{WHO}: {file}"
        words = words_of(state, where)
        check_tokens(words, self.processor, where)
        self.network = ScoringQwen(config, head(config.text_config.hidden_size), words)
        self.network.fill(state, where, kind)
        self.network.to(self.device)

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a prompt with a token of the model's own, before the first image is made."""
        check_prompt(str(record.get("prompt", "")), self.processor, where)

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image, `batch` of them at a time."""
        check_prompts(batch.prompts, len(batch.images), self.processor, WHO)
        scores = in_batches(self._score, to_pil(batch.images), batch.prompts, size=self.batch)
        return scores.to(batch.images.device)

    def _score(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> Tensor:
        texts = []
        for prompt in prompts:
            texts.append(conversation(self.processor, "image", text_of("hpsv3", prompt)))
        shown = [fitted(image) for image in images]
        inputs = self.processor(text=texts, images=shown, padding=True, return_tensors="pt")
        said: Tensor = self.network(inputs.to(self.device), self.marks)
        return said[:, 0, 0]


def head(width: int) -> nn.Sequential:
    """Make the public head, under its own names."""
    return nn.Sequential(
        nn.Linear(width, 1024),
        nn.ReLU(),
        nn.Dropout(0.05),
        nn.Linear(1024, 16),
        nn.ReLU(),
        nn.Linear(16, 2),
    )


def fitted(image: Image.Image) -> Image.Image:
    """Resize an image to about PIXELS pixels, sides multiples of 28, as the public code does."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    height, width = smart_resize(
        image.height, image.width, factor=FACTOR, min_pixels=PIXELS, max_pixels=PIXELS
    )
    return image.resize((width, height), Image.Resampling.BICUBIC)
