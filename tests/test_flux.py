"""The FLUX adapter against diffusers' own pipeline, on tiny models with random weights of the real classes."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from modelkit import edit, euler, gradients, noise, perturb
from tiny import tiny_flux
from torch import Tensor
from toykit import toy

from flowrl.batches import decision_nodes, decisions
from flowrl.config import Call
from flowrl.errors import ConfigError, DataError, ModelError
from flowrl.flow import dynamic_grid
from flowrl.likelihood import reverse
from flowrl.loop import Trainer
from flowrl.models.flux import Flux, flux, image_ids, pack, unpack
from flowrl.samplers.plans import full
from flowrl.samplers.rollout import rollout, sample_ode
from flowrl.transitions import cps, flow_sde
from flowrl.types import FlowModel, Rollout

PROMPTS = ["a red square", "two small blue circles left of a green triangle on white", "a cat"]
TOKENS = 24  # max_sequence_length everywhere, for speed
pytestmark = pytest.mark.filterwarnings("ignore:the prompt .* is cut")  # to so many tokens, which are letters here
SHIFTS: dict[str, Any] = {"base_shift": 0.2, "max_shift": 2.0, "base_image_seq_len": 4, "max_image_seq_len": 1024}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {
        "dev": tiny_flux(root / "dev"),
        "schnell": tiny_flux(root / "schnell", guidance_embeds=False, seed=1),
        "shifts": tiny_flux(root / "shifts", seed=2, **SHIFTS),
        "linear": tiny_flux(root / "linear", seed=3, time_shift_type="linear", shift_terminal=0.1),
        "static": tiny_flux(root / "static", seed=4, use_dynamic_shifting=False, shift=3.0),
        "plain": tiny_flux(root / "plain", seed=5, guidance_embeds=False, use_dynamic_shifting=True),
        "table": tiny_flux(root / "table", seed=6, use_dynamic_shifting=False, shift=2.0),
    }
    edit("scheduler/scheduler_config.json", use_flow_sigmas=True)(made["table"])
    return made


@pytest.fixture(scope="module")
def load(folders: dict[str, Path]) -> Callable[..., Flux]:
    def build(kind: str = "dev", **options: Any) -> Flux:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # test_step_distilled_models_are_named looks at these
            return flux(str(folders[kind]), device="cpu", **({"max_sequence_length": TOKENS} | options))

    return build


@pytest.fixture
def broken(folders: dict[str, Path], tmp_path: Path) -> Path:
    """Return a private copy of dev, to be damaged."""
    return Path(shutil.copytree(folders["dev"], tmp_path / "model"))


def seeds(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(i) for i in range(count)]


def reference(model: Flux, prompts: list[str], *, steps: int, size: tuple[int, int], output: str, **noise: Any) -> Any:
    """Return what diffusers itself samples; ``noise`` is its `latents` or its `generator`."""
    pipeline = model.pipeline()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompts,
        negative_prompt=[model.negative_prompt] * len(prompts) if model.guided else None,
        true_cfg_scale=model.true_cfg_scale,
        guidance_scale=99.0 if model.guidance is None else model.guidance,  # without an embedding it has no effect
        height=size[0],
        width=size[1],
        num_inference_steps=steps,
        output_type=output,
        max_sequence_length=model.max_sequence_length,
        **noise,
    ).images


def packed(x: Tensor) -> Tensor:
    """Pack latents [B,16,h,w] as the pipeline does."""
    return FluxPipeline._pack_latents(x, *x.shape)


def seen_times(model: Flux, run: Callable[[], Any]) -> list[Tensor]:
    """Return what the time embedding of the network is asked for during ``run``, one tensor [B] per call."""
    seen: list[Tensor] = []
    hook = model.transformer.time_text_embed.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    run()
    hook.remove()
    return seen


# --- the same numbers as the pipeline ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "steps", "size", "count"),
    [
        ("dev", {}, 10, (64, 64), 3),
        ("dev", {"guidance": 1.0}, 4, (64, 32), 3),
        ("dev", {"guidance": 0.0}, 1, (16, 64), 1),
        ("dev", {"guidance": 7.5, "true_cfg_scale": 2.0}, 28, (48, 64), 2),
        ("dev", {"true_cfg_scale": 4.0, "negative_prompt": "a blue dog"}, 6, (64, 48), 3),
        ("dev", {"max_sequence_length": 40, "tune": "full"}, 3, (32, 80), 2),
        ("schnell", {}, 4, (64, 64), 3),
        ("schnell", {}, 1, (32, 96), 2),
        ("schnell", {"true_cfg_scale": 3.0, "negative_prompt": "a dog"}, 2, (64, 16), 1),
        ("shifts", {}, 9, (128, 64), 1),
        ("linear", {}, 5, (32, 48), 2),
        ("static", {}, 8, (64, 64), 2),
        ("plain", {}, 6, (64, 32), 2),
    ],
)
def test_a_rollout_without_noise_equals_the_pipeline(
    load: Callable[..., Flux], kind: str, options: dict[str, Any], steps: int, size: tuple[int, int], count: int
) -> None:
    model, prompts = load(kind, **options), PROMPTS[:count]
    perturb(model, 0.05)
    ro = rollout(
        model,
        model.encode(prompts),
        full(0, steps=steps, level=0.0),
        flow_sde,
        sigmas=model.sigmas(steps, *size),
        shape=model.latent_shape(*size),
        group_size=1,
        generators=seeds(count),
        micro_batch=2,
    )
    x, ours = ro.x[ro.tree.parent < 0], ro.x[ro.leaf]
    theirs = reference(model, prompts, steps=steps, size=size, output="latent", latents=packed(x))
    assert (theirs - packed(x)).abs().mean() > 0.05  # the network moved something: these are not two copies of x
    torch.testing.assert_close(packed(ours), theirs, rtol=0, atol=1e-5)
    images = model.decode(ours)
    expected = reference(model, prompts, steps=steps, size=size, output="pt", latents=packed(x))
    assert images.shape == (count, 3, *size) and images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1 and images.std() > 0.01
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["dev", "schnell"])
def test_equal_seeds_give_the_pipelines_pictures(load: Callable[..., Flux], kind: str) -> None:
    """The pipeline draws its noise itself here; it gets our text, as a batch of texts may differ in the last bit."""
    model, size = load(kind), (64, 48)
    perturb(model)
    cond = model.encode(PROMPTS)
    grid, shape = model.sigmas(8, *size), model.latent_shape(*size)
    ours = sample_ode(model, cond, sigmas=grid, shape=shape, group_size=1, generators=seeds(3))
    pipeline = model.pipeline()
    pipeline.set_progress_bar_config(disable=True)
    options = {"height": 64, "width": 48, "num_inference_steps": 8, "generator": seeds(3), "output_type": "latent"}
    theirs = pipeline(prompt_embeds=cond["embeds"], pooled_prompt_embeds=cond["pooled"], **options).images
    assert torch.equal(packed(ours), theirs)


def test_packing_is_the_pipelines() -> None:
    x = torch.randn(2, 16, 6, 10)
    tokens = pack(x)
    assert torch.equal(tokens, packed(x)) and tokens.shape == (2, 15, 64)
    assert torch.equal(unpack(tokens, 3), x)
    assert torch.equal(FluxPipeline._unpack_latents(tokens, 48, 80, 8), x)
    ids = FluxPipeline._prepare_latent_image_ids(2, 3, 5, torch.device("cpu"), torch.float32)
    assert torch.equal(image_ids(3, 5, torch.device("cpu")), ids)


# --- noise levels and times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dev", "schnell", "shifts", "linear", "static", "plain", "table"])
@pytest.mark.parametrize(("steps", "size"), [(2, (64, 64)), (4, (32, 96)), (28, (128, 64))])
def test_noise_levels_are_the_pipelines_bit_for_bit(
    load: Callable[..., Flux], kind: str, steps: int, size: tuple[int, int]
) -> None:
    model = load(kind)
    before = model.pipeline().scheduler.sigmas.clone()
    ours = model.sigmas(steps, *size)
    assert torch.equal(model.pipeline().scheduler.sigmas, before)  # a user who is sampling is not disturbed
    reference(model, ["a"], steps=steps, size=size, output="latent", latents=packed(noise(model, 1, *size)))
    scheduler = model.pipeline().scheduler
    assert ours.dtype == torch.float32 and torch.equal(ours, scheduler.sigmas)
    assert torch.equal(model.time(ours[:-1]), scheduler.timesteps / 1000)


@pytest.mark.parametrize(("steps", "size"), [(6, (512, 512)), (10, (1024, 1024)), (28, (768, 1344))])
def test_the_grid_of_dev_and_of_schnell(load: Callable[..., Flux], steps: int, size: tuple[int, int]) -> None:
    """Closed forms: flowrl.flow.dynamic_grid, whose values are tested there, and k / steps."""
    tokens = size[0] * size[1] // 256
    torch.testing.assert_close(load("dev").sigmas(steps, *size), dynamic_grid(steps, tokens), rtol=0, atol=1e-6)
    even = torch.linspace(1, 0, steps + 1)
    torch.testing.assert_close(load("schnell").sigmas(steps, *size), even, rtol=0, atol=1e-6)
    assert (load("shifts").sigmas(steps, *size) - dynamic_grid(steps, tokens)).abs().max() > 0.01


@pytest.mark.parametrize(
    ("dtype", "tune"),
    [("float32", "lora"), ("float32", "full"), ("bfloat16", "lora"), ("bfloat16", "full"), ("float16", "none")],
)
def test_sampling_training_and_the_pipeline_ask_for_the_same_times(
    load: Callable[..., Flux], dtype: str, tune: str
) -> None:
    """What reaches the time embedding, to the bit: in a rollout, when it is scored anew, and in diffusers' own loop."""
    model, steps = load(dtype=dtype, tune=tune), 28
    state = sampled(model, steps=steps, prompts=PROMPTS[:1], group=1)
    batch = decisions(state, torch.zeros(len(state.x)), skip_last=False)
    sampling = seen_times(model, lambda: sampled(model, steps=steps, prompts=PROMPTS[:1], group=1))
    (training,) = seen_times(model, lambda: reverse(model, batch, cps))
    assert torch.equal(torch.cat(sampling)[: len(training)], training) and len(training) == steps - 1
    x = packed(noise(model, 1, 32, 32)).to(model.dtype)
    with torch.autocast("cpu", model.dtype, enabled=model.autocast):
        theirs = seen_times(
            model, lambda: reference(model, ["a"], steps=steps, size=(32, 32), output="latent", latents=x)
        )
    assert torch.equal(torch.cat(sampling), torch.cat(theirs)) and theirs[0].dtype == model.dtype


def test_rounding_after_the_division_would_be_another_time(load: Callable[..., Flux]) -> None:
    """The mistake that the one `time` rules out. Expected: the two formulas in numpy differ in 4 of 10 at 1024 px."""
    model = load(dtype="bfloat16")
    sigma = model.sigmas(10, 1024, 1024)[:-1]
    other = (sigma * 1000 / 1000).bfloat16()
    assert int((model.time(sigma) * 1000 != other * 1000).sum()) == 4


# --- text and guidance ---------------------------------------------------------------------------------------------


def test_encode_equals_the_pipelines_batch_in_any_order(load: Callable[..., Flux]) -> None:
    model = load(true_cfg_scale=2.0, negative_prompt="a dog")
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[1]]
    cond = model.encode(prompts)
    embeds, pooled, _ = model.pipeline().encode_prompt(prompts, max_sequence_length=TOKENS)
    negative, negative_pooled, _ = model.pipeline().encode_prompt(["a dog"] * 3, max_sequence_length=TOKENS)
    expected = {"embeds": embeds, "pooled": pooled, "negative_embeds": negative, "negative_pooled": negative_pooled}
    torch.testing.assert_close(cond, expected, rtol=0, atol=1e-5)
    assert cond["embeds"].shape[1] == TOKENS
    assert torch.equal(cond["embeds"][0], cond["embeds"][2])
    assert (cond["embeds"][0] - cond["embeds"][1]).abs().max() > 0.1
    assert (cond["pooled"][0] - cond["pooled"][1]).abs().max() > 0.1
    assert set(load().encode(PROMPTS)) == {"embeds", "pooled"}
    with pytest.raises(DataError, match="at least one prompt"):
        model.encode([])


def test_each_text_is_encoded_once(load: Callable[..., Flux], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(true_cfg_scale=2.0)
    calls, encode = [], model.pipeline().encode_prompt

    def counted(prompts: list[str], **options: Any) -> Any:
        calls.extend(prompts)
        return encode(prompts, **options)

    monkeypatch.setattr(model.pipeline(), "encode_prompt", counted)
    first = model.encode([PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    again = model.encode([PROMPTS[1], PROMPTS[0]])
    assert sorted(calls) == sorted([PROMPTS[0], PROMPTS[1], ""])
    assert torch.equal(first["embeds"][0], again["embeds"][1])
    assert not any(tensor.requires_grad for tensor in first.values())


def test_long_prompts_are_cut_as_in_the_pipeline(load: Callable[..., Flux]) -> None:
    """CLIP reads 77 tokens, T5 max_sequence_length."""
    model = load(max_sequence_length=300)
    long = "a red square and a blue circle " * 8
    cond = model.encode([long, long + "on white"])
    embeds, pooled, _ = model.pipeline().encode_prompt([long, long + "on white"], max_sequence_length=300)
    torch.testing.assert_close(cond, {"embeds": embeds, "pooled": pooled}, rtol=0, atol=1e-5)
    assert torch.equal(cond["pooled"][0], cond["pooled"][1])
    assert (cond["embeds"][0] - cond["embeds"][1]).abs().max() > 0.1


def test_embedded_guidance_reaches_the_network(load: Callable[..., Flux]) -> None:
    assert load().guidance == 3.5  # FluxPipeline's own default
    x, sigma = noise(load(), 2), torch.tensor([0.9, 0.4])
    v = [m.velocity(x, sigma, m.encode(PROMPTS[:2])) for m in (load(), load(guidance=3.5), load(guidance=1.5))]
    assert torch.equal(v[0], v[1]) and (v[0] - v[2]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["schnell", "plain"])
def test_guidance_without_an_embedding_is_refused(load: Callable[..., Flux], kind: str) -> None:
    assert load(kind).guidance is None
    for number in (0.0, 3.5):
        with pytest.raises(ConfigError, match=r"guidance: .* no guidance embedding .*; leave guidance out"):
            load(kind, guidance=number)


@pytest.mark.parametrize(
    ("name", "embeds", "tune", "warned"),
    [
        ("tiny", False, "lora", True),
        ("tiny", False, "none", False),
        ("tiny", True, "lora", False),
        ("Flux-Turbo", True, "full", True),
    ],
)
def test_step_distilled_models_are_named(tmp_path: Path, name: str, embeds: bool, tune: str, warned: bool) -> None:
    folder = tiny_flux(tmp_path / name, guidance_embeds=embeds)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flux(str(folder), tune=tune, device="cpu")
    found = [w for w in caught if "distilled to a few steps" in str(w.message)]
    assert len(found) == warned
    assert all(w.filename == __file__ for w in found)


def test_velocity_reads_no_tensor_values(load: Callable[..., Flux], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device tensors have no values, so any hidden .item(), bool() or .cpu() raises."""
    model = load(true_cfg_scale=2.0)
    cond = {name: rows.to("meta") for name, rows in model.encode(PROMPTS).items()}
    model.transformer.to("meta")
    monkeypatch.setattr(torch, "autocast", lambda *_args, **_options: nullcontext())  # which knows no meta device
    v = model.velocity(noise(model, 3, 64, 32).to("meta"), torch.ones(3, device="meta"), cond)
    assert v.is_meta and v.shape == (3, 16, 8, 4)


# --- training ------------------------------------------------------------------------------------------------------


def sampled(model: Flux, *, steps: int = 4, prompts: list[str] = PROMPTS[:2], group: int = 2) -> Rollout:
    """Roll out with noise on every step, in micro-batches of 4, at 32 x 32 pixels."""
    return rollout(
        model,
        model.encode(prompts),
        full(0, steps=steps, level=0.6),
        cps,
        sigmas=model.sigmas(steps, 32, 32),
        shape=model.latent_shape(32, 32),
        group_size=group,
        generators=seeds(len(prompts)),
        micro_batch=4,
    )


def gaps(model: Flux) -> dict[int, float]:
    """Measure max |ratio - 1| on one rollout of 4 rows, by micro-batch of the second evaluation."""
    ro, out = sampled(model), {}
    weight, nodes = torch.zeros(len(ro.x)), decision_nodes(ro)
    for size in (1, 3, 4, 12):
        with torch.no_grad():
            batches = [decisions(ro, weight, nodes=part) for part in nodes.split(size)]
            logs = [reverse(model, batch, cps).log_prob - batch.old_log_prob for batch in batches]
        out[size] = float((torch.cat(logs).exp() - 1).abs().max())
    return out


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dev", {}),
        ("dev", {"tune": "full"}),
        ("dev", {"true_cfg_scale": 3.0, "guidance": 2.0}),
        ("schnell", {}),
    ],
)
def test_the_ratio_is_1_before_the_first_update(load: Callable[..., Flux], kind: str, options: dict[str, Any]) -> None:
    model = load(kind, **options)
    perturb(model, 0.05)
    found = gaps(model)
    assert max(found.values()) < 1e-5 and found[4] == 0, found


@pytest.mark.parametrize("tune", ["lora", "full"])
def test_the_ratio_in_bfloat16(load: Callable[..., Flux], tune: str) -> None:
    """Equal calls give equal bits, so the time input is the same too; other batch sizes may run other kernels."""
    model = load(dtype="bfloat16", tune=tune)
    perturb(model, 0.05)
    found = gaps(model)
    print(f"bfloat16, {tune}: max |ratio - 1| by micro-batch: {found}")
    assert found[4] == 0 and max(found.values()) < 0.1


@pytest.mark.integration
def test_a_config_trains_it(folders: dict[str, Path], tmp_path: Path) -> None:
    """One iteration of the whole loop, from the YAML's words on."""
    lora = "{rank: 2, alpha: 4}"
    model = f"{{fn: flux, path: {folders['dev']}, guidance: 2.5, lora: {lora}, device: cpu, max_sequence_length: 8}}"
    size = ("image.height=32", "image.width=48", "train.group=2", "train.rollout_batch=4", "train.micro_batch=4")
    trainer = Trainer(toy(tmp_path, f"model={model}", "transition.fn=cps", "train.updates=1", *size))
    before = {name: p.detach().clone() for name, p in trainer.params.items()}
    metrics = trainer.step()
    assert metrics["on_policy_gap"] < 1e-5 and metrics["trained"] > 0
    assert isinstance(trainer.model, Flux) and trainer.model.guidance == 2.5
    moved = {name for name, p in trainer.params.items() if not torch.equal(p, before[name])}
    assert {name for name in before if ".lora_B." in name} <= moved


@pytest.mark.parametrize("options", [{}, {"tune": "full"}, {"true_cfg_scale": 3.0}, {"dtype": "bfloat16"}])
def test_gradients_reach_every_trained_weight(load: Callable[..., Flux], options: dict[str, Any]) -> None:
    model = load(**options)
    perturb(model, 0.05)
    batch = decisions(ro := sampled(model), torch.ones(len(ro.x)))
    found = gradients(model, reverse(model, batch, cps).log_prob.sum())
    assert set(found) == set(model.trainable())
    assert all(bool(grad.isfinite().all()) and grad.dtype == torch.float32 for grad in found.values())
    assert [name for name, grad in found.items() if not float(grad.abs().max()) > 0] == []


def test_gradient_flows_through_both_branches_of_true_cfg(load: Callable[..., Flux]) -> None:
    """Expected: (1 - s) grad u + s grad c, with u and c from two separate runs without it."""
    scale, model, single = 3.0, load(true_cfg_scale=3.0), load()
    perturb(model)
    perturb(single)
    x, sigma, cond = noise(model, 2), torch.tensor([0.9, 0.4]), model.encode(PROMPTS[:2])
    both = gradients(model, (model.velocity(x, sigma, cond) * x).sum())
    u = single.velocity(x, sigma, {"embeds": cond["negative_embeds"], "pooled": cond["negative_pooled"]})
    c = single.velocity(x, sigma, {"embeds": cond["embeds"], "pooled": cond["pooled"]})
    from_u, from_c = gradients(single, (u * x).sum()), gradients(single, (c * x).sum())
    assert set(both) == set(from_u) == set(from_c) == set(model.trainable())
    for name, grad in both.items():
        expected = (1 - scale) * from_u[name] + scale * from_c[name]
        torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()) + 1e-5)
    size = {name: float(grad.abs().max()) for name, grad in from_u.items()}
    # The branches differ, so leaving one of them out of the graph could not have gone unseen.
    assert any((from_u[name] - from_c[name]).abs().max() > 1e-2 * size[name] > 0 for name in size)


def test_lora_sits_on_all_attention_projections_and_starts_as_the_base(load: Callable[..., Flux]) -> None:
    base, model = load(tune="none"), load()
    params = model.trainable()
    # Two double blocks: q, k, v, out and added q, k, v, out; two single blocks: q, k, v. Each has an A and a B.
    assert len(params) == (2 * 8 + 2 * 3) * 2
    assert all(".lora_" in name and param.dtype == torch.float32 for name, param in params.items())
    x, sigma, cond = noise(base, 2), torch.tensor([0.9, 0.4]), base.encode(PROMPTS[:2])
    assert torch.equal(base.velocity(x, sigma, cond), model.velocity(x, sigma, cond))
    assert base.trainable() == {}
    for part in (model.pipeline().vae, model.pipeline().text_encoder, model.pipeline().text_encoder_2):
        assert not any(param.requires_grad for param in part.parameters())
    assert not any(module.training for module in model.transformer.modules())


def test_targets_and_layers_by_name(load: Callable[..., Flux]) -> None:
    model = load(lora={"rank": 4, "targets": ["add_q_proj"]})
    assert {name.split(".lora_")[0] for name in model.trainable()} == {
        f"transformer_blocks.{block}.attn.add_q_proj" for block in (0, 1)
    }
    model = load(tune="full", layers=["context_embedder", "proj_mlp"])
    layers = ("context_embedder", *(f"single_transformer_blocks.{block}.proj_mlp" for block in (0, 1)))
    assert set(model.trainable()) == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    for wrong in ({"lora": {"targets": ["attn.to_z"]}}, {"tune": "full", "layers": ["attn.to_z"]}):
        with pytest.raises(ModelError, match=r"no linear layer is named 'attn.to_z'; available: .*attn\.add_k_proj"):
            load(**wrong)


@pytest.mark.parametrize("tune", ["lora", "full"])
def test_short_base_keeps_trained_weights_in_float32(load: Callable[..., Flux], tune: str) -> None:
    short, exact = load(dtype="bfloat16", tune=tune), load(tune=tune)
    assert {param.dtype for param in short.trainable().values()} == {torch.float32}
    assert short.pipeline().text_encoder_2.dtype == torch.bfloat16
    x, sigma = noise(short, 2), torch.tensor([0.9, 0.4])
    v, expected = (model.velocity(x, sigma, model.encode(PROMPTS[:2])) for model in (short, exact))
    assert v.dtype == torch.float32
    # bfloat16 keeps 8 bits: about 1 % per value after a few layers; equal bits would mean it was never used.
    error = float(((v - expected).norm() / expected.norm()).detach())
    assert 1e-4 < error < 0.05
    image = short.decode(x)
    assert image.dtype == torch.float32 and image.min() >= 0 and image.max() <= 1


def test_lora_in_bfloat16_equals_the_pipelines_first_step(load: Callable[..., Flux]) -> None:
    """One step from the same bfloat16 noise; only the pipeline's rounding of its result separates the two."""
    model = load(dtype="bfloat16")
    x = noise(model, 2).bfloat16()
    ours = euler(model, x.float(), model.sigmas(1, 64, 64), PROMPTS[:2])
    theirs = reference(model, PROMPTS[:2], steps=1, size=(64, 64), output="latent", latents=packed(x))
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(packed(ours).bfloat16(), theirs)


def test_decode_does_not_depend_on_the_slice(load: Callable[..., Flux]) -> None:
    whole, sliced = load(decode_batch=64), load(decode_batch=2)
    x = noise(whole, 5, 32, 48)
    torch.testing.assert_close(whole.decode(x), sliced.decode(x), rtol=0, atol=1e-5)


def test_is_a_flow_model(load: Callable[..., Flux]) -> None:
    model = load()
    assert isinstance(model, FlowModel)
    assert model.latent_shape(64, 32) == (16, 8, 4)
    assert type(model.pipeline()) is FluxPipeline and model.pipeline().transformer is model.transformer


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(60, 64), (64, 40), (64, 0), (-16, 64)])
def test_impossible_sizes(load: Callable[..., Flux], size: tuple[int, int]) -> None:
    model, message = load(), f"multiples of 16 pixels, got {size[0]} x {size[1]}"
    with pytest.raises(ModelError, match=message):
        model.latent_shape(*size)
    with pytest.raises(ModelError, match=message):
        model.sigmas(4, *size)


def test_impossible_numbers_of_steps(load: Callable[..., Flux]) -> None:
    with pytest.raises(ConfigError, match="steps: expected at least 1"):
        load().sigmas(0, 64, 64)
    # one step that starts at 1 and ends at shift_terminal: diffusers divides 0 by 0
    with pytest.raises(ConfigError, match="noise levels that are no numbers of 1 steps and 16 tokens"):
        load("linear").sigmas(1, 64, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guidance": float("nan")}, "guidance"),
        ({"guidance": -1.0}, "guidance"),
        ({"true_cfg_scale": 0.5}, r"true_cfg_scale: expected a finite number of at least 1 \(1 is off\)"),
        ({"true_cfg_scale": float("inf")}, "true_cfg_scale"),
        ({"negative_prompt": "a dog"}, "negative_prompt: has no effect unless true_cfg_scale"),
        ({"tune": "lorra"}, "tune: expected"),
        ({"tune": "full", "lora": {"rank": 4}}, "lora: has no effect"),
        ({"lora": {"rnk": 4}}, "unknown option 'rnk'"),
        ({"layers": ["proj_out"]}, "layers: has no effect unless tune is 'full'"),
        ({"dtype": "float8"}, "dtype: expected"),
        ({"max_sequence_length": 513}, "max_sequence_length"),
        ({"decode_batch": 0}, "decode_batch"),
        ({"device": "quantum"}, "device: expected"),
    ],
)
def test_wrong_options_raise_before_the_model_is_looked_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flux("/nowhere/at/all", **options)


def test_the_config_knows_its_arguments() -> None:
    with pytest.raises(ConfigError, match=r"guidence.*did you mean 'guidance'"):
        Call.bind("model", {"fn": "flux", "path": "somewhere", "guidence": 3.5})
    assert Call.bind("model", {"fn": "flux", "path": "somewhere"}).kwargs["guidance"] is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit("model_index.json", _class_name="StableDiffusion3Pipeline"), r"'FluxPipeline', got 'StableDiffusion3P"),
        (edit("model_index.json", _class_name="FluxFillPipeline"), r"expected _class_name 'FluxPipeline'"),
        (edit("model_index.json", transformer=["diffusers", "SD3Transformer2DModel"]), r"to be FluxTransformer2DModel"),
        (edit("model_index.json", text_encoder_2=[None, None]), r"text_encoder_2 to be T5EncoderModel, got None"),
        (edit("transformer/config.json", patch_size=2), r"patch_size 1 and|could not be loaded"),
        (edit("vae/config.json", shift_factor=None), r"must set scaling_factor and shift_factor"),
        (edit("scheduler/scheduler_config.json", invert_sigmas=True), r"invert_sigmas"),
        (lambda folder: (folder / "tokenizer/tokenizer.json").unlink(), r"tokenizer: no tokenizer files"),
        (lambda folder: (folder / "tokenizer_2/tokenizer.json").unlink(), r"tokenizer_2: no tokenizer files"),
        (lambda folder: shutil.rmtree(folder / "tokenizer_2"), r"tokenizer_2: missing"),
        (lambda folder: shutil.rmtree(folder / "vae"), r"vae: missing"),
    ],
)
def test_damaged_folders(broken: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(broken)
    with pytest.raises(ModelError, match=message) as caught:
        flux(str(broken), device="cpu")
    assert str(broken) in str(caught.value)


def test_an_image_encoder_is_left_alone(broken: Path) -> None:
    """Folders saved with an IP-Adapter name one; it is not there here, so reading it would fail."""
    edit("model_index.json", image_encoder=["transformers", "CLIPVisionModelWithProjection"])(broken)
    assert flux(str(broken), device="cpu").pipeline().image_encoder is None
