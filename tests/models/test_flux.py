"""What only FLUX and FLUX.1-Kontext have to keep; what they share is in the contract files."""

from __future__ import annotations

import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from adapterkit import PROMPTS, TOKENS, Folders, diffusers_images
from diffusers import FluxPipeline
from modelkit import edit, noise
from sigmakit import dynamic_grid
from tiny import tiny_flux

from flowrl.core.errors import ConfigError, ModelError
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


def test_without_a_source_it_is_flux(folder: Path) -> None:
    x, sigma = noise(bare := load(folder, tune="none"), 2, 32, 48), torch.tensor([0.9, 0.4])
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


def test_another_class_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="expected _class_name 'FluxPipeline', got"):
        flux(str(folder), device="cpu")
