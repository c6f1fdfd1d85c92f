"""What only the adapters of UNets have to keep; what they share with all is in the contract
files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapterkit import PROMPTS, Folders
from diffusers import DDIMScheduler, EulerDiscreteScheduler
from modelkit import gradients, noise, perturb
from rolloutkit import decisions, score_draws
from tiny import EULER, WIDTH, tiny_sd15
from torch import Tensor
from toykit import toy
from unetkit import diffusers_pipeline, in_vp, ours, theirs

from flowrl.algorithms.plans.windows import full
from flowrl.algorithms.rollout.engine import rollout, sample_ode
from flowrl.algorithms.transitions import cps, dance_sde, ddim, flow_sde
from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.noise_path import vp_from_flow
from flowrl.core.types import FlowModel, Rollout, Transition
from flowrl.models.sd15 import sd15
from flowrl.models.unet import UNetModel
from flowrl.training.trainer import Trainer


@pytest.mark.parametrize("kind", ["sd15", "sd15 zero"])
def test_engine_without_noise_equals_the_pipeline(folders: Folders, kind: str) -> None:
    """The engine draws the noise; the pipeline gets what the same generators give."""
    model = folders.load(kind, guidance=3.0)
    perturb(model)
    sigmas, shape = model.sigmas(5, 64, 48), model.latent_shape(64, 48)
    seeds = [torch.Generator().manual_seed(i) for i in range(3)]
    x = sample_ode(
        model, model.encode(PROMPTS), sigmas=sigmas, shape=shape, group_size=1, generators=seeds
    )
    x_vp = torch.cat(
        [torch.randn((1, *shape), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    )
    expected = theirs(diffusers_pipeline(model, folders[kind]), model, x_vp, PROMPTS, steps=5)[0]
    unit = max(1.0, float(expected.std()))
    torch.testing.assert_close(in_vp(x, sigmas), expected, rtol=0, atol=1e-5 * unit)


@pytest.mark.parametrize("kind", ["sd15", "sd15 zero"])
def test_network_sees_the_pipelines_times(folders: Folders, kind: str) -> None:
    model, seen = folders.load(kind), []
    hook = model.unet.register_forward_pre_hook(lambda _module, args: seen.append(args[1]))
    x = noise(model, 2)
    ours(model, x, model.sigmas(5, 64, 64), PROMPTS[:2])
    own = torch.stack(seen)
    assert own.dtype == torch.int64 and own.shape == (5, 2)
    seen.clear()
    theirs(diffusers_pipeline(model, folders[kind]), model, x, PROMPTS[:2], steps=5)
    hook.remove()
    assert torch.equal(own, torch.stack(seen)[:, None].expand(5, 2))
    assert own[0, 0] == (999 if kind == "sd15 zero" else 801)


def test_a_sigma_between_timesteps_is_refused(folders: Folders) -> None:
    model = folders.load("sd15", guidance=2.0)
    x, cond = noise(model, 2), model.encode(PROMPTS[:2])
    sigmas = model.sigmas(10, 64, 64)
    for wrong in (0.5, 0.0, 1.0, float("nan"), float(sigmas[3]) + 1e-4):
        with pytest.raises(
            ModelError, match="1000 training timesteps, as `sigmas` gives them, got"
        ):
            model.velocity(x, torch.stack([sigmas[0], torch.tensor(wrong)]), cond)


def forest(
    model: FlowModel,
    transition: Transition,
    noise_scale: float,
    *,
    steps: int = 5,
    ode_last: int = 0,
) -> Rollout:
    return rollout(
        model,
        model.encode(PROMPTS[:2]),
        full(0, steps=steps, noise_scale=noise_scale, ode_last=ode_last),
        transition,
        sigmas=model.sigmas(steps, 64, 64),
        shape=model.latent_shape(64, 64),
        group_size=2,
        generators=[torch.Generator().manual_seed(i) for i in range(2)],
        micro_batch=4,
    )


@pytest.mark.parametrize(
    ("kind", "transition", "noise_scale"),
    [
        ("sd15", ddim, 1.0),
        ("sd15", dance_sde, 0.3),
        ("sd15 v", ddim, 0.5),
        ("sd15 zero", ddim, 1.0),
        ("sd15 zero", flow_sde, 0.7),
        ("sd15 zero", cps, 0.8),
    ],
)
def test_ratio_is_one_and_the_gradient_flows(
    folders: Folders, kind: str, transition: Transition, noise_scale: float
) -> None:
    model = folders.load(kind, guidance=3.0)
    perturb(model)
    ro = forest(model, transition, noise_scale)
    total = 0
    # one denoising step at a time: the network calls of the rollout
    for step in ro.tree.step[ro.tree.std > 0].unique():
        nodes = ((ro.tree.step == step) & (ro.tree.std > 0)).nonzero().flatten()
        batch = decisions(ro, torch.tensor([1.0, -1.0]).repeat(len(ro.x))[: len(ro.x)], nodes=nodes)
        log_prob = score_draws(model, batch, transition).log_prob
        assert torch.equal(log_prob, batch.old_log_prob)
        grads = gradients(model, (batch.advantage * log_prob).mean())
        assert set(grads) == set(model.trainable())
        assert all(
            bool(grad.isfinite().all()) and float(grad.abs().max()) > 0 for grad in grads.values()
        )
        total += len(nodes)
    clean = float(ro.sigmas[-1]) == 0 and transition in (
        ddim,
        cps,
    )  # their last step adds no noise there
    assert total == 4 * (4 if clean else 5)


def test_latents_have_the_std_of_the_path(folders: Folders) -> None:
    """Closed form: alpha x0 + s eps of unit data has std 1, so over alpha + s it is hypot(1 -
    sigma, sigma)."""
    model = folders.load("sd15")
    sigmas = model.sigmas(10, 64, 64)
    ro = forest(model, ddim, 1.0, steps=10)
    roots = ro.x[ro.tree.parent < 0]
    assert 0.88 < float(sigmas[0]) < 0.9  # timestep 901
    assert float(vp_from_flow(roots, sigmas[:1]).std()) == pytest.approx(1, abs=0.1)  # 1024 draws
    assert float(roots.std()) == pytest.approx(
        float(torch.hypot(1 - sigmas[0], sigmas[0])), rel=0.1
    )


DDPO = (
    "plan={fn: full, steps: 4, noise_scale: 1.0}",
    "transition.fn=ddim",
    "loss.clip_low=1e-4",
    "loss.clip_high=1e-4",
)
DANCE = (
    "plan={fn: full, steps: 4, noise_scale: 0.3, ode_last: 1}",
    "transition.fn=dance_sde",
    "train.same_noise=true",
)


@pytest.mark.integration
@pytest.mark.parametrize("method", [DDPO, DANCE], ids=["ddpo", "dance"])
def test_methods_train_it(folders: Folders, tmp_path: Path, method: tuple[str, ...]) -> None:
    options = "device: cpu, guidance: 5.0, lora: {rank: 4}"
    model = f"model={{fn: sd15, path: {folders['sd15']}, {options}}}"
    trainer = Trainer(toy(tmp_path, model, "train.updates=1", *method))
    before = {name: param.detach().clone() for name, param in trainer.params.items()}
    metrics = trainer.step()
    assert (
        metrics["on_policy_gap"] < 1e-5
        and metrics["trained"] == 2 * 4 * 3
        and metrics["grad_norm"] > 0
    )
    changed = [
        name for name, param in trainer.params.items() if not torch.equal(param, before[name])
    ]
    assert changed and all(bool(param.isfinite().all()) for param in trainer.params.values())
    assert trainer.step()["grad_norm"] > 0


def test_scheduler_of_another_class_does_not_clip(tmp_path: Path) -> None:
    """Euler's config says nothing of clip_sample, and DDIMScheduler's own default would clip the
    latents at 1."""
    euler = EulerDiscreteScheduler(**EULER, timestep_spacing="leading")
    model = sd15(str(tiny_sd15(tmp_path / "euler", scheduler=euler)), device="cpu")
    config = model.pipeline().scheduler.config
    assert type(model.pipeline().scheduler) is DDIMScheduler and config.clip_sample is False
    assert config.set_alpha_to_one and model.sigmas(4, 64, 64)[-1] == 0


def watch(model: UNetModel[Any], run: Callable[[], Any]) -> list[dict[str, Tensor]]:
    """Return the added conditioning of every call of the UNet in run."""
    seen: list[dict[str, Tensor]] = []
    hook = model.unet.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["added_cond_kwargs"]), with_kwargs=True
    )
    run()
    hook.remove()
    return seen


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"original_size": [1024, 512], "crop": [3, 7], "target_size": [256, 384]},
        {"crop": [0, 9]},
    ],
)
def test_network_is_told_what_the_pipeline_tells_it(
    folders: Folders, told: dict[str, list[int]]
) -> None:
    model = folders.load("sdxl", guidance=5.0, **told)
    x = noise(model, 3, 64, 48)
    own = watch(model, lambda: ours(model, x, model.sigmas(1, 64, 48), PROMPTS))
    names = {
        "original_size": "original_size",
        "crop": "crops_coords_top_left",
        "target_size": "target_size",
    }
    options = {names[name]: tuple(pair) for name, pair in told.items()}
    pipeline = diffusers_pipeline(model, folders["sdxl"])
    expected = watch(model, lambda: theirs(pipeline, model, x, PROMPTS, steps=1, **options))
    assert len(own) == len(expected) == 1
    assert torch.equal(own[0]["time_ids"], expected[0]["time_ids"]) and own[0][
        "time_ids"
    ].shape == (6, 6)
    torch.testing.assert_close(own[0]["text_embeds"], expected[0]["text_embeds"], rtol=0, atol=1e-5)
    assert own[0]["time_ids"][0].tolist() == [
        *told.get("original_size", [64, 48]),
        *told.get("crop", [0, 0]),
        *told.get("target_size", [64, 48]),
    ]


@pytest.mark.parametrize(
    ("kind", "negative"), [("sdxl", None), ("sdxl", ""), ("sdxl zero", None), ("sdxl", "a dog")]
)
def test_encode_equals_the_pipelines_batch(
    folders: Folders, kind: str, negative: str | None
) -> None:
    model = folders.load(kind, guidance=2.0, negative_prompt=negative)
    cond = model.encode(PROMPTS)
    texts = None if negative is None else [negative] * 3
    embeds, negatives, pooled, negative_pooled = model.pipeline().encode_prompt(
        PROMPTS, negative_prompt=texts
    )
    expected = {
        "embeds": embeds,
        "pooled": pooled,
        "negative_embeds": negatives,
        "negative_pooled": negative_pooled,
    }
    torch.testing.assert_close(cond, expected, rtol=0, atol=1e-5)
    assert cond["embeds"].shape == (3, 77, 2 * WIDTH) and cond["pooled"].shape == (3, WIDTH)
    zeros = kind == "sdxl" and negative is None  # force_zeros_for_empty_prompt
    assert (
        bool((cond["negative_embeds"] == 0).all())
        == bool((cond["negative_pooled"] == 0).all())
        == zeros
    )
    assert set(folders.load(kind).encode(PROMPTS)) == {"embeds", "pooled"}


def test_vae_decodes_float16_in_float32(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: the same weights, rounded to float16 once, in float32."""
    model, exact = (
        folders.load("sdxl", dtype="float16", tune="none"),
        folders.load("sdxl", tune="none"),
    )
    vae, wide = model.pipeline().vae, exact.pipeline().vae
    wide.load_state_dict({name: value.half().float() for name, value in wide.state_dict().items()})
    seen, decode = [], vae.decode

    def watched(z: Tensor, return_dict: bool) -> Any:
        seen.append((z.dtype, vae.dtype))
        return decode(z, return_dict=return_dict)

    monkeypatch.setattr(vae, "decode", watched)
    x = noise(model, 2)
    images = model.decode(x)
    assert seen == [(torch.float32, torch.float32)] and vae.dtype == torch.float16
    torch.testing.assert_close(images, exact.decode(x), rtol=0, atol=1e-6)
    vae.register_to_config(
        force_upcast=False
    )  # as in the files of VAEs that were mended for float16
    model.decode(x)
    assert seen[1:] == [(torch.float16, torch.float16)]


def test_a_config_can_set_the_sizes() -> None:
    sizes = "original_size: [1024, 512], crop: [0, 0]"
    model = f"model={{fn: sdxl, path: x, guidance: 5.0, negative_prompt: null, {sizes}}}"
    kwargs = load_config("shapes/flow_grpo", [model, "transition.fn=ddim"]).model.kwargs
    assert (kwargs["original_size"], kwargs["target_size"], kwargs["negative_prompt"]) == (
        (1024, 512),
        None,
        None,
    )
    with pytest.raises(ConfigError, match="original_size"):
        load_config("shapes/flow_grpo", ["model={fn: sdxl, path: x, original_size: big}"])
