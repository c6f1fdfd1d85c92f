"""What every adapter has to keep when it samples, tested in the same way for all: a new adapter is
a pipeline in adapterkit.MAKE and a row of CASES.

Each case is a tiny pipeline of the real diffusers class with random weights, saved to disk and
loaded by its path. What is trained is in test_contract_training.py, what is refused in
test_contract_failures.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from adapterkit import PROMPTS, UNETS, Folders, adapter_of, diffusers_images, seeds
from modelkit import euler, noise, perturb

from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.core.errors import DataError
from flowrl.core.noise_path import vp_from_flow
from flowrl.core.types import FlowModel
from flowrl.models.adapter import pack

SIZE = (64, 48)
A_DOG = {"negative_prompt": "a dog"}


class Case(NamedTuple):
    """A pipeline of adapterkit.MAKE and the options that it is tested with."""

    pipeline: str
    options: dict[str, Any]
    latent: tuple[int, ...] = (16, 8, 6)


CASES = {
    "sd3": Case("sd3", {"guidance": 4.5, "negative_prompt": "a blue dog"}),
    "sd3.5 with T5": Case("sd3.5", {}),
    "flux dev": Case("flux", {}),
    "flux dev, true CFG": Case("flux", {"true_cfg_scale": 2.0}),
    "flux schnell": Case("flux schnell", {}),
    "sd15": Case("sd15", {"guidance": 5.0}, (4, 8, 6)),
    "sdxl": Case("sdxl", {"guidance": 5.0}, (4, 8, 6)),
    "wan": Case("wan", {"guidance": 5.0, "negative_prompt": "a blue dog"}, (16, 2, 8, 6)),
    "qwen_image": Case("qwen_image", {"guidance": 4.0}),
    "z_image": Case("z_image", {"guidance": 4.0}),
    "flux2": Case("flux2", {}, (128, 4, 3)),
    "flux2_klein": Case("flux2_klein", {"guidance": 4.0}, (128, 4, 3)),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def model(case: Case, folders: Folders) -> Any:
    """Load a case, with weights that training has moved; no test changes it."""
    made = folders.load(case.pipeline, **case.options)
    perturb(made)
    return made


def test_it_is_a_flow_model_with_a_grid_that_falls(case: Case, model: Any) -> None:
    parts = model.pipeline().components
    assert parts["unet" if "unet" in parts else "transformer"] is model.network
    sigmas = model.sigmas(7, *SIZE)
    assert sigmas.shape == (8,) and sigmas.dtype == torch.float32
    assert bool((sigmas.diff() < 0).all())
    assert 0 <= float(sigmas[-1]) < 0.1 and 0.8 < float(sigmas[0]) <= 1
    assert model.latent_shape(*SIZE) == case.latent
    assert isinstance(model, FlowModel)


# One of each branch: schedulers, spacings, predictions, guidance, sizes, a single step.
EQUAL: list[tuple[str, dict[str, Any], int, tuple[int, int], int]] = [
    ("sd3", {"guidance": 4.5, "negative_prompt": "a blue dog"}, 5, SIZE, 3),
    ("sd3", {"guidance": 0.5}, 1, (16, 64), 1),
    ("sd3.5", {}, 7, (32, 48), 3),
    ("sd3 dynamic", {"guidance": 2.0}, 6, (64, 16), 2),
    ("flux", {}, 5, SIZE, 3),
    ("flux", {"guidance": 0.0}, 1, (16, 64), 1),
    ("flux", {"true_cfg_scale": 4.0, "negative_prompt": "a blue dog"}, 5, (64, 48), 3),
    ("flux", {"max_sequence_length": 80, "tune": "full"}, 3, (32, 80), 2),
    ("flux schnell", {}, 4, (32, 96), 2),
    ("flux shifts", {}, 6, (128, 64), 1),
    ("flux linear", {}, 5, (32, 48), 2),
    ("flux static", {}, 6, (64, 64), 2),
    ("flux plain", {}, 6, (64, 32), 2),
    ("sd15", {}, 4, (64, 64), 3),
    ("sd15", {"guidance": 7.5, "negative_prompt": "a blue dog"}, 4, (40, 64), 3),
    ("sd15", {"guidance": 0.5}, 1, (8, 64), 1),
    ("sd15", {"spacing": "trailing"}, 4, (64, 64), 2),
    ("sd15 mild", {"guidance": 3.0, "negative_prompt": "a blue dog"}, 4, (16, 48), 3),
    ("sd15 v", {"guidance": 7.5, "guidance_rescale": 0.7}, 5, (64, 64), 2),
    ("sd15 zero", {"guidance": 7.5, "guidance_rescale": 0.7}, 1, (64, 64), 1),
    ("sd15 zero", {"spacing": "leading"}, 4, (64, 64), 2),
    ("sdxl", {"guidance": 5.0, "negative_prompt": ""}, 4, (40, 64), 3),
    ("sdxl", {"guidance": 5.0, "negative_prompt": "a blue dog"}, 3, (16, 48), 2),
    ("sdxl", {}, 1, (8, 64), 1),
    ("sdxl zero", {"guidance": 5.0}, 5, (64, 32), 2),
    ("wan", {}, 4, (32, 48), 2),
    ("wan", {"guidance": 5.0, "negative_prompt": "a blue dog", "frames": 9}, 5, (48, 16), 2),
    ("wan", {"flow_shift": 8.0, "frames": 1, "decode_batch": 2}, 5, (32, 32), 3),
    ("wan euler", {"guidance": 3.0}, 6, (16, 32), 1),
    ("wan ti2v", {"guidance": 3.0}, 4, (32, 64), 2),
    ("qwen_image", {"guidance": 4.0}, 4, (32, 48), 3),
    ("qwen_image", {"guidance": 7.0, "negative_prompt": "a dog", "tune": "full"}, 3, (48, 16), 2),
    ("z_image turbo", {}, 4, SIZE, 3),
    ("z_image", {"guidance": 5.0, "tune": "full"}, 4, (32, 48), 3),
    ("z_image", {"guidance": 0.5, "cfg_normalization": 0.9} | A_DOG, 7, SIZE, 2),
    ("flux2", {}, 4, SIZE, 3),
    ("flux2", {"guidance": 1.0, "tune": "full"}, 7, (16, 48), 2),
    ("flux2_klein", {"guidance": 4.0}, 4, SIZE, 3),
    ("flux2_klein distilled", {}, 4, (32, 48), 2),
]


@pytest.mark.parametrize(("name", "options", "steps", "size", "count"), EQUAL)
def test_without_noise_latents_and_images_are_the_pipelines(
    folders: Folders,
    name: str,
    options: dict[str, Any],
    steps: int,
    size: tuple[int, int],
    count: int,
) -> None:
    """The engine's draw of the noise; to 1e-5 in float32, with weights that training has moved.

    Latents of a UNet that predicts noise: to 1e-5 of their std. Random weights take no noise away,
    so that DDIM's x0 = (x - s eps) / alpha grows latents to about 1 / alpha, 14 times a trained
    network's: their own rounding in float32 is 1e-6 per step.
    """
    model, prompts = folders.load(name, **options), PROMPTS[:count]
    perturb(model, 0.05)
    shape, sigmas = model.latent_shape(*size), model.sigmas(steps, *size)
    x = torch.cat([torch.randn((1, *shape), generator=key) for key in seeds(count)])
    drawn: dict[str, Any] = {"shape": shape, "group_size": 1, "generators": seeds(count)}
    end = sample_ode(model, model.encode(prompts), sigmas=sigmas, **drawn)

    # latents
    unet = adapter_of(name) in UNETS
    ours = vp_from_flow(end, sigmas[-1:]) if unet else end
    theirs = diffusers_images(folders[name], model, x, prompts, steps=steps, output_type="latent")
    assert (theirs - x).abs().mean() > 1e-3  # the network moved something: no copy of x
    unit = max(1.0, float(theirs.std())) if unet else 1.0
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * unit)

    # images
    images = model.decode(end)
    frames = getattr(model, "frames", 1)
    assert images.shape == (count, *([frames] if frames > 1 else []), 3, *size)
    assert images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1 and images.std() > 0.01
    expected = diffusers_images(folders[name], model, x, prompts, steps=steps).reshape(images.shape)
    # Wan's VAE multiplies latents, with their rounding, by up to 3.3
    atol = 3.3e-5 if adapter_of(name) == "wan" else 1e-5
    torch.testing.assert_close(images, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("name", "options"),
    [("sd3.5", {"guidance": 4.5})]
    + [(name, {}) for name in ("flux", "flux schnell", "z_image", "flux2")],
)
def test_equal_seeds_and_texts_give_the_pipelines_bits(
    folders: Folders, name: str, options: dict[str, Any]
) -> None:
    """The pipeline draws its noise itself; a batch of texts may differ in the last bit."""
    model, size = folders.load(name, **options), {"height": 64, "width": 48}
    perturb(model)
    cond, sigmas, shape = model.encode(PROMPTS), model.sigmas(8, *SIZE), model.latent_shape(*SIZE)
    ours = sample_ode(model, cond, sigmas=sigmas, shape=shape, group_size=1, generators=seeds(3))
    fn, pipeline = adapter_of(name), model.pipeline()
    plain = {"z_image": 0.0, "flux2": 4.0}.get(fn, 3.5)
    call: dict[str, Any] = {"guidance_scale": options.get("guidance", plain)}
    for sign in ("", "negative_") if model.guided else ("",):
        call[f"{sign}prompt_embeds"] = rows = cond[f"{sign}embeds"]
        if fn == "z_image":
            call["prompt_embeds"] = list(map(torch.narrow, rows, *[[0] * 3] * 2, cond["length"]))
        if f"{sign}pooled" in cond:
            call[f"{sign}pooled_prompt_embeds"] = cond[f"{sign}pooled"]
    pipeline.set_progress_bar_config(disable=True)
    call |= {"num_inference_steps": 8, "generator": seeds(3), "output_type": "latent"}
    theirs = pipeline(**size, **call).images
    packed = {"flux": pack, "flux2": lambda x: x.flatten(2).mT}
    assert torch.equal(packed[fn](ours) if fn in packed else ours, theirs)


TIMES: list[tuple[str, dict[str, Any]]] = [
    ("sd3", {}),
    ("sd3 dynamic", {}),
    ("flux", {}),
    ("flux", {"dtype": "bfloat16", "tune": "full"}),
    ("flux", {"dtype": "float16", "tune": "none"}),
    ("sd15 zero", {}),
    ("wan euler", {"dtype": "bfloat16"}),
    ("flux2", {"dtype": "bfloat16"}),
]
PLAIN = ("sdxl", "wan", "wan ti2v", "qwen_image", "z_image", "flux2_klein")
TIMES += [(name, {}) for name in PLAIN]
EMBEDDERS = {
    **dict.fromkeys(UNETS, "time_proj"),
    "wan": "condition_embedder.timesteps_proj",
    "z_image": "t_embedder",
    **dict.fromkeys(("flux2", "flux2_klein"), "time_guidance_embed.timestep_embedder"),
}


@pytest.mark.parametrize(("name", "options"), TIMES)
def test_the_network_is_asked_for_the_pipelines_times(
    folders: Folders, name: str, options: dict[str, Any]
) -> None:
    """What reaches the time embedding, to the bit, in 28 steps; rollout and training share it."""
    model, seen = folders.load(name, **options), []
    embed = EMBEDDERS.get(adapter_of(name), "time_text_embed")
    layer = model.network.get_submodule(embed)
    hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    x, sigmas = noise(model, 2, 32, 32), model.sigmas(28, 32, 32)
    euler(model, x, sigmas, PROMPTS[:2])
    ours, theirs = torch.stack(seen), seen
    seen.clear()
    in_float32 = model.network.dtype != model.dtype  # master weights, arithmetic in model.dtype
    with torch.autocast("cpu", model.dtype, enabled=in_float32):
        diffusers_images(folders[name], model, x.to(model.dtype), PROMPTS[:2], steps=28)
    hook.remove()
    assert len(ours) == 28 and torch.equal(ours, torch.stack(theirs))
    assert ours.dtype == theirs[0].dtype


def test_text_is_encoded_once_and_row_by_row(
    case: Case, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row depends on its prompt alone, to the bit; guidance brings a row without the prompt for
    each."""
    model = folders.load(case.pipeline, **case.options)
    calls, encode = [], model.pipeline().encode_prompt

    def counted(prompts: list[str], *args: Any, **options: Any) -> Any:
        calls.extend(prompts)
        return encode(prompts, *args, **options)

    monkeypatch.setattr(model.pipeline(), "encode_prompt", counted)
    alone, cond = model.encode(PROMPTS[1:2]), model.encode(PROMPTS)
    turned = model.encode([*PROMPTS[::-1], PROMPTS[0]])
    negative = [] if not model.guided or case.pipeline == "sdxl" else [model.negative_prompt]
    assert sorted(calls) == sorted(PROMPTS + negative)  # SDXL's are zeros
    for name, rows in cond.items():
        assert len(rows) == 3 and not rows.requires_grad
        assert torch.equal(rows, turned[name][[2, 1, 0]])
        assert torch.equal(rows[1:2], alone[name]) and torch.equal(rows[0], turned[name][3])
        assert name.startswith("negative_") or (rows[0] - rows[1]).abs().max() > 0.1
    assert any(name.startswith("negative_") for name in cond) == model.guided
    with pytest.raises(DataError, match="at least one prompt"):
        model.encode([])


def test_a_velocity_depends_on_its_own_row(model: Any) -> None:
    x, cond = noise(model, 3, *SIZE), model.encode(PROMPTS)
    sigma = model.sigmas(6, *SIZE)[torch.tensor([0, 3, 5])]
    with torch.no_grad():
        v, again = model.velocity(x, sigma, cond), model.velocity(x, sigma, cond)
        alone = []
        for i in range(3):
            row = {name: rows[i : i + 1] for name, rows in cond.items()}
            alone.append(model.velocity(x[i : i + 1], sigma[i : i + 1], row))
    assert v.shape == x.shape and v.dtype == torch.float32 and torch.equal(v, again)
    torch.testing.assert_close(torch.cat(alone), v, rtol=1e-4, atol=1e-4 * float(v.abs().mean()))


def test_decode_does_not_depend_on_the_slice(case: Case, model: Any, folders: Folders) -> None:
    sliced = folders.load(case.pipeline, **case.options, decode_batch=2)
    x = noise(model, 5, 32, 48)
    torch.testing.assert_close(model.decode(x), sliced.decode(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_lora_in_bfloat16_equals_the_pipelines_first_step(folders: Folders, name: str) -> None:
    """One step from the same bfloat16 noise; only the pipeline's rounding of its result separates
    the two."""
    model = folders.load(name, dtype="bfloat16")
    x, prompts = noise(model, 2).bfloat16(), PROMPTS[:2]
    ours = euler(model, x.float(), model.sigmas(1, 64, 64), prompts)
    theirs = diffusers_images(folders[name], model, x, prompts, steps=1, output_type="latent")
    assert theirs.dtype == torch.bfloat16 and torch.equal(ours.bfloat16(), theirs)
