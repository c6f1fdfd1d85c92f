"""The code of a card draws as the run did, for each pipeline and format: its guidance, its dtype,
and what images start from."""

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
from exportkit import KINDS, exported_facts, run_code
from modelkit import edit, perturb
from PIL import Image
from tiny import (
    tiny_flux,
    tiny_flux2,
    tiny_i2v,
    tiny_klein,
    tiny_qwen_edit,
    tiny_qwen_image,
    tiny_sd3,
    tiny_sdxl,
    tiny_ti2v,
    tiny_wan,
    tiny_wan22,
)
from tinypipelines import TINY, save
from toykit import toy

from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.core.pixels import to_bytes
from flowrl.models.adapter import first_order
from flowrl.runs.export.export import _choose, _dtype, trained_part
from flowrl.runs.export.usage import call_arguments, start_count, task_of, usage

pytestmark = pytest.mark.integration
PROMPT = "a red circle and a blue square"  # of a card without a grid
STEPS = 3


class Drawn(NamedTuple):
    """A tiny pipeline, the config's `model`, and what the code has to call the pipeline with."""

    make: Callable[[Path], Any]
    chosen: str
    call: dict[str, Any] | None  # None: flowrl's own sampling, without a pipeline, is expected
    said: str = ""  # of the negative prompt, where flowrl samples itself; "" for nothing
    form: str = "lora"
    sources: int = 0  # images that a prompt of the list starts from
    tag: str = "text-to-image"
    side: int = 32


def kontext(folder: Path) -> Path:
    edit("model_index.json", _class_name="FluxKontextPipeline")(tiny_flux(folder))
    return folder


FLUX = "fn: flux, guidance: 2.0, max_sequence_length: 8"
QWEN = "fn: qwen_image, max_sequence_length: 64"
KLEIN = "fn: flux2_klein, guidance: 3.0, max_sequence_length: 64"
AWAY = "true_cfg_scale: 3.0, negative_prompt"
EMPTY = "negative_prompt=''"
# the pipelines call the network once for each branch, so their bits differ
GUIDED = {
    "flux, empty": Drawn(tiny_flux, f"{FLUX}, {AWAY}: ''", None, EMPTY),
    "flux, not guided": Drawn(tiny_flux, FLUX, None),
    "qwen, empty": Drawn(
        tiny_qwen_image, f"{QWEN}, guidance: 3.0, negative_prompt: ''", None, EMPTY
    ),
    "qwen, its default": Drawn(
        tiny_qwen_image, f"{QWEN}, guidance: 3.0", None, "negative_prompt=' '"
    ),
    "klein, another": Drawn(
        tiny_klein, f"{KLEIN}, negative_prompt: blue", None, "negative_prompt_embeds=negative"
    ),
    "klein, empty": Drawn(tiny_klein, KLEIN, None),
    "sdxl, empty": Drawn(tiny_sdxl, "fn: sdxl, guidance: 3.0, negative_prompt: ''", None, EMPTY),
    "sdxl, zeros": Drawn(tiny_sdxl, "fn: sdxl, guidance: 3.0", None),
}
SDXL = Drawn(
    KINDS["sdxl"].folder,
    "fn: sdxl, guidance: 3.0, original_size: [64, 48], crop: [0, 8]",
    {"guidance_scale": 3.0, "original_size": (64, 48), "crops_coords_top_left": (0, 8)},
)
BLUE = {"negative_prompt": "blue", "max_sequence_length": 8}
# guidance, negative prompt, sizes, spacing, a text encoder left out
OPTIONS = {
    "sd3": Drawn(
        KINDS["sd3"].folder,
        "fn: sd3, guidance: 3.0, negative_prompt: blue, max_sequence_length: 8, t5: false",
        {"guidance_scale": 3.0, **BLUE},
    ),
    "flux": Drawn(
        tiny_flux, f"{FLUX}, {AWAY}: blue", {"guidance_scale": 2.0, "true_cfg_scale": 3.0, **BLUE}
    ),
    "sd15": Drawn(
        KINDS["sd15"].folder,
        "fn: sd15, guidance: 3.0, guidance_rescale: 0.5, spacing: trailing",
        {"guidance_scale": 3.0, "guidance_rescale": 0.5},
    ),
    "sdxl": SDXL,
    "sdxl, peft": SDXL._replace(form="peft"),
    "sdxl, kohya": SDXL._replace(form="kohya"),
    "sdxl, merged": SDXL._replace(form="merged"),
}
AREA, SEEN = 64 * 64, 96 * 96  # of Qwen's sources: the pipelines' own are too large for a test
QWEN_EDIT = f"guidance: 3.0, max_sequence_length: 400, source_pixels: {AREA}, seen_pixels: {SEEN}"
QWEN_CALL = {"true_cfg_scale": 3.0, "negative_prompt": " "}
FLUX2 = Drawn(
    tiny_flux2,
    "fn: flux2, guidance: 2.0, max_sequence_length: 128",
    {"guidance_scale": 2.0, "max_sequence_length": 128},
)
AT_ITS_SIZE = {"max_area": 32 * 32, "_auto_resize": False}
EDITS = {
    "kontext": Drawn(
        kontext,
        "fn: flux_kontext, guidance: 2.0, max_sequence_length: 8",
        {"guidance_scale": 2.0, "max_sequence_length": 8, **AT_ITS_SIZE},
        sources=1,
    ),
    "flux2": FLUX2._replace(sources=2),
    "flux2 from noise": FLUX2,
    "klein": Drawn(
        tiny_klein, KLEIN, {"guidance_scale": 3.0, "max_sequence_length": 64}, sources=1
    ),
    "qwen": Drawn(tiny_qwen_edit, f"fn: qwen_edit, {QWEN_EDIT}", QWEN_CALL, sources=1),
    "qwen, two": Drawn(
        partial(tiny_qwen_edit, plus=True),
        f"fn: qwen_edit_plus, {QWEN_EDIT}",
        QWEN_CALL,
        sources=2,
    ),
}
WAN = "fn: wan, max_sequence_length: 64"
TEXT = Drawn(
    tiny_wan,
    f"{WAN}, frames: 5, guidance: 3.0, flow_shift: 7.0",
    {"num_frames": 5, "guidance_scale": 3.0, "max_sequence_length": 64},
    tag="text-to-video",
)
EXPERTS = Drawn(
    tiny_wan22,
    f"{WAN}, frames: 5, guidance: 4.0, guidance_2: 2.0",
    {"guidance_scale_2": 2.0, **TEXT.call, "guidance_scale": 4.0},  # type: ignore[dict-item]
    tag="text-to-video",
)
# beside the trained pipeline by Euler's steps: both experts' LoRA, the shift and the source
FILMS = {
    "text": TEXT,
    "text, kohya": TEXT._replace(form="kohya"),
    "text, merged": TEXT._replace(form="merged"),
    "an image": Drawn(
        tiny_wan,
        f"{WAN}, frames: 1",
        {"num_frames": 1, "guidance_scale": 1.0, "max_sequence_length": 64},
    ),
    "experts": EXPERTS,
    "experts, kohya": EXPERTS._replace(form="kohya"),
    "experts, merged": EXPERTS._replace(form="merged"),
    "from an image": Drawn(
        partial(tiny_i2v, experts=False),
        "fn: wan_i2v, frames: 5",
        {"num_frames": 5, "guidance_scale": 1.0, "max_sequence_length": 512},
        tag="image-to-video",
    ),
    "a held image": Drawn(
        tiny_ti2v,
        "fn: wan_i2v, frames: 5, guidance: 2.0",
        {"num_frames": 5, "guidance_scale": 2.0, "max_sequence_length": 512},
        tag="image-to-video",
        side=64,
    ),
}


def by_call(name: str, form: str, tag: str = "text-to-image") -> Drawn:
    """Return a pipeline without an adapter, which the fence found equal to the run's sampling."""
    options = dict(TINY[name].options)
    frames = {"num_frames": options["frames"]} if "frames" in options else {}
    chosen = ", ".join(f"{key}: {json.dumps(value)}" for key, value in options.items())
    call = {**options["call"], **frames}
    return Drawn(partial(save, name), f"fn: pipeline, {chosen}", call, "", form, 0, tag, 64)


# with the format that each gets by default: a flow, one that diffusers reads no LoRA into, one that
# predicts noise and is trained in full, one of videos
BY_CALL = {
    "Lumina2Pipeline": by_call("Lumina2Pipeline", "lora"),
    "BriaPipeline": by_call("BriaPipeline", "peft"),
    "PixArtSigmaPipeline": by_call("PixArtSigmaPipeline", "merged"),
    "LTXPipeline": by_call("LTXPipeline", "lora", "text-to-video"),
}
CASES = GUIDED | OPTIONS | EDITS | FILMS | BY_CALL


def config_of(folder: Path, case: Drawn) -> Config:
    """Return a config of the pipeline in the folder "base"; its list may name images."""
    model = f"model={{{case.chosen}, path: {folder}/base}}"
    size = f"image={{height: {case.side}, width: {case.side}}}"
    lists = starting(folder, case.sources) if case.sources else []
    return toy(folder, *lists, model, size, f"eval.steps={STEPS}")


def starting(folder: Path, count: int) -> list[str]:
    """Write a list whose prompts start from so many images -> the override that names it."""
    names = [f"{n}.png" for n in range(count)]
    record = {"prompt": "make it red", **({"source": names} if count else {})}
    (folder / "edits.jsonl").write_text(json.dumps(record))
    return [f"prompts={{train: {folder}/edits.jsonl, test: {folder}/edits.jsonl}}"]


def drawn_by_the_run(model: Any) -> list[Any]:
    """Draw what an evaluation draws, with flowrl's own sampling and no pipeline, from the noise
    that `torch.manual_seed(3)` gives."""
    x0 = sample_ode(
        model,
        model.encode([PROMPT]),
        sigmas=model.sigmas(STEPS, 32, 32),
        shape=model.latent_shape(32, 32),
        group_size=1,
        generators=[torch.Generator().manual_seed(3)],
    )
    return [to_bytes(model.decode(x0))[0].permute(1, 2, 0).cpu().numpy()]


def drawn_by_its_pipeline(model: Any, case: Drawn, files: list[str]) -> list[Any]:
    """Let the run's own pipeline draw, called by hand."""
    pipeline, call = model.pipeline(), dict(case.call or {})
    if case in FILMS.values():
        pipeline.register_modules(scheduler=first_order(pipeline.scheduler))
    if files:
        images = [Image.open(file) for file in files]
        call["image"] = images[0] if len(images) == 1 else images
    size = {"height": case.side, "width": case.side, "output_type": "pil"}
    torch.manual_seed(3)
    found = pipeline(prompt=PROMPT, num_inference_steps=STEPS, **size, **call)
    return list(found.frames[0] if "num_frames" in call else found.images[:1])


@pytest.mark.parametrize("name", CASES)
def test_the_code_draws_what_the_run_draws(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Expected: flowrl's own sampling from the same noise, or the pipeline of the run's model,
    called with what the case says."""
    case = CASES[name]
    case.make(tmp_path / "base")
    config = config_of(tmp_path, case)
    right = pipeline_qwenimage_edit.calculate_dimensions
    at_area = lambda _, ratio: right(AREA, ratio)  # noqa: E731
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", at_area)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", AREA)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", SEEN)
    model = config.call("model")()
    perturb(model, 0.05 if name in GUIDED | BY_CALL else 0.02)
    trained = trained_part(model, name="toy")
    assert name not in BY_CALL or _choose([], trained) == [case.form]
    facts = exported_facts(config, trained, case.form, tmp_path)
    if case.form == "kohya" and name in FILMS:
        names = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
        ends = ["-high-noise", "-low-noise"] if name.startswith("experts") else [""]
        assert names == [f"toy-kohya{end}.safetensors" for end in ends]
        facts = facts._replace(kohya=names[0])
    # the card's own code, beside images to start from
    monkeypatch.chdir(tmp_path)
    files = ["source-1.png", "source-2.png"] if case.sources == 2 else ["source.png"]
    files = files if case.sources or case.tag == "image-to-video" else []
    for seed, file in enumerate(files):
        levels = torch.randint(0, 256, (64, 64, 3), generator=torch.Generator().manual_seed(seed))
        image = Image.fromarray(levels.byte().numpy())
        image.resize((case.side, case.side) if name in FILMS else (64, 64)).save(file)
    text = usage(facts)
    found = run_code(text)
    assert task_of(facts) == ("image-to-image" if case.sources else case.tag)
    assert all(f"`{file}`" in text for file in files)
    if case.call is None:
        said = re.findall(r"negative_prompt\w*=[^,]+", text.partition("```python")[2])
        assert said == [case.said] * bool(case.said)
    if name in EDITS:
        assert ("scaled its own to 32 x 32 pixels" in text) == bool(case.sources)
        other = f"an area of {AREA} pixels for the VAE and of {SEEN} for the language model"
        assert (other in text) == name.startswith("qwen")
    # the same from elsewhere
    by_run = case.call is None
    rounds = by_run or name in FILMS or case.form == "merged"  # by a level of 256 at most
    wanted = drawn_by_the_run(model) if by_run else drawn_by_its_pipeline(model, case, files)
    assert len(found) == len(wanted) == (case.call or {}).get("num_frames", 1)
    for one, other_ in zip(found, wanted, strict=True):
        gap = np.asarray(one).astype(int) - np.asarray(other_).astype(int)
        assert np.abs(gap).max() <= rounds and np.asarray(other_).std() > 1
    with Image.open("video.gif" if len(wanted) > 1 else "image.png") as file_:
        assert file_.size == (case.side, case.side)


def test_a_format_that_diffusers_does_not_read_is_refused(tmp_path: Path) -> None:
    save("BriaPipeline", tmp_path / "base")
    model = toy(tmp_path, f"model={{fn: pipeline, path: {tmp_path / 'base'}}}").call("model")()
    with pytest.raises(ConfigError, match=r"no LoRA into a BriaPipeline; take --format peft or"):
        _choose(["lora", "peft"], trained_part(model, name="toy"))


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


def test_how_many_images_where_the_list_is_gone(tmp_path: Path) -> None:
    """The strip beside the samples tells an edit from an image out of noise; a model that always
    edits needs no sign."""
    config = toy(tmp_path, *starting(tmp_path, 2), "model={fn: flux2, path: x}")
    assert start_count(config, tmp_path) == 2
    (tmp_path / "edits.jsonl").unlink()
    assert start_count(config, tmp_path) == 0
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "sources.png").touch()
    assert start_count(config, tmp_path) == 1
    assert (
        start_count(toy(tmp_path, *starting(tmp_path, 0), "model={fn: sd3, path: x}"), tmp_path)
        == 0
    )
    always = toy(tmp_path, *starting(tmp_path, 0), "model={fn: qwen_edit, path: x}")
    (tmp_path / "samples" / "sources.png").unlink()
    assert start_count(always, tmp_path) == 1
