"""GenEval's reading of colours: CLIP between ten names, on a crop with the background painted
over."""

from __future__ import annotations

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from flowrl.core.prompt_lists import COLORS
from flowrl.evaluation.suites.geneval.objects import DetectedObject

from .._backbones.clip import Towers
from .._common.scorer import in_batches

BACKGROUND = "#999"
TEMPLATES = (
    "a photo of a {color} {name}",
    "a photo of a {color}-colored {name}",
    "a photo of a {color} object",
)


class ClipColors:
    """Tell the colour of objects, zero-shot, as djghosh13/geneval does (evaluate_images.py).

    A colour's direction is the mean of three prompts' normalised embeddings, normalised again; the
    object gets the colour with the highest cosine. Directions are kept by class.
    """

    def __init__(self, towers: Towers, *, batch: int) -> None:
        self.towers, self.batch = towers, batch
        self._known: dict[str, Tensor] = {}

    def __call__(self, image: Image.Image, name: str, found: list[DetectedObject]) -> list[str]:
        """Return the colour of each object of a class on an RGB image."""
        crops = [crop(image, one) for one in found]
        seen = normalize(in_batches(self.towers.see, crops, size=self.batch), dim=-1)
        best = (seen @ self.directions(name).T).argmax(-1)
        return [COLORS[place] for place in best.tolist()]

    def directions(self, name: str) -> Tensor:
        """Return the colours' directions for a class [10, D], float32 on the CPU."""
        if name not in self._known:
            texts = [text.format(color=c, name=name) for c in COLORS for text in TEMPLATES]
            read = normalize(in_batches(self.towers.read, texts, size=self.batch), dim=-1)
            means = read.unflatten(0, (len(COLORS), len(TEMPLATES))).mean(1)
            self._known[name] = normalize(means, dim=-1)
        return self._known[name]


def crop(image: Image.Image, found: DetectedObject) -> Image.Image:
    """Cut an object out by its box; what its mask leaves out is painted grey."""
    shown = image
    if found.mask is not None:
        blank = Image.new("RGB", image.size, BACKGROUND)
        mask = torch.from_numpy(found.mask).to(torch.uint8).mul(255).numpy()
        shown = Image.composite(image, blank, Image.fromarray(mask))
    left, top, right, bottom = map(round, found.box)
    # a box thinner than a pixel still has one
    left, top = min(left, image.width - 1), min(top, image.height - 1)
    return shown.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
