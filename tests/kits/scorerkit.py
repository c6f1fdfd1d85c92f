"""Tiny random networks in the layouts of the public files, and every scorer of rewards/ on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from clipkit import (
    PROMPTS,
    pil,
    random_images,
)
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPModel
from weightkit import Weights

from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from rewards._common.learned import make_head
from rewards.adversarial import adversarial
from rewards.adversarial_layers import adversarial_layers
from rewards.adversarial_pickscore import adversarial_pickscore
from rewards.aesthetic import aesthetic
from rewards.clip import clip
from rewards.clip_reference import clip_reference
from rewards.dino import dino
from rewards.geneval import geneval
from rewards.hpsv2 import hpsv2
from rewards.hpsv3 import hpsv3
from rewards.image_reward import image_reward
from rewards.jpeg import jpeg
from rewards.ocr import ocr
from rewards.pickscore import pickscore
from rewards.shapes import shapes
from rewards.soft_shapes import soft_shapes
from rewards.step_aware import WEIGHTS as STEP_WEIGHTS
from rewards.step_aware import StepClip, step_aware
from rewards.t2i_compbench import t2i_compbench
from rewards.verdict_head import save_head, verdict_head


class Scorer(NamedTuple):
    """One scorer, and six different images that it can score."""

    make: Callable[..., Any]  # takes further arguments of the reward
    images: Tensor  # [6, 3, H, W], in steps of 8 bits
    meta: list[dict[str, Any]]  # one record for each, with its prompt
    slack: float = 0.0  # how much company, order and batch size may change a score
    half: float = 0.0  # how much bfloat16 may

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


def clip_open(weights: Weights) -> Scorer:
    given = weights.clip.open_clip
    return Scorer(lambda **more: clip(**given, **more), random_images(6), words(), 2e-6, 0.03)


def clip_transformers(weights: Weights) -> Scorer:
    path = str(weights.clip.folder)
    return Scorer(lambda **more: clip(path=path, **more), random_images(6), words(), 2e-6, 0.03)


def pick(weights: Weights) -> Scorer:
    given, images = weights.clip.parts, random_images(6, 300, 227)
    return Scorer(lambda **more: pickscore(**given, **more), images, words(), 2e-4, 2.5)


def step_by_step(weights: Weights) -> Scorer:
    """The same CLIP, told the time by layers that say something."""
    folder = weights.root / "step"
    if not folder.exists():
        model = StepClip(CLIPModel.from_pretrained(weights.clip.folder))
        draw = torch.Generator().manual_seed(5)
        for part in (*model.parts, model.end):
            last: Any = part[1]
            last.weight.data += 0.1 * torch.randn(last.weight.shape, generator=draw)
        folder.mkdir()
        model.clip.config.save_pretrained(folder)
        state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
        save_file(state, folder / STEP_WEIGHTS)
    given: dict[str, Any] = {"path": str(folder), "processor": str(weights.clip.folder)}
    images = random_images(6, 300, 227)
    return Scorer(lambda **more: step_aware(**given, **more), images, words(), 2e-4, 2.5)


def adversarial_pick(weights: Weights) -> Scorer:
    given, images = weights.clip.parts, random_images(6, 60, 50)
    return Scorer(lambda **more: adversarial_pickscore(**given, **more), images, words(), 1e-5, 0.1)


def hps(weights: Weights) -> Scorer:
    given = weights.hps
    return Scorer(lambda **more: hpsv2(**given, **more), random_images(6), words(), 2e-6, 0.03)


def pretty(weights: Weights) -> Scorer:
    given, images = weights.aesthetic, random_images(6, 300, 227)
    return Scorer(lambda **more: aesthetic(**given, **more), images, words(), 2e-5, 0.1)


def human(weights: Weights) -> Scorer:
    given, images = weights.image_reward, random_images(6, 240, 301)
    prompts = ["a red circle", "a blue square", "Red circles", "a square", "a blue circle", ""]
    return Scorer(lambda **more: image_reward(**given, **more), images, words(prompts), 1e-5, 0.5)


def hps3(weights: Weights) -> Scorer:
    given, images = weights.hpsv3, random_images(6, 40, 40)
    return Scorer(lambda **more: hpsv3(**given, **more), images, words(), 2e-5, 0.5)


def with_references(weights: Weights) -> tuple[Tensor, list[dict[str, Any]]]:
    """Six images, and records that name two others as their references."""
    images, files = random_images(8, 40, 52), []
    for index in (6, 7):
        files.append(str(weights.root / f"{index}.png"))
        pil(images[index]).save(files[-1])
    return images[:6], words(references=files)


def likeness(weights: Weights) -> Scorer:
    path, (images, meta) = weights.dino, with_references(weights)
    return Scorer(lambda **more: dino(path=path, **more), images, meta, 1e-6, 0.03)


def reference(weights: Weights) -> Scorer:
    given, (images, meta) = weights.clip.parts, with_references(weights)
    return Scorer(lambda **more: clip_reference(**given, **more), images, meta, 2e-6, 0.03)


def head(weights: Weights) -> Scorer:
    path, images = weights.dino, random_images(6, 42, 42)
    return Scorer(lambda **more: adversarial(path=path, **more), images, words(), 1e-6, 0.03)


def heads(weights: Weights) -> Scorer:
    images = random_images(6, 42, 42)
    given: dict[str, Any] = {"path": weights.dino, "layers": [0, 1]}
    return Scorer(lambda **more: adversarial_layers(**given, **more), images, words(), 1e-6, 0.03)


def verdicts(weights: Weights) -> Scorer:
    folder, network = weights.root / "verdicts", Path(weights.dino) / "config.json"
    width = json.loads(network.read_text())["hidden_size"]
    save_head(make_head(2 * width, 8, 0), folder)
    given: dict[str, Any] = {"path": str(folder), "dino": weights.dino}
    images = random_images(6, 42, 42)
    return Scorer(lambda **more: verdict_head(**given, **more), images, words(), 1e-6, 0.03)


def composition(weights: Weights) -> Scorer:
    """Ask for what the random detector is likely to find, with one colour."""
    given, meta = weights.geneval, []
    for count, name in enumerate(
        ("book", "vase", "tie", "bench", "baseball bat", "baseball glove")
    ):
        wish = {"class": name, "count": count % 3 + 1}
        wish |= {"color": "red"} if count % 2 else {}
        meta.append({"prompt": name, "tag": "two_object", "include": [wish]})
    images = random_images(6, 80, 100)
    return Scorer(lambda **more: geneval(**given, mode="graded", **more), images, meta)


def parts(weights: Weights) -> Scorer:
    """Records of every part, and of all three."""
    given, prompts = weights.t2i_compbench, ["a red car and a green boat", "a cat near a dog"]
    prompts += ["a man is reading", "The red cat is next to the blue dog."] + prompts[:2]
    kinds = [["attribute"], ["spatial"], ["action"], ["attribute", "spatial", "action"]]
    meta = []
    for prompt, mine in zip(prompts, [*kinds, *kinds[:2]], strict=True):
        meta.append({"prompt": prompt, "parts": mine})
    images = random_images(6, 80, 100)
    return Scorer(lambda **more: t2i_compbench(**given, **more), images, meta, 1e-4)


def files(weights: Weights) -> Scorer:
    return Scorer(jpeg, random_images(6, 48, 64), words())


def scenes(weights: Weights) -> Scorer:
    records = [record for task in all_records().values() for record in task[::40]][:6]
    images = render(scenes_for(records, np.random.default_rng(0)))
    rough = images + 0.15 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    return Scorer(shapes, (rough.clamp(0, 1) * 255).round() / 255, records)


def softly(weights: Weights) -> Scorer:
    """The same images and records as `scenes`."""
    return scenes(weights)._replace(make=soft_shapes)


def reading(weights: Weights) -> Scorer:
    """Read as many letters as the image is bright, by an engine of the kit's own."""

    def make(**more: Any) -> ocr:
        scorer = ocr(**more)
        scorer._read = lambda image: "x" * (int(np.asarray(image).mean()) % 17)
        return scorer

    return Scorer(make, random_images(6), words(['a sign "xxxxxxxxxxxxxxxxx"'] * 6))


SCORERS: dict[str, Callable[[Weights], Scorer]] = {
    "clip, open_clip": clip_open,
    "clip, transformers": clip_transformers,
    "pickscore": pick,
    "adversarial_pickscore": adversarial_pick,
    "step_aware": step_by_step,
    "hpsv2": hps,
    "hpsv3": hps3,
    "aesthetic": pretty,
    "image_reward": human,
    "dino": likeness,
    "clip_reference": reference,
    "adversarial": head,
    "adversarial_layers": heads,
    "verdict_head": verdicts,
    "geneval": composition,
    "t2i_compbench": parts,
    "jpeg": files,
    "shapes": scenes,
    "soft_shapes": softly,
    "ocr": reading,
}
"""Rewards behind a server judge no image themselves; win_rate asks another reward."""
