"""Tiny random networks in the layouts of the public files, and every scorer of rewards/ on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from blipkit import Public, save_image_reward, tiny_blip_vqa
from clipkit import (
    PROMPTS,
    add_architecture,
    pil,
    random_images,
    save_open_clip,
    save_transformers,
    tiny_open_clip,
)
from detectorkit import tiny_grounding_dino, tiny_mask2former
from dinokit import save_dinov2
from qwenkit import save_hpsv3
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPModel

from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from rewards._backbones.step_clip import StepClip
from rewards.adversarial import adversarial
from rewards.adversarial_layers import adversarial_layers
from rewards.adversarial_pickscore import adversarial_pickscore
from rewards.aesthetic import FILE, aesthetic, layered
from rewards.clip import clip
from rewards.clip_reference import clip_reference
from rewards.dino import dino
from rewards.geneval import geneval
from rewards.hpsv2 import FILES, hpsv2
from rewards.hpsv3 import hpsv3
from rewards.image_reward import image_reward
from rewards.jpeg import jpeg
from rewards.ocr import ocr
from rewards.pickscore import pickscore
from rewards.shapes import shapes
from rewards.soft_shapes import soft_shapes
from rewards.step_aware import WEIGHTS as STEP_WEIGHTS
from rewards.step_aware import step_aware
from rewards.t2i_compbench import t2i_compbench


class Clip:
    """One random CLIP in the layouts of open_clip and of transformers."""

    def __init__(self, folder: Path, name: str, *, seed: int = 0, **architecture: Any) -> None:
        folder.mkdir()
        self.quick = bool(architecture.get("quick_gelu"))
        self.architecture = add_architecture(folder, name, **architecture)
        self.model = tiny_open_clip(name, seed=seed)
        self.file = save_open_clip(self.model, folder / "open_clip_model.safetensors")
        self.open_clip: dict[str, Any] = {"path": str(self.file), "backend": "open_clip"}
        self.open_clip["architecture"] = name

    @cached_property
    def folder(self) -> Path:
        return save_transformers(self.model, self.file.parent / "hf", quick_gelu=self.quick)

    @property
    def parts(self) -> dict[str, Any]:
        return {"path": str(self.folder), "processor": str(self.folder)}


class Weights:
    """All networks, each saved when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.root = folder

    @cached_property
    def clip(self) -> Clip:
        return Clip(self.root / "clip", "tiny-clip")

    @cached_property
    def quick(self) -> Clip:
        return Clip(self.root / "quick", "tiny-quick", seed=3, quick_gelu=True)

    @cached_property
    def wide(self) -> Clip:
        return Clip(self.root / "wide", "tiny-wide", dimensions=768, quick_gelu=True)

    @cached_property
    def hps(self) -> dict[str, Any]:
        """Both versions in the published container; the older is `clip`, the newer `quick`."""
        folder = self.root / "hps"
        folder.mkdir()
        for name, kit in zip(FILES.values(), (self.clip, self.quick), strict=True):
            torch.save({"state_dict": kit.model.state_dict()}, folder / name)
        return {"path": str(folder), "architecture": self.clip.architecture}

    @cached_property
    def mlp(self) -> dict[str, Tensor]:
        """Weights of about the published size."""
        state, generator = layered().state_dict(), torch.Generator().manual_seed(0)
        for name, value in state.items():
            noise = torch.randn(value.shape, generator=generator)
            state[name] = noise * 1.8 / value.shape[-1] ** 0.5 if value.dim() > 1 else noise
        return state

    @cached_property
    def aesthetic(self) -> dict[str, Any]:
        torch.save(self.mlp, self.wide.file.parent / FILE)
        given = {"clip": str(self.wide.file), "architecture": self.wide.architecture}
        return {"path": str(self.wide.file.parent), "verify": False, **given}

    @cached_property
    def public_blip(self) -> Public:
        (self.root / "blip").mkdir()
        return save_image_reward(self.root / "blip")

    @cached_property
    def image_reward(self) -> dict[str, Any]:
        return {"path": str(self.public_blip.file), "tokenizer": str(self.public_blip.tokenizer)}

    @cached_property
    def geneval(self) -> dict[str, Any]:
        detector = tiny_mask2former(self.root / "mask2former")
        return {"path": str(detector), "clip": str(self.clip.folder)}

    @cached_property
    def t2i_compbench(self) -> dict[str, Any]:
        given = {"vqa": str(tiny_blip_vqa(self.root / "vqa")), "vqa_size": 48, "threshold": 0.1}
        detector = tiny_grounding_dino(self.root / "grounding_dino")
        return {**given, "path": str(detector), "clip": str(self.clip.folder)}

    @cached_property
    def hpsv3(self) -> dict[str, Any]:
        (self.root / "hpsv3").mkdir()
        return save_hpsv3(self.root / "hpsv3")[2]

    @cached_property
    def dino(self) -> str:
        return save_dinov2(self.root / "dino")


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
    "geneval": composition,
    "t2i_compbench": parts,
    "jpeg": files,
    "shapes": scenes,
    "soft_shapes": softly,
    "ocr": reading,
}
"""Rewards behind a server judge no image themselves; win_rate asks another reward."""
