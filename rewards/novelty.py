"""Reward images by how little the other images of their prompt look like them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch

from ._backbones.dino import Backbone
from ._common.scorer import to_pil


class novelty:
    """Score images [L, 3, H, W] by their distance to the others of their group, ``1 - cosine`` of
    the features of a DINOv2 or DINOv3 -> [L] float32.

    mode "nearest": the distance to the most similar other image, in [0, 2], 0 for an image that is
    alone (GARDO, 2512.24138, with DINOv3 ViT-L). "cluster": ``sqrt(N / n)`` of the N images of a
    group and the n in the image's cluster, 1 for an image that is alone (DiverseGRPO, 2512.21514):
    spectral clustering of Gaussian affinities ``exp(-d^2 / (2 width^2))``, as many clusters as
    eigenvalues before the widest gap, and no more than `most` (null: N). Reconstruction: the
    paper's features are DreamSim's; its width, and how it counts clusters, were not found.

    Use it with weight 0 and aggregate `diverse` (GARDO), or as a bonus of weight 3 to 5
    (DiverseGRPO). It ignores quality.

    Raises: ConfigError for width or most that is not positive, and what DINO's weights raise.
    """

    ignores_quality = True

    def __init__(
        self,
        *,
        path: str = "facebook/dinov2-base",
        mode: Literal["nearest", "cluster"] = "nearest",
        width: float = 0.2,
        most: int | None = None,
        size: int | None = None,
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 32,
    ) -> None:
        few = most is not None and most < 1
        if mode not in ("nearest", "cluster") or not width > 0 or few:
            raise ConfigError(
                'rewards.novelty: expected mode "nearest" or "cluster", width > 0 and most >= 1 or '
                f"null, got {mode=}, {width=}, {most=}"
            )
        self.mode, self.width, self.most = mode, width, most
        who = "rewards.novelty"
        self.backbone = Backbone(path, size=size, device=device, dtype=dtype, batch=batch, who=who)

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image among those of its group."""
        if not len(batch.images):
            return torch.zeros(0)
        features = torch.cat([part.cls.cpu() for part in self.backbone(to_pil(batch.images))])
        score = torch.zeros(len(features))
        for prompt in batch.group.unique():
            mine = (batch.group == prompt).nonzero().flatten().cpu()
            score[mine] = self.among(features[mine])
        return score

    def among(self, features: Tensor) -> Tensor:
        """Score the images of one group by their features [N, D] -> [N] float32."""
        unit = normalize(features.double(), dim=1)
        distance = 1 - unit @ unit.T
        if self.mode == "cluster":
            size = cluster_sizes(distance, width=self.width, most=self.most)
            return (len(size) / size).sqrt().float()
        if len(distance) < 2:
            return torch.zeros(len(distance))
        others = distance.fill_diagonal_(torch.inf)
        return others.min(1).values.clamp_min(0).float()


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
