"""Train the small editing model of the shapes world: a FluxKontextPipeline that is told in words
what to change about one object of an image.

    python scripts/assets/shapes_editor/train_editor.py
    python scripts/assets/shapes_editor/train_editor.py --sizes 64 96 --out data/two-sizes

The autoencoder is that of `assets/shapes-sd3`. Text encoders and transformer are trained together
by flow matching on rendered edits, which are drawn anew for each pool; scenes of the prompt lists
have seeds of their own. Several sizes take turns, step by step. Writes the averaged weights to
assets/shapes-kontext, and to training.jsonl there the loss and how the validation edits are judged
at each size. Seeded, on one core.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from editor_network import Network, attention, tokens_of, write
from torch import Tensor

from flowrl.core.noise_path import interpolate
from flowrl.core.prompts import load_prompts
from flowrl.evaluation.sources import sources_of
from flowrl.evaluation.suites.shapes.edits import KINDS, check_edits, draw_edits
from flowrl.evaluation.suites.shapes.scene import SIZE, render
from flowrl.models.adapter import unpack

sys.path.insert(0, str(Path(__file__).parents[1] / "shapes_base"))
from common import Averaged, Log  # noqa: E402

OUT = Path("assets/shapes-kontext")
WIDTHS = 128, 2, 4  # width; blocks with weights of their own for the text, and the others
STEPS, UNTIL = 6000, 3000  # of the schedule, and those that are taken unless asked
BATCH, LR, EMA, SEED, EVERY = 64, 3e-3, 0.995, 0, 250
COUNT, FRESH = 10000, 1500  # edits that are drawn at a time; steps after which they are drawn anew
VAE, VALIDATION = "assets/shapes-sd3/vae", "assets/shapes-edits/validation.jsonl"
SEEDS = 10**6  # pools begin here; the lists' seeds are far below
EULER = 10  # steps of the images that are judged
IMAGES = 2  # of each validation edit


class Pool:
    """Edits as latents of some sizes and words, drawn from a seed."""

    def __init__(self, network: Network, vae: AutoencoderKL, seed: int, sizes: list[int]) -> None:
        rng = np.random.default_rng(SEEDS + seed)
        edits = draw_edits(rng, rng.integers(0, len(KINDS), COUNT))
        before, after = render(edits.before), render(edits.after)
        self.source = {size: tokens_of(vae, scaled(before, size)) for size in sizes}
        self.target = {size: tokens_of(vae, scaled(after, size)) for size in sizes}
        self.ids = network.read([record["prompt"] for record in edits.records])


class Validation:
    """The validation edits, and how well they are made at a size."""

    def __init__(self, network: Network, vae: AutoencoderKL, size: int) -> None:
        prompts = load_prompts(VALIDATION)
        self.records = prompts.records * IMAGES
        sources = sources_of(prompts, range(len(prompts)), (SIZE, SIZE))
        self.sources = torch.stack([source[0] for source in sources]).repeat(IMAGES, 1, 1, 1)
        self.tokens = tokens_of(vae, scaled(self.sources, size))
        self.ids = network.read([record["prompt"] for record in self.records])
        self.vae = vae

    @torch.no_grad()
    def judge(self, network: Network) -> dict[str, float]:
        """Edit by Euler steps from fixed noise -> means of the strict and the graded verdict."""
        x = torch.randn(self.tokens.shape, generator=torch.Generator().manual_seed(0))
        sigmas = torch.linspace(1, 0, EULER + 1)
        for now, then in zip(sigmas[:-1], sigmas[1:], strict=True):
            v = network(x, self.tokens, now.expand(len(x)), self.ids)
            x = x + (then - now) * v
        config = self.vae.config
        latents = unpack(x, math.isqrt(x.shape[1])) / config.scaling_factor + config.shift_factor
        images = (self.vae.decode(latents).sample / 2 + 0.5).clamp(0, 1)
        found = check_edits(scaled(images, SIZE), self.sources, self.records)
        both = {"strict": found.strict, "graded": found.graded}
        return {name: round(float(verdict.float().mean()), 4) for name, verdict in both.items()}


class Student(Averaged[Network]):
    """The editor's network in training."""

    def step(self, pool: Pool, step: int) -> float:
        """Take one step, at the size whose turn it is -> the loss."""
        # a batch of the pool, noised: tokens [B, N, C], one noise level for each
        rng = torch.Generator().manual_seed(SEED * 1_000_003 + step)
        rows = torch.randint(0, COUNT, (BATCH,), generator=rng)
        size = [*pool.target][step % len(pool.target)]
        x0, sigma = pool.target[size][rows], _sigma(BATCH, rng)
        noise = torch.randn(x0.shape, generator=rng)
        x = interpolate(x0, noise, sigma)
        # the source goes in beside the noised target, as in FLUX.1 Kontext
        with torch.autocast("cpu", torch.bfloat16):
            ids = pool.ids[0][rows], pool.ids[1][rows]
            v = self.network(x, pool.source[size][rows], sigma, ids)
        return self.descend(F.mse_loss(v.float(), noise - x0), step)


def scaled(images: Tensor, size: int) -> Tensor:
    """Scale images [N, 3, H, W] to a size, as the reward `shapes_edit` does."""
    if images.shape[-1] == size:
        return images
    found = F.interpolate(images, (size, size), mode="bicubic", antialias=True)
    return found.clamp(0, 1)


def _sigma(count: int, rng: torch.Generator) -> Tensor:
    """Draw noise levels [count]: half of them even, half logit-normal."""
    even = torch.rand(count, generator=rng)
    middle = torch.sigmoid(torch.randn(count, generator=rng))
    return torch.where(torch.rand(count, generator=rng) < 0.5, middle, even)


def main() -> None:
    """Train for `--steps` of a schedule of `STEPS`, and write the pipeline's folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[SIZE], help="in pixels")
    parser.add_argument("--steps", type=int, default=UNTIL, help=f"to take, of {STEPS}")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the pipeline")
    asked = parser.parse_args()
    # repeatable on one core
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    vae = AutoencoderKL.from_pretrained(VAE).eval()
    student = Student(Network(*WIDTHS), LR, STEPS, EMA)
    validations = {size: Validation(student.network, vae, size) for size in asked.sizes}
    print(sum(p.numel() for p in student.network.parameters()), "weights", flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    log = Log(asked.out / "training.jsonl")
    losses: list[float] = []
    for step in range(asked.steps):
        # a new pool now and then, so that edits are not learned by heart
        if step % FRESH == 0:
            pool = Pool(student.network, vae, SEED * 1000 + step // FRESH, asked.sizes)
        losses.append(student.step(pool, step))
        # judge the averaged weights at each size, and write them
        if (step + 1) % EVERY == 0 or step + 1 == asked.steps:
            row = {"step": step + 1, "loss": round(float(np.mean(losses[-EVERY:])), 5)}
            minutes = round(time.process_time() / 60, 2)
            for size, validation in validations.items():
                log(**row, size=size, **validation.judge(student.average), minutes=minutes)
            write(student.average, vae, asked.out)


if __name__ == "__main__":
    main()
