"""Groups of like images."""

from __future__ import annotations

import torch
from torch import Tensor


def cluster_sizes(distance: Tensor, *, width: float, most: int | None = None) -> Tensor:
    """Count the images in each image's cluster, of distances [N, N] -> [N] float64.

    Spectral clustering (Ng, Jordan and Weiss 2001): the first k eigenvectors of the normalised
    affinity, rows of length 1, and k-means from the rows that lie farthest apart. k is the place of
    the widest gap between eigenvalues; the last eigenvalue's gap is to 0, so that images that are
    all unlike are as many clusters. Where that is more than `most`, k is `most`: of images that are
    all unlike some then have to share a cluster, and which ones do is arbitrary.
    """
    affinity = torch.exp(-distance.square() / (2 * width**2))
    root = affinity.sum(1).rsqrt()
    value, vector = torch.linalg.eigh(root[:, None] * affinity * root)
    # eigenvalues ascend: the first gap is the last one
    down = torch.cat([value.flip(0), value.new_zeros(1)])
    # all gaps, also those past `most`: among equal eigenvalues alone the widest would be noise
    count = int(down.diff().neg().argmax()) + 1
    count = min(count, most or count)
    rows = torch.nn.functional.normalize(vector.flip(1)[:, :count], dim=1)
    label = _k_means(rows, count)
    return torch.bincount(label, minlength=count)[label].double()


def _k_means(rows: Tensor, count: int, rounds: int = 50) -> Tensor:
    """Divide rows [N, D] into at most `count` clusters -> [N] int64, the same every time."""
    # each further centre is the row farthest from those before
    picked = [0]
    for _ in range(count - 1):
        picked.append(int(torch.cdist(rows, rows[picked]).min(1).values.argmax()))
    centre = rows[picked]
    label = torch.cdist(rows, centre).argmin(1)
    for _ in range(rounds):
        for k in range(count):
            if bool((label == k).any()):
                centre[k] = rows[label == k].mean(0)
        new = torch.cdist(rows, centre).argmin(1)
        if torch.equal(new, label):
            break
        label = new
    return label
