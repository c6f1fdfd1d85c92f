"""A new user's script, with a pipeline, a list and a function of their own: it trains, says whether
it gained, samples and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from adapterkit import MAKE
from safetensors import safe_open

import flowrl
from flowrl.api.given import with_model
from flowrl.config.load import load_config
from flowrl.core.errors import ModelError
from flowrl.cost.memory import kept_memory
from flowrl.training.rehearsal import check_plan

SCRIPT = """
import diffusers, flowrl

pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
prompts = ["a red cube", "a blue ball", "a green cat", "a tall tree"]

def redness(images, prompts, **record):
    return images[..., 0, :, :].mean((-2, -1)) - images[..., 1, :, :].mean((-2, -1))

run = flowrl.train(config, model=pipe, prompts=prompts, rewards=redness, **smaller)
print(run.gain)
page, drawn = run.report(), run.sample(["a red cube"])
image = run.pipeline("a red cube", **small).images
again = run.evaluate(prompts=["a small red house"])
files = run.export("lora.safetensors")
"""
SMALLER: dict[str, Any] = {
    "image": {"height": 32, "width": 32},
    "plan": {"fn": "full", "steps": 2, "noise_scale": 0.5, "ode_last": 1},
    "train": {
        "iterations": 1,
        "prompts": 2,
        "group": 2,
        "updates": 1,
        "micro_batch": 4,
        "rollout_batch": 4,
    },
    "eval": {"steps": 2, "images": 1, "every": 0},
    "samples": {"every": 0, "prompts": 1},
}
CONFIGS = {
    "flux": "flux/flow_grpo_fast",
    "sdxl": "sd3/flow_grpo_fast",  # there is none of this method: the pipeline chooses its adapter
    "wan": "wan/flow_grpo_fast",
}


@pytest.mark.integration
@pytest.mark.parametrize("name", CONFIGS)
def test_a_script_of_fifteen_lines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = MAKE[name](tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    small: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 1}
    about: dict[str, Any] = {"folder": folder, "config": CONFIGS[name], "smaller": SMALLER}
    about["small"] = small
    if name == "wan":
        about["small"] = {"height": 32, "width": 32, "num_inference_steps": 1, "num_frames": 5}
        about["script"] = SCRIPT.replace(").images", ").frames")
    assert len([line for line in SCRIPT.splitlines() if line]) <= 15
    exec(compile(about.get("script", SCRIPT), name, "exec"), about)
    run, out = about["run"], capsys.readouterr()
    assert isinstance(run, flowrl.TrainedRun) and run.gain is not None
    assert run.gain.sentence in out.out
    assert "1 of 4 prompts are held out to judge by" in out.err
    assert out.err.rstrip().splitlines()[-1] != "" and run.gain.sentence in out.err
    assert about["page"].is_file() and "redness" in about["again"]
    assert isinstance(about["pipe"], diffusers.DiffusionPipeline)
    with safe_open("lora.safetensors", "pt") as file:
        assert any("lora" in key for key in file.keys())  # noqa: SIM118 - no mapping
    # the pipeline in memory is as it was, and the run can be opened without the program
    assert not hasattr(next(iter(about["pipe"].components.values())), "peft_config")
    opened = flowrl.open(run.folder)
    assert opened.sample(["a red cube"])[0] is not None
    assert opened.config.model.kwargs["path"] == str(folder)


def test_a_pipeline_whose_weights_have_8_bits(tmp_path: Path) -> None:
    """Cast as they stand: nothing says what their scale was."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(MAKE["sd3.5"](tmp_path / "model"))
    pipe.transformer.to(torch.float8_e4m3fn)
    said = "model: the SD3Transformer2DModel of the pipeline: .* kind float8_e4m3fn: weights that"
    with pytest.raises(ModelError, match=said):
        with_model(load_config("sd3/flow_grpo_fast"), pipe)


def test_a_pipeline_in_memory_is_counted_as_its_folder(tmp_path: Path) -> None:
    """By what its class's adapter states."""
    folder = MAKE["sd3.5"](tmp_path / "model")
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    size = ["image={height: 64, width: 64}"]
    named = load_config("shapes/flow_grpo", [f"model={{path: {folder}, device: cpu}}", *size])
    given = with_model(load_config("shapes/flow_grpo", size), pipe)
    counted = []
    for one in (given, named):
        counted.append({part.name for part in kept_memory(one, check_plan(one))[0]})
    assert counted[0] == counted[1] and "trained weights" in counted[0]
