"""Train the small DINOv2 `assets/shapes-dino`, the network under the DINO rewards' demonstration on shapes.

A Dinov2Model of the real class, trained without labels on rendered scenes. Each scene is seen twice: moved by a few
pixels, lighter or darker, with a little noise, and with a quarter of the patches hidden. The CLS tokens of both views
must find each other among those of the batch; each patch token, also of a hidden patch, predicts the pixels of its
patch. Same seed, same weights on the same machine; about five minutes on one free core.

    python scripts/train_shapes_dino.py --out assets/shapes-dino
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model

from flowrl.shapes.prompts import Record, base_records, scenes_for, split_records
from flowrl.shapes.scene import CLASSES, COLORS, SIZE, render

PATCH = 8
TEMPERATURE = 0.2
MEAN, STD = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))  # ImageNet's, as the rewards use
CARD = """---
license: apache-2.0
library_name: transformers
---

# shapes-dino

A `Dinov2Model` of transformers with {parameters:,} parameters ({layers} layers, width {width}, patches of {patch} x
{patch}, pictures of {size} x {size}). It stands in for a public DINOv2 in flowrl's demonstration of the DINO rewards on
pictures of coloured shapes. It is not Meta's DINOv2, was not trained by DINO's self-distillation, and knows nothing but
such pictures.

Made by `scripts/train_shapes_dino.py` (seed {seed}, CPU) without labels: {steps} batches of {batch} rendered scenes of
the benchmark's training captions, each seen twice, with contrastive learning on CLS and pixel prediction on patches.

| measured on {probe} scenes of the test prompts | trained | before training |
|---|---|---|
| share of the pixels' variance explained in hidden patches | {variance:.3f} | |
| number of shapes, 1 to 4 | {count[1]:.3f} | {count[0]:.3f} |
| which of the six colours are there, all six right | {colors[1]:.3f} | {colors[0]:.3f} |
| which of the four classes are there, all four right | {classes[1]:.3f} | {classes[0]:.3f} |

The last three are read from the CLS token by least squares, fitted on {fit} other scenes of the training captions.
Always guessing the most frequent number of shapes is right for {guess:.3f} of the scenes.
"""


class Scenes(NamedTuple):
    """Rendered scenes and what is in them."""

    images: Tensor  # [N, 3, 64, 64] in 8-bit steps, normalised as the rewards do
    number: Tensor  # [N] int64, 1..4
    colors: Tensor  # [N, 6] 0 or 1: which colours are there
    classes: Tensor  # [N, 4] 0 or 1: which classes are there


def draw_scenes(records: list[Record], number: int, *key: int) -> Scenes:
    """Draw scenes of random records; the same key, the same scenes."""
    rng = np.random.default_rng(key)
    drawn = scenes_for([records[i] for i in rng.integers(0, len(records), number)], rng)
    images = ((render(drawn) * 255).round() / 255 - MEAN[:, None, None]) / STD[:, None, None]
    colors, classes = torch.zeros(number, len(COLORS)), torch.zeros(number, len(CLASSES))
    for row, count in enumerate(drawn.number):
        colors[row, torch.from_numpy(drawn.color[row, :count])] = 1
        classes[row, torch.from_numpy(drawn.shape[row, :count])] = 1
    return Scenes(images, torch.from_numpy(drawn.number), colors, classes)


def view(images: Tensor, noise: torch.Generator) -> Tensor:
    """Move each picture by up to 4 pixels, change its brightness by up to 4 % of white, add noise."""
    moves = torch.randint(-4, 5, (len(images), 2), generator=noise).tolist()
    moved = torch.stack([image.roll(move, (1, 2)) for image, move in zip(images, moves, strict=True)])
    light = (torch.rand(len(images), 1, 1, 1, generator=noise) - 0.5) * 0.4
    return moved + light + 0.05 * torch.randn(images.shape, generator=noise)


def hide(number: int, noise: torch.Generator) -> Tensor:
    """Choose a quarter of each picture's patches -> [N, 64] bool."""
    count = (SIZE // PATCH) ** 2
    return torch.rand(number, count, generator=noise).argsort(-1) < count // 4


class Learner(nn.Module):
    """The network with its two linear heads, which are thrown away after training."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        config = Dinov2Config(
            image_size=SIZE,
            patch_size=PATCH,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            mlp_ratio=4,
        )
        self.network = Dinov2Model(config)
        self.to_pixels, self.to_code = nn.Linear(width, 3 * PATCH * PATCH), nn.Linear(width, 64)

    def forward(self, images: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes [B, 64] of length 1 and the squared errors of the patches [B, 64]."""
        tokens = self.network(pixel_values=images, bool_masked_pos=hidden).last_hidden_state
        wrong = (self.to_pixels(tokens[:, 1:]) - patches_of(images)).square().mean(-1)
        return F.normalize(self.to_code(tokens[:, 0]), dim=-1), wrong


def patches_of(images: Tensor) -> Tensor:
    """Cut pictures into patches -> [B, 64, 192]."""
    return F.unfold(images, PATCH, stride=PATCH).transpose(1, 2)


def contrast(codes: Tensor) -> Tensor:
    """Return the mean cross-entropy of finding row i + B/2 from row i, or i from i + B/2, among all rows (InfoNCE)."""
    likeness = (codes @ codes.T / TEMPERATURE).fill_diagonal_(-math.inf)
    partner = torch.arange(len(codes)).roll(len(codes) // 2)
    return F.cross_entropy(likeness, partner)


def train(model: Learner, args: argparse.Namespace) -> None:
    """Train for `--steps` batches of fresh scenes; AdamW, linear warm-up, cosine to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05, betas=(0.9, 0.95))
    records = base_records()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        noise = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        images = draw_scenes(records, args.batch, args.seed, 1, step).images
        views, hidden = torch.cat([view(images, noise), view(images, noise)]), hide(2 * args.batch, noise)
        codes, wrong = model(views, hidden)
        found, patch, seen = contrast(codes), wrong[hidden].mean(), wrong[~hidden].mean()
        optimizer.zero_grad()
        (found + patch + seen).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49 or step == args.steps - 1:
            print(f"step={step + 1} find={found:.4f} hidden={patch:.4f} seen={seen:.4f}", flush=True)


@torch.no_grad()
def measure(model: Learner, args: argparse.Namespace) -> dict[str, float]:
    """Measure on fresh scenes how much the features say: see the table in CARD."""
    fit = draw_scenes(base_records(), args.fit, args.seed, 2)
    test = draw_scenes(split_records()[1], args.probe, args.seed, 3)
    features = []
    for scenes in (fit, test):
        cls = [model.network(pixel_values=part).last_hidden_state[:, 0] for part in scenes.images.split(256)]
        features.append(torch.cat([torch.cat(cls), torch.ones(len(scenes.images), 1)], dim=1).double())
    wanted = torch.cat([F.one_hot(fit.number - 1, 4), fit.colors, fit.classes], dim=1).double()
    number, colors, classes = (features[1] @ torch.linalg.lstsq(features[0], wanted).solution).split([4, 6, 4], dim=1)
    hidden = hide(args.probe, torch.Generator().manual_seed(args.seed))
    patches = patches_of(test.images)[hidden]
    wrong = model(test.images, hidden)[1][hidden].mean()
    return {
        "variance": 1 - (wrong / (patches - patches.mean(0)).square().mean()).item(),
        "count": (number.argmax(1) + 1 == test.number).double().mean().item(),
        "colors": ((colors > 0.5) == (test.colors > 0.5)).all(1).double().mean().item(),
        "classes": ((classes > 0.5) == (test.classes > 0.5)).all(1).double().mean().item(),
        "guess": (test.number == torch.bincount(test.number).argmax()).double().mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=64, help="scenes; each is seen twice")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--fit", type=int, default=4000, help="scenes that the least squares are fitted on")
    parser.add_argument("--probe", type=int, default=1000, help="scenes that are measured")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = Learner(args.width, args.layers)
    before, began = measure(model, args), time.time()
    train(model, args)
    print(f"{time.time() - began:.0f} s", flush=True)
    after = measure(model, args)
    model.network.save_pretrained(args.out, safe_serialization=True)
    facts: dict[str, Any] = {name: (before[name], after[name]) for name in ("count", "colors", "classes")}
    facts |= {**vars(args), "variance": after["variance"], "guess": after["guess"], "patch": PATCH, "size": SIZE}
    facts["parameters"] = sum(p.numel() for p in model.network.parameters())
    (args.out / "README.md").write_text(CARD.format(**facts), encoding="utf-8")
    print({name: facts[name] for name in ("variance", "count", "colors", "classes", "guess")})


if __name__ == "__main__":
    main()
