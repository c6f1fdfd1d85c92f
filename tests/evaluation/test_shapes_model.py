"""The embedded base model: small, loadable by diffusers alone, and the same through our adapter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from flowrl.core.shipped_files import resource
from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.prompts import HELD_COLORED, all_records
from flowrl.evaluation.suites.shapes.scene import COLORS
from flowrl.models.sd3 import sd3

pytestmark = pytest.mark.integration
FOLDER = resource("assets/shapes-sd3")


@pytest.fixture(scope="module")
def pipeline() -> Iterator[StableDiffusion3Pipeline]:
    pipe = StableDiffusion3Pipeline.from_pretrained(
        FOLDER
    )  # as any user would, with no argument of ours
    pipe.set_progress_bar_config(disable=True)
    yield pipe


def test_lives_in_git() -> None:
    files = [f for f in FOLDER.rglob("*.safetensors") if "training" not in f.parts]
    assert len(files) == 5  # transformer, VAE, three text encoders
    assert sum(f.stat().st_size for f in files) <= 25e6  # the limit that the project set itself


def test_diffusers_alone_draws_what_is_asked_for(pipeline: StableDiffusion3Pipeline) -> None:
    # 12 images of seen coloured shapes, guidance 3.5, 15 steps, the pipeline's own default text
    # length. Measured rate of this task: 0.74 (assets/results/shapes-base.json); fewer than 6 of
    # 12 then has probability 0.018 (binomial), and the seed is fixed. A model that ignores the
    # prompt is right once in 24.
    wanted = [r for r in all_records()["colors"] if not r["held_out"]][::2]
    assert {(r["include"][0]["class"], r["include"][0]["color"]) for r in wanted}.isdisjoint(
        HELD_COLORED
    )
    wanted = wanted[:12]
    images = pipeline(
        [r["prompt"] for r in wanted],
        height=64,
        width=64,
        num_inference_steps=15,
        guidance_scale=3.5,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images
    assert len(COLORS) == 6 and int(check(images.float(), wanted).strict.sum()) >= 6


@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_adapter_equals_diffusers(pipeline: StableDiffusion3Pipeline, guidance: float) -> None:
    # expected: the pipeline's own latents from the same noise; its T5 of zeros is what `t5=False`
    # leaves out
    model = sd3(str(FOLDER), guidance=guidance, tune="none", t5=False)
    prompts = ["a red circle", "a cross to the left of a square"]
    x = noise = torch.randn(
        2, *model.latent_shape(64, 64), generator=torch.Generator().manual_seed(1)
    )
    cond, sigmas = model.encode(prompts), model.sigmas(4, 64, 64)
    with torch.no_grad():
        for now, after in zip(sigmas, sigmas[1:], strict=False):
            x = x + (after - now) * model.velocity(x, now.expand(2), cond)
    reference = pipeline(
        prompts,
        height=64,
        width=64,
        num_inference_steps=4,
        guidance_scale=guidance,
        latents=noise,
        output_type="latent",
    ).images
    assert (x - reference).abs().max() < 1e-4  # latents of size 3; 4 steps of float32 rounding


def test_text_length_hardly_matters() -> None:
    # The model was trained with 1 and with 256 zero tokens behind the prompt: the images must be
    # nearly the same.
    images = []
    for length in (1, 256):
        model = sd3(str(FOLDER), tune="none", t5=False, max_sequence_length=length)
        x = torch.randn(4, *model.latent_shape(64, 64), generator=torch.Generator().manual_seed(2))
        cond, sigmas = (
            model.encode(["a blue square", "a cross", "a red circle", "two circles"]),
            model.sigmas(10, 64, 64),
        )
        with torch.no_grad():
            for now, after in zip(sigmas, sigmas[1:], strict=False):
                x = x + (after - now) * model.velocity(x, now.expand(4), cond)
            images.append(model.decode(x))
    distance = (images[0] - images[1]).square().mean().sqrt()
    other = (images[0] - images[0].roll(1, 0)).square().mean().sqrt()
    assert distance < 0.35 * other  # `other`: how far images of different prompts are apart
