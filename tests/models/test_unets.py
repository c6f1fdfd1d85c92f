"""What only the adapters of UNets have to keep: the training schedule seen from the flow path,
steps, options; what they share with all is in the contract files."""

from __future__ import annotations

import inspect
import math
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from adapterkit import PROMPTS, UNETS, Folders, diffusers_images, sampled
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
    UniPCMultistepScheduler,
)
from modelkit import euler as euler_steps
from modelkit import noise, told
from tiny import EULER, NOISE, WIDTH
from torch import Tensor

from flowrl.algorithms.likelihoods.forward import forward
from flowrl.algorithms.likelihoods.through_sampler import draft_lv
from flowrl.algorithms.plans.windows import full
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.transitions import ddim, euler
from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.noise_path import flow_from_vp, vp_from_flow
from flowrl.core.seeds import NodeStreams, generator
from flowrl.evaluation.velocity_drift import Given, take
from flowrl.models.unet import KEPT, SCHEDULERS, WITHOUT_EFFECT, Schedule, ddim_scheduler


def test_a_sigma_between_timesteps_is_refused(folders: Folders) -> None:
    model = folders.load("sd15", guidance=2.0)
    x, cond = noise(model, 2), model.encode(PROMPTS[:2])
    sigmas = model.sigmas(10, 64, 64)
    message = "1000 training timesteps, as `sigmas` gives them, got"
    for wrong in (0.5, 0.0, 1.0, float("nan"), float(sigmas[3]) + 1e-4):
        with pytest.raises(ModelError, match=message):
            model.velocity(x, torch.tensor([float(sigmas[0]), wrong]), cond)


def test_latents_have_the_std_of_the_path(folders: Folders) -> None:
    """alpha x0 + s eps of unit data has std 1, so over alpha + s it is hypot(1 - sigma, sigma)."""
    model = folders.load("sd15")
    ro = sampled(model, steps=10, size=(64, 64), transition=ddim, noise_scale=1.0)
    first, roots = ro.sigmas[0], ro.x[ro.tree.parent < 0]
    assert 0.88 < float(first) < 0.9  # timestep 901
    found = float(vp_from_flow(roots, ro.sigmas[:1]).std())
    assert found == pytest.approx(1, abs=0.1)  # 1024 draws
    assert float(roots.std()) == pytest.approx(float(torch.hypot(1 - first, first)), rel=0.1)


@pytest.mark.parametrize("name", UNETS)
def test_drift_is_looked_at_where_rollouts_start(folders: Folders, name: str) -> None:
    """The probe's first latents are the engine's of the same noise, so they lie on the path."""
    model = folders.load(name)
    probe = take(model, Given(PROMPTS[:2]), height=64, width=64, steps=10, seed=0)
    sigmas = model.sigmas(10, 64, 64)
    ro = rollout(
        model,
        model.encode(PROMPTS[:2]),
        full(0, steps=10, noise_scale=1.0),
        ddim,
        sigmas=sigmas,
        shape=model.latent_shape(64, 64),
        group_size=1,
        generators=[generator(0, "drift", place) for place in range(2)],
    )
    torch.testing.assert_close(probe.x[0], ro.x[ro.tree.parent < 0], rtol=1e-6, atol=0)
    # 512 draws: their std is off by 3 %, that of noise of std 1 by another 10
    first = float(sigmas[0])
    assert first < 0.95
    assert float(probe.x[0].std()) == pytest.approx(math.hypot(1 - first, first), rel=0.07)


@pytest.mark.parametrize("likelihood", [forward(times="grid"), draft_lv(draws=1)])
def test_leaves_are_noised_from_what_the_pipeline_decodes(
    folders: Folders, likelihood: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expected: what the VAE is handed for the leaves, noised on the path by hand."""
    model = folders.load("sd15")
    ro = sampled(model, steps=10, size=(64, 64), transition=ddim, noise_scale=1.0)
    assert 0.027 < float(ro.sigmas[-1]) < 0.029
    vae, seen = model.pipeline().vae, list[Tensor]()
    decode = vae.decode

    def watched(z: Tensor, return_dict: bool) -> Any:
        seen.append(z)
        return decode(z, return_dict=return_dict)

    monkeypatch.setattr(vae, "decode", watched)
    model.decode(ro.x[ro.leaf])
    x0 = torch.cat(seen) * vae.config.scaling_factor
    advantage = torch.zeros(len(ro.x))
    batch = likelihood.batch(ro, advantage, ro.leaf, NodeStreams(ro.tree.group, "noise"))
    eps = (batch.x - (1 - batch.sigma[:, None, None, None]) * x0) / batch.sigma[:, None, None, None]
    assert float(eps.std()) == pytest.approx(1, abs=0.1)
    if isinstance(likelihood, forward):
        torch.testing.assert_close(batch.target, eps - x0, rtol=0, atol=1e-4)
    # the leaves themselves lie 2.8 % lower, and another noise would be found from them
    ratio = float(ro.x[ro.leaf].std() / x0.std())
    assert ratio == pytest.approx(0.972, abs=0.001)
    # the same noise on an image of the pipeline's own scale
    stream = NodeStreams(ro.tree.group, "noise").of(ro.leaf[:1])[0]
    if isinstance(likelihood, draft_lv):
        drawn = torch.randn(eps[:1].shape, generator=stream)
        torch.testing.assert_close(eps[:1], drawn, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"original_size": [1024, 512], "crop": [3, 7], "target_size": [256, 384]},
        {"crop": [0, 9]},
    ],
)
def test_network_is_told_what_the_pipeline_tells_it(
    folders: Folders, sizes: dict[str, list[int]]
) -> None:
    model = folders.load("sdxl", guidance=5.0, **sizes)
    x = noise(model, 3, 64, 48)
    names = {"crop": "crops_coords_top_left"}
    options = {names.get(name, name): tuple(pair) for name, pair in sizes.items()}
    with told(model.unet) as seen:
        euler_steps(model, x, model.sigmas(1, 64, 48), PROMPTS)
        diffusers_images(folders["sdxl"], model, x, PROMPTS, steps=1, **options)
    own, expected = (call["added_cond_kwargs"] for call in seen)
    assert torch.equal(own["time_ids"], expected["time_ids"]) and own["time_ids"].shape == (6, 6)
    torch.testing.assert_close(own["text_embeds"], expected["text_embeds"], rtol=0, atol=1e-5)
    filled = {"original_size": [64, 48], "crop": [0, 0], "target_size": [64, 48]} | sizes
    assert own["time_ids"][0].tolist() == [n for pair in filled.values() for n in pair]


@pytest.mark.parametrize(
    ("kind", "negative"), [("sdxl", None), ("sdxl", ""), ("sdxl zero", None), ("sdxl", "a dog")]
)
def test_encode_equals_the_pipelines_batch(
    folders: Folders, kind: str, negative: str | None
) -> None:
    model = folders.load(kind, guidance=2.0, negative_prompt=negative)
    cond, texts = model.encode(PROMPTS), None if negative is None else [negative] * 3
    found = model.pipeline().encode_prompt(PROMPTS, negative_prompt=texts)
    names = ("embeds", "negative_embeds", "pooled", "negative_pooled")
    expected = dict(zip(names, found, strict=True))
    torch.testing.assert_close(cond, {name: expected[name] for name in cond}, rtol=0, atol=1e-5)
    assert cond["embeds"].shape == (3, 77, 2 * WIDTH) and cond["pooled"].shape == (3, WIDTH)
    zeros = kind == "sdxl" and negative is None  # force_zeros_for_empty_prompt
    for name in ("negative_embeds", "negative_pooled"):
        assert bool((cond[name] == 0).all()) == zeros
    assert set(folders.load(kind).encode(PROMPTS)) == {"embeds", "pooled"}


def short_and_exact(folders: Folders) -> tuple[Any, Any]:
    """Load SDXL in float16, and in float32 with the VAE's weights rounded to float16 once."""
    model = folders.load("sdxl", dtype="float16", tune="none")
    exact = folders.load("sdxl", tune="none")
    wide = exact.pipeline().vae
    wide.load_state_dict({name: value.half().float() for name, value in wide.state_dict().items()})
    return model, exact


def test_vae_encodes_float16_in_float32(folders: Folders) -> None:
    model, exact = short_and_exact(folders)
    vae = model.pipeline().vae
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    found, expected = model.latents(images), exact.latents(images)
    assert vae.dtype == torch.float16 and found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    # as in the files of VAEs that were mended for float16: rounded on the way
    vae.register_to_config(force_upcast=False)
    assert not torch.allclose(model.latents(images), expected, rtol=0, atol=1e-6)


def test_vae_decodes_float16_in_float32(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    model, exact = short_and_exact(folders)
    vae, seen = model.pipeline().vae, []
    decode = vae.decode

    def watched(z: Tensor, return_dict: bool) -> Any:
        seen.append((z.dtype, vae.dtype))
        return decode(z, return_dict=return_dict)

    monkeypatch.setattr(vae, "decode", watched)
    x = noise(model, 2)
    images = model.decode(x)
    assert seen == [(torch.float32, torch.float32)] and vae.dtype == torch.float16
    torch.testing.assert_close(images, exact.decode(x), rtol=0, atol=1e-6)
    # as in the files of VAEs that were mended for float16
    vae.register_to_config(force_upcast=False)
    model.decode(x)
    assert seen[1:] == [(torch.float16, torch.float16)]


def test_a_config_can_set_the_sizes() -> None:
    sizes = "original_size: [1024, 512], crop: [0, 0]"
    model = f"model={{fn: sdxl, path: x, guidance: 5.0, negative_prompt: null, {sizes}}}"
    kwargs = load_config("shapes/flow_grpo", [model, "transition.fn=ddim"]).model.kwargs
    assert kwargs["original_size"] == (1024, 512)
    assert kwargs["target_size"] is None and kwargs["negative_prompt"] is None
    with pytest.raises(ConfigError, match="original_size"):
        load_config("shapes/flow_grpo", ["model={fn: sdxl, path: x, original_size: big}"])


CPU = torch.device("cpu")


def schedule(**changes: Any) -> Schedule:
    scheduler = DDIMScheduler(**(NOISE | {"clip_sample": False} | changes))
    return Schedule(ddim_scheduler(scheduler, "model", None), CPU)


def levels() -> np.ndarray:
    """Return sigma [1000] of Stable Diffusion, in numpy float64 from its published betas."""
    beta = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    bar = np.cumprod(1 - beta)
    alpha, s = np.sqrt(bar), np.sqrt(1 - bar)
    return s / (alpha + s)


def test_levels_are_those_of_the_published_betas() -> None:
    table = schedule().sigma
    # the scheduler multiplies in float32
    np.testing.assert_allclose(table.numpy(), levels(), rtol=0, atol=2e-6)
    assert table.dtype == torch.float32
    assert (float(table[0]), float(table[-1])) == pytest.approx((0.028341, 0.935958), abs=1e-6)


TRAILING = {"timestep_spacing": "trailing"}
ONE = {"set_alpha_to_one": True}


@pytest.mark.parametrize(
    ("changes", "steps", "timesteps", "end"),
    [  # the formulas of 2305.08891 table 2
        ({}, 4, [751, 501, 251, 1], 0),
        (ONE | {"steps_offset": 0}, 3, [666, 333, 0], None),
        (TRAILING, 4, [999, 749, 499, 249], 0),
        (TRAILING | ONE, 7, [999, 856, 713, 570, 428, 285, 142], None),
    ],
)
def test_grid_is_that_of_the_timesteps(
    changes: dict[str, Any], steps: int, timesteps: list[int], end: int | None
) -> None:
    grid, table = schedule(**changes).grid(steps), levels()
    expected = [*table[timesteps], 0.0 if end is None else table[end]]
    assert grid.dtype == torch.float32
    np.testing.assert_allclose(grid.numpy(), expected, rtol=0, atol=2e-6)


def test_the_ends_of_a_grid() -> None:
    v = {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}
    zero = schedule(**TRAILING, **v)  # zero terminal SNR starts at one
    assert zero.grid(5)[0] == 1 and zero.sigma[998] < 1
    with pytest.raises(ConfigError, match="steps: expected 1 to 1000"):
        schedule().grid(1001)


@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_every_number_of_steps_has_as_many_levels(spacing: str) -> None:
    """Against diffusers' DDIM: its own timesteps, without the -1 that it adds to 61, 103, 121 and
    122 trailing ones; every grid falls."""
    model, odd = schedule(timestep_spacing=spacing), []
    for steps in range(1, 201):
        theirs = DDIMScheduler(**(NOISE | {"timestep_spacing": spacing}))
        theirs.set_timesteps(steps)
        timesteps = theirs.timesteps[theirs.timesteps >= 0]
        if len(timesteps) < len(theirs.timesteps):
            odd.append(steps)
        grid = model.grid(steps)
        assert len(grid) == steps + 1 and bool((grid.diff() < 0).all())
        assert torch.equal(grid[:-1], model.sigma[timesteps])
    assert odd[:4] == ([61, 103, 121, 122] if spacing == "trailing" else [])


def test_a_last_step_without_length_is_refused() -> None:
    """As SDXL's pipeline would take it: from timestep 0 to timestep 0."""
    with pytest.raises(ConfigError, match="last of 20 steps has no length.*steps_offset to 1"):
        schedule(steps_offset=0).grid(20)


@pytest.mark.filterwarnings("ignore:The configuration file of this scheduler:FutureWarning")
def test_what_the_pipeline_corrects_in_an_outdated_file_is_kept() -> None:
    """A file without steps_offset and clip_sample, as the first Stable Diffusion files: its
    pipeline sets both, and samples these timesteps."""
    bare = {name: value for name, value in NOISE.items() if name.startswith("beta")}
    for extra in ({"set_alpha_to_one": False}, {}):
        pipe = sd15_pipeline(DDIMScheduler(**bare, **extra))
        pipe.scheduler.set_timesteps(10)
        ours = ddim_scheduler(pipe.scheduler, "model", None)
        assert ours.config.steps_offset == pipe.scheduler.config.steps_offset == 1
        assert ours.config.clip_sample is False
        assert ours.config.set_alpha_to_one is extra.get("set_alpha_to_one", True)
        grid, model = Schedule(ours, CPU).grid(10), Schedule(ours, CPU)
        assert torch.equal(grid[:-1], model.sigma[pipe.scheduler.timesteps])
        assert pipe.scheduler.timesteps[-1] == 1


def sd15_pipeline(scheduler: Any) -> StableDiffusionPipeline:
    """Let diffusers' pipeline look at a scheduler."""
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "unet", "safety_checker"))
    more = {"feature_extractor": None, "requires_safety_checker": False}
    return StableDiffusionPipeline(**parts, scheduler=scheduler, **more)


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        (EulerDiscreteScheduler, {"use_karras_sigmas": True}),
        (EulerDiscreteScheduler, {"use_exponential_sigmas": True}),
        (EulerDiscreteScheduler, {"use_beta_sigmas": True}),
        (EulerDiscreteScheduler, {"sigma_max": 10.0}),
        (EulerDiscreteScheduler, {"timestep_type": "continuous"}),
        (DPMSolverMultistepScheduler, {"use_karras_sigmas": True}),
        (DPMSolverMultistepScheduler, {"use_lu_lambdas": True}),
        (DPMSolverMultistepScheduler, {"lambda_min_clipped": -5.1}),
        (DPMSolverMultistepScheduler, {"use_flow_sigmas": True}),
        (UniPCMultistepScheduler, {"use_beta_sigmas": True}),
    ],
)
def test_flags_that_move_the_grid_are_refused_by_name(kind: Any, flag: dict[str, Any]) -> None:
    ((name, value),) = flag.items()
    with pytest.raises(ModelError, match=f"scheduler_config.json: {name} {value!r}: "):
        ddim_scheduler(kind(**EULER, **flag), "model", "leading")
    # DDIM itself knows none of them, and diffusers ignores them there
    other = DDIMScheduler(**NOISE, clip_sample=False)
    other.register_to_config(**flag)
    assert ddim_scheduler(other, "model", None).config.clip_sample is False


def test_where_other_classes_end_and_which_levels_they_know() -> None:
    """From the classes' own defaults, and the names by which each of them says so."""
    heun = ddim_scheduler(HeunDiscreteScheduler(), "model", "leading").config
    assert (heun.beta_start, heun.beta_end, heun.set_alpha_to_one) == (0.00085, 0.012, True)
    assert ddim_scheduler(PNDMScheduler(**EULER), "model", None).config.set_alpha_to_one is False
    for kind, last in (("zero", True), ("sigma_min", False)):
        dpm = DPMSolverMultistepScheduler(**EULER, final_sigmas_type=kind)
        assert ddim_scheduler(dpm, "model", "leading").config.set_alpha_to_one is last
    # SDXL's file: Euler's, with a key of DDIM beside, which DDIM has always read
    euler_file = EulerDiscreteScheduler(**(EULER | {"timestep_spacing": "leading"}))
    euler_file.register_to_config(set_alpha_to_one=False)
    found = ddim_scheduler(euler_file, "model", None).config
    assert found.set_alpha_to_one is False and found.steps_offset == EULER["steps_offset"]


def test_every_setting_of_a_scheduler_is_looked_at() -> None:
    """A setting that a release of diffusers adds to one of the classes has to be kept, refused, or
    be known to be the solver's."""
    solver = {
        *("algorithm_type", "solver_order", "solver_type", "lower_order_final", "euler_at_final"),
        *("predict_x0", "disable_corrector", "solver_p", "skip_prk_steps", "variance_type"),
        *("interpolation_type", "flow_shift", "time_shift_type"),  # of refused ones, or of no grid
    }
    read = {
        *("timestep_spacing", "final_sigmas_type", "clip_sample", "thresholding"),
        *("clip_sample_range", "sample_max_value", "dynamic_thresholding_ratio"),
    }
    for name in SCHEDULERS:
        settings = inspect.signature(getattr(diffusers, name).__init__).parameters.keys() - {"self"}
        assert settings <= {*KEPT, *WITHOUT_EFFECT, *solver, *read}, name


def test_every_level_finds_its_timestep() -> None:
    model = schedule()
    t = torch.arange(1000)
    next_to = torch.nextafter(model.sigma, torch.tensor(2.0))
    for sigma in (model.sigma, next_to, model.sigma.double(), model.sigma - 5e-7):
        found, known = model.timesteps(sigma)
        assert torch.equal(found, t) and bool(known.all())
    between = (model.sigma[1:] + model.sigma[:-1]) / 2
    for wrong in (model.sigma + 1e-5, between, torch.tensor([0.0, 1.0, torch.nan])):
        assert not bool(model.timesteps(wrong)[1].any())


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_velocity_is_the_noise_minus_the_data(prediction: str) -> None:
    """From x0 and eps: what a perfect network says of x_vp = alpha x0 + s eps, by the definitions
    of 2202.00512."""
    model = schedule(prediction_type=prediction)
    torch.manual_seed(0)
    x0, eps = torch.randn(2, 6, 3, dtype=torch.float64)
    degrees = torch.tensor([1.0, 20, 45, 70, 86, 90], dtype=torch.float64).deg2rad()
    if prediction == "epsilon":  # where alpha is 0, noise says nothing of the data
        x0, eps, degrees = x0[:-1], eps[:-1], degrees[:-1]
    alpha, s = degrees.cos(), degrees.sin()
    x_vp = alpha[:, None] * x0 + s[:, None] * eps
    out = eps if prediction == "epsilon" else alpha[:, None] * eps - s[:, None] * x0
    x, sigma = flow_from_vp(x_vp, alpha, s)
    torch.testing.assert_close(model.velocity(x, out, sigma), eps - x0)


def rescaled(model: Schedule, x_vp: Tensor, t: int) -> Tensor:
    """Return x of x_vp at timestep t, or at the final alpha for t < 0; alpha and s straight from
    the scheduler."""
    scheduler = model._scheduler
    bar = scheduler.alphas_cumprod[t] if t >= 0 else scheduler.final_alpha_cumprod
    return x_vp / (bar.sqrt() + (1 - bar).sqrt())


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("one", [True, False])
def test_the_euler_step_is_ddims(prediction: str, one: bool) -> None:
    """DDIMScheduler.step with eta 0 on the same network output, for every step of a grid."""
    model = schedule(prediction_type=prediction, set_alpha_to_one=one)
    scheduler, grid = model._scheduler, model.grid(20)
    scheduler.set_timesteps(20)
    torch.manual_seed(0)
    for k, t in enumerate(scheduler.timesteps.tolist()):
        x_vp, out = torch.randn(2, 2, 4, 8, 8)
        expected = rescaled(model, scheduler.step(out, t, x_vp).prev_sample, t - 50)
        x, sigma = rescaled(model, x_vp, t), grid[k].expand(2)
        got = euler(x, model.velocity(x, out, sigma), sigma, grid[k + 1].expand(2))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_schedulers_of_other_classes_become_ddims() -> None:
    """DDIMScheduler's own default would clip latents at 1; other files do not speak of it."""
    leading = EulerDiscreteScheduler(**EULER, timestep_spacing="leading")
    for scheduler in (leading, DDPMScheduler(**EULER)):
        assert ddim_scheduler(scheduler, "model", None).config.clip_sample is False
    linspace = EulerDiscreteScheduler(**EULER, timestep_spacing="linspace")
    assert ddim_scheduler(linspace, "model", "trailing").config.timestep_spacing == "trailing"
    laplace = DDIMScheduler(**NOISE, clip_sample=False)
    laplace.register_to_config(beta_schedule="laplace")
    for scheduler, message in (
        (DDPMScheduler(**EULER, clip_sample=True), "clip_sample and thresholding must be false"),
        (linspace, "timestep_spacing 'linspace'"),
        (laplace, "model: scheduler/scheduler_config.json: laplace is not implemented"),
    ):
        with pytest.raises(ModelError, match=message):
            ddim_scheduler(scheduler, "model", None)
