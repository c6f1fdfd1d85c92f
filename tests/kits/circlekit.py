"""Images of one circle, and a model that paints them."""

from __future__ import annotations

import numpy as np
import torch

from flowrl.core.types import Cond
from flowrl.evaluation.suites.shapes.prompts import entry, make_record
from flowrl.evaluation.suites.shapes.scene import Scenes, render

CIRCLE = make_record("single_object", [entry("circle")], "a circle", False)


def circles(*things: tuple[int, float, float]) -> torch.Tensor:
    """Render one circle an image, (colour number, x, y), all of radius 10."""
    n = len(things)
    shape, color = np.zeros((n, 4), np.int64), np.zeros((n, 4), np.int64)
    center, radius = np.full((n, 4, 2), 32, np.float32), np.full((n, 4), 10, np.float32)
    for i, (tint, x, y) in enumerate(things):
        color[i, 0], center[i, 0] = tint, (x, y)
    return render(Scenes(np.ones(n, np.int64), shape, color, center, radius, np.full(n, 0.95)))


class Painter:
    """A model whose images are known: red circles, of which every third stands at the edge."""

    def sigmas(self, steps: int, height: int, width: int) -> torch.Tensor:
        return torch.linspace(1, 0, steps + 1)

    def encode(self, prompts: list[str]) -> Cond:
        return {"length": torch.zeros(len(prompts))}

    def velocity(self, x: torch.Tensor, sigma: torch.Tensor, cond: Cond) -> torch.Tensor:
        return torch.zeros_like(x)

    def decode(self, x0: torch.Tensor) -> torch.Tensor:
        return circles(*((0, 32 if i % 3 else 1, 32) for i in range(len(x0))))

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return (1, 2, 2)
