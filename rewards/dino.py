"""Reward images by their likeness to reference images, in the features of DINOv2 or DINOv3."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch

from ._backbones.dino import Backbone, FeatureCache, Features
from ._common.references import References
from ._common.scorer import to_pil


class dino:
    """Score images [L, 3, H, W] by the highest similarity to any of their prompt's references ->
    [L] in [-1, 1].

    `mode` "cls": cosine of the CLS features (Oquab et al. 2023; the evaluation of Adv-GRPO,
    2511.20256). "patch": for each patch the highest cosine to any patch of the reference, averaged
    over the image's patches. An identical image scores 1 in both.

    References: all images of the folder `references`, for every prompt; or, without it, those
    that the prompt's record names as `column` (a path or a list of paths, relative to `root`).
    `size` is the side in pixels that images are resized to; None: the network's own, 518 for the
    public DINOv2, 224 for DINOv3.
    """

    judges_singly = True

    def __init__(
        self,
        *,
        path: str = "facebook/dinov2-base",
        mode: Literal["cls", "patch"] = "cls",
        references: str = "",
        column: str = "references",
        root: str = ".",
        size: int | None = None,
        cache_mb: int = 1024,
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 32,
    ) -> None:
        if mode not in ("cls", "patch"):
            raise ConfigError(f'rewards.dino: mode: expected "cls" or "patch", got {mode!r}')
        who = "rewards.dino"
        self.mode = mode
        self.references = References(references, column=column, root=root, who=who)
        self.backbone = Backbone(path, size=size, device=device, dtype=dtype, batch=batch, who=who)
        self.library = FeatureCache(
            self.backbone, megabytes=cache_mb, patches=mode == "patch", who=who
        )

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record whose references are missing, before the first image is made."""
        self.references.check(record, where)

    @torch.no_grad()
    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image against its own references. Raises DataError for an image with NaN or
        no references."""
        if len(batch.meta) != len(batch.images):
            raise DataError(
                "rewards.dino: expected one prompt record per image in `meta`, got "
                f"{len(batch.meta)} records for {len(batch.images)} images"
            )
        # images with the same references together
        images, scores = to_pil(batch.images), torch.zeros(len(batch.images))
        alike: dict[tuple[Path, ...], list[int]] = {}
        for row, record in enumerate(batch.meta):
            alike.setdefault(self.references.of(record), []).append(row)
        # the likest reference of each
        for paths, rows in alike.items():
            mine = [images[row] for row in rows]
            parts = [self._best(part, paths) for part in self.backbone(mine)]
            scores[rows] = torch.cat(parts).cpu()
        return scores.to(batch.images.device)

    def _best(self, seen: Features, paths: tuple[Path, ...]) -> Tensor:
        """Return the highest similarity of each image [B] to any reference."""
        likeness = cls_similarity if self.mode == "cls" else patch_similarity
        return torch.cat([likeness(seen, known) for known in self.library(paths)], dim=1).amax(1)


def cls_similarity(seen: Features, known: Features) -> Tensor:
    """Return the cosine of the CLS features of B images and R references -> [B, R]."""
    return normalize(seen.cls, dim=-1) @ normalize(known.cls, dim=-1).T


def patch_similarity(seen: Features, known: Features) -> Tensor:
    """Return for B images and R references the mean over patches of the highest patch cosine ->
    [B, R]."""
    mine = normalize(seen.patches, dim=-1)
    columns = [(mine @ normalize(r, dim=-1).T).amax(-1).mean(-1) for r in known.patches]
    return torch.stack(columns, dim=1)
