"""Classes without adapter are trained by their own call: first ratios, gradients beside brute
force, whole runs of a forward and of a reverse method, and LoRA that the plain pipeline loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from tinypipelines import TINY, save, tiny_pipeline

from flowrl.config.load import load_config
from flowrl.models.pipeline import from_pipeline
from flowrl.runs.export.export import export
from flowrl.runs.folder import read_object, read_rows
from flowrl.runs.open_run import open_run
from flowrl.runs.train import train
from flowrl.training.trainer import Trainer

SIZE = (64, 64)
CLASSES = ["Lumina2Pipeline", "ChromaPipeline", "AuraFlowPipeline", "SanaPipeline", "Krea2Pipeline"]
PLUGINS = ["brightkit"]
SMALL = [
    "rewards={bright: {fn: brightkit.BrightImage}}",
    "eval.score=bright",
    "monitors.plateau=null",
    "train.iterations=3",
    "train.prompts=1",
    "train.balance=null",
    "train.micro_batch=8",
    "train.rollout_batch=8",
    "eval.images=1",
    "eval.steps=2",
    "eval.every=3",
    "checkpoint.every=3",
    "samples.prompts=1",
    "samples.every=3",
    "prompts.test=assets/shapes/validation.jsonl",
]


def model_of(name: str, folder: Path) -> str:
    """Return the section of a config, as one override."""
    options = {k: v for k, v in TINY[name].options.items() if k != "adapter"}
    call = ", ".join(f"{k}: {_yaml(v)}" for k, v in options["call"].items())
    frames = f", frames: {options['frames']}" if "frames" in options else ""
    return f"model={{path: {folder}, call: {{{call}}}, lora: {{rank: 4, alpha: 8}}{frames}}}"


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower()


@pytest.mark.parametrize("name", CLASSES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    """Along one random direction of all weights, in float32."""
    model: Any = from_pipeline(tiny_pipeline(name), tune="full", **TINY[name].options)
    x = torch.randn(2, *model.latent_shape(*SIZE), generator=torch.Generator().manual_seed(0))
    sigma = model.sigmas(4, *SIZE)[[1, 2]]
    cond = model.encode(["a red cube", "two green spheres"])
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def value() -> torch.Tensor:
        return (model.velocity(x, sigma, cond) * weight).double().sum()

    params = [*model.trainable().values()]
    grads = torch.autograd.grad(value(), params, allow_unused=True)
    stream = torch.Generator().manual_seed(2)
    ways = [torch.randn(p.shape, generator=stream) for p in params]
    pairs = zip(grads, ways, strict=True)
    slope = float(sum((g.double() * w).sum() for g, w in pairs if g is not None))
    step, ends = 1e-4, []
    with torch.no_grad():
        for sign in (1, -1):
            for p, w in zip(params, ways, strict=True):
                p += sign * step * w
            ends.append(float(value()))
            for p, w in zip(params, ways, strict=True):
                p -= sign * step * w
    measured = (ends[0] - ends[1]) / (2 * step)
    assert measured == pytest.approx(slope, rel=2e-2)


@pytest.mark.parametrize("name", [*CLASSES, "LTXPipeline"])
def test_the_first_ratio_is_one(name: str, tmp_path: Path) -> None:
    """Of a reverse method: what was sampled is scored the same in training."""
    folder = save(name, tmp_path / "model")
    over = [model_of(name, folder), *SMALL]
    if "frames" in TINY[name].options:
        over.append("rewards={bright: {fn: brightkit.Bright}}")
    trainer = Trainer(load_config("shapes/flow_grpo", over, PLUGINS))
    metrics = trainer.step()
    assert metrics["trained"] > 0
    assert metrics["ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_std"] < 1e-5


@pytest.mark.parametrize("method", ["awm", "flow_grpo"])
def test_a_run_ends_in_a_lora_that_the_plain_pipeline_loads(method: str, tmp_path: Path) -> None:
    """Three iterations of a class without adapter; the run knows the fence, and the exported LoRA
    makes the images of the run's model."""
    name = "Lumina2Pipeline"
    folder, run = save(name, tmp_path / "model"), tmp_path / "run"
    over = [model_of(name, folder), *SMALL, "optimizer.lr=0.05"]
    summary = train(load_config(f"shapes/{method}", over, PLUGINS), run, quiet=True)
    assert summary["iterations"] == 3
    assert [row["iteration"] for row in read_rows(run, "metrics.jsonl")] == [0, 1, 2]
    kept = read_object(run, "environment.json")["fence"]
    assert {one["pipeline"] for one in kept} == {name}
    assert {one["version"] for one in kept} == {diffusers.__version__}
    assert sum(row["trained"] for row in read_rows(run, "metrics.jsonl")) > 0
    # the model of the run, and the plain pipeline with the LoRA
    export(run, tmp_path / "lora", iteration="last", weights="current", plugins=PLUGINS)
    model: Any = open_run(run, iteration="last", weights="current", plugins=PLUGINS)[0]
    plain = diffusers.Lumina2Pipeline.from_pretrained(folder)
    given: dict[str, Any] = {
        "num_inference_steps": 3,
        "height": 64,
        "width": 64,
        "guidance_scale": 3.0,
    }
    given |= {"output_type": "pt", "prompt": ["a red cube"]}
    latents = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    before = plain(**given, latents=latents).images
    plain.load_lora_weights(tmp_path / "lora")
    after = plain(**given, latents=latents).images
    x, sigmas = latents, model.sigmas(3, 64, 64)
    cond = model.encode(["a red cube"])
    with torch.no_grad():
        for k in range(3):
            x = x + (sigmas[k + 1] - sigmas[k]) * model.velocity(x, sigmas[k : k + 1], cond)
        ours = model.decode(x)
    assert float((ours - after).abs().max()) < 1e-4
    assert float((before - after).abs().max()) > 1e-3


def test_a_resume_passes_the_fence_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "Lumina2Pipeline"
    folder, run = save(name, tmp_path / "model"), tmp_path / "run"
    config = load_config("shapes/awm", [model_of(name, folder), *SMALL], PLUGINS)
    train(config, run, quiet=True)
    monkeypatch.setattr(diffusers, "__version__", "99.0")
    capsys.readouterr()
    more = load_config(run / "config.yaml", ["train.iterations=4"], PLUGINS)
    train(more, run, quiet=True, resume=True)
    said = capsys.readouterr().err
    assert "fence      Lumina2Pipeline by its own call, diffusers 99.0" in said
    assert "the fence is passed under 99.0, too" in said
