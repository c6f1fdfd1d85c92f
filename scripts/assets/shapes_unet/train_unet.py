"""Train the small SDXL of the shapes world: a StableDiffusionXLPipeline that predicts noise.

    mkdir -p data/shapes_unet
    cp -r assets/shapes-sd3/vae assets/shapes-sd3/tokenizer data/shapes_unet
    python scripts/assets/shapes_base/main.py scenes --out data/shapes_unet
    python scripts/assets/shapes_unet/train_unet.py --scenes data/shapes_unet

Autoencoder and text encoders are those of `assets/shapes-sd3`, unchanged. Only the UNet learns,
from nothing, on true captions: to tell the noise at the 1,000 timesteps of Stable Diffusion's
schedule, weighed by min-SNR-5 (Hang et al. 2023, arXiv 2303.09556). Twins, which differ in word
order only, share noise and time. Writes the averaged weights to assets/shapes-sdxl, and to
training.jsonl there the loss and how images of validation prompts are judged. Seeded, on one core.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import CLIPTokenizer
from unet_network import BASE, Text, Unet, sample, schedule, write

from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.prompts import TASKS
from flowrl.models.files.loading import without_bars
from flowrl.models.runtime import quiet

sys.path.insert(0, str(Path(__file__).parents[1] / "shapes_base"))
from accuracy import validation_records  # noqa: E402
from common import CHANNELS, GRID, Averaged, Log  # noqa: E402
from scenes import Batches  # noqa: E402

SNR = 5.0  # above it a step's weight falls
SIZES = [64, 96], [1, 2]  # channels and attention blocks of each resolution
STEPS, BATCH, LR, EMA, SEED = 4000, 64, 2e-3, 0.998, 0
PROMPTS, UNTOLD = 0.5, 0.1  # shares: of prompts among captions, of images without a caption
EVERY, IMAGES, GUIDANCE = 1000, 40, (1.0, 3.0)  # of a validation; images of each task
OUT = Path("assets/shapes-sdxl")


class Batch(NamedTuple):
    """2n latents with captions, noise and times; twins lie side by side."""

    x0: Tensor  # [2n, 16, 8, 8]
    noise: Tensor  # [2n, 16, 8, 8]
    t: Tensor  # [2n], whole, from 0 to 999
    ids: Tensor  # [2n, TOKENS]
    untold: Tensor  # [2n], True: without a caption


class Student(Averaged[Unet]):
    """The UNet in training."""

    bar = schedule().alphas_cumprod

    def step(self, batch: Batch, text: Text, step: int) -> float:
        """Take one step -> the loss: the noise that is asked for, weighed by min(SNR, 5) / SNR."""
        bar = self.bar[batch.t]
        root, rest = bar.sqrt()[:, None, None, None], (1 - bar).sqrt()[:, None, None, None]
        x = root * batch.x0 + rest * batch.noise
        out = self.network(x, batch.t, *text.encode(batch.ids, batch.untold))
        weight = (SNR * (1 - bar) / bar).clamp(max=1.0)
        loss = (weight * (out - batch.noise).square().mean((1, 2, 3))).mean()
        return self.descend(loss, step)


def draw(batches: Batches, offset: float, step: int) -> Batch:
    """Draw the batch of a step; it depends on seed and step alone."""
    n, rng = BATCH // 2, torch.Generator().manual_seed(SEED * 1_000_003 + step)
    rows, slots = batches.draw(n, PROMPTS, rng)
    untold = torch.rand(n, generator=rng) < UNTOLD
    t = torch.randint(0, 1000, (n,), generator=rng)
    noise = torch.randn(n, CHANNELS, GRID, GRID, generator=rng)
    return Batch(
        batches.latents[rows].flatten(0, 1).float() + offset,
        noise.repeat_interleave(2, 0),
        t.repeat_interleave(2, 0),
        batches.ids(rows, slots),
        untold.repeat_interleave(2),
    )


class Validation:
    """Validation prompts, and how many of their images are right."""

    def __init__(self, text: Text, vae: Any) -> None:
        self.records = [r for task in TASKS for r in validation_records(task, IMAGES)]
        ids = text.ids([record["prompt"] for record in self.records])
        none = torch.zeros(len(ids), dtype=torch.bool)
        self.told, self.untold = text.encode(ids, none), text.encode(ids, ~none)
        generator = torch.Generator().manual_seed(99)
        self.noise = torch.randn(len(ids), CHANNELS, GRID, GRID, generator=generator)
        self.vae = vae

    @torch.no_grad()
    def judge(self, unet: Unet, guidance: float) -> dict[str, float]:
        """Return the share of right images of each task, and their mean as "mean"."""
        latents = sample(unet, self.noise, self.told, self.untold, guidance)
        decoded = self.vae.decode(latents / self.vae.config.scaling_factor).sample
        strict = check((decoded / 2 + 0.5).clamp(0, 1), self.records).strict.float()
        shares = strict.unflatten(0, (len(TASKS), -1)).mean(1)
        found = {"mean": float(shares.mean()), **dict(zip(TASKS, shares.tolist(), strict=True))}
        return {name: round(share, 4) for name, share in found.items()}


def train(scenes: Path) -> None:
    """Train, and write the pipeline's folder."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    text, vae = Text(), Unet.autoencoder()
    tokenizer = CLIPTokenizer.from_pretrained(f"{BASE}/tokenizer")
    batches = Batches(scenes, tokenizer)
    student = Student(Unet(*SIZES), LR, STEPS, EMA)
    validation = Validation(text, vae)
    print(sum(p.numel() for p in student.network.parameters()), "weights", flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    log = Log(OUT / "training.jsonl")
    losses: list[float] = []
    began = time.time()
    for step in range(STEPS):
        # an SDXL shifts no latents: what the autoencoder's shift took off is put back
        losses.append(student.step(draw(batches, text.offset, step), text, step))
        if (step + 1) % 100 == 0:
            print(step + 1, float(np.mean(losses[-100:])), int(time.time() - began), flush=True)
        # judge the averaged weights, and write them
        if (step + 1) % EVERY == 0 or step + 1 == STEPS:
            minutes = round(time.process_time() / 60, 2)
            row: dict[str, Any] = {"loss": round(float(np.mean(losses[-EVERY:])), 5)}
            for guidance in GUIDANCE:
                row[f"right, guidance {guidance}"] = validation.judge(student.average, guidance)
            log(step=step + 1, **row, minutes=minutes)
            write(student.average, vae, OUT)


def main() -> None:
    """Train on the folder in which the stage `scenes` wrote."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenes", type=Path, required=True)
    with quiet(), without_bars():
        train(parser.parse_args().scenes)


if __name__ == "__main__":
    main()
