"""What only FLUX and FLUX.1-Kontext have to keep; what they share is in the contract files."""

from __future__ import annotations

import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from adapterkit import PROMPTS, TOKENS, Folders, diffusers_images, seeds
from diffusers import FluxPipeline
from modelkit import edit, gradients, noise, perturb, told
from rolloutkit import ratio_gap
from sigmakit import dynamic_grid
from tiny import tiny_flux
from torch import Tensor

from flowrl.algorithms.plans.windows import full
from flowrl.algorithms.rollout.engine import rollout, sample_ode
from flowrl.algorithms.transitions import cps
from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.types import Source
from flowrl.models.adapter import pack, unpack
from flowrl.models.flux import flux, image_ids
from flowrl.models.flux_kontext import flux_kontext


def test_packing_is_the_pipelines() -> None:
    x = torch.randn(2, 16, 6, 10)
    tokens = pack(x)
    assert torch.equal(tokens, FluxPipeline._pack_latents(x, *x.shape))
    assert tokens.shape == (2, 15, 64) and torch.equal(unpack(tokens, 3), x)
    assert torch.equal(FluxPipeline._unpack_latents(tokens, 48, 80, 8), x)
    ids = FluxPipeline._prepare_latent_image_ids(2, 3, 5, torch.device("cpu"), torch.float32)
    assert torch.equal(image_ids(3, 5, torch.device("cpu")), ids)


KINDS = ["", " schnell", " shifts", " linear", " static", " plain", " table"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("steps", "size"), [(2, (64, 64)), (28, (128, 64))])
def test_noise_levels_are_the_pipelines_bit_for_bit(
    folders: Folders, kind: str, steps: int, size: tuple[int, int]
) -> None:
    model = folders.load(f"flux{kind}")
    scheduler = model.pipeline().scheduler
    before = scheduler.sigmas.clone()
    ours = model.sigmas(steps, *size)
    assert torch.equal(scheduler.sigmas, before)  # a user who is sampling is not disturbed
    x = noise(model, 1, *size)
    diffusers_images(folders[f"flux{kind}"], model, x, ["a"], steps=steps, output_type="latent")
    scheduler = model.pipeline().scheduler
    assert ours.dtype == torch.float32 and torch.equal(ours, scheduler.sigmas)
    assert torch.equal(model.time(ours[:-1]), scheduler.timesteps / 1000)


@pytest.mark.parametrize(
    ("steps", "size"), [(6, (512, 512)), (10, (1024, 1024)), (28, (768, 1344))]
)
def test_the_grid_of_dev_and_of_schnell(
    folders: Folders, steps: int, size: tuple[int, int]
) -> None:
    """Closed forms: noise_path.dynamic_grid, whose values are tested there, and k / steps."""
    dynamic = dynamic_grid(steps, size[0] * size[1] // 256)
    dev, schnell, shifts = (folders.load(f"flux{kind}").sigmas(steps, *size) for kind in KINDS[:3])
    torch.testing.assert_close(dev, dynamic, rtol=0, atol=1e-6)
    torch.testing.assert_close(schnell, torch.linspace(1, 0, steps + 1), rtol=0, atol=1e-6)
    assert (shifts - dynamic).abs().max() > 0.01


def test_rounding_after_the_division_would_be_another_time(folders: Folders) -> None:
    """The mistake that the one `time` rules out: in numpy 4 of 10 differ at 1024 px."""
    model = folders.load("flux", dtype="bfloat16")
    sigma = model.sigmas(10, 1024, 1024)[:-1]
    other = (sigma * 1000 / 1000).bfloat16()
    assert int((model.time(sigma) * 1000 != other * 1000).sum()) == 4


def test_embedded_guidance_reaches_the_network(folders: Folders) -> None:
    models = [folders.load("flux", **o) for o in ({}, {"guidance": 3.5}, {"guidance": 1.5})]
    assert models[0].guidance == 3.5  # FluxPipeline's own default
    x, sigma = noise(models[0], 2), torch.tensor([0.9, 0.4])
    v = [model.velocity(x, sigma, model.encode(PROMPTS[:2])) for model in models]
    assert torch.equal(v[0], v[1]) and (v[0] - v[2]).abs().max() > 1e-3
    for kind in ("flux schnell", "flux plain"):
        assert folders.load(kind).guidance is None
        for number in (0.0, 3.5):
            message = r"guidance: .* no guidance embedding .*; leave guidance out"
            with pytest.raises(ConfigError, match=message):
                folders.load(kind, guidance=number)


@pytest.mark.parametrize(
    ("name", "embeds", "tune", "warned"),
    [
        ("tiny", False, "lora", True),
        ("tiny", False, "none", False),
        ("tiny", True, "lora", False),
        ("Flux-Turbo", True, "full", True),
    ],
)
def test_step_distilled_models_are_named(
    tmp_path: Path, name: str, embeds: bool, tune: str, warned: bool
) -> None:
    folder = tiny_flux(tmp_path / name, guidance_embeds=embeds)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flux(str(folder), tune=tune, device="cpu")
    found = [w for w in caught if "distilled to a few steps" in str(w.message)]
    assert len(found) == warned and all(w.filename == __file__ for w in found)


def test_velocity_reads_no_tensor_values(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device tensors have no values, so any hidden .item(), bool() or .cpu() raises."""
    model = folders.load("flux", true_cfg_scale=2.0)
    cond = {name: rows.to("meta") for name, rows in model.encode(PROMPTS).items()}
    model.transformer.to("meta")
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # knows no meta device
    v = model.velocity(noise(model, 3, 64, 32).to("meta"), torch.ones(3, device="meta"), cond)
    assert v.is_meta and v.shape == (3, 16, 8, 4)


def test_an_image_encoder_is_left_alone(folders: Folders, tmp_path: Path) -> None:
    """Folders saved with an IP-Adapter name one; it is not there here, so reading it would fail."""
    copy = Path(shutil.copytree(folders["flux"], tmp_path / "model"))
    encoder = ["transformers", "CLIPVisionModelWithProjection"]
    edit("model_index.json", image_encoder=encoder)(copy)
    assert flux(str(copy), device="cpu").pipeline().image_encoder is None


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
    with torch.no_grad(), told(model.network) as ours:
        cond = model.encode_with_sources(prompts, given)
        drawn: dict[str, Any] = {"shape": shape, "group_size": 1, "generators": seeds(count)}
        end = sample_ode(model, cond, sigmas=sigmas, **drawn)
    pipeline = model.pipeline()
    pipeline.set_progress_bar_config(disable=True)
    call: dict[str, Any] = {"guidance_scale": 3.5 if model.guidance is None else model.guidance}
    if model.guided:
        call |= {"true_cfg_scale": 2.0, "negative_prompt": ["a blue dog"] * count}
    call |= {"height": size[0], "width": size[1], "max_sequence_length": TOKENS}
    with told(model.network) as seen:
        theirs: Tensor = pipeline(
            prompt=prompts,
            num_inference_steps=steps,
            latents=pack(x),
            output_type="latent",
            **call,
            image=torch.stack([one for (one,) in given]),
            max_area=size[0] * size[1],
            _auto_resize=False,
        ).images
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
    nodes = (ro.tree.std > 0).nonzero().flatten()
    for count, limit in ((4, 0.0), (3, 0.1 if "dtype" in options else 1e-5)):
        for part in nodes.split(count):
            assert ratio_gap(model, ro, part, cps) <= limit


def test_what_it_refuses(folder: Path) -> None:
    model = load(folder, tune="none")
    with pytest.raises(ModelError, match="positive multiples of 16 pixels, got 24 x 32"):
        model.encode_with_sources(PROMPTS[:1], sources(1, (24, 32)))
    two = (*sources(1, (32, 32))[0], *sources(1, (32, 32))[0])
    with pytest.raises(DataError, match="expected one source for each of 1 prompts.*one with 2"):
        model.encode_with_sources(PROMPTS[:1], [two])
    with pytest.raises(ModelError, match="expected _class_name 'FluxPipeline', got"):
        flux(str(folder), device="cpu")
