"""Qwen-Image-Edit, -Edit-Plus, FLUX.1-Kontext and FLUX.2 with references beside diffusers' own
pipelines, on tiny random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from adapterkit import PROMPTS, seeds
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from estimatekit import model_config
from modelkit import gradients, noise, perturb, told
from rolloutkit import ratio_gap
from tiny import tiny_flux, tiny_flux2, tiny_klein, tiny_qwen_edit, tiny_qwen_image
from torch import Tensor

from flowrl.algorithms.plans.windows import full
from flowrl.algorithms.rollout.engine import rollout, sample_ode
from flowrl.algorithms.transitions import cps
from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.types import Source
from flowrl.cost.meta_run import _inputs, workload_of
from flowrl.models.adapter import pack
from flowrl.models.flux2 import Flux2, flux2
from flowrl.models.flux2_klein import Flux2Klein, flux2_klein
from flowrl.models.flux_kontext import FluxKontext, flux_kontext
from flowrl.models.prompt_encoding import to_pil
from flowrl.models.qwen_edit import QwenEdit, qwen_edit
from flowrl.models.qwen_edit_plus import qwen_edit_plus

SMALL = {"source_pixels": 64 * 64, "max_sequence_length": 400}
SEEN = 96 * 96
# of the last block of Qwen-Image, whose text goes nowhere
IDLE = ("attn.add_q", "attn.norm_added_q", "attn.to_add_out", "txt_mlp", "txt_mod")
GUIDED = {"guidance": 3.0, "negative_prompt": "a dog"}


PACKED = (QwenEdit, FluxKontext)  # whose pipelines are given latents as tokens


class Case(NamedTuple):
    """A tiny pipeline and its adapter."""

    make: Callable[[Path], Path]
    load: Callable[..., Any]
    options: dict[str, Any]
    sources: int  # of each prompt


CASES = {
    "edit": Case(tiny_qwen_edit, qwen_edit, SMALL | GUIDED, 1),
    "edit, plain": Case(tiny_qwen_edit, qwen_edit, SMALL | {"tune": "full"}, 1),
    "plus": Case(
        partial(tiny_qwen_edit, plus=True),
        qwen_edit_plus,
        SMALL | GUIDED | {"seen_pixels": SEEN},
        1,
    ),
    "plus, two sources, zero time": Case(
        partial(tiny_qwen_edit, plus=True, zero_cond_t=True),
        qwen_edit_plus,
        SMALL | {"seen_pixels": SEEN},
        2,
    ),
    "flux2": Case(tiny_flux2, flux2, {"max_sequence_length": 128}, 2),
    "kontext": Case(
        partial(tiny_flux, seed=7, kontext=True),
        flux_kontext,
        {"max_sequence_length": 16, "true_cfg_scale": 2.0, "negative_prompt": "a dog"},
        1,
    ),
    "kontext, plain": Case(
        partial(tiny_flux, seed=7, kontext=True),
        flux_kontext,
        {"max_sequence_length": 16, "guidance": 0.0, "tune": "full"},
        1,
    ),
    "klein": Case(tiny_klein, flux2_klein, {"max_sequence_length": 64, "guidance": 3.0}, 1),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def model(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Load a case, with weights that training has moved; no test changes it."""
    folder = case.make(tmp_path_factory.mktemp("references") / "model")
    # adapters count twice; 32 times, as with alpha's default, they would blow rounding up
    lora = {"lora": {"rank": 2, "alpha": 4.0}}
    options = case.options if "tune" in case.options else lora | case.options
    made = case.load(str(folder), device="cpu", **options)
    perturb(made, 0.05)
    return made


def sources(case: Case, size: tuple[int, int], seed: int = 3) -> list[Source]:
    """Draw the references of two prompts, of 8 bits as files have them."""
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (2, case.sources, 3, *size), generator=draw) / 255
    return [tuple(row) for row in images]


def theirs(
    model: Any, x: Tensor, given: list[Source], steps: int, monkeypatch: pytest.MonkeyPatch
) -> Tensor:
    """Let the pipeline edit each prompt's own sources -> what it ends with, as it gives it.

    Its areas, numbers in its code that are too large for a test, are those of the model's options.
    """
    edits, kontext = isinstance(model, QwenEdit), isinstance(model, FluxKontext)
    pipeline = model.pipeline()
    pipeline.set_progress_bar_config(disable=True)
    told_guidance = model.guidance if kontext else getattr(model.options, "guidance", None)
    call: dict[str, Any] = {"guidance_scale": told_guidance}
    if edits:
        right, area = pipeline_qwenimage_edit.calculate_dimensions, model.options.source_pixels
        monkeypatch.setattr(
            pipeline_qwenimage_edit, "calculate_dimensions", lambda _, ratio: right(area, ratio)
        )
        monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", area)
        monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", SEEN)
        call = {"true_cfg_scale": model.options.guidance}
        call |= {"negative_prompt": "a dog"} if model.guided else {}
    else:
        call["max_sequence_length"] = model.options.max_sequence_length
    if kontext:
        call |= {"max_area": 64 * x.shape[-2] * x.shape[-1], "_auto_resize": False}
        call |= {"true_cfg_scale": 2.0, "negative_prompt": "a dog"} if model.guided else {}
    packed = isinstance(model, PACKED)
    unit = 8 if packed else 16
    found = [
        pipeline(
            prompt=prompt,
            num_inference_steps=steps,
            height=unit * x.shape[-2],
            width=unit * x.shape[-1],
            latents=pack(x[row : row + 1]) if packed else x[row : row + 1],
            output_type="latent",
            **call,
            image=to_pil(given[row]) if len(given[row]) > 1 else to_pil(given[row])[0],
        ).images
        for row, prompt in enumerate(PROMPTS[:2])
    ]
    return torch.cat(found)


@pytest.mark.parametrize("size", [(64, 64), (64, 96)])
def test_without_noise_edits_are_the_pipelines(
    case: Case, model: Any, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latents to 1e-5 in float32, two prompts with sources of their own in one call, each alone in
    the pipeline's; positions, times and guidance as the network is told them, to the bit."""
    given, steps = sources(case, size), 3
    shape, sigmas = model.latent_shape(*size), model.sigmas(steps, *size)
    x = torch.cat([torch.randn((1, *shape), generator=key) for key in seeds(2)])
    with torch.no_grad(), told(model.network) as ours:
        cond = model.encode_with_sources(PROMPTS[:2], given)
        drawn: dict[str, Any] = {"shape": shape, "group_size": 1, "generators": seeds(2)}
        end = sample_ode(model, cond, sigmas=sigmas, **drawn)
    with told(model.network) as seen:
        made = theirs(model, x, given, steps, monkeypatch)
    mine = pack(end) if isinstance(model, PACKED) else end
    if isinstance(model, Flux2):
        mine = end.flatten(2).transpose(1, 2)
    elif isinstance(model, Flux2Klein):  # whose pipeline returns what its VAE decodes
        made = model._from_vae(made)
    start = pack(x) if made.dim() == 3 and isinstance(model, PACKED) else x.reshape(made.shape)
    assert (made - start).abs().mean() > 1e-3
    torch.testing.assert_close(mine, made, rtol=0, atol=1e-5)
    assert torch.equal(sigmas, model.pipeline().scheduler.sigmas)
    first, other = ours[0], seen[0]
    for name in ("img_ids", "guidance", "timestep"):
        if other.get(name) is not None:
            shared = name == "img_ids" and other[name].dim() == 2  # of all rows
            expected = other[name] if shared else other[name][0]
            assert torch.equal(first[name] if name == "img_ids" else first[name][0], expected)
    if "img_shapes" in first:
        assert first["img_shapes"][0] == other["img_shapes"][0]
    # the sources' tokens
    tokens = made.shape[1] if made.dim() == 3 else made[0, 0].numel()
    behind = first["hidden_states"][-2:-1, tokens:], other["hidden_states"][:, tokens:]
    assert behind[0].shape[1] > 0
    torch.testing.assert_close(*behind, rtol=0, atol=1e-5)


def test_sources_decide_and_rows_are_their_own(case: Case, model: Any) -> None:
    """Other sources, another velocity; a row alone as in a batch; the ratio is 1 before the first
    update; gradients reach what is trained, through guidance's norm too."""
    size = (32, 64)
    x, sigma = noise(model, 2, *size), model.sigmas(6, *size)[1:3]
    cond = model.encode_with_sources(PROMPTS[:2], sources(case, size))
    other = model.encode_with_sources(PROMPTS[:2], sources(case, size, seed=4))
    v = model.velocity(x, sigma, cond)
    moved = (v - model.velocity(x, sigma, other)).abs().flatten(1).mean(1)
    assert v.shape == x.shape and bool((moved > 1e-4).all())
    alone = model.velocity(x[1:], sigma[1:], {name: rows[1:] for name, rows in cond.items()})
    torch.testing.assert_close(alone, v[1:], rtol=1e-4, atol=1e-5)
    found = gradients(model, v.square().mean())
    idle = {name for name, grad in found.items() if not bool((grad != 0).any())}
    assert found.keys() == model.trainable().keys()
    for name in idle:
        assert name.startswith("transformer_blocks.1.") and any(key in name for key in IDLE)
    how: dict[str, Any] = {"shape": model.latent_shape(*size), "group_size": 2, "micro_batch": 4}
    how |= {"sigmas": model.sigmas(4, *size), "generators": seeds(2)}
    ro = rollout(model, cond, full(0, steps=4, noise_scale=0.6), cps, **how)
    nodes = (ro.tree.std > 0).nonzero().flatten()
    for count, limit in ((4, 0.0), (3, 1e-4)):
        for part in nodes.split(count)[:2]:
            assert ratio_gap(model, ro, part, cps) <= limit


def test_what_is_refused(case: Case, model: Any, tmp_path: Path) -> None:
    given = sources(case, (32, 32))
    many = (given[0][0],) * (model.most_sources + 1)
    with pytest.raises(DataError, match=r"expected (one source|1 to \d+ sources) for each of 1"):
        model.encode_with_sources(PROMPTS[:1], [many])
    if model.most_sources > 1:
        with pytest.raises(DataError, match="as many sources as each other.*Take a list for each"):
            model.encode_with_sources(PROMPTS[:2], [many[:1], many[:2]])
    if not isinstance(model, QwenEdit):
        with pytest.raises(ModelError, match="positive multiples of 16 pixels, got 24 x 32"):
            model.encode_with_sources(PROMPTS[:1], sources(case, (24, 32))[:1])
        return
    with pytest.raises(DataError, match="edits images, but no prompt has a source"):
        model.encode(PROMPTS[:1])
    path = model.options.path
    short = case.load(path, device="cpu", tune="none", max_sequence_length=40, source_pixels=4096)
    with pytest.raises(DataError, match=r"has \d+ tokens, and model.max_sequence_length is 40"):
        short.encode_with_sources(PROMPTS[:1], given[:1])
    with pytest.raises(ConfigError, match="runtime.cache: .* depends on its source"):
        case.load(path, device="cpu", runtime={"cache": str(tmp_path)})
    with pytest.raises(ModelError, match="expected _class_name 'QwenImageEdit(Plus)?Pipeline'"):
        case.load(str(tiny_qwen_image(tmp_path / "plain")), device="cpu")


def test_the_estimate_counts_the_source(case: Case, model: Any, tmp_path: Path) -> None:
    """What it runs without numbers has the shapes of what the network is called with."""
    if not isinstance(model, QwenEdit) or case.sources > 1:
        return
    fn = type(model).__module__.rpartition(".")[2]
    options = ", ".join(f"{key}: {value}" for key, value in case.options.items())
    config = model_config(tmp_path, f"{{fn: {fn}, path: {model.options.path}, {options}}}")
    expected = _inputs(workload_of(config), 1)
    cond = model.encode_with_sources(PROMPTS[:1], sources(case, (64, 48))[:1])
    with told(model.network) as seen:
        model.velocity(noise(model, 1, 64, 48), torch.ones(1), cond)
    for name in ("hidden_states", "encoder_hidden_states", "timestep"):
        assert seen[0][name].shape == expected[name].shape
    assert seen[0]["img_shapes"] == expected["img_shapes"]
