"""What only the FLUX adapter has to keep; what it shares is in the contract files."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from adapterkit import PROMPTS, Folders, diffusers_images
from diffusers import FluxPipeline
from modelkit import edit, noise, perturb
from rolloutkit import decisions, score_draws
from tiny import tiny_flux
from torch import Tensor

from flowrl.algorithms.nodes import decision_nodes
from flowrl.algorithms.plans.windows import full
from flowrl.algorithms.rollout.engine import rollout, sample_ode
from flowrl.algorithms.transitions import cps
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import dynamic_grid
from flowrl.core.types import Rollout
from flowrl.models.flux import Flux, flux, image_ids, pack, unpack


def seeds(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(i) for i in range(count)]


def packed(x: Tensor) -> Tensor:
    """Pack latents [B,16,h,w] as the pipeline does."""
    return FluxPipeline._pack_latents(x, *x.shape)


def seen_times(model: Flux, run: Callable[[], Any]) -> list[Tensor]:
    """Return what the time embedding of the network is asked for during ``run``, one tensor [B] per
    call."""
    seen: list[Tensor] = []
    hook = model.transformer.time_text_embed.register_forward_pre_hook(
        lambda _module, args: seen.append(args[0])
    )
    run()
    hook.remove()
    return seen


def sampled(
    model: Flux, *, steps: int = 4, prompts: list[str] = PROMPTS[:2], group: int = 2
) -> Rollout:
    """Roll out with noise on every step, in micro-batches of 4, at 32 x 32 pixels."""
    return rollout(
        model,
        model.encode(prompts),
        full(0, steps=steps, noise_scale=0.6),
        cps,
        sigmas=model.sigmas(steps, 32, 32),
        shape=model.latent_shape(32, 32),
        group_size=group,
        generators=seeds(len(prompts)),
        micro_batch=4,
    )


@pytest.mark.parametrize("kind", ["flux", "flux schnell"])
def test_equal_seeds_give_the_pipelines_images(folders: Folders, kind: str) -> None:
    """The pipeline draws its noise itself here; it gets our text, as a batch of texts may differ in
    the last bit."""
    model, size = folders.load(kind), (64, 48)
    perturb(model)
    cond = model.encode(PROMPTS)
    grid, shape = model.sigmas(8, *size), model.latent_shape(*size)
    ours = sample_ode(model, cond, sigmas=grid, shape=shape, group_size=1, generators=seeds(3))
    pipeline = model.pipeline()
    pipeline.set_progress_bar_config(disable=True)
    options = {
        "height": 64,
        "width": 48,
        "num_inference_steps": 8,
        "generator": seeds(3),
        "output_type": "latent",
    }
    theirs = pipeline(
        prompt_embeds=cond["embeds"], pooled_prompt_embeds=cond["pooled"], **options
    ).images
    assert torch.equal(packed(ours), theirs)


def test_packing_is_the_pipelines() -> None:
    x = torch.randn(2, 16, 6, 10)
    tokens = pack(x)
    assert torch.equal(tokens, packed(x)) and tokens.shape == (2, 15, 64)
    assert torch.equal(unpack(tokens, 3), x)
    assert torch.equal(FluxPipeline._unpack_latents(tokens, 48, 80, 8), x)
    ids = FluxPipeline._prepare_latent_image_ids(2, 3, 5, torch.device("cpu"), torch.float32)
    assert torch.equal(image_ids(3, 5, torch.device("cpu")), ids)


@pytest.mark.parametrize(
    "kind",
    [
        "flux",
        "flux schnell",
        "flux shifts",
        "flux linear",
        "flux static",
        "flux plain",
        "flux table",
    ],
)
@pytest.mark.parametrize(("steps", "size"), [(2, (64, 64)), (4, (32, 96)), (28, (128, 64))])
def test_noise_levels_are_the_pipelines_bit_for_bit(
    folders: Folders, kind: str, steps: int, size: tuple[int, int]
) -> None:
    model = folders.load(kind)
    before = model.pipeline().scheduler.sigmas.clone()
    ours = model.sigmas(steps, *size)
    assert torch.equal(
        model.pipeline().scheduler.sigmas, before
    )  # a user who is sampling is not disturbed
    diffusers_images(
        folders[kind], model, noise(model, 1, *size), ["a"], steps=steps, output_type="latent"
    )
    scheduler = model.pipeline().scheduler
    assert ours.dtype == torch.float32 and torch.equal(ours, scheduler.sigmas)
    assert torch.equal(model.time(ours[:-1]), scheduler.timesteps / 1000)


@pytest.mark.parametrize(
    ("steps", "size"), [(6, (512, 512)), (10, (1024, 1024)), (28, (768, 1344))]
)
def test_the_grid_of_dev_and_of_schnell(
    folders: Folders, steps: int, size: tuple[int, int]
) -> None:
    """Closed forms: flowrl.core.noise_path.dynamic_grid, whose values are tested there, and k /
    steps."""
    tokens = size[0] * size[1] // 256
    torch.testing.assert_close(
        folders.load("flux").sigmas(steps, *size), dynamic_grid(steps, tokens), rtol=0, atol=1e-6
    )
    even = torch.linspace(1, 0, steps + 1)
    torch.testing.assert_close(
        folders.load("flux schnell").sigmas(steps, *size), even, rtol=0, atol=1e-6
    )
    assert (
        folders.load("flux shifts").sigmas(steps, *size) - dynamic_grid(steps, tokens)
    ).abs().max() > 0.01


@pytest.mark.parametrize(
    ("dtype", "tune"),
    [
        ("float32", "lora"),
        ("float32", "full"),
        ("bfloat16", "lora"),
        ("bfloat16", "full"),
        ("float16", "none"),
    ],
)
def test_sampling_training_and_the_pipeline_ask_for_the_same_times(
    folders: Folders, dtype: str, tune: str
) -> None:
    """What reaches the time embedding, to the bit: in a rollout, when it is scored anew, and in
    diffusers' own loop."""
    model, steps = folders.load("flux", dtype=dtype, tune=tune), 28
    state = sampled(model, steps=steps, prompts=PROMPTS[:1], group=1)
    batch = decisions(state, torch.zeros(len(state.x)), skip_last=False)
    sampling = seen_times(model, lambda: sampled(model, steps=steps, prompts=PROMPTS[:1], group=1))
    (training,) = seen_times(model, lambda: score_draws(model, batch, cps))
    assert (
        torch.equal(torch.cat(sampling)[: len(training)], training) and len(training) == steps - 1
    )
    x = packed(noise(model, 1, 32, 32)).to(model.dtype)
    with torch.autocast("cpu", model.dtype, enabled=model.autocast):
        theirs = seen_times(
            model,
            lambda: diffusers_images(
                folders["flux"], model, noise(model, 1, 32, 32), ["a"], steps=steps, latents=x
            ),
        )
    assert torch.equal(torch.cat(sampling), torch.cat(theirs)) and theirs[0].dtype == model.dtype


def test_rounding_after_the_division_would_be_another_time(folders: Folders) -> None:
    """The mistake that the one `time` rules out. Expected: the two formulas in numpy differ in 4 of
    10 at 1024 px."""
    model = folders.load("flux", dtype="bfloat16")
    sigma = model.sigmas(10, 1024, 1024)[:-1]
    other = (sigma * 1000 / 1000).bfloat16()
    assert int((model.time(sigma) * 1000 != other * 1000).sum()) == 4


def test_embedded_guidance_reaches_the_network(folders: Folders) -> None:
    assert folders.load("flux").guidance == 3.5  # FluxPipeline's own default
    x, sigma = noise(folders.load("flux"), 2), torch.tensor([0.9, 0.4])
    v = [
        m.velocity(x, sigma, m.encode(PROMPTS[:2]))
        for m in (
            folders.load("flux"),
            folders.load("flux", guidance=3.5),
            folders.load("flux", guidance=1.5),
        )
    ]
    assert torch.equal(v[0], v[1]) and (v[0] - v[2]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["flux schnell", "flux plain"])
def test_guidance_without_an_embedding_is_refused(folders: Folders, kind: str) -> None:
    assert folders.load(kind).guidance is None
    for number in (0.0, 3.5):
        with pytest.raises(
            ConfigError, match=r"guidance: .* no guidance embedding .*; leave guidance out"
        ):
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
    assert len(found) == warned
    assert all(w.filename == __file__ for w in found)


def test_velocity_reads_no_tensor_values(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device tensors have no values, so any hidden .item(), bool() or .cpu() raises."""
    model = folders.load("flux", true_cfg_scale=2.0)
    cond = {name: rows.to("meta") for name, rows in model.encode(PROMPTS).items()}
    model.transformer.to("meta")
    monkeypatch.setattr(
        torch, "autocast", lambda *_args, **_options: nullcontext()
    )  # which knows no meta device
    v = model.velocity(noise(model, 3, 64, 32).to("meta"), torch.ones(3, device="meta"), cond)
    assert v.is_meta and v.shape == (3, 16, 8, 4)


def gaps(model: Flux) -> dict[int, float]:
    """Measure max |ratio - 1| on one rollout of 4 rows, by micro-batch of the second evaluation."""
    ro, out = sampled(model), {}
    weight, nodes = torch.zeros(len(ro.x)), decision_nodes(ro)
    for size in (1, 3, 4, 12):
        with torch.no_grad():
            batches = [decisions(ro, weight, nodes=part) for part in nodes.split(size)]
            logs = [
                score_draws(model, batch, cps).log_prob - batch.old_log_prob for batch in batches
            ]
        out[size] = float((torch.cat(logs).exp() - 1).abs().max())
    return out


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("flux", {}),
        ("flux", {"tune": "full"}),
        ("flux", {"true_cfg_scale": 3.0, "guidance": 2.0}),
        ("flux schnell", {}),
    ],
)
def test_the_ratio_is_1_before_the_first_update(
    folders: Folders, kind: str, options: dict[str, Any]
) -> None:
    model = folders.load(kind, **options)
    perturb(model, 0.05)
    found = gaps(model)
    assert max(found.values()) < 1e-5 and found[4] == 0, found


@pytest.mark.parametrize("tune", ["lora", "full"])
def test_the_ratio_in_bfloat16(folders: Folders, tune: str) -> None:
    """Equal calls give equal bits, so the time input is the same too; other batch sizes may run
    other kernels."""
    model = folders.load("flux", dtype="bfloat16", tune=tune)
    perturb(model, 0.05)
    found = gaps(model)
    print(f"bfloat16, {tune}: max |ratio - 1| by micro-batch: {found}")
    assert found[4] == 0 and max(found.values()) < 0.1


def test_an_image_encoder_is_left_alone(folders: Folders, tmp_path: Path) -> None:
    """Folders saved with an IP-Adapter name one; it is not there here, so reading it would fail."""
    broken = Path(shutil.copytree(folders["flux"], tmp_path / "model"))
    edit("model_index.json", image_encoder=["transformers", "CLIPVisionModelWithProjection"])(
        broken
    )
    assert flux(str(broken), device="cpu").pipeline().image_encoder is None
