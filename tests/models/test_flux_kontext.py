"""FLUX.1-Kontext beside diffusers' own pipeline, on tiny random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapterkit import PROMPTS, TOKENS, seeds
from modelkit import edit, gradients, noise, perturb
from rolloutkit import decisions, score_draws
from tiny import tiny_flux
from torch import Tensor

from flowrl.algorithms.plans.windows import full
from flowrl.algorithms.rollout.engine import rollout, sample_ode
from flowrl.algorithms.transitions import cps
from flowrl.core.errors import DataError, ModelError
from flowrl.core.types import Source
from flowrl.models.flow_matching import pack
from flowrl.models.flux import flux
from flowrl.models.flux_kontext import flux_kontext

CLASS = edit("model_index.json", _class_name="FluxKontextPipeline")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_flux(tmp_path_factory.mktemp("kontext") / "model", seed=7)
    CLASS(made)
    return made


def load(folder: Path, **options: Any) -> Any:
    return flux_kontext(str(folder), device="cpu", max_sequence_length=TOKENS, **options)


def sources(count: int, size: tuple[int, int], seed: int = 3) -> list[Source]:
    images = torch.rand(count, 3, *size, generator=torch.Generator().manual_seed(seed))
    return [(image,) for image in images]


def watch(model: Any) -> tuple[list[dict[str, Any]], Any]:
    """Note what the network is called with."""
    seen: list[dict[str, Any]] = []
    hook = model.network.register_forward_pre_hook(
        lambda _, args, named: seen.append(named), with_kwargs=True
    )
    return seen, hook


@pytest.mark.parametrize(
    ("options", "steps", "size", "count"),
    [
        ({}, 4, (64, 48), 3),
        ({"true_cfg_scale": 2.0, "negative_prompt": "a blue dog", "guidance": 2.5}, 4, (48, 64), 2),
        ({"guidance": 0.0, "tune": "full"}, 1, (16, 64), 1),
    ],
)
def test_without_noise_edits_are_the_pipelines(
    folder: Path, options: dict[str, Any], steps: int, size: tuple[int, int], count: int
) -> None:
    """Latents and images to 1e-5 in float32, with weights that training has moved; times, positions
    and guidance as the network is told them, to the bit."""
    model, prompts, given = load(folder, **options), PROMPTS[:count], sources(count, size)
    perturb(model, 0.05)
    shape, sigmas = model.latent_shape(*size), model.sigmas(steps, *size)
    x = torch.cat([torch.randn((1, *shape), generator=key) for key in seeds(count)])
    seen, hook = watch(model)
    with torch.no_grad():
        cond = model.encode_with_sources(prompts, given)
        drawn: dict[str, Any] = {"shape": shape, "group_size": 1, "generators": seeds(count)}
        end = sample_ode(model, cond, sigmas=sigmas, **drawn)
    ours, pipeline = [*seen], model.pipeline()
    seen.clear()
    pipeline.set_progress_bar_config(disable=True)
    call: dict[str, Any] = {"guidance_scale": 3.5 if model.guidance is None else model.guidance}
    if model.guided:
        call |= {"true_cfg_scale": 2.0, "negative_prompt": ["a blue dog"] * count}
    theirs: Tensor = pipeline(
        prompt=prompts,
        num_inference_steps=steps,
        height=size[0],
        width=size[1],
        latents=pack(x),
        max_sequence_length=TOKENS,
        output_type="latent",
        **call,
        **model.pipeline_sources(given),
    ).images
    hook.remove()
    assert (theirs - pack(x)).abs().mean() > 1e-3
    torch.testing.assert_close(pack(end), theirs, rtol=0, atol=1e-5)
    assert torch.equal(sigmas, pipeline.scheduler.sigmas)
    # the pipeline calls twice under true CFG, ours once with both
    for mine, other in zip(ours, seen[:: len(seen) // len(ours)], strict=True):
        assert torch.equal(mine["img_ids"], other["img_ids"])
        assert torch.equal(mine["timestep"][:count], other["timestep"])
        assert torch.equal(mine["guidance"][:count], other["guidance"])
    behind = ours[0]["hidden_states"][-count:, pack(x).shape[1] :]
    torch.testing.assert_close(behind, seen[0]["hidden_states"][:, behind.shape[1] :])


def test_the_source_decides_and_rows_are_their_own(folder: Path) -> None:
    """Another source, another velocity; a row alone as in a batch; gradients reach what is trained;
    without a source it is FLUX."""
    model, size = load(folder, lora={"rank": 2}), (32, 48)
    perturb(model)
    x, sigma = noise(model, 2, *size), model.sigmas(6, *size)[1:3]
    cond = model.encode_with_sources(PROMPTS[:2], sources(2, size))
    other = model.encode_with_sources(PROMPTS[:2], sources(2, size, seed=4))
    v = model.velocity(x, sigma, cond)
    assert v.shape == x.shape
    moved = (v - model.velocity(x, sigma, other)).abs().mean((1, 2, 3))
    assert bool((moved > 1e-3).all())
    alone = model.velocity(x[1:], sigma[1:], {name: rows[1:] for name, rows in cond.items()})
    torch.testing.assert_close(alone, v[1:], rtol=1e-4, atol=1e-5)
    found = gradients(model, v.square().mean())
    assert found.keys() == model.trainable().keys()
    assert all(bool((grad != 0).any()) for grad in found.values())
    bare = load(folder, tune="none")
    edit("model_index.json", _class_name="FluxPipeline")(folder)
    try:
        plain = flux(str(folder), device="cpu", max_sequence_length=TOKENS, tune="none")
    finally:
        CLASS(folder)
    without = [one.velocity(x, sigma, one.encode(PROMPTS[:2])) for one in (bare, plain)]
    assert torch.equal(*without)


def test_the_grid_has_the_published_numbers(folder: Path) -> None:
    """1024 pixels, ten steps, FLUX.1's shifts: the reference's digits; the source's tokens do not
    count."""
    found = load(folder, tune="none").sigmas(10, 1024, 1024)
    expected = [1, 0.966014, 0.926647, 0.880513, 0.825702, 0.759511, 0.677987, 0.575103]
    expected_ = torch.tensor([*expected, 0.4412, 0.259758, 0])
    torch.testing.assert_close(found, expected_, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"true_cfg_scale": 3.0}, {"dtype": "bfloat16"}])
def test_the_ratio_is_1_before_the_first_update(folder: Path, options: dict[str, Any]) -> None:
    """In calls as in the rollout to the bit; in others to rounding. A group shares its source."""
    model, size = load(folder, lora={"rank": 2}, **options), (32, 32)
    perturb(model, 0.05)
    cond = model.encode_with_sources(PROMPTS[:2], sources(2, size))
    how: dict[str, Any] = {"shape": model.latent_shape(*size), "group_size": 2, "micro_batch": 4}
    plan = full(0, steps=4, noise_scale=0.6)
    how |= {"sigmas": model.sigmas(4, *size), "generators": seeds(2)}
    ro = rollout(model, cond, plan, cps, **how)
    zero, nodes = torch.zeros(len(ro.x)), (ro.tree.std > 0).nonzero().flatten()
    for count, limit in ((4, 0.0), (3, 0.1 if "dtype" in options else 1e-5)):
        for part in nodes.split(count):
            batch = decisions(ro, zero, nodes=part)
            with torch.no_grad():
                log_prob = score_draws(model, batch, cps).log_prob
            assert float(((log_prob - batch.old_log_prob).exp() - 1).abs().max()) <= limit


def test_what_it_refuses(folder: Path) -> None:
    model = load(folder, tune="none")
    with pytest.raises(ModelError, match="positive multiples of 16 pixels, got 24 x 32"):
        model.encode_with_sources(PROMPTS[:1], sources(1, (24, 32)))
    two = (*sources(1, (32, 32))[0], *sources(1, (32, 32))[0])
    with pytest.raises(DataError, match="expected one source for each of 1 prompts.*one with 2"):
        model.encode_with_sources(PROMPTS[:1], [two])
    with pytest.raises(ModelError, match="expected _class_name 'FluxPipeline', got"):
        flux(str(folder), device="cpu")
