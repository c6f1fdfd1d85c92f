"""The shipped editor of shapes: it follows its prompts, as diffusers' own pipeline of the folder
does, and its config can be trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline

from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.config.load import load_config
from flowrl.core.prompts import load_prompts
from flowrl.core.shipped_files import resource
from flowrl.evaluation.sources import sources_of
from flowrl.evaluation.suites.shapes.edits import check_edits
from flowrl.models.flux_kontext import FluxKontext
from flowrl.training.rehearsal import check_plan


@pytest.fixture(scope="module")
def model() -> FluxKontext:
    config = load_config(
        "assets/shapes-edits/awm.yaml", ["model.device=cpu", "model.dtype=float32"]
    )
    assert check_plan(config) is not None
    made: FluxKontext = config.call("model")()
    return made


def test_it_follows_the_prompt_and_leaves_room(model: FluxKontext) -> None:
    """The validation edits in 10 steps: a fifth to three fifths are right by the exact checker.
    Told what another edit of the kind is told, about none is: what chance would have."""
    prompts = load_prompts("assets/shapes-edits/validation.jsonl")
    given = sources_of(prompts, range(len(prompts)), (64, 64))
    images = torch.stack([source[0] for source in given])
    right = []
    for texts in (prompts.texts, [*prompts.texts[4:], *prompts.texts[:4]]):
        cond = model.encode_with_sources(texts, given)
        draws = [torch.Generator().manual_seed(i) for i in range(len(texts))]
        shape, sigmas = model.latent_shape(64, 64), model.sigmas(10, 64, 64)
        with torch.no_grad():
            x0 = sample_ode(model, cond, sigmas=sigmas, shape=shape, group_size=1, generators=draws)
            found = check_edits(model.decode(x0), images, prompts.records)
        right.append(float(found.strict.float().mean()))
    assert 0.15 < right[0] < 0.65 and right[1] <= 0.07


def test_the_pipeline_of_the_folder_edits_alike(model: FluxKontext) -> None:
    """One edit of the test list, from equal seeds, to a level of 255."""
    prompts = load_prompts("assets/shapes-edits/test.jsonl")
    given = sources_of(prompts, [1], (64, 64))
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        cond = model.encode_with_sources(prompts.texts[1:2], given)
        shape, sigmas = model.latent_shape(64, 64), model.sigmas(4, 64, 64)
        x0 = sample_ode(model, cond, sigmas=sigmas, shape=shape, group_size=1, generators=[draw])
        ours = model.decode(x0)[0].permute(1, 2, 0).numpy()
    pipeline = FluxKontextPipeline.from_pretrained(
        resource("assets/shapes-kontext"), dtype=torch.float32
    )
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(
        prompt=prompts.texts[1],
        height=64,
        width=64,
        num_inference_steps=4,
        max_sequence_length=6,
        generator=torch.Generator().manual_seed(5),
        output_type="np",
        **model.pipeline_sources(given),
    ).images[0]
    assert float(np.abs(ours - theirs).max()) < 1 / 255
