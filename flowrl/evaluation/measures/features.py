"""Measures of the features of images: how varied they are by any image encoder; FID, KID and
Inception Score through torchmetrics, from features that are computed once; and LPIPS."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torchvision.transforms import InterpolationMode

from flowrl.core.devices import check_folder, misfits
from flowrl.core.errors import ConfigError, DataError, ModelError, install

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


# --------------------------------------------------------------- through networks that papers share


EXTRA = f"install what it needs with: {install('metrics')}"
WEIGHTS = (
    "give --inception FILE, torch-fidelity's pt_inception-2015-12-05-6726825d.pth (from the "
    "releases of toshas/torch-fidelity)"
)
KID_SUBSET, KID_SUBSETS, SPLITS = 1000, 100, 10  # of the papers' code


class InceptionOutputs(NamedTuple):
    """What Inception says of n images."""

    features: Tensor  # [n, 2048] float32, the last pooling
    logits: Tensor  # [n, 1008] without the bias of the last layer


def inception(path: str | None, device: torch.device) -> Callable[[Tensor], InceptionOutputs]:
    """Load the TensorFlow Inception of FID's code -> a function of images [n, 3, H, W] uint8.

    Images are resized to 299 as TensorFlow 1 did, as in pytorch-fid and torch-fidelity.
    **Differs:** torchmetrics by itself resizes with antialiasing. Raises ConfigError without the
    extra or the file, ModelError for a file that is something else; a file that holds code is
    refused.
    """
    if path is None:
        raise ConfigError(f"fid, kid and inception_score look through an Inception: {WEIGHTS}")
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ImportError as error:
        raise ConfigError(f"fid, kid, inception_score: {error}; {EXTRA}") from error
    # the library loads any pickle; torch then refuses all but tensors
    kinds = ["2048", "logits_unbiased"]
    try:
        with patch.dict(os.environ, TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"):
            network = FeatureExtractorInceptionV3("inception-v3-compat", kinds, str(path))
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{path}: expected the weights of FID's Inception: {reason}") from error
    network = network.to(device)

    @torch.inference_mode()
    def look(images: Tensor) -> InceptionOutputs:
        features, logits = network(images.to(device))
        return InceptionOutputs(features.float().cpu(), logits.float().cpu())

    return look


def fid(features: Tensor, reference: Tensor) -> float:
    """Return the Frechet distance of features [n, D] to a reference's [m, D] (1706.08500).

    It falls with the number of images, so compare equal numbers only. Raises DataError for fewer
    than two images.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance

    _enough(features, reference, 2, "fid")
    metric = FrechetInceptionDistance(feature=_Given(features.shape[1]))
    metric.set_dtype(torch.float64)
    with _quiet(0):
        metric.update(reference.double(), real=True)
        metric.update(features.double(), real=False)
        return float(metric.compute())


def kid(features: Tensor, reference: Tensor) -> dict[str, float]:
    """Return the kernel distance of features [n, D] to a reference's [m, D] (1801.01401) ->
    {"value", "std", "subset"}: mean and std over 100 subsets of 1,000 images, or of all where there
    are fewer; subsets are drawn from a seed. Raises DataError."""
    from torchmetrics.image.kid import KernelInceptionDistance

    _enough(features, reference, 2, "kid")
    size = min(KID_SUBSET, len(features), len(reference))
    with _quiet(0):
        metric = KernelInceptionDistance(
            feature=_Given(features.shape[1]), subsets=KID_SUBSETS, subset_size=size
        )
        metric.update(reference, real=True)
        metric.update(features, real=False)
        mean, std = metric.compute()
    return {"value": float(mean), "std": float(std), "subset": size}


def inception_score(logits: Tensor) -> dict[str, float]:
    """Return the Inception Score of logits [n, K] (1606.03498) -> {"value", "std", "splits"}: mean
    and std over 10 parts, or fewer, so that a part has two images at least; parts are dealt out
    from a seed. A part of few images has a low score, whatever the images. Raises DataError."""
    from torchmetrics.image.inception import InceptionScore

    _enough(logits, logits, 2, "inception_score")
    parts = min(SPLITS, len(logits) // 2)
    with _quiet(0):
        metric = InceptionScore(feature=_Given(logits.shape[1]), splits=parts)
        metric.update(logits)
        mean, std = metric.compute()
    # torch.chunk makes parts of one size, which may be fewer
    made = math.ceil(len(logits) / math.ceil(len(logits) / parts))
    return {"value": float(mean), "std": float(std), "splits": made}


class _Given(nn.Module):
    """Hand features on that were computed before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_features = width

    def forward(self, features: Tensor) -> Tensor:
        return features


@contextmanager
def _quiet(seed: int) -> Iterator[None]:
    """Draw from a seed of our own, and leave out what torchmetrics says of its memory."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*will save all extracted features.*")
        torch.manual_seed(seed)
        yield


def _enough(features: Tensor, reference: Tensor, least: int, name: str) -> None:
    if min(len(features), len(reference)) < least:
        raise DataError(
            f"{name}: expected at least {least} images in each set, got {len(features)} and "
            f"{len(reference)}"
        )


def metrics_there() -> Any:
    """Import torchmetrics. Raises ConfigError that names the extra."""
    try:
        import torchmetrics
    except ImportError as error:
        raise ConfigError(f"{error}; {EXTRA}") from error
    return torchmetrics


def lpips(path: str | None, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Load LPIPS on AlexNet (1801.03924, version 0.1) -> a function of two stacks of images
    [n, 3, H, W] in [0, 1] that returns n distances.

    `path` is torchvision's AlexNet (alexnet-owt-7be5be79.pth, or as safetensors); the weights on
    top of it come with torchmetrics. Raises ConfigError without the extra or the file, ModelError
    for a file that is something else.
    """
    metrics_there()
    from torchmetrics.functional.image.lpips import _NoTrainLpips

    if path is None:
        raise ConfigError(
            "lpips looks through an AlexNet: give --alexnet FILE, torchvision's "
            "alexnet-owt-7be5be79.pth"
        )
    network = _NoTrainLpips(net="alex", pnet_rand=True)
    # torchvision's layer features.8 is slice4.8 here
    known = _read(path)
    own = network.net.state_dict()
    wanted = {name: f"features.{name.partition('.')[2]}" for name in own}
    wrong = []
    for name, key in wanted.items():
        if key not in known or known[key].shape != own[name].shape:
            wrong.append(key)
    if wrong:
        raise ModelError(f"{path}: expected torchvision's AlexNet, got a file without {wrong[:3]}")
    network.net.load_state_dict({name: known[key] for name, key in wanted.items()})
    network = network.to(device)

    @torch.inference_mode()
    def compare(first: Tensor, second: Tensor) -> Tensor:
        both = (images.to(device) * 2 - 1 for images in (first, second))
        return network(*both).flatten().float().cpu()

    return compare


def _read(path: str) -> dict[str, Tensor]:
    """Read a file of tensors and nothing else. Raises ModelError."""
    try:
        if Path(path).suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{path}: expected a file of tensors: {reason}") from error
    return dict(found)
