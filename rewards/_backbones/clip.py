"""What the CLIP-family scorers share: both towers in either library, strictly loaded, and their
cosines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from flowrl.core.errors import ConfigError, DataError, ModelError, near
from flowrl.core.files import read_json
from flowrl.core.noise_path import wide
from flowrl.core.types import RewardBatch

from .._common.pixels import normalise
from .._common.scorer import (
    OPENAI_MEAN,
    OPENAI_STD,
    check_images,
    find_file,
    first_line,
    in_batches,
    load_network,
    load_strict,
    read_weights,
    to_pil,
)

Prepare = Callable[[Image.Image, int], Tensor]
"""``prepare(image, size) -> [3, size, size]`` in [0, 1], not normalised."""

OPEN_CLIP_SETTINGS = "open_clip_config.json"
OPEN_CLIP_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


class Towers(Protocol):
    """Both towers of a CLIP model on one device; embeddings come out as they are, not
    normalised."""

    scale: float  # exp(logit_scale), taken in float32 whatever the dtype of the towers

    def see(self, images: Sequence[Image.Image]) -> Tensor: ...  # [N, D]

    def read(self, prompts: Sequence[str]) -> Tensor: ...  # [N, D]


class OpenClip:
    """A plain CLIP of open_clip: its architecture by name, its weights from `path`, loaded
    strictly.

    `path` is a file, or a folder or hub repository that holds `files[0]` or one of the other names.
    Raises ConfigError for an unknown architecture, ModelError for weights that are not there or do
    not fit.
    """

    def __init__(
        self,
        path: str,
        architecture: str,
        *,
        prepare: Prepare,
        device: torch.device,
        dtype: torch.dtype,
        who: str,
        files: Sequence[str] = OPEN_CLIP_FILES,
    ) -> None:
        import open_clip

        # the network and its weights
        config = _config_of(architecture, who)
        file = _first_file(path, files, who)
        model = open_clip.CLIP(**config)
        load_strict(model, read_weights(file, who), f"{who}: {file} as open_clip {architecture}")
        mean, std = _pixels_of(path, prepare, who)
        self.mean, self.std = (torch.tensor(row, device=device) for row in (mean, std))
        # what goes in and comes out
        height, width = model.visual.image_size
        if height != width:
            raise ConfigError(
                f"{who}: architecture {architecture}: expected square images, got {height} x "
                f"{width}"
            )
        self.size, self.prepare, self.device = width, prepare, device
        self.dimensions = int(config["embed_dim"])
        self.scale = float(model.logit_scale.detach().exp())
        self.tokens = open_clip.get_tokenizer(architecture)
        self.model = model.to(device, dtype).eval().requires_grad_(False)

    def see(self, images: Sequence[Image.Image]) -> Tensor:
        """Embed images -> [N, D]."""
        raw = torch.stack([self.prepare(image, self.size) for image in images])
        return self.embed(raw)

    def embed(self, pixels: Tensor) -> Tensor:
        """Embed squares of pixels [N, 3, size, size] in [0, 1] -> [N, D]; a gradient passes."""
        wanted = normalise(pixels.to(self.device), self.mean, self.std)
        embedding: Tensor = self.model.encode_image(wanted.to(self.model.visual.conv1.weight.dtype))
        return embedding

    def read(self, prompts: Sequence[str]) -> Tensor:
        """Embed prompts, cut to 77 tokens -> [N, D]."""
        ids = self.tokens(list(prompts)).to(self.device, non_blocking=True)
        embedding: Tensor = self.model.encode_text(ids)
        return embedding


def _pixels_of(path: str, resize: Prepare, who: str) -> tuple[Sequence[float], Sequence[float]]:
    """Return mean and std of the pixels that weights were trained on, as the settings beside them
    say; OpenAI's where there are none. Raises ModelError for another resize than is made."""
    beside = str(Path(path).parent) if Path(path).is_file() else path
    try:
        file = find_file(beside, OPEN_CLIP_SETTINGS, who)
    except ModelError:
        return OPENAI_MEAN, OPENAI_STD
    try:
        found = read_json(file, dict[str, Any], error=ModelError).get("preprocess_cfg", {})
        mean = [float(value) for value in found.get("mean", OPENAI_MEAN)]
        std = [float(value) for value in found.get("std", OPENAI_STD)]
        kinds = [found.get("interpolation", "bicubic"), found.get("resize_mode", "shortest")]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{who}: {file}: {type(error).__name__}: {error}") from error
    made = ["bicubic", getattr(resize, "__name__", kinds[1])]
    if kinds != made:
        raise ModelError(
            f"{who}: {file}: these weights want images resized by {', '.join(kinds)}, and they are "
            f"resized by {', '.join(made)}; take other weights, or another `resize` where there is "
            "one"
        )
    return mean, std


def _config_of(architecture: str, who: str) -> dict[str, Any]:
    import open_clip

    # the name
    config: dict[str, Any] | None = open_clip.get_model_config(architecture)
    if config is None:
        hint = near(architecture, open_clip.list_models())
        raise ConfigError(f"{who}: architecture: open_clip has no {architecture!r}{hint}")
    # no tower of another library, no third one
    vision, text = config["vision_cfg"], config["text_cfg"]
    foreign = "timm_model_name" in vision or "hf_model_name" in text
    foreign |= not isinstance(vision.get("layers"), int)
    if foreign or config.get("custom_text") or "multimodal_cfg" in config:
        raise ConfigError(
            f"{who}: architecture: {architecture!r} is no plain CLIP with two transformers of "
            "open_clip's own, like 'ViT-L-14-quickgelu' or 'ViT-H-14'"
        )
    return config


def _first_file(path: str, names: Sequence[str], who: str) -> Path:
    first: ModelError | None = None
    for name in names:
        try:
            return find_file(path, name, who)
        except ModelError as error:
            first = first or error
    raise first or ModelError(f"{who}: no file name to look for")


class TransformersClip:
    """A CLIPModel of transformers: safetensors and config from `path`, tokenizer and image settings
    from `processor`.

    Images go through the library's PIL image processor, the one that published scores were made
    with; the default of transformers 5 resizes with torchvision. Raises ModelError for weights that
    are not there or do not fit.
    """

    def __init__(
        self, path: str, processor: str, *, device: torch.device, dtype: torch.dtype, who: str
    ) -> None:
        from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

        expected = "a CLIPModel"
        model = load_network(CLIPModel, path, who=who, expected=expected, dtype=torch.float32)
        self.images = load_part(CLIPImageProcessorPil, "an image processor", processor, who)
        self.tokens = load_part(CLIPTokenizer, "a CLIP tokenizer", processor, who)
        self.length = int(model.config.text_config.max_position_embeddings)
        _check_tokens(self.tokens, model.config.text_config, processor, who)
        self.scale = float(model.logit_scale.detach().exp())
        self.device, self.dtype = device, dtype
        self.model = model.to(device, dtype).eval().requires_grad_(False)

    def see(self, images: Sequence[Image.Image]) -> Tensor:
        """Embed images -> [N, D]."""
        pixels = self.images(list(images), return_tensors="pt")["pixel_values"]
        embedding: Tensor = self.model.get_image_features(
            pixels.to(self.device, self.dtype)
        ).pooler_output
        return embedding

    def read(self, prompts: Sequence[str]) -> Tensor:
        """Embed prompts, padded and cut to 77 tokens -> [N, D]."""
        ids, mask = tokens_of(self.tokens, prompts, self.length, self.device)
        embedding: Tensor = self.model.get_text_features(ids, attention_mask=mask).pooler_output
        return embedding


def tokens_of(
    tokenizer: Any, prompts: Sequence[str], length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return ids and attention mask [N, length] of prompts, padded and cut to so many tokens."""
    cut = {"padding": "max_length", "truncation": True, "max_length": length}
    tokens = tokenizer(list(prompts), return_tensors="pt", **cut)
    return tokens["input_ids"].to(device), tokens["attention_mask"].to(device)


def load_part(kind: Any, name: str, folder: str, who: str) -> Any:
    """Load a tokenizer or image settings from a folder or hub repository. Raises ModelError."""
    try:
        return kind.from_pretrained(folder)
    except Exception as error:
        raise ModelError(
            f"{who}: {folder}: expected a folder or hub repository with {name}: {first_line(error)}"
        ) from error


def _check_tokens(tokens: Any, config: Any, folder: str, who: str) -> None:
    """Refuse a tokenizer whose end token is not the one at which the text tower reads its
    answer."""
    end, largest = int(tokens.eos_token_id), len(tokens) - 1
    # configs from before transformers 4.31 say 2 and mean the largest id of the prompt
    fits = end == largest if config.eos_token_id == 2 else end == config.eos_token_id
    if not fits or largest >= config.vocab_size:
        raise ModelError(
            f"{who}: {folder}: the tokenizer ({largest + 1} tokens, end token {end}) does not "
            f"belong to the model ({config.vocab_size} tokens, end token {config.eos_token_id})"
        )


def cosines(towers: Towers, batch: RewardBatch, *, size: int, who: str) -> Tensor:
    """Return the cosine of each image with its own prompt -> [L] float32 on the CPU, in [-1, 1].

    Images are rounded to 8 bits first. Each different prompt is read once. Raises DataError.
    """
    check_prompts(batch, who)
    return pair_cosines(towers, to_pil(batch.images), batch.prompts, size=size)


def check_prompts(batch: RewardBatch, who: str) -> None:
    """Raise DataError unless each image has a prompt."""
    if len(batch.prompts) != len(batch.images):
        raise DataError(
            f"{who}: expected one prompt per image, got {len(batch.prompts)} for "
            f"{len(batch.images)}"
        )


def pair_cosines(
    towers: Towers, images: Sequence[Image.Image], texts: Sequence[str], *, size: int
) -> Tensor:
    """Return the cosine of each image with the text in its place -> [N] float32 on the CPU, in
    [-1, 1]. Images may differ in size; each different text is read once."""
    if not texts:
        return torch.zeros(0)
    place = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    seen = functional.normalize(in_batches(towers.see, images, size=size), dim=-1)
    read = functional.normalize(in_batches(towers.read, list(place), size=size), dim=-1)
    return (seen * read[[place[text] for text in texts]]).sum(dim=-1)


def followed_cosines(
    towers: OpenClip,
    images: Tensor,
    texts: Sequence[str],
    *,
    resize: Callable[[Tensor, int], Tensor],
    size: int,
) -> Tensor:
    """Return the cosine of each image [N, 3, H, W] in [0, 1] with the text in its place -> [N], at
    least float32, where the images are; a gradient passes. Each different text is read once."""
    check_images(images)
    place = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    with torch.no_grad():
        read = functional.normalize(wide(towers.read(list(place))), dim=-1)
    rows = torch.tensor([place[text] for text in texts]).to(read.device, non_blocking=True)
    parts = []
    for some, mine in zip(images.split(size), rows.split(size), strict=True):
        seen = functional.normalize(wide(towers.embed(resize(some, towers.size))), dim=-1)
        parts.append((seen * read[mine]).sum(-1))
    return torch.cat(parts).to(images.device)


def positive(value: float, name: str, who: str) -> float:
    """Return `value` if it is finite and above 0; raise ConfigError otherwise."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{who}: {name}: expected a finite number above 0, got {value!r}")
    return value
