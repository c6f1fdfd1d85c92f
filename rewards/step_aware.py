"""SPO's step-aware preference model: which of several estimates of one image people would pick, at
any noise level."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from flowrl.core.errors import ModelError
from flowrl.core.pixels import round_8bit
from flowrl.core.types import RewardBatch

from ._backbones.clip import load_part, positive, tokens_of
from ._backbones.step_clip import StepClip, from_published, times
from ._common.scorer import (
    check_images,
    find_file,
    first_line,
    in_batches,
    load_strict,
    local,
    pick_device,
    pick_dtype,
    read_weights,
)

WHO = "rewards.step_aware"
WEIGHTS = "step_aware.safetensors"


class step_aware:
    """Score images [L, 3, H, W] by ``exp(logit_scale) cosine(image, prompt)``, the image seen at
    the noise level that it was estimated at -> [L] float32.

    SPO (2406.04314), its preference model: a CLIP whose vision tower is told the time. `path` is a
    folder or hub repository with the `config.json` of a CLIPModel; `weights` all weights: a file of
    the published layout or of flowrl's, `owner/repository/file` on the hub, by default
    `step_aware.safetensors` in `path`, as `scripts/assets/shapes_step_aware.py` writes it. `processor` has
    tokenizer and image settings, by default `path`. `clock` says how a sigma becomes a time from 0
    to 999: "flow" 1000 sigma, "sd" the step of Stable Diffusion's schedule with that noise level.
    Finished images are seen at time 0. Raises ConfigError, ModelError, DataError.

    Images are resized as SPO's code does: bicubic on numbers and without a filter, cut to [0, 1]
    afterwards. **Differs:** they are rounded to 8 bits before, as for all rewards. The published
    weights, a torch file, are read without running code of it.
    """

    judges_singly = True
    sees_sigma = True

    def __init__(
        self,
        *,
        path: str,
        weights: str = "",
        processor: str = "",
        clock: Literal["flow", "sd"] = "flow",
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 32,
    ) -> None:
        from transformers import CLIPImageProcessorPil, CLIPTokenizer

        self.batch, self.clock = int(positive(batch, "batch", WHO)), clock
        self.device, self.dtype = pick_device(device, WHO), pick_dtype(dtype, WHO)
        folder = str(local(path))
        model = _empty(folder)
        file = _weights_of(path, weights)
        load_strict(model, from_published(read_weights(file, WHO)), f"{WHO}: {file}")
        self.model = model.to(self.device, self.dtype).eval().requires_grad_(False)
        # what goes in
        beside = str(local(processor)) if processor else folder
        self.images = load_part(CLIPImageProcessorPil, "an image processor", beside, WHO)
        self.tokens = load_part(CLIPTokenizer, "a CLIP tokenizer", beside, WHO)
        self.length = int(model.clip.config.text_config.max_position_embeddings)

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image against its own prompt, at its own sigma."""
        if not batch.prompts:
            return torch.zeros(0)
        check_images(batch.images)
        time, shown = times(batch.sigma.cpu(), self.clock), round_8bit(batch.images).cpu()
        scores = in_batches(self._score, shown, batch.prompts, time, size=self.batch)
        return scores.to(batch.images.device)

    def _score(self, shown: Tensor, prompts: Sequence[str], time: Tensor) -> Tensor:
        """Score some of them, images [B, 3, H, W] -> [B]."""
        pixels = prepared(shown, self.images)
        ids, mask = tokens_of(self.tokens, prompts, self.length, self.device)
        seen = self.model.see(pixels.to(self.device, self.dtype), time.to(self.device))
        return self.model.score(seen, self.model.read(ids, mask))


def _weights_of(path: str, weights: str) -> Path:
    """Find the file of weights: beside the config, a file here, or a file of a hub repository."""
    if not weights:
        return find_file(path, WEIGHTS, WHO)
    owner, _, name = weights.rpartition("/")
    return local(weights) if local(weights).is_file() else find_file(owner or ".", name, WHO)


def prepared(images: Tensor, settings: Any) -> Tensor:
    """Bring the short side of images [B, 3, H, W] in [0, 1] to the size of the settings, cut out
    the middle, and normalise -> [B, 3, S, S]. **Differs** from these settings' own processor, which
    filters before it makes smaller."""
    from torchvision.transforms.functional import center_crop

    short, cut = int(settings.size["shortest_edge"]), settings.crop_size
    scale = short / min(images.shape[2:])
    size = [int(side * scale + 0.5) for side in images.shape[2:]]
    if size != list(images.shape[2:]):
        images = functional.interpolate(images, size, mode="bicubic").clamp(0, 1)
    middle = center_crop(images, [int(cut["height"]), int(cut["width"])])
    mean, std = (torch.tensor(row) for row in (settings.image_mean, settings.image_std))
    return (middle - mean[:, None, None]) / std[:, None, None]


def _empty(folder: str) -> StepClip:
    """Make the network that a folder's config describes, without its weights."""
    from transformers import CLIPConfig, CLIPModel

    try:
        config: Any = CLIPConfig.from_pretrained(folder)
        return StepClip(CLIPModel(config))
    except Exception as error:  # no such folder, offline, another kind of model
        raise ModelError(
            f"{WHO}: {folder}: expected a folder or hub repository with the config.json of a "
            "CLIPModel; scripts/assets/shapes_step_aware.py makes one for shapes. Reading it as one "
            f"failed: {first_line(error)}"
        ) from error
