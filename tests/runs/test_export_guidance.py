"""The code of a card draws as the run did: its guidance, its dtype, and what images start from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from exportkit import assert_code_draws, exported_facts, run_code
from modelkit import edit, perturb
from PIL import Image
from tiny import (
    tiny_flux,
    tiny_flux2,
    tiny_klein,
    tiny_qwen_edit,
    tiny_qwen_image,
    tiny_sd3,
    tiny_sdxl,
)
from toykit import toy

from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.config.load import Config
from flowrl.core.pixels import to_bytes
from flowrl.runs.export.export import _dtype, trained_part
from flowrl.runs.export.usage import call_arguments, start_count, task_of, usage

pytestmark = pytest.mark.integration
PROMPT = "a red circle and a blue square"  # of a card without a grid


class Guided(NamedTuple):
    """A tiny pipeline, the config's `model`, and what of the negative prompt the code has to
    say; "" for nothing."""

    make: Callable[[Path], Path]
    chosen: str
    said: str


FLUX = "fn: flux, guidance: 2.0, max_sequence_length: 8"
QWEN = "fn: qwen_image, max_sequence_length: 64"
KLEIN = "fn: flux2_klein, guidance: 3.0, max_sequence_length: 64"
CASES = {
    "flux, empty": Guided(
        tiny_flux, f"{FLUX}, true_cfg_scale: 3.0, negative_prompt: ''", "negative_prompt=''"
    ),
    "flux, not guided": Guided(tiny_flux, FLUX, ""),
    "qwen, empty": Guided(
        tiny_qwen_image, f"{QWEN}, guidance: 3.0, negative_prompt: ''", "negative_prompt=''"
    ),
    "qwen, its default": Guided(tiny_qwen_image, f"{QWEN}, guidance: 3.0", "negative_prompt=' '"),
    "klein, another": Guided(
        tiny_klein, f"{KLEIN}, negative_prompt: blue", "negative_prompt_embeds=negative"
    ),
    "klein, empty": Guided(tiny_klein, KLEIN, ""),
    "sdxl, empty": Guided(
        tiny_sdxl, "fn: sdxl, guidance: 3.0, negative_prompt: ''", "negative_prompt=''"
    ),
    "sdxl, zeros": Guided(tiny_sdxl, "fn: sdxl, guidance: 3.0", ""),
}


def made(folder: Path, case: Guided) -> Config:
    """Return a config of a tiny pipeline in the folder "base"."""
    case.make(folder / "base")
    model = f"model={{{case.chosen}, path: {folder}/base}}"
    return toy(folder, model, "image={height: 32, width: 32}", "eval.steps=3")


def drawn_by_the_run(model: Any, steps: int) -> np.ndarray[Any, Any]:
    """Draw what an evaluation draws, with flowrl's own sampling and no pipeline, from the noise
    that `torch.manual_seed(3)` gives."""
    x0 = sample_ode(
        model,
        model.encode([PROMPT]),
        sigmas=model.sigmas(steps, 32, 32),
        shape=model.latent_shape(32, 32),
        group_size=1,
        generators=[torch.Generator().manual_seed(3)],
    )
    return to_bytes(model.decode(x0))[0].permute(1, 2, 0).cpu().numpy()


@pytest.mark.parametrize("name", CASES)
def test_the_code_draws_the_image_of_the_run(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Expected: flowrl's own sampling from the same noise. The pipelines call the network once for
    each branch, so their bits differ: by a level of 256 at most."""
    case = CASES[name]
    config = made(tmp_path, case)
    model = config.call("model")()
    perturb(model, 0.05)
    text = usage(exported_facts(config, trained_part(model, name="toy"), "lora", tmp_path))
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert re.findall(r"negative_prompt\w*=[^,]+", code) == [case.said] * bool(case.said)
    monkeypatch.chdir(tmp_path)
    found = np.asarray(run_code(text)[0]).astype(int)
    expected = drawn_by_the_run(model, config.eval.steps).astype(int)
    assert expected.std() > 1 and np.abs(found - expected).max() <= 1


@pytest.mark.parametrize(
    ("fn", "scale"),
    [("flux_kontext", "true_cfg_scale"), ("qwen_edit", "guidance"), ("qwen_edit_plus", "guidance")],
)
def test_editing_models_are_guided_away_from_the_empty_prompt(
    tmp_path: Path, fn: str, scale: str
) -> None:
    """Their pipelines guide if `negative_prompt is not None`, as those that the code was run on
    above do. Without guidance none is named."""
    if fn == "flux_kontext":
        edit("model_index.json", _class_name="FluxKontextPipeline")(tiny_flux(tmp_path / "base"))
    else:
        tiny_qwen_edit(tmp_path / "base", plus=fn.endswith("plus"))
    given = f"fn: {fn}, path: {tmp_path}/base"
    for options, told in ((f", {scale}: 3.0, negative_prompt: ''", ["''"]), ("", [])):
        code = ", ".join(call_arguments(toy(tmp_path, f"model={{{given}{options}}}")))
        assert re.findall(r"negative_prompt=(\S+)", code) == told
        assert ("true_cfg_scale=3.0" in code) == bool(told)


@pytest.mark.parametrize(
    ("given", "gpus", "expected"),
    [
        ("auto", ["NVIDIA H100"], "bfloat16"),  # docs/config.md: auto is bfloat16 on CUDA
        ("bfloat16", [], "bfloat16"),
        ("float32", ["NVIDIA H100"], "float32"),
    ],
)
def test_the_code_computes_in_the_dtype_of_the_run(
    tmp_path: Path, given: str, gpus: list[str], expected: str
) -> None:
    """The run's own record of its machine decides, wherever it is exported."""
    tiny_sd3(tmp_path / "base")
    model = f"model={{fn: sd3, path: {tmp_path}/base, dtype: {given}}}"
    config = toy(tmp_path, model, "image={height: 32, width: 32}")
    (tmp_path / "environment.json").write_text(json.dumps({"gpus": gpus}))
    assert _dtype(config, tmp_path) == expected
    trained = trained_part(config.call("model")(), name="toy")
    text = usage(exported_facts(config, trained, "lora", tmp_path, dtype=expected))
    assert ("torch_dtype=torch.bfloat16" in text) == (expected == "bfloat16")
    (load,) = re.findall(r"from_pretrained\((.*)\)", text)
    assert ("torch_dtype" in load) == (expected != "float32")


def test_auto_is_what_it_is_here_for_a_run_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a CPU that multiplies in bfloat16 and on one that does not."""
    config = toy(tmp_path, "model={fn: sd3, path: owner/name, dtype: auto}")
    (tmp_path / "environment.json").write_text(json.dumps({"gpus": []}))
    for able, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda able=able: {"amx_bf16": able})
        assert _dtype(config, tmp_path) == expected


AREA, SEEN = 64 * 64, 96 * 96  # of Qwen's sources: the pipelines' own are too large for a test


class Edit(NamedTuple):
    """A tiny pipeline, its config, how many images a prompt has, what the pipeline is called
    with."""

    make: Callable[[Path], Path]
    chosen: str
    sources: int
    call: dict[str, Any]


def kontext(folder: Path) -> Path:
    edit("model_index.json", _class_name="FluxKontextPipeline")(tiny_flux(folder))
    return folder


QWEN_EDIT = f"guidance: 3.0, max_sequence_length: 400, source_pixels: {AREA}"
QWEN_CALL = {"true_cfg_scale": 3.0, "negative_prompt": " "}
FLUX2 = {"guidance_scale": 2.0, "max_sequence_length": 128}
GUIDED = {"guidance_scale": 3.0, "max_sequence_length": 64}
EDITS = {
    "kontext": Edit(
        kontext,
        "fn: flux_kontext, guidance: 2.0, max_sequence_length: 8",
        1,
        {
            "guidance_scale": 2.0,
            "max_sequence_length": 8,
            "max_area": 32 * 32,
            "_auto_resize": False,
        },
    ),
    "flux2": Edit(tiny_flux2, "fn: flux2, guidance: 2.0, max_sequence_length: 128", 2, FLUX2),
    "flux2 from noise": Edit(
        tiny_flux2, "fn: flux2, guidance: 2.0, max_sequence_length: 128", 0, FLUX2
    ),
    "klein": Edit(tiny_klein, "fn: flux2_klein, guidance: 3.0, max_sequence_length: 64", 1, GUIDED),
    "qwen": Edit(tiny_qwen_edit, f"fn: qwen_edit, seen_pixels: {SEEN}, {QWEN_EDIT}", 1, QWEN_CALL),
    "qwen, two": Edit(
        partial(tiny_qwen_edit, plus=True),
        f"fn: qwen_edit_plus, seen_pixels: {SEEN}, {QWEN_EDIT}",
        2,
        QWEN_CALL,
    ),
}


def edits(folder: Path, chosen: str, count: int) -> Config:
    """Write a list whose prompts start from so many images -> a config that trains on it."""
    names = [f"{n}.png" for n in range(count)]
    record = {"prompt": "make it red", **({"source": names} if count else {})}
    (folder / "edits.jsonl").write_text(json.dumps(record))
    lists = f"prompts={{train: {folder}/edits.jsonl, test: {folder}/edits.jsonl}}"
    model = f"model={{{chosen}, path: {folder}/base}}"
    return toy(folder, lists, model, "image={height: 32, width: 32}")


@pytest.mark.parametrize("name", EDITS)
def test_the_code_starts_from_the_images_of_a_prompt(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It loads as many as the run's list names, hands them over as the pipeline wants them, and
    draws what the run's own pipeline draws."""
    case = EDITS[name]
    case.make(tmp_path / "base")
    config = edits(tmp_path, case.chosen, case.sources)
    monkeypatch.setattr(
        pipeline_qwenimage_edit,
        "calculate_dimensions",
        partial(_at_area, pipeline_qwenimage_edit.calculate_dimensions),
    )
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", AREA)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", SEEN)
    model = config.call("model")()
    perturb(model, 0.02)
    facts = exported_facts(config, trained_part(model, name="toy"), "lora", tmp_path)
    files = ["source.png"] if case.sources == 1 else ["source-1.png", "source-2.png"]
    images = [_drawn(tmp_path / file, seed) for seed, file in enumerate(files[: case.sources])]
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {}
    if images:
        given = {"image": images[0] if case.sources == 1 else images}
    options = {"num_inference_steps": config.eval.steps, **case.call, **given}
    text = usage(facts)
    assert_code_draws(text, model, "a red circle and a blue square", options)
    assert task_of(facts) == ("image-to-image" if images else "text-to-image")
    assert all(f"`{file}`" in text for file in files) == bool(images)
    assert ("scaled its own to 32 x 32 pixels" in text) == bool(images)
    other = f"an area of {AREA} pixels for the VAE and of {SEEN} for the language model"
    assert (other in text) == name.startswith("qwen")


def test_how_many_images_where_the_list_is_gone(tmp_path: Path) -> None:
    """The strip beside the samples tells an edit from an image out of noise; a model that always
    edits needs no sign."""
    config = edits(tmp_path, "fn: flux2", 2)
    assert start_count(config, tmp_path) == 2
    (tmp_path / "edits.jsonl").unlink()
    assert start_count(config, tmp_path) == 0
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "sources.png").touch()
    assert start_count(config, tmp_path) == 1
    assert start_count(edits(tmp_path, "fn: sd3", 0), tmp_path) == 0
    always = edits(tmp_path, "fn: qwen_edit", 0)
    (tmp_path / "samples" / "sources.png").unlink()
    assert start_count(always, tmp_path) == 1


def _at_area(right: Callable[[int, float], Any], _: int, ratio: float) -> Any:
    return right(AREA, ratio)


def _drawn(file: Path, seed: int) -> Image.Image:
    levels = torch.randint(0, 256, (64, 64, 3), generator=torch.Generator().manual_seed(seed))
    image = Image.fromarray(levels.byte().numpy())
    image.save(file)
    return image
