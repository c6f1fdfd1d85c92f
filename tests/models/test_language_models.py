"""What only Qwen-Image, Z-Image and FLUX.2 have to keep; what they share is in the contract
files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from adapterkit import Folders, diffusers_images, load_folder
from diffusers import Flux2Pipeline
from modelkit import edit, noise
from tiny import tiny_klein, tiny_qwen_image

from flowrl.core.errors import ConfigError, ModelError
from flowrl.models.flux2 import positions
from flowrl.models.flux2_klein import flux2_klein

# Read from the installed schedulers with the released constants, to the digits that are printed
GRIDS: list[tuple[str, int, int, list[float]]] = [
    (
        "qwen_image",
        512,
        10,
        [1, 0.92897, 0.851485, 0.766624, 0.673281, 0.570117, 0.455497] + [0.3274, 0.1833, 0.02, 0],
    ),
    (
        "qwen_image",
        1024,
        10,
        [1, 0.936978, 0.866951, 0.788682, 0.700624, 0.600818, 0.486747]
        + [0.355115, 0.20153, 0.02, 0],
    ),
    ("z_image turbo", 512, 8, [1, 0.954545, 0.9, 0.833333, 0.75, 0.642857, 0.5, 0.3, 0]),
    ("z_image", 512, 10, [1, 0.981818, 0.96, 0.933333, 0.9, 0.857143, 0.8, 0.72, 0.6, 0.4, 0]),
    ("flux2", 512, 8, [1, 0.981072, 0.956922, 0.925043, 0.881018, 0.81627, 0.711667, 0.514045, 0]),
    ("flux2_klein", 1024, 4, [1, 0.967384, 0.908144, 0.7672, 0]),
]

# the last sigmas before 0, whose shift depends on the number of steps, too
ENDS = [(10, [0.8036, 0.704736, 0.514751]), (50, [0.133719])]


@pytest.mark.parametrize(("name", "size", "steps", "expected"), GRIDS)
def test_the_grid_has_the_published_numbers(
    folders: Folders, name: str, size: int, steps: int, expected: list[float]
) -> None:
    found = folders.load(name, tune="none").sigmas(steps, size, size)
    assert found.shape == (steps + 1,) and float(found[-1]) == 0
    expected_ = torch.tensor(expected)
    torch.testing.assert_close(found[: len(expected)], expected_, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("steps", "expected"), ENDS)
def test_the_end_of_a_grid_of_flux2(folders: Folders, steps: int, expected: list[float]) -> None:
    """At 1024 pixels, to the digits of the reference."""
    found = folders.load("flux2", tune="none").sigmas(steps, 1024, 1024)[-1 - len(expected) : -1]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen_image", "z_image turbo", "flux2", "flux2_klein"])
def test_the_grid_is_the_pipelines_bit_for_bit(folders: Folders, name: str) -> None:
    model = folders.load(name, tune="none")
    ours = model.sigmas(7, 48, 32)
    x = noise(model, 1, 48, 32)
    diffusers_images(folders[name], model, x, ["a"], steps=7, output_type="latent")
    assert torch.equal(ours, model.pipeline().scheduler.sigmas)


def test_qwen_image_is_told_the_time_in_float32(folders: Folders) -> None:
    """In bfloat16 the pipeline would have rounded 0.7595 to 0.76."""
    model = folders.load("qwen_image", dtype="bfloat16")
    told = model.time(torch.tensor([0.7595, 1.0]))
    assert told.dtype == torch.float32 and told.tolist() == pytest.approx([0.7595, 1.0], abs=1e-7)


def test_the_sign_of_z_image(folders: Folders) -> None:
    """The network gives x0 - noise: x + sigma out is the clean image that it sees."""
    model = folders.load("z_image", tune="none")
    x, sigma, cond = noise(model, 1), torch.tensor([0.3]), model.encode(["a red square"])
    seen: list[Any] = []
    hook = model.network.register_forward_hook(lambda _, args, out: seen.append((args[1], out[0])))
    v = model.velocity(x, sigma, cond)
    hook.remove()
    time, (out,) = seen[0]
    assert float(time) == pytest.approx(0.7, abs=1e-6)
    assert torch.equal(x - sigma * v, x + sigma * out[None, :, 0])


def test_positions_are_the_pipelines() -> None:
    cpu = torch.device("cpu")
    ids = Flux2Pipeline._prepare_latent_ids(torch.zeros(1, 128, 3, 5))[0]
    assert torch.equal(positions(3, 5, 1, cpu), ids.float())
    ids = Flux2Pipeline._prepare_text_ids(torch.zeros(1, 7, 4))[0]
    assert torch.equal(positions(1, 1, 7, cpu), ids.float())


@pytest.mark.parametrize("name", ["qwen_image", "flux2_klein"])
def test_latents_of_images_are_those_that_are_decoded(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Encoding normalises as decoding does the other way: checked on the VAE's own latents."""
    model = folders.load(name, tune="none")
    vae, image = model.pipeline().vae, torch.rand(1, 3, 32, 48)
    pixels = 2 * image - 1
    found = model.latents(image)
    assert found.shape == (1, *model.latent_shape(32, 48))
    seen: list[torch.Tensor] = []
    decode = vae.decode

    def watched(z: torch.Tensor, **options: Any) -> Any:
        seen.append(z)
        return decode(z, **options)

    monkeypatch.setattr(vae, "decode", watched)
    model.decode(found)
    mode = vae.encode(pixels[:, :, None] if name == "qwen_image" else pixels).latent_dist.mode()
    torch.testing.assert_close(seen[0], mode, rtol=0, atol=1e-5)


def test_what_is_refused(folders: Folders, tmp_path: Path) -> None:
    edit("transformer/config.json", zero_cond_t=True)(tiny_qwen_image(tmp_path / "edit"))
    with pytest.raises(ModelError, match="sets zero_cond_t, so this is no Qwen-Image from text"):
        load_folder("qwen_image", tmp_path / "edit")
    with pytest.raises(ConfigError, match="guidance: .* is distilled, .* ignores guidance; set it"):
        folders.load("flux2_klein distilled", guidance=4.0)
    with pytest.raises(ModelError, match="expected _class_name 'Flux2Pipeline'"):
        load_folder("flux2", folders["flux2_klein"])
    with pytest.raises(ConfigError, match="negative_prompt: has no effect unless guidance is"):
        folders.load("qwen_image", negative_prompt="a dog")
    with pytest.raises(ModelError, match="positive multiples of 16 pixels, got 40 x 48"):
        folders.load("z_image", tune="none").sigmas(4, 40, 48)


def test_distilled_models_are_named(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = tiny_klein(tmp_path / "klein", distilled=True)
        flux2_klein(str(folder), device="cpu")
    found = [w for w in caught if "distilled to a few steps" in str(w.message)]
    assert len(found) == 1 and found[0].filename == __file__
