"""What every adapter has to keep when it is trained: gradients, LoRA, layers, dtypes."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from adapterkit import GUIDED, PROMPTS, Folders, parts_of, relative_error, velocity
from diffusers import QwenImagePipeline
from modelkit import gradients, noise, perturb
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.training.weights import Weights


class Case(NamedTuple):
    """What LoRA and full tuning of some layers find in a tiny pipeline."""

    projections: int  # layers that get LoRA by default
    pattern: str  # of their names
    layers: list[str]  # an argument of full tuning
    chosen: set[str]  # the weights that it trains
    absent: tuple[str, str]  # a layer that is not there, and what the message offers
    # trained weights that no output depends on: the last block asks nothing in the text's name,
    # since its text goes nowhere
    idle: tuple[str, ...] = ()


def both(*layers: str) -> set[str]:
    return {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}


UNET_KEYS = {
    f"{block}.attentions.0.transformer_blocks.0.attn2.to_k.weight"
    for block in ("down_blocks.0", "mid_block", "up_blocks.1")
} | {"up_blocks.1.attentions.1.transformer_blocks.0.attn2.to_k.weight"}
# one transformer block before, in and after the middle with its skips: 1 + 1 + 2, each with two
# attentions
UNET = Case(
    4 * 2 * 4,
    r"attn[12]\.to_(q|k|v|out\.0)\.lora_",
    ["attn2.to_k"],
    UNET_KEYS,
    ("attn.to_q", r"attn1\.to_k.*attn2\.to_q"),
)
LAST = ("transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.norm_added_q")
# Z-Image
LAYERS = ("layers.0", "layers.1", "noise_refiner.0", "context_refiner.0")
FLUX2 = Case(
    2 * (8 + 4) + 2 * 2,
    r"transformer_blocks\.[01]\.(attn|ff|ff_context)\.",
    ["context_embedder", "attn.to_qkv_mlp_proj"],
    {
        "context_embedder.weight",
        "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight",
        "single_transformer_blocks.1.attn.to_qkv_mlp_proj.weight",
    },
    ("attn.to_z", r"attn\.add_k_proj"),
)
# Qwen-Image: what the last block does with the text after its attention
TEXT_END = tuple(f"transformer_blocks.1.{part}" for part in ("attn.to_add_out", "txt_mlp"))
CASES = {
    # 8 in each block, but the last has no projection of the text out
    "sd3": Case(
        8 + 7,
        r"transformer_blocks\.[01]\.attn\.",
        ["context_embedder", "attn.add_k_proj"],
        both(
            "context_embedder",
            "transformer_blocks.0.attn.add_k_proj",
            "transformer_blocks.1.attn.add_k_proj",
        ),
        ("attn.to_z", r"attn\.add_k_proj.*attn\.to_q"),
        LAST,
    ),
    # two double blocks: q, k, v, out and added q, k, v, out; two single blocks: q, k, v
    "flux": Case(
        2 * 8 + 2 * 3,
        r"transformer_blocks\.[01]\.attn\.",
        ["context_embedder", "proj_mlp"],
        both(
            "context_embedder",
            "single_transformer_blocks.0.proj_mlp",
            "single_transformer_blocks.1.proj_mlp",
        ),
        ("attn.to_z", r"attn\.add_k_proj"),
    ),
    "sd15": UNET,
    "sdxl": UNET,
    # in each of two blocks q, k, v and out of both attentions, and two layers after them
    "wan": Case(
        2 * (2 * 4 + 2),
        r"blocks\.[01]\.(attn[12]|ffn)\.",
        ["proj_out", "attn2.to_k"],
        both("proj_out", "blocks.0.attn2.to_k", "blocks.1.attn2.to_k"),
        ("attn.to_q", r"attn1\.to_k.*attn2\.to_q"),
    ),
    # 8 of the joint attention and two of each MLP, in both blocks
    "qwen_image": Case(
        2 * 12,
        r"transformer_blocks\.[01]\.(attn|img_mlp|txt_mlp)\.",
        ["txt_in", "img_mlp.net.2"],
        both("txt_in", "transformer_blocks.0.img_mlp.net.2", "transformer_blocks.1.img_mlp.net.2"),
        ("attn.to_z", r"attn\.add_k_proj"),
        (*LAST, *TEXT_END),
    ),
    # attention and MLP of two layers and of two refiners
    "z_image": Case(
        4 * 7,
        r"(layers|refiner)\.[01]\.(attention|feed_forward)\.",
        ["cap_embedder.1", "feed_forward.w2"],
        both("cap_embedder.1") | {f"{layer}.feed_forward.w2.weight" for layer in LAYERS},
        ("attn.to_q", r"attention\.to_k"),
    ),
    # 8 and two of each MLP in each double block, 2 in each single block
    "flux2": FLUX2,
    "flux2_klein": FLUX2,
}


# each class of network once; SDXL's is that of Stable Diffusion 1, klein's that of FLUX.2
NETWORKS = [name for name in CASES if name not in ("sdxl", "flux2_klein")]


@pytest.fixture(scope="module", params=NETWORKS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("tune", ["lora", "full"])
def test_gradients_reach_all_that_is_trained_and_nothing_else(
    folders: Folders, name: str, tune: str
) -> None:
    model = folders.load(name, tune=tune, **GUIDED[name])
    perturb(model, 0.02)
    params = model.trainable()
    assert params and all(p.requires_grad and p.dtype == torch.float32 for p in params.values())
    x, cond = noise(model, 2, 32, 48), model.encode(PROMPTS[:2])
    sigma = model.sigmas(6, 32, 48)[2:3].expand(2)
    found = gradients(model, model.velocity(x, sigma, cond).square().mean())
    assert all(bool(grad.isfinite().all()) for grad in found.values())
    reached = {key for key, grad in found.items() if bool((grad != 0).any())}
    assert reached == {key for key in params if not key.startswith(CASES[name].idle)}
    trained = [p for part in parts_of(model) for p in part.parameters() if p.requires_grad]
    assert set(map(id, trained)) == set(map(id, params.values()))


def mixed(name: str, u: Tensor, c: Tensor) -> Tensor:
    """Mix two branches with scale 3, as the code of each pipeline does."""
    both = u + 3.0 * (c - u)  # Z-Image says 2 and means c + 2 (c - u)
    if name != "qwen_image":
        return both
    size = (len(u), *u.shape[1:])
    whole, cond = (QwenImagePipeline._pack_latents(v, *size) for v in (both, c))
    ratio = torch.norm(cond, dim=-1, keepdim=True) / torch.norm(whole, dim=-1, keepdim=True)
    height, width = (8 * side for side in u.shape[2:])
    return QwenImagePipeline._unpack_latents(whole * ratio, height, width, 8)[:, :, 0]


@pytest.mark.parametrize("name", [name for name in CASES if GUIDED[name]])
def test_gradient_flows_through_both_guidance_branches(folders: Folders, name: str) -> None:
    """Expected: the chain rule with u and c from two separate runs without guidance, and what the
    pipeline's own mixing passes back to each."""
    model, single = folders.load(name, **GUIDED[name]), folders.load(name)
    perturb(model)
    perturb(single)
    x, sigma = noise(model, 2), model.sigmas(4, 64, 64)[:2]
    cond = model.encode(PROMPTS[:2])
    positive = {key: rows for key, rows in cond.items() if not key.startswith("negative_")}
    negative = {key: cond[f"negative_{key}"] for key in positive}
    guided = gradients(model, (model.velocity(x, sigma, cond) * x).sum())
    u, c = single.velocity(x, sigma, negative), single.velocity(x, sigma, positive)
    at_u, at_c = torch.autograd.grad((mixed(name, u, c) * x).sum(), (u, c), retain_graph=True)
    from_u, from_c = gradients(single, (u * at_u).sum()), gradients(single, (c * at_c).sum())
    assert set(guided) == set(from_u) == set(from_c) == set(model.trainable())
    for key, grad in guided.items():
        expected = from_u[key] + from_c[key]
        atol = 1e-3 * float(expected.abs().max()) + 1e-5
        torch.testing.assert_close(grad, expected, rtol=1e-3, atol=atol)
    # The branches differ, so leaving one of them out of the graph could not have gone unseen.
    size = {key: float(grad.abs().max()) for key, grad in from_u.items()}
    assert any((from_u[key] - from_c[key]).abs().max() > 1e-2 * size[key] > 0 for key in size)


def test_lora_starts_as_the_base_network_and_from_its_seed_alone(
    folders: Folders, name: str
) -> None:
    base, one = folders.load(name, tune="none"), folders.load(name)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    same, other = folders.load(name, seed=0, dtype="bfloat16"), folders.load(name, seed=1)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is not disturbed
    x, sigma, cond = noise(base, 2), base.sigmas(4, 64, 64)[:2], base.encode(PROMPTS[:2])
    with torch.no_grad():
        assert torch.equal(base.velocity(x, sigma, cond), one.velocity(x, sigma, cond))
    assert base.trainable() == {}
    for key, param in one.trainable().items():
        assert torch.equal(param, same.trainable()[key]), key
        assert torch.equal(param, other.trainable()[key]) == (".lora_B." in key), key


@pytest.mark.parametrize("name", ["sd3", "sd15"])
def test_without_adapters_the_network_is_the_base_to_the_bit(folders: Folders, name: str) -> None:
    """The adapters as they start add B A x = 0; a call in between leaves gradients alone."""
    model = folders.load(name, tune="lora")
    weights = Weights(model.trainable())
    weights.snapshot("ref")
    assert weights.adds_nothing("ref")
    perturb(model)
    with torch.no_grad(), weights.using("ref"):
        expected = velocity(model)
    wanted = gradients(model, velocity(model).square().mean())
    loss = velocity(model).square().mean()
    with torch.no_grad(), model.base():
        found = velocity(model)
    assert torch.equal(found, expected) and not torch.equal(velocity(model), expected)
    assert all(map(torch.equal, gradients(model, loss).values(), wanted.values()))
    weights.snapshot("ref")
    assert not weights.adds_nothing("ref")
    assert folders.load(name, tune="full").base() is None


def test_lora_defaults_are_flow_grpos(folders: Folders, name: str) -> None:
    model, case = folders.load(name), CASES[name]
    params = model.trainable()
    order = [key for key, param in model.network.named_parameters() if param.requires_grad]
    assert list(params) == order and len(params) == 2 * case.projections  # an A and a B each
    assert all(".lora_" in key and re.search(case.pattern, key) for key in params)
    # std 1/rank; thousands of draws put the sample's std within 4 % (5 standard errors)
    a = torch.cat([p.detach().flatten() for key, p in params.items() if ".lora_A." in key])
    assert abs(float(a.std()) * 32 - 1) < 0.04
    config = model.network.peft_config["default"]
    assert (config.r, config.lora_alpha) == (32, 64)
    assert not any(module.training for part in parts_of(model) for module in part.modules())


def test_targets_and_layers_by_name(folders: Folders, name: str) -> None:
    case = CASES[name]
    model = folders.load(name, lora={"rank": 4, "alpha": 2, "targets": [case.layers[-1]]})
    wanted = {key.rpartition(".")[0] for key in case.chosen if case.layers[-1] in key}
    assert {key.split(".lora_")[0] for key in model.trainable()} == wanted
    assert {min(p.shape) for p in model.trainable().values()} == {4}
    config = model.network.peft_config["default"]
    assert (config.r, config.lora_alpha) == (4, 2)
    assert set(folders.load(name, tune="full", layers=case.layers).trainable()) == case.chosen
    whole = folders.load(name, tune="full")
    assert set(whole.trainable()) == {key for key, _ in whole.network.named_parameters()}
    wrong, offered = case.absent
    for option, options in (
        ("lora.targets", {"lora": {"targets": [case.layers[0], wrong]}}),
        ("layers", {"tune": "full", "layers": [wrong]}),
    ):
        message = rf"{option}: no linear layer is named '{wrong}'; available: .*{offered}"
        with pytest.raises(ModelError, match=message):
            folders.load(name, **options)


SHORT = [(name, "lora") for name in NETWORKS] + [("sd3", "full"), ("flux", "full"), ("wan", "full")]


@pytest.mark.parametrize(("name", "tune"), SHORT)
def test_short_base_keeps_trained_weights_in_float32(
    folders: Folders, name: str, tune: str
) -> None:
    pipeline = {"sd15": "sd15 v"}.get(name, name)  # which does not divide by the signal left
    guidance = {} if name == "flux" else GUIDED[name]  # true CFG would multiply the rounding
    options: dict[str, Any] = guidance | {"tune": tune}
    short = folders.load(pipeline, dtype="bfloat16", **options)
    exact = folders.load(pipeline, **options)
    assert {param.dtype for param in short.trainable().values()} == {torch.float32}
    assert short.pipeline().text_encoder.dtype == torch.bfloat16
    wide = tuple(short.network._keep_in_fp32_modules or ())  # what diffusers itself keeps so
    frozen = set()
    for key, p in short.network.named_parameters():
        if not p.requires_grad and not any(part in key for part in wide):
            frozen.add(p.dtype)
    assert frozen == ({torch.bfloat16} if tune == "lora" else set())
    x, sigma = noise(short, 2), short.sigmas(4, 64, 64)[1:3]
    v = short.velocity(x, sigma, short.encode(PROMPTS[:2]))
    expected = exact.velocity(x, sigma, exact.encode(PROMPTS[:2]))
    assert v.dtype == torch.float32
    # bfloat16 keeps 8 bits: about 1 % per value after a few layers; equal bits would mean it was
    # never used
    assert 1e-5 < relative_error(v, expected) < 0.05
    found = gradients(short, v.sum()).values()
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in found)
    image = short.decode(x)
    assert image.dtype == torch.float32 and image.min() >= 0 and image.max() <= 1
