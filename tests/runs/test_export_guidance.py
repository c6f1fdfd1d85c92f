"""The code of a card guides as the run did, also where the negative prompt is empty or the pipeline
takes none; and it computes in the run's dtype."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from exportkit import exported_facts
from modelkit import edit, perturb
from PIL import Image
from tiny import tiny_flux, tiny_sd3, tiny_sdxl
from tinylm import tiny_klein, tiny_qwen_edit, tiny_qwen_image
from toykit import toy

from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.config.load import Config
from flowrl.core.pixels import to_bytes
from flowrl.runs.export.export import _dtype, trained_part
from flowrl.runs.export.usage import call_arguments, usage

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
    code = code.replace("\nimage =", "\ntorch.manual_seed(3)\nimage =")
    exec(compile(code, "README.md", "exec"), {})
    found = np.asarray(Image.open("image.png")).astype(int)
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
