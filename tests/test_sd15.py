"""The SD1.5 adapter, and with it all that UNet adapters share, against diffusers on tiny models of the real classes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, StableDiffusionPipeline, UNet2DConditionModel
from modelkit import edit, gradients, noise, perturb
from tiny import EULER, NOISE, WIDTH, tiny_sd15, tiny_sdxl
from toykit import toy
from unetkit import PROMPTS, check_equal, diffusers_pipeline, in_vp, ours, theirs

from flowrl.batches import decisions
from flowrl.errors import ConfigError, ModelError
from flowrl.flow import vp_from_flow
from flowrl.likelihood import reverse
from flowrl.loop import Trainer
from flowrl.losses.policy import ppo_clip
from flowrl.models.sd15 import sd15
from flowrl.models.unet import UNetFlow
from flowrl.samplers.plans import full
from flowrl.samplers.rollout import rollout, sample_ode
from flowrl.transitions import cps, dance_sde, ddim, flow_sde
from flowrl.types import FlowModel, Rollout, Transition

MILD = {
    "beta_start": 1e-4,
    "beta_end": 2e-3,
    "clip_sample": False,
    "steps_offset": 1,
}  # half of the signal is left at the last timestep
ZERO = NOISE | {"set_alpha_to_one": True, "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
Load = Callable[..., UNetFlow]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make SD1.5 itself, one with little noise, SD2.1 (v prediction), and one with zero terminal SNR."""
    root = tmp_path_factory.mktemp("models")
    v = {"prediction_type": "v_prediction", "clip_sample": False}
    return {
        "plain": tiny_sd15(root / "plain"),
        "mild": tiny_sd15(root / "mild", seed=1, scheduler=DDIMScheduler(**MILD)),
        "v": tiny_sd15(root / "v", seed=2, scheduler=DDIMScheduler(**NOISE, **v)),
        "zero": tiny_sd15(root / "zero", seed=3, scheduler=DDIMScheduler(**ZERO, **v)),
    }


@pytest.fixture(scope="module")
def load(folders: dict[str, Path]) -> Load:
    def build(kind: str = "plain", **options: Any) -> UNetFlow:
        return sd15(str(folders[kind]), device="cpu", **options)

    return build


@pytest.fixture
def broken(folders: dict[str, Path], tmp_path: Path) -> Path:
    """Return a private copy of the plain model, to be damaged."""
    return Path(shutil.copytree(folders["plain"], tmp_path / "model"))


# --- the same numbers as the pipeline ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "guidance", "negative", "steps", "size", "count"),
    [
        ("plain", 1.0, "", 10, (64, 64), 3),
        ("plain", 7.5, "", 10, (64, 32), 2),
        ("plain", 7.5, "a blue dog", 4, (40, 64), 3),
        ("plain", 1.0, "", 1, (8, 64), 1),
        ("plain", 0.5, "", 2, (64, 64), 1),
        ("plain", 5.0, "", 50, (16, 16), 1),
        ("mild", 1.0, "", 20, (64, 64), 2),
        ("mild", 3.0, "a blue dog", 7, (16, 48), 3),
        ("v", 1.0, "", 10, (64, 64), 3),
        ("v", 4.0, "a blue dog", 30, (32, 16), 2),
        ("zero", 1.0, "", 10, (64, 64), 3),
        ("zero", 7.5, "", 5, (32, 64), 2),
        ("zero", 7.5, "a blue dog", 1, (64, 64), 1),
    ],
)
def test_euler_and_decode_equal_the_pipeline(
    folders: dict[str, Path],
    load: Load,
    kind: str,
    guidance: float,
    negative: str,
    steps: int,
    size: tuple[int, int],
    count: int,
) -> None:
    model = load(kind, guidance=guidance, negative_prompt=negative)
    perturb(model)
    pipeline = diffusers_pipeline(model, folders[kind])
    check_equal(model, pipeline, noise(model, count, *size), steps, scale=kind == "plain")


@pytest.mark.parametrize("kind", ["v", "zero"])
def test_guidance_rescale_equals_the_pipeline(folders: dict[str, Path], load: Load, kind: str) -> None:
    model, plain = load(kind, guidance=7.5, guidance_rescale=0.7), load(kind, guidance=7.5)
    perturb(model)
    perturb(plain)
    x = noise(model, 2)
    check_equal(model, diffusers_pipeline(model, folders[kind]), x, 5, scale=False)
    sigmas = model.sigmas(5, 64, 64)
    assert (ours(model, x, sigmas, PROMPTS[:2]) - ours(plain, x, sigmas, PROMPTS[:2])).abs().mean() > 0.01


@pytest.mark.parametrize(("kind", "spacing"), [("plain", "trailing"), ("zero", "leading")])
def test_spacing_overrides_the_schedulers(folders: dict[str, Path], load: Load, kind: str, spacing: str) -> None:
    model = load(kind, spacing=spacing)
    perturb(model)
    pipeline = diffusers_pipeline(model, folders[kind], timestep_spacing=spacing)
    assert not torch.equal(model.sigmas(10, 64, 64), load(kind).sigmas(10, 64, 64))
    check_equal(model, pipeline, noise(model, 2), 10, scale=kind == "plain")


@pytest.mark.parametrize("kind", ["plain", "zero"])
def test_engine_without_noise_equals_the_pipeline(folders: dict[str, Path], load: Load, kind: str) -> None:
    """The engine draws the noise; the pipeline gets what the same generators give."""
    model = load(kind, guidance=3.0)
    perturb(model)
    sigmas, shape = model.sigmas(5, 64, 48), model.latent_shape(64, 48)
    seeds = [torch.Generator().manual_seed(i) for i in range(3)]
    x = sample_ode(model, model.encode(PROMPTS), sigmas=sigmas, shape=shape, group_size=1, generators=seeds)
    x_vp = torch.cat([torch.randn((1, *shape), generator=torch.Generator().manual_seed(i)) for i in range(3)])
    expected = theirs(diffusers_pipeline(model, folders[kind]), model, x_vp, PROMPTS, steps=5)[0]
    unit = max(1.0, float(expected.std()))
    torch.testing.assert_close(in_vp(x, sigmas), expected, rtol=0, atol=1e-5 * unit)


@pytest.mark.parametrize("kind", ["plain", "zero"])
def test_network_sees_the_pipelines_times(folders: dict[str, Path], load: Load, kind: str) -> None:
    model, seen = load(kind), []
    hook = model.unet.register_forward_pre_hook(lambda _module, args: seen.append(args[1]))
    x = noise(model, 2)
    ours(model, x, model.sigmas(5, 64, 64), PROMPTS[:2])
    own = torch.stack(seen)
    assert own.dtype == torch.int64 and own.shape == (5, 2)
    seen.clear()
    theirs(diffusers_pipeline(model, folders[kind]), model, x, PROMPTS[:2], steps=5)
    hook.remove()
    assert torch.equal(own, torch.stack(seen)[:, None].expand(5, 2))
    assert own[0, 0] == (999 if kind == "zero" else 801)


def test_a_sigma_between_timesteps_is_refused(load: Load) -> None:
    model = load(guidance=2.0)
    x, cond = noise(model, 2), model.encode(PROMPTS[:2])
    sigmas = model.sigmas(10, 64, 64)
    for wrong in (0.5, 0.0, 1.0, float("nan"), float(sigmas[3]) + 1e-4):
        with pytest.raises(ModelError, match="1000 training timesteps, as `sigmas` gives them, got"):
            model.velocity(x, torch.stack([sigmas[0], torch.tensor(wrong)]), cond)


# --- text ----------------------------------------------------------------------------------------------------------


def test_encode_equals_the_pipelines_batch_in_any_order(load: Load) -> None:
    model = load(guidance=2.0, negative_prompt="a dog")
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[1]]
    cond = model.encode(prompts)
    embeds, negative = model.pipeline().encode_prompt(prompts, model.device, 1, True, ["a dog"] * 3)
    torch.testing.assert_close(cond, {"embeds": embeds, "negative_embeds": negative}, rtol=0, atol=1e-5)
    assert cond["embeds"].shape == (3, 77, WIDTH)
    assert torch.equal(cond["embeds"][0], cond["embeds"][2])
    assert (cond["embeds"][0] - cond["embeds"][1]).abs().max() > 0.1
    assert set(load().encode(prompts)) == {"embeds"}


def test_each_text_is_encoded_once(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(guidance=2.0)
    calls, encode = [], model.pipeline().encode_prompt

    def counted(prompts: list[str], *args: Any) -> Any:
        calls.append(prompts[0])
        return encode(prompts, *args)

    monkeypatch.setattr(model.pipeline(), "encode_prompt", counted)
    model.encode([PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    model.encode([PROMPTS[1], PROMPTS[0]])
    assert sorted(calls) == sorted([PROMPTS[0], PROMPTS[1], ""])


# --- training ------------------------------------------------------------------------------------------------------


def forest(model: FlowModel, transition: Transition, level: float, *, steps: int = 5, ode_last: int = 0) -> Rollout:
    return rollout(
        model,
        model.encode(PROMPTS[:2]),
        full(0, steps=steps, level=level, ode_last=ode_last),
        transition,
        sigmas=model.sigmas(steps, 64, 64),
        shape=model.latent_shape(64, 64),
        group_size=2,
        generators=[torch.Generator().manual_seed(i) for i in range(2)],
        micro_batch=4,
    )


@pytest.mark.parametrize(
    ("kind", "transition", "level"),
    [
        ("plain", ddim, 1.0),
        ("plain", dance_sde, 0.3),
        ("v", ddim, 0.5),
        ("zero", ddim, 1.0),
        ("zero", flow_sde, 0.7),
        ("zero", cps, 0.8),
    ],
)
def test_ratio_is_one_and_the_gradient_flows(load: Load, kind: str, transition: Transition, level: float) -> None:
    model = load(kind, guidance=3.0)
    perturb(model)
    ro = forest(model, transition, level)
    total = 0
    for step in ro.tree.step[
        ro.tree.std > 0
    ].unique():  # one denoising step at a time: the network calls of the rollout
        nodes = ((ro.tree.step == step) & (ro.tree.std > 0)).nonzero().flatten()
        batch = decisions(ro, torch.tensor([1.0, -1.0]).repeat(len(ro.x))[: len(ro.x)], nodes=nodes)
        log_prob = reverse(model, batch, transition).log_prob
        assert torch.equal(log_prob, batch.old_log_prob)
        loss, _ = ppo_clip(log_prob, batch.old_log_prob, batch.weight, clip_low=0.1, clip_high=0.1)
        grads = gradients(model, loss.mean())
        assert set(grads) == set(model.trainable())
        assert all(bool(grad.isfinite().all()) and float(grad.abs().max()) > 0 for grad in grads.values())
        total += len(nodes)
    clean = float(ro.sigmas[-1]) == 0 and transition in (ddim, cps)  # their last step adds no noise there
    assert total == 4 * (4 if clean else 5)


def test_gradient_flows_through_both_guidance_branches(load: Load) -> None:
    """Expected: (1 - s) grad u + s grad c, with u and c from two separate runs without guidance."""
    scale, model, single = 3.0, load(guidance=3.0), load()
    perturb(model)
    perturb(single)
    x, sigma, cond = noise(model, 2), model.sigmas(4, 64, 64)[:2], model.encode(PROMPTS[:2])
    guided = gradients(model, (model.velocity(x, sigma, cond) * x).sum())
    u = single.velocity(x, sigma, {"embeds": cond["negative_embeds"]})
    c = single.velocity(x, sigma, {"embeds": cond["embeds"]})
    from_u, from_c = gradients(single, (u * x).sum()), gradients(single, (c * x).sum())
    assert set(guided) == set(from_u) == set(from_c) and len(guided) > 8
    for name, grad in guided.items():
        expected = (1 - scale) * from_u[name] + scale * from_c[name]
        torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()) + 1e-5)
    assert any((from_u[name] - from_c[name]).abs().max() > 1e-2 * from_u[name].abs().max() for name in from_u)


DDPO = ("plan={fn: full, steps: 4, level: 1.0}", "transition.fn=ddim", "loss.clip_low=1e-4", "loss.clip_high=1e-4")
DANCE = ("plan={fn: full, steps: 4, level: 0.3, ode_last: 1}", "transition.fn=dance_sde", "train.same_noise=true")


@pytest.mark.integration
@pytest.mark.parametrize("method", [DDPO, DANCE], ids=["ddpo", "dance"])
def test_methods_train_it(folders: dict[str, Path], tmp_path: Path, method: tuple[str, ...]) -> None:
    model = f"model={{fn: sd15, path: {folders['plain']}, device: cpu, guidance: 5.0, lora: {{rank: 4}}}}"
    trainer = Trainer(toy(tmp_path, model, "train.updates=1", *method))
    before = {name: param.detach().clone() for name, param in trainer.params.items()}
    metrics = trainer.step()
    assert metrics["on_policy_gap"] < 1e-5 and metrics["trained"] == 2 * 4 * 3 and metrics["grad_norm"] > 0
    changed = [name for name, param in trainer.params.items() if not torch.equal(param, before[name])]
    assert changed and all(bool(param.isfinite().all()) for param in trainer.params.values())
    assert trainer.step()["grad_norm"] > 0


def test_lora_defaults_and_full_tuning(load: Load) -> None:
    base, model = load(tune="none"), load()
    # one transformer block before, in and after the middle with its skips: 1 + 1 + 2, each with two attentions
    assert len(model.trainable()) == 4 * 2 * 4 * 2
    assert all(re.search(r"attn[12]\.to_(q|k|v|out\.0)\.lora_", name) for name in model.trainable())
    x, sigma, cond = noise(base, 2), base.sigmas(4, 64, 64)[:2], base.encode(PROMPTS[:2])
    assert torch.equal(base.velocity(x, sigma, cond), model.velocity(x, sigma, cond))
    assert base.trainable() == {}
    assert set(load(tune="full").trainable()) == {name for name, _ in base.unet.named_parameters()}
    layers = load(tune="full", layers=["attn2.to_k"])
    assert len(layers.trainable()) == 4 and all(name.endswith("attn2.to_k.weight") for name in layers.trainable())
    everything = [model.unet, model.pipeline().vae, model.pipeline().text_encoder]
    assert not any(module.training for part in everything for module in part.modules())


@pytest.mark.parametrize("tune", ["lora", "full"])
def test_short_base_keeps_trained_weights_in_float32(load: Load, tune: str) -> None:
    short, exact = load("v", dtype="bfloat16", tune=tune, guidance=2.0), load("v", tune=tune, guidance=2.0)
    assert {param.dtype for param in short.trainable().values()} == {torch.float32}
    frozen = {param.dtype for param in short.unet.parameters() if not param.requires_grad}
    assert frozen == ({torch.bfloat16} if tune == "lora" else set())
    x, sigma = noise(short, 2), short.sigmas(4, 64, 64)[:2]
    v, expected = (model.velocity(x, sigma, model.encode(PROMPTS[:2])) for model in (short, exact))
    assert v.dtype == torch.float32
    error = float(((v - expected).norm() / expected.norm()).detach())
    assert 1e-5 < error < 0.05  # bfloat16 keeps 8 bits; equal bits would mean that it was never used
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in gradients(short, v.sum()).values())
    assert short.decode(x).dtype == torch.float32


def test_decode_does_not_depend_on_the_slice(load: Load) -> None:
    whole, sliced = load(decode_batch=64), load(decode_batch=2)
    x = noise(whole, 5)
    torch.testing.assert_close(whole.decode(x), sliced.decode(x), rtol=0, atol=1e-5)


def test_is_a_flow_model_around_the_public_class(load: Load) -> None:
    model = load()
    assert isinstance(model, FlowModel)
    assert model.latent_shape(64, 32) == (4, 8, 4)
    assert type(model.pipeline()) is StableDiffusionPipeline and model.pipeline().unet is model.unet
    assert model.pipeline().safety_checker is None


def test_latents_have_the_std_of_the_path(load: Load) -> None:
    """Closed form: alpha x0 + s eps of unit data has std 1, so over alpha + s it is hypot(1 - sigma, sigma)."""
    model = load()
    sigmas = model.sigmas(10, 64, 64)
    ro = forest(model, ddim, 1.0, steps=10)
    roots = ro.x[ro.tree.parent < 0]
    assert 0.88 < float(sigmas[0]) < 0.9  # timestep 901
    assert float(vp_from_flow(roots, sigmas[:1]).std()) == pytest.approx(1, abs=0.1)  # 1024 draws
    assert float(roots.std()) == pytest.approx(float(torch.hypot(1 - sigmas[0], sigmas[0])), rel=0.1)


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(60, 64), (64, 0), (-8, 64)])
def test_impossible_sizes(load: Load, size: tuple[int, int]) -> None:
    model = load()
    with pytest.raises(ModelError, match=f"multiples of 8 pixels, got {size[0]} x {size[1]}"):
        model.latent_shape(*size)
    with pytest.raises(ModelError, match="multiples of 8 pixels"):
        model.sigmas(4, *size)


def test_impossible_steps(load: Load) -> None:
    for steps in (0, 1001):
        with pytest.raises(ConfigError, match=f"steps: expected 1 to 1000.*got {steps}"):
            load().sigmas(steps, 64, 64)
    with pytest.raises(ConfigError, match=r"steps: with 1000 .*starts at timestep 1000"):
        load().sigmas(1000, 64, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guidance": float("nan")}, "guidance"),
        ({"negative_prompt": "a dog"}, "negative_prompt: has no effect"),
        ({"guidance_rescale": 0.7}, "guidance_rescale: has no effect"),
        ({"guidance": 3.0, "guidance_rescale": 1.5}, "guidance_rescale: expected 0 to 1"),
        ({"spacing": "linspace"}, "spacing: expected leading or trailing"),
        ({"tune": "lorra"}, "tune: expected"),
        ({"lora": {"rnk": 4}}, "unknown option 'rnk'"),
        ({"decode_batch": 0}, "decode_batch"),
    ],
)
def test_wrong_options_raise_before_the_model_is_looked_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sd15("/nowhere/at/all", **options)


SCHEDULER = "scheduler/scheduler_config.json"


def inpainting(folder: Path) -> None:
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    UNet2DConditionModel.from_config(unet.config, in_channels=9).save_pretrained(folder / "unet")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit("model_index.json", _class_name="FluxPipeline"), r"expected .*'StableDiffusionPipeline', got 'Flux"),
        (lambda folder: (folder / "tokenizer/tokenizer.json").unlink(), r"tokenizer: no tokenizer files"),
        (lambda folder: (folder / "unet/config.json").unlink(), r"unet: no config.json"),
        (edit("model_index.json", scheduler=["diffusers", "LCMScheduler"]), r"expected scheduler to be DDIMScheduler"),
        (edit("model_index.json", unet=["my_code", "UNet2DConditionModel"]), r"unet comes from 'my_code'"),
        (edit(SCHEDULER, prediction_type="sample"), r"expected prediction_type 'epsilon' or .*got 'sample'"),
        (edit(SCHEDULER, prediction_type="flow_prediction"), r"got 'flow_prediction'"),
        (edit(SCHEDULER, rescale_betas_zero_snr=True), r"rescale_betas_zero_snr needs prediction_type 'v_prediction'"),
        (edit(SCHEDULER, timestep_spacing="linspace"), r"'linspace'.*set spacing to 'leading' or 'trailing'"),
        (edit(SCHEDULER, thresholding=True), r"clip_sample and thresholding must be false"),
        (edit(SCHEDULER, trained_betas=[0.01] * 5 + [0.0] * 5), r"noise must rise with every training timestep"),
        (inpainting, r"same number of latent channels, in and out, got 4, 9 and 4; a UNet for inpainting"),
    ],
)
def test_damaged_folders(broken: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(broken)
    with pytest.raises(ModelError, match=message):
        sd15(str(broken), device="cpu")


def test_another_pipeline_is_refused(tmp_path: Path) -> None:
    folder = tiny_sdxl(tmp_path / "sdxl")
    with pytest.raises(ModelError, match="'StableDiffusionPipeline', got 'StableDiffusionXLPipeline'.*another adapter"):
        sd15(str(folder), device="cpu")


def test_target_without_a_layer_names_what_there_is(load: Load) -> None:
    with pytest.raises(ModelError, match=r"'attn.to_q'; available: .*attn1\.to_k.*attn2\.to_q"):
        load(lora={"targets": ["attn.to_q"]})


def test_scheduler_of_another_class_does_not_clip(tmp_path: Path) -> None:
    """Euler's config says nothing of clip_sample, and DDIMScheduler's own default would clip the latents at 1."""
    euler = EulerDiscreteScheduler(**EULER, timestep_spacing="leading")
    model = sd15(str(tiny_sd15(tmp_path / "euler", scheduler=euler)), device="cpu")
    config = model.pipeline().scheduler.config
    assert type(model.pipeline().scheduler) is DDIMScheduler and config.clip_sample is False
    assert config.set_alpha_to_one and model.sigmas(4, 64, 64)[-1] == 0
