"""SPO's step-aware preference model: which of several estimates of one image people would pick, at
any noise level."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from flowrl.core.errors import ModelError
from flowrl.core.pixels import round_8bit
from flowrl.core.types import RewardBatch

from ._backbones.clip import load_part, positive, tokens_of
from ._backbones.clock import Clock
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
    `step_aware.safetensors` in `path`, as `scripts/assets/shapes_step_aware.py` writes it.
    `processor` has tokenizer and image settings, by default `path`. `clock` says how a sigma
    becomes a time from 0 to 999: "flow" 1000 sigma, "sd" the step of Stable Diffusion's schedule
    with that noise level. Finished images are seen at time 0. Raises ConfigError, ModelError,
    DataError.

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
            "CLIPModel; scripts/assets/shapes_step_aware.py makes one for shapes. Reading it as "
            f"one failed: {first_line(error)}"
        ) from error


def _still(width: int, biases: list[int]) -> nn.Sequential:
    """Make a layer that says the same at every time, as many vectors as there are biases."""
    layer = nn.Linear(width, len(biases) * width)
    nn.init.zeros_(layer.weight)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor(biases).repeat_interleave(width))
    return nn.Sequential(nn.SiLU(), layer)


class StepClip(nn.Module):
    """SPO's step-aware preference model (2406.04314): transformers' CLIPModel with a shift, scale
    and gate of each vision layer's two parts that follow from the time, and a shift and scale of
    the pooled vector.

    At the start all of that changes nothing: its layers are 0 but for the gates' biases, 1.
    """

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.clip = clip
        config = clip.config.vision_config
        width = config.hidden_size
        self.clock = Clock(width)
        # shift, scale, gate of the attention; shift, scale, gate of the MLP
        gates = [0, 0, 1, 0, 0, 1]
        self.parts = nn.ModuleList(_still(width, gates) for _ in range(config.num_hidden_layers))
        self.end = _still(width, [0, 0])

    def see(self, pixels: Tensor, time: Tensor) -> Tensor:
        """Embed prepared images [B, 3, H, W] at times [B] in [0, 1000) -> [B, D]."""
        vision, now = self.clip.vision_model, self.clock(time)
        x = vision.pre_layrnorm(vision.embeddings(pixels))
        for layer, part in zip(vision.encoder.layers, self.parts, strict=True):
            shift, scale, gate, shift2, scale2, gate2 = part(now)[:, None].chunk(6, -1)
            seen = layer.layer_norm1(x) * (1 + scale) + shift
            x = x + gate * layer.self_attn(seen, attention_mask=None)[0]
            x = x + gate2 * layer.mlp(layer.layer_norm2(x) * (1 + scale2) + shift2)
        shift, scale = self.end(now).chunk(2, -1)
        pooled = vision.post_layernorm(x[:, 0]) * (1 + scale) + shift
        embedding: Tensor = self.clip.visual_projection(pooled)
        return embedding

    def read(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Embed tokens [B, T] -> [B, D]."""
        embedding: Tensor = self.clip.get_text_features(ids, attention_mask=mask).pooler_output
        return embedding

    def score(self, seen: Tensor, read: Tensor) -> Tensor:
        """Return ``exp(logit_scale) cos`` of image and text embeddings [B, D] -> [B]."""
        cosine = nn.functional.cosine_similarity(seen, read, dim=-1)
        value: Tensor = self.clip.logit_scale.exp() * cosine
        return value


def from_published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give the weights of SPO's code the names of `StepClip`; weights that have these names already
    stay as they are.

    There the model is below ``model.``, the clock is ``t_embedder.mlp``, and the layers that follow
    from the time stand inside of the tower's, each as ``adaLN_modulation``. Positions, which are
    counted and not learned, are left out (RockeyCoss/SPO at 27a8642, time_conditioned_clip.py).
    """
    if not any(name.startswith("model.t_embedder.") for name in state):
        return state
    found = {}
    for name, value in state.items():
        if name.endswith(".position_ids"):
            continue
        new = name.replace("model.t_embedder.mlp.", "clock.layers.")
        layer = r"^model\.vision_model\.encoder\.layers\.(\d+)\.adaLN_modulation"
        new = re.sub(layer, r"parts.\1", new)
        new = re.sub(r"^model\.vision_model\.adaLN_modulation", "end", new)
        found[re.sub(r"^model\.", "clip.", new)] = value
    return found


def times(sigma: Tensor, clock: Literal["flow", "sd"]) -> Tensor:
    """Turn sigmas [B] of the flow path into times [B] from 0 to 999, as the model was trained with.

    "sd": the step t of Stable Diffusion's schedule (betas from 0.00085 to 0.012, linear in their
    roots) with the nearest ``sigma = s / (a + s)``, a^2 + s^2 = 1.
    """
    if clock == "flow":
        return (sigma * 1000).clamp(0, 999)
    roots = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64)
    kept = (1 - roots.square()).cumprod(0)
    a, s = kept.sqrt(), (1 - kept).sqrt()
    known = s / (a + s)
    place: Tensor = (sigma.double()[:, None] - known).abs().argmin(1)
    return torch.where(sigma > 0, place.float(), 0.0)
