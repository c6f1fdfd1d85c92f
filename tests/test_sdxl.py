"""The SDXL adapter against diffusers on tiny models of the real classes; what it shares is tested in test_sd15.py."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionXLPipeline
from modelkit import edit, gradients, noise, perturb
from tiny import NOISE, WIDTH, tiny_sd15, tiny_sdxl
from torch import Tensor
from unetkit import PROMPTS, check_equal, diffusers_pipeline, ours, theirs

from flowrl.batches import decisions
from flowrl.config import load_config
from flowrl.errors import ConfigError, ModelError
from flowrl.likelihood import reverse
from flowrl.models.sdxl import sdxl
from flowrl.models.unet import UNetFlow
from flowrl.samplers.plans import full
from flowrl.samplers.rollout import rollout
from flowrl.transitions import ddim
from flowrl.types import FlowModel

V = NOISE | {"prediction_type": "v_prediction", "clip_sample": False, "timestep_spacing": "trailing"}
Load = Callable[..., UNetFlow]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make SDXL itself, and a v-predicting one with zero terminal SNR whose empty negative prompt is encoded."""
    root = tmp_path_factory.mktemp("models")
    zero = DDIMScheduler(**V, rescale_betas_zero_snr=True)
    return {
        "plain": tiny_sdxl(root / "plain"),
        "zero": tiny_sdxl(root / "zero", seed=1, scheduler=zero, force_zeros=False),
    }


@pytest.fixture(scope="module")
def load(folders: dict[str, Path]) -> Load:
    def build(kind: str = "plain", **options: Any) -> UNetFlow:
        return sdxl(str(folders[kind]), device="cpu", **options)

    return build


@pytest.fixture
def broken(folders: dict[str, Path], tmp_path: Path) -> Path:
    """Return a private copy of the plain model, to be damaged."""
    return Path(shutil.copytree(folders["plain"], tmp_path / "model"))


@pytest.mark.parametrize(
    ("kind", "guidance", "negative", "steps", "size", "count"),
    [
        ("plain", 1.0, None, 10, (64, 64), 3),
        ("plain", 5.0, None, 10, (64, 32), 2),
        ("plain", 5.0, "", 4, (40, 64), 3),
        ("plain", 5.0, "a blue dog", 7, (16, 48), 2),
        ("plain", 1.0, None, 1, (8, 64), 1),
        ("zero", 1.0, None, 10, (64, 64), 3),
        ("zero", 5.0, None, 5, (64, 32), 2),
        ("zero", 5.0, "a blue dog", 25, (32, 32), 1),
    ],
)
def test_euler_and_decode_equal_the_pipeline(
    folders: dict[str, Path],
    load: Load,
    kind: str,
    guidance: float,
    negative: str | None,
    steps: int,
    size: tuple[int, int],
    count: int,
) -> None:
    model = load(kind, guidance=guidance, negative_prompt=negative)
    perturb(model)
    pipeline = diffusers_pipeline(model, folders[kind])
    check_equal(model, pipeline, noise(model, count, *size), steps, scale=kind == "plain")


def watch(model: UNetFlow, run: Callable[[], Any]) -> list[dict[str, Tensor]]:
    """Return the added conditioning of every call of the UNet in run."""
    seen: list[dict[str, Tensor]] = []
    hook = model.unet.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["added_cond_kwargs"]), with_kwargs=True
    )
    run()
    hook.remove()
    return seen


@pytest.mark.parametrize(
    "told", [{}, {"original_size": [1024, 512], "crop": [3, 7], "target_size": [256, 384]}, {"crop": [0, 9]}]
)
def test_network_is_told_what_the_pipeline_tells_it(
    folders: dict[str, Path], load: Load, told: dict[str, list[int]]
) -> None:
    model = load(guidance=5.0, **told)
    x = noise(model, 3, 64, 48)
    own = watch(model, lambda: ours(model, x, model.sigmas(1, 64, 48), PROMPTS))
    names = {"original_size": "original_size", "crop": "crops_coords_top_left", "target_size": "target_size"}
    options = {names[name]: tuple(pair) for name, pair in told.items()}
    pipeline = diffusers_pipeline(model, folders["plain"])
    expected = watch(model, lambda: theirs(pipeline, model, x, PROMPTS, steps=1, **options))
    assert len(own) == len(expected) == 1
    assert torch.equal(own[0]["time_ids"], expected[0]["time_ids"]) and own[0]["time_ids"].shape == (6, 6)
    torch.testing.assert_close(own[0]["text_embeds"], expected[0]["text_embeds"], rtol=0, atol=1e-5)
    assert own[0]["time_ids"][0].tolist() == [
        *told.get("original_size", [64, 48]),
        *told.get("crop", [0, 0]),
        *told.get("target_size", [64, 48]),
    ]


@pytest.mark.parametrize(("kind", "negative"), [("plain", None), ("plain", ""), ("zero", None), ("plain", "a dog")])
def test_encode_equals_the_pipelines_batch(load: Load, kind: str, negative: str | None) -> None:
    model = load(kind, guidance=2.0, negative_prompt=negative)
    cond = model.encode(PROMPTS)
    texts = None if negative is None else [negative] * 3
    embeds, negatives, pooled, negative_pooled = model.pipeline().encode_prompt(PROMPTS, negative_prompt=texts)
    expected = {"embeds": embeds, "pooled": pooled, "negative_embeds": negatives, "negative_pooled": negative_pooled}
    torch.testing.assert_close(cond, expected, rtol=0, atol=1e-5)
    assert cond["embeds"].shape == (3, 77, 2 * WIDTH) and cond["pooled"].shape == (3, WIDTH)
    zeros = kind == "plain" and negative is None  # force_zeros_for_empty_prompt
    assert bool((cond["negative_embeds"] == 0).all()) == bool((cond["negative_pooled"] == 0).all()) == zeros
    assert set(load(kind).encode(PROMPTS)) == {"embeds", "pooled"}


@pytest.mark.parametrize("kind", ["plain", "zero"])
def test_ratio_is_one_and_the_gradient_flows(load: Load, kind: str) -> None:
    model = load(kind, guidance=3.0)
    perturb(model)
    sigmas, generators = model.sigmas(5, 64, 48), [torch.Generator().manual_seed(i) for i in range(2)]
    ro = rollout(
        model,
        model.encode(PROMPTS[:2]),
        full(0, steps=5, level=1.0),
        ddim,
        sigmas=sigmas,
        shape=model.latent_shape(64, 48),
        group_size=2,
        generators=generators,
        micro_batch=4,
    )
    for step in range(1, 6):
        nodes = (ro.tree.step == step).nonzero().flatten()
        batch = decisions(ro, torch.zeros(len(ro.x)), nodes=nodes)
        log_prob = reverse(model, batch, ddim).log_prob
        assert torch.equal(log_prob, batch.old_log_prob)
        grads = gradients(model, log_prob.sum())
        assert set(grads) == set(model.trainable())
        assert all(bool(grad.isfinite().all()) and float(grad.abs().max()) > 0 for grad in grads.values())


def test_vae_decodes_float16_in_float32(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: the same weights, rounded to float16 once, in float32."""
    model, exact = load(dtype="float16", tune="none"), load(tune="none")
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
    vae.register_to_config(force_upcast=False)  # as in the files of VAEs that were mended for float16
    model.decode(x)
    assert seen[1:] == [(torch.float16, torch.float16)]


def test_is_a_flow_model_around_the_public_class(load: Load) -> None:
    model = load()
    assert isinstance(model, FlowModel)
    assert model.latent_shape(64, 32) == (4, 8, 4)
    assert type(model.pipeline()) is StableDiffusionXLPipeline and model.pipeline().unet is model.unet
    assert (
        model.sigmas(4, 64, 64)[-1] > 0.02
    )  # set_alpha_to_one is false in SDXL's file, though Euler knows no such key


def test_a_config_can_set_the_sizes() -> None:
    model = "model={fn: sdxl, path: x, guidance: 5.0, negative_prompt: null, original_size: [1024, 512], crop: [0, 0]}"
    kwargs = load_config("shapes/flow_grpo", [model, "transition.fn=ddim"]).model.kwargs
    assert (kwargs["original_size"], kwargs["target_size"], kwargs["negative_prompt"]) == ([1024, 512], None, None)
    with pytest.raises(ConfigError, match="original_size"):
        load_config("shapes/flow_grpo", ["model={fn: sdxl, path: x, original_size: big}"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"negative_prompt": "a dog"}, "negative_prompt: has no effect"),
        ({"original_size": [64]}, r"original_size: expected two whole numbers of at least 1, got \[64\]"),
        ({"target_size": [64, 0]}, r"target_size: expected two whole numbers of at least 1"),
        ({"crop": [-1, 0]}, r"crop: expected two whole numbers of at least 0"),
        ({"crop": [0.5, 0]}, r"crop: expected two whole numbers"),
        ({"spacing": "linspace"}, "spacing: expected leading or trailing"),
        ({"tune": "lorra"}, "tune: expected"),
    ],
)
def test_wrong_options_raise_before_the_model_is_looked_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sdxl("/nowhere/at/all", **options)


SCHEDULER = "scheduler/scheduler_config.json"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "tokenizer_2/tokenizer.json").unlink(), r"tokenizer_2: no tokenizer files"),
        (lambda folder: shutil.rmtree(folder / "text_encoder_2"), r"text_encoder_2: missing"),
        (edit("model_index.json", text_encoder=[None, None]), r"expected text_encoder to be CLIPTextModel, got None"),
        (edit(SCHEDULER, prediction_type="sample"), r"expected prediction_type 'epsilon' or .*got 'sample'"),
        (edit(SCHEDULER, rescale_betas_zero_snr=True), r"rescale_betas_zero_snr needs prediction_type 'v_prediction'"),
        (edit(SCHEDULER, clip_sample=True), r"clip_sample and thresholding must be false"),
        (edit("vae/config.json", latents_mean=[0.0] * 4), r"latents_mean or latents_std"),
        (edit("unet/config.json", addition_time_embed_dim=16), r"expects 64 numbers .* its config makes 112"),
    ],
)
def test_damaged_folders(broken: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(broken)
    with pytest.raises(ModelError, match=message):
        sdxl(str(broken), device="cpu")


def test_another_pipeline_is_refused(tmp_path: Path) -> None:
    folder = tiny_sd15(tmp_path / "sd15")
    with pytest.raises(ModelError, match="'StableDiffusionXLPipeline', got 'StableDiffusionPipeline'.*another adapter"):
        sdxl(str(folder), device="cpu")


def test_impossible_sizes_and_targets(load: Load) -> None:
    with pytest.raises(ModelError, match="multiples of 8 pixels, got 60 x 64"):
        load().latent_shape(60, 64)
    with pytest.raises(ModelError, match=r"'attn.to_q'; available: .*attn1\.to_k.*attn2\.to_q"):
        load(lora={"targets": ["attn.to_q"]})
