"""Exports of pipelines that have no adapter: files that can be read back, and code that draws as
the run did."""

from __future__ import annotations

from pathlib import Path

import pytest
from exportkit import assert_code_draws, exported_facts
from modelkit import perturb
from tinypipelines import TINY, save
from toykit import toy

from flowrl.core.errors import ConfigError
from flowrl.runs.export.export import _choose, trained_part
from flowrl.runs.export.usage import task_of, usage

pytestmark = pytest.mark.integration
SIZE = 64
PROMPT = "a red circle and a blue square"  # of a card without a grid
# each class with the format that it gets by default: a flow, one that diffusers reads no LoRA
# into, one that predicts noise and is trained in full, one of videos
CASES = {
    "Lumina2Pipeline": "lora",
    "BriaPipeline": "peft",
    "PixArtSigmaPipeline": "merged",
    "LTXPipeline": "lora",
}


@pytest.mark.parametrize("name", CASES)
def test_the_code_draws_what_the_run_drew(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Expected: the pipeline of the run's model, which the fence found equal to its sampling."""
    save(name, tmp_path / "base")
    options = {"fn": "pipeline", "path": str(tmp_path / "base"), **TINY[name].options}
    small = [f"image={{height: {SIZE}, width: {SIZE}}}", "eval.steps=3"]
    config = toy(tmp_path, f"model={options}", *small)
    model = config.call("model")()
    perturb(model, 0.05)
    trained = trained_part(model, name="toy")
    [form] = _choose([], trained)
    assert form == CASES[name]
    facts = exported_facts(config, trained, form, tmp_path)
    films = "frames" in TINY[name].options
    assert task_of(facts) == ("text-to-video" if films else "text-to-image")
    monkeypatch.chdir(tmp_path)
    # the arguments that the config gives it
    asked = {"height": SIZE, "width": SIZE, "num_inference_steps": 3, **TINY[name].options["call"]}
    asked |= {"num_frames": TINY[name].options["frames"]} if films else {}
    assert_code_draws(usage(facts), model, PROMPT, asked)


def test_a_format_that_diffusers_does_not_read_is_refused(tmp_path: Path) -> None:
    save("BriaPipeline", tmp_path / "base")
    model = toy(tmp_path, f"model={{fn: pipeline, path: {tmp_path / 'base'}}}").call("model")()
    with pytest.raises(ConfigError, match=r"no LoRA into a BriaPipeline; take --format peft or"):
        _choose(["lora", "peft"], trained_part(model, name="toy"))
