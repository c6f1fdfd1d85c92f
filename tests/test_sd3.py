"""The SD3 adapter against diffusers' own pipeline, on tiny models with random weights of the real classes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from modelkit import edit, euler, gradients, noise, perturb
from safetensors.torch import load_file, save_file
from tiny import tiny_sd3
from torch import Tensor

from flowrl.errors import ConfigError, DataError, FlowRLError, ModelError
from flowrl.models.loading import locate
from flowrl.models.sd3 import SD3, sd3
from flowrl.samplers.rollout import sample_ode
from flowrl.types import FlowModel

PROMPTS = ["a red square", "two small blue circles left of a green triangle on white", "a cat"]
TOKENS = 24  # max_sequence_length everywhere, for speed
pytestmark = pytest.mark.filterwarnings("ignore:the prompt .* is cut")  # to so many tokens, which are letters here


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "plain": tiny_sd3(root / "plain"),
        "t5": tiny_sd3(root / "t5", t5=True, dual=True, seed=1),
        "dynamic": tiny_sd3(root / "dynamic", dynamic_shift=True, seed=2),
    }


@pytest.fixture(scope="module")
def load(folders: dict[str, Path]) -> Callable[..., SD3]:
    def build(kind: str = "plain", **options: Any) -> SD3:
        return sd3(str(folders[kind]), device="cpu", max_sequence_length=TOKENS, **options)

    return build


@pytest.fixture
def broken(folders: dict[str, Path], tmp_path: Path) -> Path:
    """Return a private copy of the T5 model, to be damaged."""
    return Path(shutil.copytree(folders["t5"], tmp_path / "model"))


def reference(model: SD3, x: Tensor, prompts: list[str], *, steps: int, size: tuple[int, int], output: str) -> Tensor:
    """Return what diffusers itself samples from the same noise."""
    pipeline = model.pipeline()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompts,
        negative_prompt=[model.negative_prompt] * len(prompts),
        height=size[0],
        width=size[1],
        num_inference_steps=steps,
        guidance_scale=model.guidance,
        latents=x,
        output_type=output,
        max_sequence_length=model.max_sequence_length,
    ).images


# --- the same numbers as the pipeline ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "guidance", "negative", "steps", "size", "count"),
    [
        ("plain", 1.0, "", 10, (64, 64), 3),
        ("plain", 4.5, "", 10, (64, 64), 2),
        ("plain", 4.5, "a blue dog", 4, (64, 32), 3),
        ("plain", 1.0, "", 1, (16, 64), 1),
        ("plain", 0.5, "", 2, (64, 64), 1),
        ("t5", 1.0, "", 7, (32, 48), 3),
        ("t5", 3.0, "", 10, (64, 64), 2),
        ("t5", 7.0, "a blue dog", 40, (48, 64), 2),
        ("dynamic", 1.0, "", 6, (64, 64), 2),
        ("dynamic", 2.0, "", 6, (64, 16), 2),
    ],
)
def test_euler_and_decode_equal_the_pipeline(
    load: Callable[..., SD3],
    kind: str,
    guidance: float,
    negative: str,
    steps: int,
    size: tuple[int, int],
    count: int,
) -> None:
    model = load(kind, guidance=guidance, negative_prompt=negative)
    perturb(model)
    x, prompts = noise(model, count, *size), PROMPTS[:count]
    ours = euler(model, x, model.sigmas(steps, *size), prompts)
    theirs = reference(model, x, prompts, steps=steps, size=size, output="latent")
    assert (theirs - x).abs().mean() > 0.05  # the network moved something: equality is not that of two copies of x
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    images = model.decode(ours)
    expected = reference(model, x, prompts, steps=steps, size=size, output="pt")
    assert images.shape == (count, 3, *size) and images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1 and images.std() > 0.01
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-5)


def test_engine_without_noise_equals_the_pipeline_bit_for_bit(load: Callable[..., SD3]) -> None:
    """The pipeline is given our text embeddings here: a batch of texts may differ from single texts in the last bit."""
    model = load("t5", guidance=4.5)
    perturb(model)
    cond, roots = model.encode(PROMPTS), []
    hook = model.transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: roots.append(kwargs["hidden_states"]), with_kwargs=True
    )
    ours = sample_ode(
        model,
        cond,
        sigmas=model.sigmas(8, 64, 48),
        shape=model.latent_shape(64, 48),
        group_size=1,
        generators=[torch.Generator().manual_seed(i) for i in range(3)],
    )
    hook.remove()
    pipeline = model.pipeline()
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(
        prompt_embeds=cond["embeds"],
        pooled_prompt_embeds=cond["pooled"],
        negative_prompt_embeds=cond["negative_embeds"],
        negative_pooled_prompt_embeds=cond["negative_pooled"],
        height=64,
        width=48,
        num_inference_steps=8,
        guidance_scale=4.5,
        latents=roots[0][:3],  # the first call's batch is (unconditional, conditional)
        output_type="latent",
    ).images
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["plain", "dynamic"])
def test_network_sees_the_pipelines_times_bit_for_bit(load: Callable[..., SD3], kind: str) -> None:
    model, seen = load(kind), []
    hook = model.transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["timestep"]), with_kwargs=True
    )
    x = noise(model, 2)
    euler(model, x, model.sigmas(9, 64, 64), PROMPTS[:2])
    ours = torch.stack(seen)
    seen.clear()
    reference(model, x, PROMPTS[:2], steps=9, size=(64, 64), output="latent")
    hook.remove()
    assert torch.equal(ours, torch.stack(seen))


def test_sigmas_are_the_doubly_shifted_grid(load: Callable[..., SD3]) -> None:
    """Closed form: S(s) = 3s / (1 + 2s) over linspace(1, S(1/1000), 10), then 0."""

    def shift(sigma: Tensor) -> Tensor:
        return 3 * sigma / (1 + 2 * sigma)

    low = float(shift(torch.tensor(0.001, dtype=torch.float64)))
    expected = torch.cat([shift(torch.linspace(1, low, 10, dtype=torch.float64)), torch.zeros(1, dtype=torch.float64)])
    model = load()
    sigmas = model.sigmas(10, 64, 64)
    assert sigmas.dtype == torch.float32 and sigmas[-1] == 0 and sigmas[0] == 1
    torch.testing.assert_close(sigmas.double(), expected, rtol=0, atol=1e-6)


def test_dynamic_shift_depends_on_the_size_and_leaves_the_scheduler_alone(load: Callable[..., SD3]) -> None:
    model = load("dynamic")
    before = model.pipeline().scheduler.sigmas.clone()
    assert not torch.equal(model.sigmas(5, 64, 64), model.sigmas(5, 64, 16))
    assert torch.equal(model.pipeline().scheduler.sigmas, before)


# --- text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "t5"])
def test_encode_equals_the_pipelines_batch_in_any_order(load: Callable[..., SD3], kind: str) -> None:
    model = load(kind, guidance=2.0, negative_prompt="a dog")
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[1]]
    cond = model.encode(prompts)
    embeds, negative, pooled, negative_pooled = model.pipeline().encode_prompt(
        prompts, None, None, negative_prompt=["a dog"] * 3, max_sequence_length=TOKENS
    )
    expected = {"embeds": embeds, "pooled": pooled, "negative_embeds": negative, "negative_pooled": negative_pooled}
    torch.testing.assert_close(cond, expected, rtol=0, atol=1e-5)
    assert cond["embeds"].shape[1] == 77 + TOKENS
    assert torch.equal(cond["embeds"][0], cond["embeds"][2])
    assert (cond["embeds"][0] - cond["embeds"][1]).abs().max() > 0.1
    assert bool((cond["embeds"][:, 77:] == 0).all()) == (kind == "plain")  # zero tokens stand in for an absent T5


def test_each_text_is_encoded_once(load: Callable[..., SD3], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(guidance=2.0)
    calls, encode = [], model.pipeline().encode_prompt

    def counted(prompts: list[str], *args: Any, **options: Any) -> Any:
        calls.append(prompts[0])
        return encode(prompts, *args, **options)

    monkeypatch.setattr(model.pipeline(), "encode_prompt", counted)
    first = model.encode([PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    again = model.encode([PROMPTS[1], PROMPTS[0]])
    assert sorted(calls) == sorted([PROMPTS[0], PROMPTS[1], ""])
    assert torch.equal(first["embeds"][0], again["embeds"][1])
    assert not any(tensor.requires_grad for tensor in first.values())


def test_text_cache_stays_within_its_bound(load: Callable[..., SD3], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load()
    one = model.encode(["x"])
    size = sum(tensor.numel() * 4 for tensor in one.values())
    monkeypatch.setattr("flowrl.models.texts.CACHE_BYTES", 2 * size)
    many = model.encode([f"{i}" for i in range(5)])
    assert len(model._core.texts) == 2 and model._core.texts.bytes == 2 * size
    assert torch.equal(model.encode(["0"])["embeds"][0], many["embeds"][0])  # encoded again, to the bit


def test_guidance_decides_the_negative_rows(load: Callable[..., SD3]) -> None:
    assert set(load().encode(PROMPTS)) == {"embeds", "pooled"}
    with pytest.raises(DataError, match="at least one prompt"):
        load().encode([])


# --- training ------------------------------------------------------------------------------------------------------


def test_gradient_flows_through_both_guidance_branches(load: Callable[..., SD3]) -> None:
    """Expected: (1 - s) grad u + s grad c, with u and c from two separate runs without guidance."""
    scale, model, single = 3.0, load(guidance=3.0), load()
    perturb(model)
    perturb(single)
    x, sigma, cond = noise(model, 2), torch.tensor([0.9, 0.4]), model.encode(PROMPTS[:2])
    guided = gradients(model, (model.velocity(x, sigma, cond) * x).sum())
    u = single.velocity(x, sigma, {"embeds": cond["negative_embeds"], "pooled": cond["negative_pooled"]})
    c = single.velocity(x, sigma, {"embeds": cond["embeds"], "pooled": cond["pooled"]})
    from_u, from_c = gradients(single, (u * x).sum()), gradients(single, (c * x).sum())
    assert set(guided) == set(from_u) == set(from_c) and len(guided) > 8
    for name, grad in guided.items():
        expected = (1 - scale) * from_u[name] + scale * from_c[name]
        torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()) + 1e-5)
    size = {name: float(grad.abs().max()) for name, grad in from_u.items()}
    assert max(size.values()) > 1e-2
    # The branches differ, so leaving one of them out of the graph could not have gone unseen.
    assert any((from_u[name] - from_c[name]).abs().max() > 1e-2 * size[name] > 0 for name in size)


def test_lora_starts_as_the_base_network_and_from_its_seed_alone(load: Callable[..., SD3]) -> None:
    base, one = load(tune="none"), load()
    torch.manual_seed(99)
    state = torch.get_rng_state()
    same, other = load(seed=0, dtype="bfloat16"), load(seed=1)
    assert torch.equal(torch.get_rng_state(), state)  # drawing adapters does not disturb the global generator
    x, sigma, cond = noise(base, 2), torch.tensor([0.9, 0.4]), base.encode(PROMPTS[:2])
    assert torch.equal(base.velocity(x, sigma, cond), one.velocity(x, sigma, cond))
    assert base.trainable() == {}
    for name, param in one.trainable().items():
        assert torch.equal(param, same.trainable()[name]), name
        assert torch.equal(param, other.trainable()[name]) == (".lora_B." in name), name


def test_lora_defaults_are_flow_grpos(load: Callable[..., SD3]) -> None:
    model = load()
    params = model.trainable()
    # Per block: q, k, v, out and added q, k, v, out, each with an A and a B; the last block has no text output layer.
    assert len(params) == (8 + 7) * 2
    assert list(params) == [name for name, p in model.transformer.named_parameters() if p.requires_grad]
    assert all(".lora_" in name and param.dtype == torch.float32 for name, param in params.items())
    a = torch.cat([param.detach().flatten() for name, param in params.items() if ".lora_A." in name])
    # std 1/rank; 15 layers x 32 x 16 = 7680 draws put the sample's std within 4 % (5 standard errors).
    assert abs(float(a.std()) * 32 - 1) < 0.04
    assert model.transformer.peft_config["default"].r == 32
    assert model.transformer.peft_config["default"].lora_alpha == 64
    everything = [model.transformer, model.pipeline().vae, model.pipeline().text_encoder]
    assert not any(module.training for part in everything for module in part.modules())
    for part in everything[1:]:
        assert not any(param.requires_grad for param in part.parameters())


def test_lora_options_reach_the_adapters(load: Callable[..., SD3]) -> None:
    model = load(lora={"rank": 4, "alpha": 2, "targets": ["attn.to_q"]})
    shapes = {name: tuple(param.shape) for name, param in model.trainable().items()}
    assert shapes == {
        f"transformer_blocks.{block}.attn.to_q.lora_{side}.default.weight": shape
        for block in (0, 1)
        for side, shape in (("A", (4, 16)), ("B", (16, 4)))
    }


def test_target_without_a_layer_names_what_there_is(load: Callable[..., SD3]) -> None:
    with pytest.raises(ModelError, match=r"'attn.to_z'; available: .*attn\.add_k_proj.*attn\.to_q"):
        load(lora={"targets": ["attn.to_q", "attn.to_z"]})


def test_full_tuning_of_named_layers(load: Callable[..., SD3]) -> None:
    model = load(tune="full", layers=["context_embedder", "attn.add_k_proj"])
    layers = ("context_embedder", "transformer_blocks.0.attn.add_k_proj", "transformer_blocks.1.attn.add_k_proj")
    assert set(model.trainable()) == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    with pytest.raises(ModelError, match=r"layers: no linear layer is named 'norm_out'; available: .*norm_out\.linear"):
        load(tune="full", layers=["norm_out"])


def test_automatic_dtype(load: Callable[..., SD3]) -> None:
    # the expectation is read from the kernel's own list of the processor's features, not from torch
    listed = Path("/proc/cpuinfo")
    if torch.cuda.is_available() or not listed.exists():
        pytest.skip("needs a Linux machine without a GPU")
    flags = listed.read_text(encoding="utf-8").split()
    short = "avx512_bf16" in flags or "amx_bf16" in flags
    model = load(tune="full", dtype="auto")
    assert model.dtype == (torch.bfloat16 if short else torch.float32)
    assert next(iter(model.trainable().values())).dtype == torch.float32


def test_full_tuning_trains_every_parameter_of_the_transformer_only(load: Callable[..., SD3]) -> None:
    model = load(tune="full")
    assert set(model.trainable()) == {name for name, _ in model.transformer.named_parameters()}
    x, cond = noise(model, 1), model.encode(PROMPTS[:1])
    assert "proj_out.weight" in gradients(model, model.velocity(x, torch.tensor([0.5]), cond).sum())


@pytest.mark.parametrize("tune", ["lora", "full"])
def test_short_base_keeps_trained_weights_in_float32(load: Callable[..., SD3], tune: str) -> None:
    short, exact = load(dtype="bfloat16", tune=tune, guidance=2.0), load(tune=tune, guidance=2.0)
    assert {param.dtype for param in short.trainable().values()} == {torch.float32}
    assert short.pipeline().text_encoder.dtype == torch.bfloat16
    frozen = {param.dtype for param in short.transformer.parameters() if not param.requires_grad}
    assert frozen == ({torch.bfloat16} if tune == "lora" else set())
    x, sigma = noise(short, 2), torch.tensor([0.9, 0.4])
    v, expected = (model.velocity(x, sigma, model.encode(PROMPTS[:2])) for model in (short, exact))
    assert v.dtype == torch.float32
    # bfloat16 keeps 8 bits: about 1 % per value after a few layers; equal bits would mean it was never used.
    error = float(((v - expected).norm() / expected.norm()).detach())
    assert 1e-4 < error < 0.05
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in gradients(short, v.sum()).values())
    image = short.decode(x)
    assert image.dtype == torch.float32 and image.min() >= 0 and image.max() <= 1


def test_lora_in_bfloat16_equals_the_pipelines_first_step(load: Callable[..., SD3]) -> None:
    """One step from the same bfloat16 noise; only the pipeline's rounding of its result separates the two."""
    model = load(dtype="bfloat16")
    x = noise(model, 2).bfloat16()
    ours = euler(model, x.float(), model.sigmas(1, 64, 64), PROMPTS[:2])
    theirs = reference(model, x, PROMPTS[:2], steps=1, size=(64, 64), output="latent")
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(ours.bfloat16(), theirs)


def test_decode_does_not_depend_on_the_slice(load: Callable[..., SD3]) -> None:
    whole, sliced = load(decode_batch=64), load(decode_batch=2)
    x = noise(whole, 5)
    torch.testing.assert_close(whole.decode(x), sliced.decode(x), rtol=0, atol=1e-5)


def test_is_a_flow_model(load: Callable[..., SD3]) -> None:
    model = load()
    assert isinstance(model, FlowModel)
    assert model.latent_shape(64, 32) == (16, 8, 4)


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((60, 64), "multiples of 16 pixels, got 60 x 64"),
        ((64, 0), "multiples of 16"),
        ((64, 144), "at most 128 pixels here, got 64 x 144"),
    ],
)
def test_impossible_sizes(load: Callable[..., SD3], size: tuple[int, int], message: str) -> None:
    model = load()
    with pytest.raises(ModelError, match=message):
        model.latent_shape(*size)
    with pytest.raises(ModelError, match=message):
        model.sigmas(4, *size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guidance": float("nan")}, "guidance"),
        ({"guidance": -1.0}, "guidance"),
        ({"negative_prompt": "a dog"}, "negative_prompt: has no effect"),
        ({"tune": "lorra"}, "tune: expected"),
        ({"tune": "full", "lora": {"rank": 4}}, "lora: has no effect"),
        ({"lora": {"rnk": 4}}, "unknown option 'rnk'"),
        ({"lora": {"rank": 0}}, "lora.rank"),
        ({"lora": {"alpha": -1}}, "lora.alpha"),
        ({"lora": {"targets": "attn.to_q"}}, "lora.targets"),
        ({"lora": {"init": "pissa"}}, "lora.init"),
        ({"layers": ["proj_out"]}, "layers: has no effect unless tune is 'full'"),
        ({"tune": "full", "layers": "proj_out"}, "layers: expected a list"),
        ({"tune": "full", "layers": []}, "layers: expected a list"),
        ({"dtype": "float8"}, "dtype: expected"),
        ({"max_sequence_length": 513}, "max_sequence_length"),
        ({"decode_batch": 0}, "decode_batch"),
        ({"device": "quantum"}, "device: expected"),
    ],
)
def test_wrong_options_raise_before_the_model_is_looked_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sd3("/nowhere/at/all", **options)


def test_zero_steps(load: Callable[..., SD3]) -> None:
    with pytest.raises(ConfigError, match="steps"):
        load().sigmas(0, 64, 64)


def test_missing_folder_and_file_instead_of_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model at"):
        sd3(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="no model at"):
        sd3("assets/no-such-model")  # reads as owner/name, but names a folder of this project
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="got a file"):
        sd3(str(tmp_path / "file"))
    with pytest.raises(ModelError, match="no model_index.json"):
        sd3(str(tmp_path))


def test_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert locate("owner/no-such-model") == "owner/no-such-model"
    with pytest.raises(ModelError, match=r"'owner/no-such-model' .*could not be fetched.*HF_HUB_OFFLINE"):
        sd3("owner/no-such-model")


def truncate(folder: Path) -> None:
    file = folder / "transformer/diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def drop_tensor(folder: Path) -> None:
    file = folder / "transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["proj_out.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def reshape_tensor(folder: Path) -> None:
    file = folder / "vae/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["decoder.conv_in.bias"] = tensors["decoder.conv_in.bias"].repeat(2)
    save_file(tensors, file, metadata={"format": "pt"})


def pickle_only(folder: Path) -> None:
    file = folder / "vae/diffusion_pytorch_model.safetensors"
    torch.save(load_file(file), folder / "vae/diffusion_pytorch_model.bin")
    file.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"diffusion_pytorch_model.safetensors: corrupt or truncated"),
        (drop_tensor, r"1 tensors are missing .*proj_out.weight"),
        (reshape_tensor, r"could not be loaded"),
        (pickle_only, r"vae: no \*.safetensors file; flowrl never unpickles"),
        (lambda folder: (folder / "tokenizer_2/tokenizer.json").unlink(), r"tokenizer_2: no tokenizer files"),
        (lambda folder: (folder / "tokenizer_3/tokenizer.json").unlink(), r"tokenizer_3: no tokenizer files"),
        (lambda folder: shutil.rmtree(folder / "text_encoder"), r"text_encoder: missing"),
        (lambda folder: (folder / "vae/config.json").unlink(), r"vae: no config.json"),
        (lambda folder: (folder / "scheduler/scheduler_config.json").unlink(), r"no scheduler_config.json"),
        (lambda folder: (folder / "model_index.json").write_text("{"), r"model_index.json: not valid JSON"),
        (edit("model_index.json", _class_name="FluxPipeline"), r"expected .*StableDiffusion3Pipeline.* 'FluxPipeline'"),
        (edit("model_index.json", vae=[None, None]), r"expected vae to be AutoencoderKL, got None"),
        (edit("model_index.json", vae=["diffusers"]), r"expected vae to be \[library, class\]"),
        (edit("model_index.json", vae=["my_code", "AutoencoderKL"]), r"vae comes from 'my_code'"),
        (edit("scheduler/scheduler_config.json", invert_sigmas=True), r"invert_sigmas"),
        (edit("vae/config.json", shift_factor=None), r"shift_factor"),
    ],
)
def test_damaged_folders(broken: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(broken)
    with pytest.raises(ModelError, match=message) as caught:
        sd3(str(broken), device="cpu")
    assert isinstance(caught.value, FlowRLError) and str(broken) in str(caught.value)


def test_pipeline_is_the_public_class_with_the_current_weights(load: Callable[..., SD3]) -> None:
    model = load()
    assert type(model.pipeline()) is StableDiffusion3Pipeline
    assert model.pipeline().transformer is model.transformer


def test_without_t5_zero_tokens_stand_in_its_place(folders: dict[str, Path], load: Callable[..., SD3]) -> None:
    # expected: diffusers' own prompt encoding of the same folder, loaded with text_encoder_3=None as its docs show
    bare = StableDiffusion3Pipeline.from_pretrained(folders["t5"], text_encoder_3=None, tokenizer_3=None)
    model = load("t5", t5=False)
    assert model.pipeline().text_encoder_3 is None and model.pipeline().tokenizer_3 is None
    options = {"do_classifier_free_guidance": False, "max_sequence_length": TOKENS}
    embeds, _, pooled, _ = bare.encode_prompt(["a cat"], None, None, **options)
    cond = model.encode(["a cat"])
    assert torch.equal(cond["embeds"], embeds) and torch.equal(cond["pooled"], pooled)
    assert not cond["embeds"][:, -TOKENS:].any() and load("t5").encode(["a cat"])["embeds"][:, -TOKENS:].any()
