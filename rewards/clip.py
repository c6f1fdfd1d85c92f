"""CLIPScore (2104.08718): how well an image fits its prompt, by the cosine of their CLIP
embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch

from ._backbones.clip import OpenClip, Towers, TransformersClip, cosines, pair_cosines, positive
from ._common.pixels import shortest, squash
from ._common.prompts import cell_texts
from ._common.scorer import pick_device, pick_dtype, to_pil
from ._judge.images import cut, grid_size

WHO = "rewards.clip"
PREPARE = {"shortest": shortest, "squash": squash}
PUBLIC = {
    "transformers": "openai/clip-vit-large-patch14",
    "open_clip": "timm/vit_large_patch14_clip_224.openai",
}


class clip:
    """Score images [L, 3, H, W] by ``scale * cosine(image, prompt) / divide`` -> [L] float32.

    `path` is a CLIPModel (back end "transformers") or open_clip weights of the named `architecture`
    (back end "open_clip"); null is OpenAI's ViT-L/14 in either layout. `scale` null is the model's
    own exp(logit_scale), 100 for OpenAI's, so that the value before `divide` is the library's
    logit. Flow-Factory, Pref-GRPO and ImageReward's code take the cosine, DiffusionNFT logits /
    100, Adv-GRPO logits / 30. `cells` cuts an image into the grid that its prompt names ("2x2"),
    scores each cell by the text that is its own (". [LEFT]: ...") and takes their mean: PaCo-RL's
    CLIP-T per sub-figure. Texts belong to cells row by row in the prompt's order, and a label of
    another place is refused. **Differs:** DiffusionNFT and Adv-GRPO resize unrounded tensors; here
    8-bit images go through PIL, as OpenAI's do. Raises ConfigError, ModelError, DataError.
    """

    judges_singly = True

    @staticmethod
    def reads(given: Mapping[str, Any]) -> dict[str, str]:
        """Return what is read for each argument that names weights."""
        return {"path": given["path"] or PUBLIC[given["backend"]]}

    def __init__(
        self,
        *,
        path: str | None = None,
        backend: Literal["transformers", "open_clip"] = "transformers",
        architecture: str | None = None,
        resize: Literal["shortest", "squash"] | None = None,
        scale: float | None = 1.0,
        divide: float = 1.0,
        cells: bool = False,
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 32,
    ) -> None:
        # the arguments
        if backend not in PUBLIC:
            raise ConfigError(
                f"{WHO}: backend: expected one of {', '.join(PUBLIC)}, got {backend!r}"
            )
        if backend == "transformers" and (architecture is not None or resize is not None):
            raise ConfigError(
                f"{WHO}: architecture and resize belong to backend 'open_clip'; with "
                "'transformers' the model's folder says both"
            )
        if resize not in (None, *PREPARE):
            raise ConfigError(
                f"{WHO}: resize: expected one of {', '.join(PREPARE)}, got {resize!r}"
            )
        self.batch, self.cells = int(positive(batch, "batch", WHO)), cells
        factor = None if scale is None else positive(scale, "scale", WHO)
        where, kind = pick_device(device, WHO), pick_dtype(dtype, WHO)
        path = path or PUBLIC[backend]
        divide = positive(divide, "divide", WHO)
        # the towers
        self.towers: Towers
        if backend == "open_clip":
            prepare, name = PREPARE[resize or "shortest"], architecture or "ViT-L-14-quickgelu"
            self.towers = OpenClip(path, name, prepare=prepare, device=where, dtype=kind, who=WHO)
        else:
            self.towers = TransformersClip(path, path, device=where, dtype=kind, who=WHO)
        self.factor = (self.towers.scale if factor is None else factor) / divide

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a prompt whose cells cannot be read, where cells are scored. Raises DataError."""
        if self.cells:
            _texts(str(record.get("prompt", "")), where)

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image against its own prompt, or each cell against its own text."""
        if self.cells:
            cosine = self._by_cell(batch)
        else:
            cosine = cosines(self.towers, batch, size=self.batch, who=WHO)
        return (self.factor * cosine).to(batch.images.device)

    def _by_cell(self, batch: RewardBatch) -> Tensor:
        """Return the mean cosine of each image's cells -> [L] float32 on the CPU."""
        images = to_pil(batch.images)
        if len(batch.prompts) != len(images):
            raise DataError(
                f"{WHO}: expected one prompt per image, got {len(batch.prompts)} for {len(images)}"
            )
        # cells of all images are seen together, whatever their grids
        shown: list[Image.Image] = []
        texts: list[str] = []
        counts = []
        for place, (image, prompt) in enumerate(zip(images, batch.prompts, strict=True)):
            (rows, columns), own = _texts(prompt, f"image {place}")
            shown += cut(image, rows, columns, WHO)
            texts += own
            counts.append(len(own))
        found = pair_cosines(self.towers, shown, texts, size=self.batch)
        means = [part.mean() for part in found.split(counts)]
        return torch.stack(means) if means else found


def _texts(prompt: str, where: str) -> tuple[tuple[int, int], list[str]]:
    """Return rows and columns of a prompt's grid, and the text of each cell. Raises DataError."""
    rows, columns = grid_size(prompt, where, WHO)
    return (rows, columns), cell_texts(prompt, (rows, columns), where, WHO)
