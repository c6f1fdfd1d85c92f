"""True scenes of the training prompts, as data to go on training on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from demonstration_measure import by_task
from torch import Tensor

from flowrl.core.prompts import load_prompts
from flowrl.evaluation.suites.shapes.prompts import scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from flowrl.models.adapter import PipelineModel

BLOCK = 256


def rendered_scenes(
    model: PipelineModel[Any], prompts: str, count: int, seed: int
) -> tuple[Tensor, list[int]]:
    """Render scenes that show what a prompt asks for, in all that it leaves open drawn anew, and
    encode them -> latents [count, C, h, w], and of each its prompt's place in the list. Tasks come
    equally often."""
    listed = load_prompts(prompts)
    tasks, rng = list(by_task(listed.records).values()), np.random.default_rng(seed)
    latents, places = [], list[int]()
    while len(places) < count:
        chosen = [int(rng.choice(tasks[i % len(tasks)])) for i in range(BLOCK)]
        scenes = scenes_for([listed.records[i] for i in chosen], rng)
        latents.append(model.latents(render(scenes)))
        places += chosen
    return torch.cat(latents)[:count], places[:count]
