"""How varied images are, from their features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from flowrl.core.errors import DataError


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
