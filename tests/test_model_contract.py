"""What every model adapter has to keep, tested in the same way for all: a new adapter is a new row of CASES.

Each case is a tiny pipeline of the real diffusers class with random weights, saved to disk and loaded by its path.
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline
from modelkit import euler, gradients, noise, perturb
from tiny import tiny_flux, tiny_sd3, tiny_sd15, tiny_sdxl
from torch import Tensor
from toykit import toy

from flowrl.errors import CheckpointError, FlowRLError, ModelError
from flowrl.flow import vp_from_flow
from flowrl.loop import Trainer, put_weights
from flowrl.models.flux import flux, pack
from flowrl.models.sd3 import sd3
from flowrl.models.sd15 import sd15
from flowrl.models.sdxl import sdxl
from flowrl.types import FlowModel
from flowrl.weights import Weights

PROMPTS = ["a red square", "two small blue circles left of a green triangle on white", "a cat"]
SIZE = (64, 48)
T5 = {"max_sequence_length": 64}


class Case(NamedTuple):
    """An adapter, its tiny pipeline, and the options that it is tested with."""

    fn: Callable[..., Any]
    make: Callable[..., Path]
    made: dict[str, Any]
    options: dict[str, Any]
    guided: bool
    vp: bool = False  # predicts noise or v on the variance-preserving path
    idle: tuple[str, ...] = ()  # trained weights that no output depends on


# The last block asks nothing in the text's name, since its text goes nowhere.
LAST = ("transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.norm_added_q")
CASES = {
    "sd3": Case(sd3, tiny_sd3, {}, {**T5, "guidance": 4.5, "negative_prompt": "a blue dog"}, True, idle=LAST),
    "sd3.5 with T5": Case(sd3, tiny_sd3, {"t5": True, "dual": True}, {**T5, "guidance": 1.0}, False, idle=LAST),
    "flux dev": Case(flux, tiny_flux, {}, {**T5, "guidance": 3.5}, False),
    "flux dev, true CFG": Case(flux, tiny_flux, {}, {**T5, "guidance": 3.5, "true_cfg_scale": 2.0}, True),
    "flux schnell": Case(flux, tiny_flux, {"guidance_embeds": False}, T5, False),
    "sd15": Case(sd15, tiny_sd15, {}, {"guidance": 5.0}, True, vp=True),
    "sd15, no guidance": Case(sd15, tiny_sd15, {}, {"guidance": 1.0}, False, vp=True),
    "sdxl": Case(sdxl, tiny_sdxl, {}, {"guidance": 5.0}, True, vp=True),
}
# a pipeline that is none of its own
OTHER: dict[Any, Callable[..., Path]] = {sd3: tiny_sd15, flux: tiny_sd3, sd15: tiny_sdxl, sdxl: tiny_flux}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    chosen = CASES[request.param]
    return chosen, chosen.make(tmp_path_factory.mktemp("model") / "it", **chosen.made)


def load(case: tuple[Case, Path], **options: Any) -> Any:
    chosen, folder = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # step-distilled models warn; tests/test_flux.py looks at it
        return chosen.fn(str(folder), **{"device": "cpu", **chosen.options, **options})


def reference(case: tuple[Case, Path], model: Any, x: Tensor, steps: int) -> Tensor:
    """Return the pictures that diffusers' pipeline makes of standard normal latents x, with the model's weights."""
    chosen, folder = case
    pipeline, more = model.pipeline(), {name: v for name, v in chosen.options.items() if name not in ("guidance",)}
    if chosen.vp:
        checker = {"safety_checker": None} if "safety_checker" in pipeline.components else {}
        network, pipeline = pipeline.unet, DiffusionPipeline.from_pretrained(folder, **checker)
        pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, clip_sample=False)
        pipeline.unet = network
    if chosen.fn is flux:
        x = pack(x)
    if "negative_prompt" in more:
        more["negative_prompt"] = [more["negative_prompt"]] * len(PROMPTS)
    if chosen.fn is flux and chosen.guided:
        more["negative_prompt"] = [""] * len(PROMPTS)
    pipeline.set_progress_bar_config(disable=True)
    guidance = {"guidance_scale": chosen.options["guidance"]} if "guidance" in chosen.options else {}
    size = {"height": SIZE[0], "width": SIZE[1]}
    return pipeline(PROMPTS, num_inference_steps=steps, latents=x, output_type="pt", **size, **guidance, **more).images


def test_it_is_a_flow_model_with_a_grid_that_falls(case: tuple[Case, Path]) -> None:
    model = load(case)
    assert isinstance(model, FlowModel)
    sigmas, shape = model.sigmas(7, *SIZE), model.latent_shape(*SIZE)
    assert sigmas.shape == (8,) and sigmas.dtype == torch.float32 and bool((sigmas.diff() < 0).all())
    assert 0 <= float(sigmas[-1]) < 0.1 and 0.8 < float(sigmas[0]) <= 1
    assert all(isinstance(n, int) and n > 0 for n in shape)


def test_without_noise_pictures_are_the_pipelines(case: tuple[Case, Path]) -> None:
    """Diffusers' own output; 1e-5 in float32, from the same latents, with weights that training has moved."""
    model = load(case)
    perturb(model)
    x, sigmas = noise(model, 3, *SIZE), model.sigmas(5, *SIZE)
    # Below sigma 1 initial noise has another std on the flow path; see flow_from_vp.
    start = x * math.hypot(1 - float(sigmas[0]), float(sigmas[0])) if case[0].vp else x
    end = euler(model, start, sigmas, PROMPTS)
    if case[0].vp:
        assert bool(vp_from_flow(end, sigmas[-1:]).isfinite().all())
    ours = model.decode(end)
    assert ours.shape == (3, 3, *SIZE) and ours.dtype == torch.float32 and float(ours.std()) > 0.01
    assert float(ours.min()) >= 0 and float(ours.max()) <= 1
    torch.testing.assert_close(ours, reference(case, model, x, 5), rtol=0, atol=1e-5)


def test_text_is_encoded_row_by_row(case: tuple[Case, Path]) -> None:
    """A row depends on its prompt alone, to the bit; guidance brings a row without the prompt for each."""
    model = load(case)
    cond, turned, alone = model.encode(PROMPTS), model.encode(PROMPTS[::-1]), load(case).encode(PROMPTS[1:2])
    for name, rows in cond.items():
        assert len(rows) == 3 and torch.equal(rows.flip(0), turned[name]) and torch.equal(rows[1:2], alone[name])
    assert any(name.startswith("negative_") for name in cond) == case[0].guided
    assert not any(rows.requires_grad for rows in cond.values())


def test_a_velocity_depends_on_its_own_row(case: tuple[Case, Path]) -> None:
    model = load(case)
    perturb(model)
    x, cond = noise(model, 3, *SIZE), model.encode(PROMPTS)
    sigma = model.sigmas(6, *SIZE)[torch.tensor([0, 3, 5])]
    with torch.no_grad():
        v, again = model.velocity(x, sigma, cond), model.velocity(x, sigma, cond)
        alone = [
            model.velocity(x[i : i + 1], sigma[i : i + 1], {k: c[i : i + 1] for k, c in cond.items()})
            for i in (0, 1, 2)
        ]
    assert v.shape == x.shape and v.dtype == torch.float32 and torch.equal(v, again)
    torch.testing.assert_close(torch.cat(alone), v, rtol=1e-4, atol=1e-4 * float(v.abs().mean()))


@pytest.mark.parametrize("tune", ["lora", "full"])
def test_gradients_reach_all_that_is_trained_and_nothing_else(case: tuple[Case, Path], tune: str) -> None:
    """Under guidance through both branches: the gradient is that of the mixture u + w (c - u), and differs from c's."""
    model = load(case, tune=tune)
    perturb(model, 0.02)
    names = list(model.trainable())
    assert names and all(p.requires_grad and p.dtype == torch.float32 for p in model.trainable().values())
    x, cond = noise(model, 2, *SIZE), model.encode(PROMPTS[:2])
    found = gradients(model, model.velocity(x, model.sigmas(6, *SIZE)[2:3].expand(2), cond).square().mean())
    reached = {name for name, grad in found.items() if bool((grad != 0).any())}
    assert reached == {name for name in names if not name.startswith(case[0].idle)}, sorted(set(names) - reached)[:5]
    parts = [part for part in model.pipeline().components.values() if isinstance(part, torch.nn.Module)]
    trained = {id(p) for part in parts for p in part.parameters() if p.requires_grad}
    assert trained == {id(p) for p in model.trainable().values()}


def test_weights_change_places_and_come_back(case: tuple[Case, Path]) -> None:
    model = load(case)
    weights, x, cond = Weights(model.trainable()), noise(model, 1, *SIZE), model.encode(PROMPTS[:1])
    sigma = model.sigmas(6, *SIZE)[2:3]
    weights.snapshot("ref")
    with torch.no_grad():
        before = model.velocity(x, sigma, cond)
        perturb(model)
        moved = model.velocity(x, sigma, cond)
        with weights.using("ref"):
            assert torch.equal(model.velocity(x, sigma, cond), before)
        assert torch.equal(model.velocity(x, sigma, cond), moved) and not torch.equal(moved, before)


def test_the_ratio_is_1_before_the_first_update(case: tuple[Case, Path], tmp_path: Path) -> None:
    """Rollout and training compute the same log-probs; DDIM's noise where the path is variance-preserving."""
    how = "{fn: ddim}" if case[0].vp else "{fn: flow_sde}"
    small = ("image={height: 32, width: 32}", "train.updates=1", f"transition={how}", "train.prompts=1")
    trainer = Trainer(toy(tmp_path, *small), model=load(case))
    perturb(trainer.model)
    metrics = trainer.step()
    assert metrics["on_policy_gap"] < 1e-5 and metrics["trained"] > 0 and metrics["grad_norm"] > 0


def test_checkpoints_of_another_model_are_refused(case: tuple[Case, Path], tmp_path: Path) -> None:
    model, other = load(case), load(case, lora={"rank": 3})
    with pytest.raises(CheckpointError, match="another model"):
        put_weights(model.trainable(), {name: p.detach() for name, p in other.trainable().items()}, tmp_path)


def test_wrong_folders_and_options_have_one_clear_message(case: tuple[Case, Path], tmp_path: Path) -> None:
    chosen, folder = case
    other = OTHER[chosen.fn](tmp_path / "other")
    with pytest.raises(ModelError, match="_class_name"):
        load((chosen, other))
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    for file in (broken / "tokenizer").iterdir():
        file.unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load((chosen, broken))
    with pytest.raises(ModelError, match=r"lora.targets: no linear layer is named 'nowhere'; available: "):
        load(case, lora={"targets": ["nowhere"]})
    with pytest.raises(ModelError, match="multiples of"):
        load(case).latent_shape(65, 64)
    for wrong in ({"tune": "some"}, {"dtype": "int3"}, {"device": "abacus"}, {"lora": {"rank": 0}}):
        with pytest.raises(FlowRLError, match=next(iter(wrong))):
            load(case, **wrong)
