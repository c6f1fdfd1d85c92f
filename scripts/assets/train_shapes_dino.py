"""Train the small DINOv2 `assets/shapes-dino`, the network under the DINO rewards' demonstration on
shapes.

A Dinov2Model of the real class, trained without labels on rendered scenes, on several tasks at
once. Each scene is seen twice: whole, and in four of five cases damaged in one of the ways that
drawn images are wrong in, too. The CLS token names the damage, each patch token says whether its
patch is damaged. Both views (moved, lighter or darker, noisy, half of them with hidden patches)
must find each other in the batch by CLS. Each patch token, also of a hidden patch, predicts the
pixels of its patch. Same seed, same weights on the same machine; about ten minutes on one free
core. Needs torch >= 2.9 for the Muon optimizer.

    python scripts/assets/train_shapes_dino.py
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model

from flowrl.evaluation.suites.shapes.lists import benchmark_lists
from flowrl.evaluation.suites.shapes.prompts import Record, base_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import CLASSES, COLORS, SIZE, render

OUT = Path("assets/shapes-dino")
STEPS, BATCH, LR, SEED = 1500, 64, 1e-2, 0  # a batch's scenes are each seen twice
PATCH, WIDTH, LAYERS = 8, 96, 3
TEMPERATURE = 0.2
# ImageNet's, as the rewards use
MEAN, STD = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
DAMAGES = ("none", "blend", "tint", "warp", "blur")


class Scenes(NamedTuple):
    """Rendered scenes and what is in them."""

    images: Tensor  # [N, 3, 64, 64] in [0, 1], in 8-bit steps
    number: Tensor  # [N] int64, 1..4
    colors: Tensor  # [N, 6] 0 or 1: which colours are there
    classes: Tensor  # [N, 4] 0 or 1: which classes are there


def draw_scenes(records: list[Record], number: int, *key: int) -> Scenes:
    """Draw scenes of random records; the same key, the same scenes."""
    rng = np.random.default_rng(key)
    drawn = scenes_for([records[i] for i in rng.integers(0, len(records), number)], rng)
    images = (render(drawn) * 255).round() / 255
    colors, classes = torch.zeros(number, len(COLORS)), torch.zeros(number, len(CLASSES))
    for row, count in enumerate(drawn.number):
        colors[row, torch.from_numpy(drawn.color[row, :count])] = 1
        classes[row, torch.from_numpy(drawn.shape[row, :count])] = 1
    return Scenes(images, torch.from_numpy(drawn.number), colors, classes)


def damage(images: Tensor, kind: Tensor, noise: torch.Generator) -> Tensor:
    """Damage images [N, 3, 64, 64] in [0, 1]; `kind` [N] is an index into DAMAGES.

    blend: with another scene, in some places. tint: shapes drift to another colour. warp: smooth
    shifts of about 5 pixels at most. blur: once by 1 pixel.
    """
    n, color = len(images), torch.tensor(list(COLORS.values())) / 255
    where = ((_field(n, 4, noise) - 0.5) * 8).sigmoid()
    much = 0.25 + 0.5 * torch.rand(n, 1, 1, 1, generator=noise)
    high, low = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    shapes = ((high - low > 0.25) | (high < 0.4)).float()
    other = color[torch.randint(len(color), (n,), generator=noise)][:, :, None, None]
    line = torch.linspace(-1, 1, SIZE)
    straight = torch.stack([line.expand(SIZE, SIZE), line[:, None].expand(SIZE, SIZE)], dim=-1)
    bent = straight + 0.35 * (
        torch.cat([_field(n, 7, noise), _field(n, 7, noise)], 1) - 0.5
    ).movedim(1, -1)
    five = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
    done = [
        images,
        images.lerp(images.roll(1, 0), where * much),
        images + (other - images) * shapes * where * 1.3 * much,
        F.grid_sample(images, bent.clamp(-1, 1), padding_mode="border", align_corners=True),
        F.conv2d(
            F.pad(images, (2, 2, 2, 2), "replicate"), five.outer(five).expand(3, 1, 5, 5), groups=3
        ),
    ]
    return torch.stack(done, dim=1)[torch.arange(n), kind]


def _field(number: int, size: int, noise: torch.Generator) -> Tensor:
    rough = torch.rand(number, 1, size, size, generator=noise)
    return F.interpolate(rough, (SIZE, SIZE), mode="bicubic")


def view(images: Tensor, changed: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    """Move images and maps of change by up to 4 pixels; make images lighter or darker and
    noisy."""
    moves = torch.randint(-4, 5, (len(images), 2), generator=noise).tolist()
    both = torch.cat([images, changed], dim=1)
    moved = torch.stack([image.roll(move, (1, 2)) for image, move in zip(both, moves, strict=True)])
    light = (torch.rand(len(images), 1, 1, 1, generator=noise) - 0.5) * 0.09
    return moved[:, :3] + light + 0.011 * torch.randn(images.shape, generator=noise), moved[:, 3:]


def hide(number: int, noise: torch.Generator) -> Tensor:
    """Choose a quarter of each image's patches -> [N, 64] bool."""
    count = (SIZE // PATCH) ** 2
    return torch.rand(number, count, generator=noise).argsort(-1) < count // 4


class Learner(nn.Module):
    """The network with its linear heads, which are thrown away after training."""

    def __init__(self) -> None:
        super().__init__()
        config = Dinov2Config(
            image_size=SIZE,
            patch_size=PATCH,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=WIDTH // 32,
            mlp_ratio=4,
        )
        self.network = Dinov2Model(config)
        self.to_pixels, self.to_code = nn.Linear(WIDTH, 3 * PATCH * PATCH), nn.Linear(WIDTH, 64)
        self.to_kind, self.to_flag = nn.Linear(WIDTH, len(DAMAGES)), nn.Linear(WIDTH, 1)

    def forward(self, images: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return CLS [B, D] and patch tokens [B, 64, D]."""
        tokens = self.network(pixel_values=images, bool_masked_pos=hidden).last_hidden_state
        return tokens[:, 0], tokens[:, 1:]


def normalise(images: Tensor) -> Tensor:
    """Subtract ImageNet's mean and divide by its std, as the rewards do."""
    return (images - MEAN[:, None, None]) / STD[:, None, None]


def patches_of(images: Tensor) -> Tensor:
    """Cut images into patches -> [B, 64, 192]."""
    return F.unfold(images, PATCH, stride=PATCH).transpose(1, 2)


def contrast(codes: Tensor) -> Tensor:
    """Return the mean cross-entropy of finding row i + B/2 from row i, or i from i + B/2, among all
    rows (InfoNCE)."""
    likeness = (codes @ codes.T / TEMPERATURE).fill_diagonal_(-math.inf)
    partner = torch.arange(len(codes)).roll(len(codes) // 2)
    return F.cross_entropy(likeness, partner)


def losses(model: Learner, images: Tensor, noise: torch.Generator) -> dict[str, Tensor]:
    """Return the losses of all tasks on one batch of whole scenes, [N, 3, 64, 64] in [0, 1]."""
    n = len(images)
    kind = torch.randint(len(DAMAGES), (n,), generator=noise)
    broken = damage(images, kind, noise)
    changed = torch.cat(
        [(broken - images).abs().amax(1, keepdim=True), torch.zeros(n, 1, SIZE, SIZE)]
    )
    views, changed = view(torch.cat([broken, images]), changed, noise)
    views, kind = normalise(views), torch.cat([kind, torch.zeros_like(kind)])
    hidden = hide(2 * n, noise) & (torch.rand(2 * n, 1, generator=noise) < 0.5)
    cls, patches = model(views, hidden)
    flags = (F.max_pool2d(changed, PATCH).flatten(1) > 0.1).float()
    return {
        "kind": F.cross_entropy(model.to_kind(cls), kind),
        "flag": F.binary_cross_entropy_with_logits(model.to_flag(patches).squeeze(-1), flags),
        "find": 0.3 * contrast(F.normalize(model.to_code(cls), dim=-1)),
        "pixels": 0.5 * F.mse_loss(model.to_pixels(patches), patches_of(views)),
    }


def train(model: Learner) -> None:
    """Train for `STEPS` batches of fresh scenes: Muon for the layers' matrices, AdamW for the
    rest."""
    named = dict(model.named_parameters())
    inner = [name for name, p in named.items() if p.ndim == 2 and ".encoder." in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            [named[k] for k in inner], lr=LR, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            [p for k, p in named.items() if k not in inner], lr=LR / 10, weight_decay=0.05
        ),
    ]
    records = base_records()
    for step in range(STEPS):
        factor = min(1, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        noise = torch.Generator().manual_seed(SEED * 1_000_003 + step)
        parts = losses(model, draw_scenes(records, BATCH, SEED, 1, step).images, noise)
        torch.stack(list(parts.values())).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(optimizers, (LR, LR / 10), strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 49 or step == STEPS - 1:
            print(
                f"step={step + 1} " + " ".join(f"{k}={v:.4f}" for k, v in parts.items()), flush=True
            )


@torch.no_grad()
def measure(
    model: Learner, fit: int = 4000, probe: int = 1000, seed: int = SEED
) -> dict[str, float]:
    """Measure on fresh scenes, `fit` for the least squares and `probe` to look at, how much the
    features say: see the table of the card."""
    # least squares from CLS to what is on a scene: fitted on one set, read on another
    sets = (
        draw_scenes(base_records(), fit, seed, 2),
        draw_scenes(benchmark_lists().test, probe, seed, 3),
    )
    inputs, kinds = [], []
    for number, scenes in enumerate(sets):
        noise = torch.Generator().manual_seed(seed * 1_000_003 - 1 - number)
        kind = torch.randint(1, len(DAMAGES), (len(scenes.images),), generator=noise)
        kinds.append(torch.where(torch.rand(len(kind), generator=noise) < 0.5, 0, kind))
        inputs.append(
            [read_cls(model, x) for x in (scenes.images, damage(scenes.images, kinds[-1], noise))]
        )
    said = [
        inputs[1][k] @ torch.linalg.lstsq(inputs[0][k], wanted).solution
        for k, wanted in enumerate(
            (
                torch.cat(
                    [F.one_hot(sets[0].number - 1, 4), sets[0].colors, sets[0].classes], dim=1
                ).double(),
                F.one_hot(kinds[0], len(DAMAGES)).double(),
            )
        )
    ]
    number, colors, classes = said[0].split([4, len(COLORS), len(CLASSES)], dim=1)
    test = sets[1]
    hidden = hide(probe, torch.Generator().manual_seed(seed))
    pixels = patches_of(normalise(test.images))[hidden]
    wrong = model.to_pixels(model(normalise(test.images), hidden)[1][hidden]) - pixels
    return {
        "variance": 1 - (wrong.square().mean() / (pixels - pixels.mean(0)).square().mean()).item(),
        "damage": (said[1].argmax(1) == kinds[1]).double().mean().item(),
        "count": (number.argmax(1) + 1 == test.number).double().mean().item(),
        "colors": ((colors > 0.5) == (test.colors > 0.5)).all(1).double().mean().item(),
        "classes": ((classes > 0.5) == (test.classes > 0.5)).all(1).double().mean().item(),
        "guess": (test.number == torch.bincount(test.number).argmax()).double().mean().item(),
    }


def read_cls(model: Learner, images: Tensor) -> Tensor:
    """Return CLS tokens with a column of ones, float64, for least squares."""
    cls = torch.cat(
        [
            model.network(pixel_values=normalise(part)).last_hidden_state[:, 0]
            for part in images.split(256)
        ]
    )
    return torch.cat([cls, torch.ones(len(cls), 1)], dim=1).double()


def main() -> None:
    """Train the network and write it."""
    torch.manual_seed(SEED)
    model = Learner()
    train(model)
    model.network.save_pretrained(OUT, safe_serialization=True)
    print(measure(model))


if __name__ == "__main__":
    main()
