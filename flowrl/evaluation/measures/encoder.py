"""Features of images from an image encoder of transformers: CLIP, SigLIP, DINOv2 and their kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.loaded_weights import misfits

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def encoder(path: str | None, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Load an encoder from a folder or hub id -> a function of images [n, 3, H, W] uint8 that
    returns features [n, D] float32.

    A network with two towers gives its image embedding, another one its pooled output, or the first
    token where it pools nothing. Images go through the folder's own processor; a folder without one
    gets ImageNet's mean and std at the network's size, by a bicubic filter. Weights are read from
    safetensors, no code of theirs is run. Raises ConfigError without a path, ModelError.
    """
    if path is None:
        raise ConfigError(
            "vendi and distance compare features: give --encoder PATH, a folder or hub id of an "
            "image encoder of transformers, such as facebook/dinov2-base"
        )
    # slow to import, and needed by two measures only
    from transformers import AutoImageProcessor, AutoModel

    try:
        options: dict[str, Any] = {"trust_remote_code": False}
        network, info = AutoModel.from_pretrained(
            path,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # named below, like the missing ones
            output_loading_info=True,
            **options,
        )
        # how images have to be prepared stands beside the weights, where at all
        bare = Path(path).is_dir() and not (Path(path) / "preprocessor_config.json").exists()
        if bare:
            ready = _plain(network.config.image_size)
        else:
            ready = _by(AutoImageProcessor.from_pretrained(path, **options))
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"{path}: expected a folder, or a hub id with HF_HUB_OFFLINE unset, of an image "
            f"encoder (config.json, safetensors, preprocessor_config.json): {reason}"
        ) from error
    # a head on top may be left over; what is missing would be random, and so the features
    wrong = misfits(info, allowed=("unexpected",))
    if wrong:
        raise ModelError(
            f"{path}: expected all weights of the {type(network).__name__} that config.json "
            f"describes, got {wrong}; copy the files again, or take the encoder's own folder"
        )
    network = network.to(device).eval().requires_grad_(False)

    @torch.inference_mode()
    def look(images: Tensor) -> Tensor:
        pixels = ready(images).to(device)
        # networks with two towers, such as CLIP: the image's side
        if hasattr(network, "get_image_features"):
            said = network.get_image_features(pixels)
            return (said if isinstance(said, Tensor) else said.pooler_output).float().cpu()
        said = network(pixel_values=pixels)
        pooled = getattr(said, "pooler_output", None)
        return (said.last_hidden_state[:, 0] if pooled is None else pooled).float().cpu()

    return look


def _by(processor: Any) -> Callable[[Tensor], Tensor]:
    def ready(images: Tensor) -> Tensor:
        rows = [image.permute(1, 2, 0).numpy() for image in images]
        return processor(images=rows, return_tensors="pt")["pixel_values"]

    return ready


def _plain(size: int) -> Callable[[Tensor], Tensor]:
    """Return what makes images [n, 3, H, W] uint8 ready: resized, with ImageNet's mean and std."""
    from torchvision.transforms.v2.functional import normalize, resize

    def ready(images: Tensor) -> Tensor:
        small = resize(images, [size, size], interpolation=InterpolationMode.BICUBIC)
        return normalize(small.float() / 255, [*IMAGENET_MEAN], [*IMAGENET_STD])

    return ready
