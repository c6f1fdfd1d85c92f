"""Train the judge: a small detector of shapes, on rendered scenes alone.

    python scripts/assets/shapes_judge/train_judge.py

The labels are what was drawn; the checker has no part in it. A third of the scenes have something
odd: ellipses, diamonds, two shapes in one, two colours, other colours, ghosts, shapes cut by the
edge. Images are blurred and noisy by chance. Writes assets/shapes-judge/model.safetensors and, to
judge.json beside it, how often the judge is right about fresh scenes. Seeded; minutes on one core.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from judge_network import CELL, ODD, WEIGHTS, Judge, things_on
from safetensors.torch import save_file
from torch import Tensor, nn

from flowrl.core.files import replacing, write_json
from flowrl.evaluation.suites.shapes.scene import CLASSES, COLORS, SIZE, Scenes, coverage, layout

STEPS, BATCH, LR, SEED = 3000, 48, 5e-3, 0
TEST = 1000  # fresh scenes to measure on
COUNTS = (0.04, 0.24, 0.38, 0.17, 0.14, 0.02, 0.01)
"""Chances of no object, one object, and so on up to six."""

ODDITIES = ("ellipse", "diamond", "union", "two colours", "other colour", "ghost", "cut")
_RGB = np.array(list(COLORS.values()), np.float32) / 255


def main() -> None:
    """Train, measure, write."""
    torch.set_num_threads(1)
    # the judge, and how often it is right
    began = time.process_time()
    judge = train(STEPS, BATCH, LR, SEED)
    seconds = time.process_time() - began
    found = measure(judge, TEST, SEED)
    # files
    with replacing(WEIGHTS) as draft:
        save_file(judge.state_dict(), draft)
    settings = {"steps": STEPS, "batch": BATCH, "lr": LR, "seed": SEED, "test": TEST}
    write_json(WEIGHTS.with_name("judge.json"), {**settings, "seconds": seconds, **found})
    print(found)


def train(steps: int, batch: int, lr: float, seed: int) -> Judge:
    """Train a judge from scratch."""
    torch.manual_seed(seed)
    judge, rng = Judge(), np.random.default_rng((seed, 1))
    optimizer = torch.optim.AdamW(judge.parameters(), lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
    for step in range(steps):
        # a batch of fresh scenes
        scenes, odd = draw(batch, rng)
        loss = loss_of(judge(spoil(paint(scenes, odd, rng), rng)), scenes, odd)
        # one step
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    return judge.eval()


def draw(n: int, rng: np.random.Generator) -> tuple[Scenes, np.ndarray]:
    """Draw n scenes, all classes and colours alike -> scenes, what is odd [n, K]; -1 is nothing."""
    number = rng.choice(len(COUNTS), n, p=COUNTS)
    center, radius = layout(rng, np.maximum(number, 1))
    slots = radius.shape
    shape = rng.integers(0, len(CLASSES), slots)
    color = rng.integers(0, len(COLORS), slots)
    # something odd on a third of the images, in one slot or in several
    odd = rng.integers(0, len(ODDITIES), slots)
    plain = (rng.random(slots) < 0.5) | (rng.random(n) < 2 / 3)[:, None]
    odd = np.where(plain, -1, odd)
    cut = odd == ODDITIES.index("cut")
    center = np.where((cut & (rng.random(slots) < 0.5))[..., None], center * (1, 0), center)
    center = np.where((cut & (center[..., 1] > 0))[..., None], center * (0, 1), center)
    grey = rng.uniform(0.85, 1.0, n).astype(np.float32)
    return Scenes(number, shape, color, center.astype(np.float32), radius, grey), odd


def paint(scenes: Scenes, odd: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Draw scenes with their oddities -> [n, 3, 64, 64]."""
    n = len(scenes.number)
    images = np.broadcast_to(scenes.background[:, None, None, None], (n, 3, SIZE, SIZE)).copy()
    for slot in range(scenes.shape.shape[1]):
        for i in np.flatnonzero(scenes.number > slot):
            mask, rgb = _object(scenes, int(i), slot, odd[i, slot], rng)
            images[i] = images[i] * (1 - mask) + rgb * mask
    return torch.from_numpy(images.astype(np.float32))


def _object(
    scenes: Scenes, i: int, slot: int, odd: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return how an object covers the image [64, 64], and its colour [3, 64, 64]."""
    kind, r = scenes.shape[i, slot], float(scenes.radius[i, slot])
    x0, y0 = scenes.center[i, slot]
    name = ODDITIES[odd] if odd >= 0 else ""
    rgb = np.broadcast_to(_RGB[scenes.color[i, slot]][:, None, None], (3, SIZE, SIZE))
    mask = _mask(kind, x0, y0, r)
    y, x = np.mgrid[:SIZE, :SIZE] + np.float32(0.5)
    # another outline
    if name == "ellipse":
        a, b = (r, r / rng.uniform(1.5, 2.2))[:: rng.choice([-1, 1])]
        away = np.hypot((x - x0) / a, (y - y0) / b) - 1
        mask = np.clip(0.5 - away * min(a, b), 0, 1)
    if name == "diamond":
        mask = np.clip(0.5 - (np.abs(x - x0) + np.abs(y - y0) - r) / 1.41, 0, 1)
    if name == "union":
        shift = rng.uniform(0.5, 0.9) * r
        mask = np.maximum(mask, _mask((kind + rng.integers(1, 4)) % 4, x0 + shift, y0, r))
    # another colour
    if name == "two colours":
        other = _RGB[(scenes.color[i, slot] + rng.integers(1, 6)) % 6][:, None, None]
        rgb = np.where((x < x0)[None], rgb, other)
    if name == "other colour":
        rgb = np.broadcast_to(_stray_color(rng)[:, None, None], (3, SIZE, SIZE))
    if name == "ghost":
        mask = mask * rng.uniform(0.25, 0.6)
    return mask, rgb


def _mask(kind: int, x: float, y: float, r: float) -> np.ndarray:
    center = np.array([[x, y]], np.float32)
    return coverage(np.array([kind]), center, np.array([r], np.float32))[0]


def _stray_color(rng: np.random.Generator) -> np.ndarray:
    """Draw a dark enough colour that is far from all of the palette."""
    while True:
        rgb = rng.random(3).astype(np.float32)
        far = np.linalg.norm(_RGB - rgb, axis=1).min() > 0.32
        if far and rgb.min() < 0.6:
            return rgb


def spoil(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Blur and add noise, of a strength by chance, as a VAE would."""
    n = len(images)
    width = torch.from_numpy(rng.uniform(0.05, 0.8, n).astype(np.float32))
    place = torch.arange(-2.0, 3.0)
    kernel = torch.exp(-0.5 * (place / width[:, None]) ** 2)
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(3, 0)[:, None]
    flat = nn.functional.pad(images.reshape(1, 3 * n, SIZE, SIZE), (2, 2, 2, 2), mode="replicate")
    flat = nn.functional.conv2d(flat, kernel[:, :, None, :], groups=3 * n)
    flat = nn.functional.conv2d(flat, kernel[:, :, :, None], groups=3 * n)
    noise = torch.from_numpy(rng.standard_normal(images.shape, dtype=np.float32))
    scale = torch.from_numpy(rng.uniform(0, 0.03, n).astype(np.float32))[:, None, None, None]
    return (flat.reshape(n, 3, SIZE, SIZE) + scale * noise).clamp(0, 1)


def loss_of(cells: Tensor, scenes: Scenes, odd: np.ndarray) -> Tensor:
    """Return centres' cross-entropy over all cells, and class, colour and place over objects."""
    image, slot = np.nonzero(np.arange(scenes.shape.shape[1]) < scenes.number[:, None])
    place = np.clip(scenes.center[image, slot] / CELL, 0, SIZE / CELL - 1e-3)
    column, row = place.astype(np.int64).T
    mine = cells[image, :, row, column]
    # is a centre here
    there = torch.zeros_like(cells[:, 0])
    there[image, row, column] = 1
    centers = nn.functional.binary_cross_entropy_with_logits(cells[:, 0], there, reduction="sum")
    # what stands there; an odd thing has no colour that counts
    strange = odd[image, slot] >= 0
    shape = torch.from_numpy(np.where(strange, ODD, scenes.shape[image, slot]))
    color = torch.from_numpy(np.where(strange, -100, scenes.color[image, slot]))
    what = nn.functional.cross_entropy(mine[:, 1 : 2 + ODD], shape, reduction="sum")
    hue = nn.functional.cross_entropy(mine[:, 2 + ODD : -2], color, reduction="sum")
    # and where in the cell
    within = torch.from_numpy((place % 1).astype(np.float32))
    where = (mine[:, -2:].sigmoid() - within).abs().sum()
    return (centers + what + hue + where) / len(image)


def measure(judge: Judge, n: int, seed: int) -> dict[str, float]:
    """Return how often all of a fresh scene is read right, of plain ones and of odd ones."""
    rng = np.random.default_rng((seed, 2))
    scenes, odd = draw(n, rng)
    seen = things_on(judge, spoil(paint(scenes, odd, rng), rng))
    right: dict[str, list[bool]] = {"plain": [], "odd": []}
    for i, things in enumerate(seen):
        strange = odd[i, : scenes.number[i]] >= 0
        if strange.any():
            right["odd"].append(any(thing.shape == ODD for thing in things))
            continue
        truth = zip(scenes.shape[i], scenes.color[i], range(scenes.number[i]), strict=False)
        wanted = sorted((int(shape), int(color)) for shape, color, _ in truth)
        right["plain"].append(sorted((t.shape, t.color) for t in things) == wanted)
    return {f"{kind}_scenes_read": float(np.mean(some)) for kind, some in right.items()}


if __name__ == "__main__":
    main()
