"""The code in the card of a model whose images start from others: every editing model, and FLUX.2
with references and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from exportkit import assert_code_draws, exported_facts
from modelkit import edit, perturb
from PIL import Image
from tiny import tiny_flux
from tinylm import tiny_flux2, tiny_klein, tiny_qwen_edit
from toykit import toy

from flowrl.config.load import Config
from flowrl.runs.export.export import trained_part
from flowrl.runs.export.usage import start_count, task_of, usage

pytestmark = pytest.mark.integration
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


QWEN = f"guidance: 3.0, max_sequence_length: 400, source_pixels: {AREA}"
QWEN_CALL = {"true_cfg_scale": 3.0, "negative_prompt": " "}
FLUX2 = {"guidance_scale": 2.0, "max_sequence_length": 128}
KLEIN = {"guidance_scale": 3.0, "max_sequence_length": 64}
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
    "klein": Edit(tiny_klein, "fn: flux2_klein, guidance: 3.0, max_sequence_length: 64", 1, KLEIN),
    "qwen": Edit(tiny_qwen_edit, f"fn: qwen_edit, seen_pixels: {SEEN}, {QWEN}", 1, QWEN_CALL),
    "qwen, two": Edit(
        partial(tiny_qwen_edit, plus=True),
        f"fn: qwen_edit_plus, seen_pixels: {SEEN}, {QWEN}",
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
