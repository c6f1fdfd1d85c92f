"""Reward images by a small head that learnt from verdicts, on frozen DINO features."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from flowrl.core.errors import ModelError
from flowrl.core.types import RewardBatch

from ._backbones.dino import Backbone
from ._common.learned import make_head
from ._common.scorer import find_file, load_strict, read_weights, to_pil

WHO = "rewards.verdict_head"
WEIGHTS = "head.safetensors"


class verdict_head:
    """Score images [L, 3, H, W] by how likely a head H finds that they were judged right -> [L] in
    [0, 1].

    ``sigmoid(H(CLS / |CLS|, mean p / |mean p|))``: CLS and the mean of the patch tokens p of a
    frozen DINO; H = Linear-GELU-Linear, as in Adv-GRPO (2511.20256). `path`: a folder with the
    head, as `scripts/assets/shapes_verdicts.py` writes it, or the file. `size` is the side in
    pixels that images are resized to; None: the network's own. It reads no prompt and learns
    nothing while it scores: a policy that is trained on it finds where it errs (docs/hacking.md).

    Raises: ConfigError, ModelError for a head that does not fit the network, DataError for an image
    with NaN.
    """

    judges_singly = True

    @staticmethod
    def reads(given: Mapping[str, Any]) -> dict[str, str]:
        """Return what is read for each argument that names weights."""
        return {"path": given["path"], "dino": given["dino"]}

    def __init__(
        self,
        *,
        path: str,
        dino: str = "facebook/dinov2-base",
        size: int | None = None,
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 128,
    ) -> None:
        self.backbone = Backbone(dino, size=size, device=device, dtype=dtype, batch=batch, who=WHO)
        file = find_file(path, WEIGHTS, WHO)
        state = read_weights(file, WHO)
        if "0.weight" not in state or state["0.weight"].dim() != 2:
            raise ModelError(f"{WHO}: {file}: expected the weights of a head, got {sorted(state)}")
        self.head = make_head(2 * self.backbone.width, len(state["0.weight"]), 0)
        load_strict(self.head, state, f"{WHO}: {file}")
        self.head = self.head.to(self.backbone.device).eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image, whatever its prompt."""
        seen = features(self.backbone, batch.images)
        return self.head(seen).squeeze(-1).sigmoid().to(batch.images.device)


@torch.no_grad()
def features(backbone: Backbone, images: Tensor) -> Tensor:
    """Return what the head is shown of images [L, 3, H, W]: [L, 2 D], on the backbone's device."""
    seen = [torch.zeros(0, 2 * backbone.width, device=backbone.device)]
    for found in backbone(to_pil(images)):
        both = (found.cls, found.patches.mean(1))
        seen.append(torch.cat([normalize(part, dim=-1) for part in both], dim=-1))
    return torch.cat(seen)


def save_head(head: nn.Module, folder: Path) -> None:
    """Write a head into the folder that the reward takes as `path`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().contiguous() for name, value in head.state_dict().items()}
    save_file(state, folder / WEIGHTS)
