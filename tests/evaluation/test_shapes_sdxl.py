"""The shipped SDXL of shapes, a model that predicts noise: it draws what it is asked for, as
diffusers' own pipeline of the folder does."""

from __future__ import annotations

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from modelkit import euler, noise

from flowrl.core.prompts import load_prompts
from flowrl.core.shipped_files import resource
from flowrl.evaluation.suites.shapes.checker import check
from flowrl.models.sdxl import sdxl

pytestmark = pytest.mark.integration
FOLDER = resource("assets/shapes-sdxl")
GUIDANCE, STEPS = 3.0, 10


def test_lives_in_git() -> None:
    files = list(FOLDER.rglob("*.safetensors"))
    assert len(files) == 4  # UNet, VAE, two text encoders
    assert sum(file.stat().st_size for file in files) <= 13e6


def test_diffusers_alone_draws_what_is_asked_for_and_we_draw_the_same() -> None:
    """Prompts that ask for one coloured shape, from the same noise, in float32.

    The adapter's latents are the pipeline's over alpha + s, which has the std hypot(1 - sigma,
    sigma) at the first level.
    """
    found = load_prompts("assets/shapes/validation.jsonl")
    rows = [i for i, record in enumerate(found.records) if record["tag"] == "colors"]
    texts = [found.texts[i] for i in rows]
    records = [found.records[i] for i in rows]
    pipeline = StableDiffusionXLPipeline.from_pretrained(FOLDER, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.scheduler.config.prediction_type == "epsilon"
    model = sdxl(path=str(FOLDER), tune="none", dtype="float32", guidance=GUIDANCE)
    start, sigmas = noise(model, len(texts)), model.sigmas(STEPS, 64, 64)
    theirs = pipeline(
        texts,
        height=64,
        width=64,
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        latents=start,
        output_type="pt",
    ).images
    x = start * torch.hypot(1 - sigmas[0], sigmas[0])
    ours = model.decode(euler(model, x, sigmas, texts))
    assert float((ours - theirs).abs().max()) < 1 / 255
    # told what the others are told, the images are wrong
    turned = [*records[3:], *records[:3]]
    right, wrong = [int(check(theirs, asked).strict.sum()) for asked in (records, turned)]
    assert right >= len(records) / 2 and wrong == 0
