"""How varied images are, from the features of an image encoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torchvision.transforms import InterpolationMode

from flowrl.core.devices import check_folder, misfits
from flowrl.core.errors import ConfigError, DataError, ModelError

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
        own = None if bare else AutoImageProcessor.from_pretrained(path, **options)
        ready = _plain(network.config.image_size) if own is None else _by(own)
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
    check_folder(path, "the encoder")
    network.to(device).eval().requires_grad_(False)

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


def vendi(features: Tensor) -> float:
    """Return the Vendi score of features [n, D]: the effective number of different images, 1 to n.

    exp of the entropy of the eigenvalues of K / n, with K the cosines between images (Friedman and
    Dieng 2022, 2210.02410, definition 3.1). n equal images give 1, n orthogonal ones n. Raises
    DataError for fewer than one image, or a feature of length 0.
    """
    rows = _unit(features, 1)
    # the smaller of the two Gram matrices: both have the same eigenvalues above 0
    few = len(rows) <= rows.shape[1]
    gram = rows @ rows.T if few else rows.T @ rows
    shares = torch.linalg.eigvalsh(gram / len(rows))
    shares = shares[shares > 1e-12]
    return float((-(shares * shares.log()).sum()).exp())


def distance(features: Tensor) -> float:
    """Return the mean over pairs of images of 1 - cosine, features [n, D], n from 2 -> [0, 2].

    By the length of the sum of all directions s: sum over pairs of cosines = (s^2 - n) / 2. Raises
    DataError.
    """
    rows = _unit(features, 2)
    n = len(rows)
    cosines = float(rows.sum(0).square().sum()) - n
    return 1 - cosines / (n * (n - 1))


def _unit(features: Tensor, least: int) -> Tensor:
    """Return features as directions, float64. Raises DataError."""
    if features.ndim != 2 or len(features) < least or not bool(features.isfinite().all()):
        raise DataError(
            f"expected finite features [n, D] of at least {least} images, got "
            f"{list(features.shape)}"
        )
    if bool((features.norm(dim=1) == 0).any()):
        raise DataError("expected features with a direction, got one that is all zeros")
    return normalize(features.double().cpu(), dim=1)
