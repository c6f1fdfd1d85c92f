"""Reward images by the cosine of their CLIP embedding with that of a reference image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch

from ._backbones.clip import TransformersClip, positive
from ._common.references import References, open_image
from ._common.scorer import in_batches, pick_device, pick_dtype, to_pil

WHO = "rewards.clip_reference"


class clip_reference:
    """Score images [L, 3, H, W] by their CLIP cosine with reference images -> [L] in [-1, 1].

    Adv-GRPO (2511.20256), its variant of a rule with a CLIP reference: ``lambda rule + (1 - lambda)
    cos``; the two weights are those of the config's rewards. `over` says which of several
    references counts: the likest, "max", or all, "mean". References: all images of the folder
    `references` for every prompt; or, without it, those that the prompt's record names as `column`
    (a path or a list of them, relative to `root`). `path`: a CLIPModel, `processor` its image
    settings, by default the same.
    """

    judges_singly = True

    def __init__(
        self,
        *,
        path: str = "openai/clip-vit-large-patch14",
        processor: str = "",
        references: str = "",
        column: str = "references",
        root: str = ".",
        over: Literal["max", "mean"] = "max",
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 32,
    ) -> None:
        if over not in ("max", "mean"):
            raise ConfigError(f'{WHO}: over: expected "max" or "mean", got {over!r}')
        self.over, self.batch = over, int(positive(batch, "batch", WHO))
        self.references = References(references, column=column, root=root, who=WHO)
        where, kind = pick_device(device, WHO), pick_dtype(dtype, WHO)
        self.towers = TransformersClip(path, processor or path, device=where, dtype=kind, who=WHO)
        self.known: dict[Path, Tensor] = {}  # [D] of each reference seen so far

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record whose references are missing, before the first image is made."""
        self.references.check(record, where)

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image against its own references. Raises DataError."""
        if len(batch.meta) != len(batch.images):
            raise DataError(
                f"{WHO}: expected one prompt record per image in `meta`, got {len(batch.meta)} "
                f"records for {len(batch.images)} images"
            )
        if not len(batch.images):
            return torch.zeros(0)
        mine = [self.references.of(record) for record in batch.meta]
        self._learn([path for paths in mine for path in paths])
        seen = normalize(in_batches(self.towers.see, to_pil(batch.images), size=self.batch), dim=-1)
        scores = [self._score(row, paths) for row, paths in zip(seen, mine, strict=True)]
        return torch.stack(scores).to(batch.images.device)

    def _score(self, seen: Tensor, paths: Sequence[Path]) -> Tensor:
        cosines = torch.stack([self.known[path] for path in paths]) @ seen
        return cosines.max() if self.over == "max" else cosines.mean()

    def _learn(self, paths: Sequence[Path]) -> None:
        """Embed the references that were not seen before."""
        new = [path for path in dict.fromkeys(paths) if path not in self.known]
        for start in range(0, len(new), self.batch):
            part = new[start : start + self.batch]
            images = [open_image(path, WHO) for path in part]
            found = normalize(in_batches(self.towers.see, images, size=self.batch), dim=-1)
            self.known |= dict(zip(part, found, strict=True))
