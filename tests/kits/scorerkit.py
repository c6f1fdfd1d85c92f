"""Every scorer of rewards/ with tiny random weights: for the tests of what all have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from clipkit import (
    PROMPTS,
    add_architecture,
    pil,
    random_images,
    save_open_clip,
    save_transformers,
    tiny_open_clip,
)
from dinokit import save_dinov2
from torch import Tensor

from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from rewards.adversarial import adversarial
from rewards.adversarial_pickscore import adversarial_pickscore
from rewards.aesthetic import FILE, aesthetic, layered
from rewards.clip import clip
from rewards.dino import dino
from rewards.hpsv2 import hpsv2
from rewards.image_reward import image_reward
from rewards.jpeg import jpeg
from rewards.ocr import ocr
from rewards.pickscore import pickscore
from rewards.shapes import shapes


class Scorer(NamedTuple):
    """One scorer, and six different images that it can score."""

    make: Callable[..., Any]  # takes further arguments of the reward
    images: Tensor  # [6, 3, H, W], in steps of 8 bits
    meta: list[dict[str, Any]]  # one record for each, with its prompt
    slack: float  # how much company, order and batch size may change a score

    def batch(self, rows: list[int] | None = None, images: Tensor | None = None) -> RewardBatch:
        """Return some of the images, or others in their place."""
        rows = list(range(6)) if rows is None else rows
        meta = [self.meta[row] for row in rows]
        given = self.images[rows] if images is None else images
        prompts = [record["prompt"] for record in meta]
        return RewardBatch(given, prompts, torch.arange(len(rows)), meta, torch.zeros(len(rows)))


def words(prompts: list[str] | None = None, **more: Any) -> list[dict[str, Any]]:
    """Return one record for each of six prompts."""
    return [{"prompt": prompt, **more} for prompt in prompts or PROMPTS]


def clip_open(folder: Path) -> Scorer:
    name = add_architecture(folder, "battery-clip")
    file = save_open_clip(tiny_open_clip(name), folder / "open_clip_model.safetensors")
    given: dict[str, Any] = {"path": str(file), "backend": "open_clip", "architecture": name}
    return Scorer(lambda **more: clip(**given, **more), random_images(6), words(), 2e-6)


def clip_transformers(folder: Path) -> Scorer:
    model = tiny_open_clip(add_architecture(folder, "battery-hf"))
    path = str(save_transformers(model, folder / "hf"))
    return Scorer(lambda **more: clip(path=path, **more), random_images(6), words(), 2e-6)


def pick(folder: Path) -> Scorer:
    model = tiny_open_clip(add_architecture(folder, "battery-pick"), seed=1)
    path = str(save_transformers(model, folder / "hf"))
    images = random_images(6, 300, 227)
    given: dict[str, Any] = {"path": path, "processor": path}
    return Scorer(lambda **more: pickscore(**given, **more), images, words(), 2e-4)


def adversarial_pick(folder: Path) -> Scorer:
    model = tiny_open_clip(add_architecture(folder, "battery-adv"), seed=2)
    path = str(save_transformers(model, folder / "hf"))
    given: dict[str, Any] = {"path": path, "processor": path}
    images = random_images(6, 60, 50)
    return Scorer(lambda **more: adversarial_pickscore(**given, **more), images, words(), 1e-5)


def hps(folder: Path) -> Scorer:
    name = add_architecture(folder, "battery-hps")
    weights = {"state_dict": tiny_open_clip(name, seed=3).state_dict()}
    torch.save(weights, folder / "HPS_v2.1_compressed.pt")
    given: dict[str, Any] = {"path": str(folder), "architecture": name}
    return Scorer(lambda **more: hpsv2(**given, **more), random_images(6), words(), 2e-6)


def pretty(folder: Path) -> Scorer:
    name = add_architecture(folder, "battery-aesthetic", dimensions=768, quick_gelu=True)
    towers = save_open_clip(tiny_open_clip(name, seed=4), folder / "open_clip_model.safetensors")
    torch.manual_seed(0)
    torch.save(layered().state_dict(), folder / FILE)
    given: dict[str, Any] = {
        "path": str(folder),
        "clip": str(towers),
        "architecture": name,
        "verify": False,
    }
    return Scorer(lambda **more: aesthetic(**given, **more), random_images(6), words(), 2e-5)


def human(folder: Path) -> Scorer:
    from blipkit import save_image_reward

    public = save_image_reward(folder)
    given: dict[str, Any] = {"path": str(public.file), "tokenizer": str(public.tokenizer)}
    prompts = ["a red circle", "a blue square", "Red circles", "a square", "a blue circle", ""]
    images = random_images(6, 240, 301)
    return Scorer(lambda **more: image_reward(**given, **more), images, words(prompts), 1e-5)


def likeness(folder: Path) -> Scorer:
    path, images = save_dinov2(folder / "net"), random_images(8, 40, 52)
    for index in (6, 7):
        pil(images[index]).save(folder / f"{index}.png")
    meta = words(references=[str(folder / "6.png"), str(folder / "7.png")])
    return Scorer(lambda **more: dino(path=path, **more), images[:6], meta, 1e-6)


def head(folder: Path) -> Scorer:
    path, images = save_dinov2(folder / "net"), random_images(6, 42, 42)
    return Scorer(lambda **more: adversarial(path=path, **more), images, words(), 1e-6)


def files(folder: Path) -> Scorer:
    return Scorer(jpeg, random_images(6, 48, 64), words(), 0.0)


def scenes(folder: Path) -> Scorer:
    records = [record for task in all_records().values() for record in task[::40]][:6]
    images = render(scenes_for(records, np.random.default_rng(0)))
    rough = images + 0.15 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    return Scorer(shapes, (rough.clamp(0, 1) * 255).round() / 255, records, 0.0)


def reading(folder: Path) -> Scorer:
    """Read as many letters as the image is bright, by an engine of the kit's own."""

    def make(**more: Any) -> ocr:
        scorer = ocr(**more)
        scorer._read = lambda image: "x" * (int(np.asarray(image).mean()) % 17)
        return scorer

    return Scorer(make, random_images(6), words(['a sign "xxxxxxxxxxxxxxxxx"'] * 6), 0.0)


SCORERS: dict[str, Callable[[Path], Scorer]] = {
    "clip, open_clip": clip_open,
    "clip, transformers": clip_transformers,
    "pickscore": pick,
    "adversarial_pickscore": adversarial_pick,
    "hpsv2": hps,
    "aesthetic": pretty,
    "image_reward": human,
    "dino": likeness,
    "adversarial": head,
    "jpeg": files,
    "shapes": scenes,
    "ocr": reading,
}
"""{name: how it is made in a folder of its own}. Rewards behind a server judge no image themselves;
win_rate asks another reward."""
