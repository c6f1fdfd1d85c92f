"""FID, KID and Inception Score through torchmetrics, from features that are computed once; and
LPIPS."""

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

from flowrl.core.errors import ConfigError, DataError, ModelError, install

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
