"""Classes without adapter are trained by their own call: first ratios, gradients beside brute
force, and a whole run of a reverse method; test_pipeline_table.py has runs of a forward one."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
from pipelineruns import PLUGINS, overrides, ratio_gap, slope_gap, trained
from tinypipelines import save

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.runs.catalogue import load_methods
from flowrl.runs.composed import composed
from flowrl.runs.folder import read_object, read_rows
from flowrl.runs.train import train
from flowrl.training.trainer import Trainer

CLASSES = ["Lumina2Pipeline", "ChromaPipeline", "AuraFlowPipeline", "SanaPipeline", "Krea2Pipeline"]


@pytest.mark.parametrize("name", CLASSES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    assert slope_gap(name, prompts=2) < 2e-2


@pytest.mark.parametrize("name", [*CLASSES, "LTXPipeline"])
def test_the_first_ratio_is_one(name: str, tmp_path: Path) -> None:
    """Of a reverse method: what was sampled is scored the same in training."""
    assert ratio_gap(name, tmp_path) < 1e-5


def test_a_run_ends_in_a_lora_that_the_plain_pipeline_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three iterations; the exported LoRA makes the images of the run's model. The run knows the
    fence, and a resume under another diffusers passes it again."""
    name, run = "Lumina2Pipeline", tmp_path / "run"
    found = trained(name, tmp_path, "flow_grpo")
    assert found["iterations"] == 3
    assert sum(row["trained"] for row in read_rows(run, "metrics.jsonl")) > 0
    assert found["images"] < 1e-4 and found["velocity"] < 1e-4 and found["moved"] > 1e-3
    kept = read_object(run, "environment.json")["fence"]
    assert {(one["pipeline"], one["version"]) for one in kept} == {(name, diffusers.__version__)}
    # the resume
    monkeypatch.setattr(diffusers, "__version__", "99.0")
    capsys.readouterr()
    more = load_config(run / "config.yaml", ["train.iterations=4"], PLUGINS)
    train(more, run, quiet=True, resume=True)
    said = capsys.readouterr().err
    assert "fence      Lumina2Pipeline by its own call, diffusers 99.0" in said
    assert "the fence is passed under 99.0, too" in said


@pytest.mark.parametrize("name", ["Lumina2Pipeline", "PixArtSigmaPipeline"])
def test_a_folder_is_trained_as_it_is_composed(name: str, tmp_path: Path) -> None:
    """With the method's own plan and times, but for their number."""
    over = [*overrides(name, tmp_path), "train.iterations=1", "plan.steps=4", "likelihood.last=3"]
    config = load_config(composed("awm", str(save(name, tmp_path / "model"))), over, PLUGINS)
    assert Trainer(config).step()["trained"] > 0


@pytest.mark.parametrize("name", ["Lumina2Pipeline", "PixArtSigmaPipeline"])
def test_what_predicts_noise_gets_whole_timesteps(name: str, tmp_path: Path) -> None:
    """Methods whose times lie between those of training have others on it."""
    folder, between = str(save(name, tmp_path / "model")), []
    for method in load_methods():
        try:
            made = composed(method.slug, folder)
        except ConfigError:  # such as one that is made of the rewards of shapes
            continue
        times = made.get("likelihood", {}).get("times")
        if made["plan"]["fn"] == "sa_solver" or times in ("logit_normal", "power_law"):
            between.append(method.slug)
    assert bool(between) == (name == "Lumina2Pipeline"), between
