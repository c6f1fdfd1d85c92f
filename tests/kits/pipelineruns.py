"""Train a tiny pipeline of a class, export what was trained, and put the plain pipeline with it
beside the run's own model; the gradient beside finite differences, and the first ratio."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from peft import PeftModel
from PIL import Image
from tinypipelines import SIDE, TINY, save, small, tiny_pipeline
from torch import Tensor

from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.config.load import load_config
from flowrl.core.seeds import generator
from flowrl.core.types import Source
from flowrl.models.adapter import first_order, pack
from flowrl.models.by_call.fence import public_run, relative
from flowrl.models.by_call.model import PROMPTS, PipelineCall, flat, in_unit
from flowrl.models.by_call.options import check_scheduler
from flowrl.models.files.lora_read import LORA_FILE, SECOND_LORA_FILE
from flowrl.models.options import adapters
from flowrl.models.pipeline import from_pipeline
from flowrl.models.prompt_encoding import to_pil
from flowrl.runs.composed import composed
from flowrl.runs.export.export import export
from flowrl.runs.folder import read_rows
from flowrl.runs.open_run import load_run
from flowrl.runs.train import train
from flowrl.training.trainer import Trainer

PLUGINS = ["brightkit"]
STEPS = 4
SAME_SLOPE = 2e-2
SIZE = (SIDE, SIDE)
SMALL = [
    *("eval.score=bright", "eval.images=1", f"eval.steps={STEPS}", "eval.every=3", "eval.batch=1"),
    *("train.iterations=3", "train.prompts=1", "train.group=2", "train.parts=1"),
    *("train.micro_batch=2", "train.rollout_batch=2"),
    *("checkpoint.every=3", "samples.prompts=1", "samples.every=3", "optimizer.lr=0.05"),
    *("model.dtype=float32", "eval.height=0", "eval.width=0"),
]
FEW = [  # times of AWM, on the model's own grid
    f"plan={{fn: ode, steps: {STEPS}}}",
    f"likelihood={{fn: forward, draws: 2, times: grid, first: 1, last: {STEPS}}}",
]


def _prompts(folder: Path, options: dict[str, Any]) -> Path:
    """Write a list of one prompt, with a source for what edits -> the file."""
    record: dict[str, Any] = {"prompt": PROMPTS[0]}
    if options.get("sources"):
        Image.new("RGB", SIZE, "gray").save(folder / "source.png")
        record["source"] = [f"{folder / 'source.png'}"]
    file = folder / "prompts.jsonl"
    file.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return file


def overrides(name: str, folder: Path) -> list[str]:
    """Return what a config on the tiny pipeline of a class is changed by."""
    tiny = TINY[name]
    frames = tiny.options.get("frames", 1)
    kind = "Bright" if frames > 1 else "BrightImage"
    over = [f"rewards={{bright: {{fn: brightkit.{kind}}}}}", *SMALL]
    over += [f"image={{height: {SIDE}, width: {SIDE}}}"]
    over += [f"prompts.{use}={_prompts(folder, tiny.options)}" for use in ("train", "test")]
    if name in adapters():
        over.append("model.runtime.quantize=none")  # what a CPU lacks
        over += [f"model.frames={frames}"] if frames > 1 else []
        return over + (["model.source_pixels=4096"] if name.startswith("QwenImageEdit") else [])
    options = {"tune": "lora", **tiny.options}
    if options["tune"] == "lora":
        options["lora"] = {"rank": 4, "alpha": 8}
    else:
        over += ["model.lora=null", "optimizer.lr=1.0e-3"]
    return over + [f"model.{key}={json.dumps(value)}" for key, value in options.items()]


def _plan(name: str, method: str) -> list[str]:
    """Return what makes a method's plan short, in steps that a class has."""
    if method == "awm":
        return FEW
    scheduler = tiny_pipeline(name).scheduler
    if check_scheduler(type(scheduler).__name__, scheduler.config, name):
        return ["transition={fn: ddim}", f"plan={{fn: full, steps: {STEPS}, noise_scale: 1.0}}"]
    return [f"plan.steps={STEPS}"]


def slope_gap(name: str, prompts: int = 1) -> float:
    """Return the relative difference of the gradient of all weights along one random direction from
    a central finite difference, in float32, of a batch of one or two prompts."""
    options = {**TINY[name].options, "tune": "full"}
    with small():
        model: Any = from_pipeline(tiny_pipeline(name), adapter=False, **options)
        shape = model.latent_shape(*SIZE)
        sigma = model.sigmas(STEPS, *SIZE)[1 : 1 + prompts]
        asked = [model.asked(prompt, model.layout(*SIZE)) for prompt in PROMPTS[:prompts]]
        cond = model._encoded(asked)
        x = torch.randn(prompts, *shape, generator=torch.Generator().manual_seed(0))
        weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

        def value() -> Tensor:
            return (model.velocity(x, sigma, cond) * weight).double().sum()

        params = [*model.trainable().values()]
        grads = torch.autograd.grad(value(), params, allow_unused=True)
        stream = torch.Generator().manual_seed(2)
        ways = [torch.randn(p.shape, generator=stream) for p in params]
        pairs = zip(grads, ways, strict=True)
        slope = float(sum((g.double() * w).sum() for g, w in pairs if g is not None))
        gap = float("inf")
        # a network that rounds inside needs longer steps than rounding hides
        for step in (1e-4, 1e-3, 1e-2):
            ends = []
            with torch.no_grad():
                for sign in (1, -2, 1):
                    for p, w in zip(params, ways, strict=True):
                        p += sign * step * w
                    ends.append(float(value()))
            found = (ends[0] - ends[1]) / (2 * step)
            gap = min(gap, abs(found - slope) / abs(slope))
            if gap < SAME_SLOPE:
                break
    return gap


def ratio_gap(name: str, folder: Path) -> float:
    """Return how far the ratio of what was sampled is from 1 before the first update of Flow-GRPO,
    its mean or its deviation, whichever is more."""
    # before the first update: nothing moves between the steps of an iteration
    over = [*overrides(name, folder), *_plan(name, "flow_grpo"), "optimizer.lr=1.0e-12"]
    with small():
        model = save(name, folder / "sampled")
        config = load_config(composed("flow_grpo", str(model)), over, PLUGINS)
        metrics = Trainer(config).step()
    if not metrics["trained"]:
        raise AssertionError(f"{name}: nothing was trained")
    return max(abs(metrics["ratio"] - 1), metrics["ratio_std"])


def trained(name: str, folder: Path, method: str = "awm") -> dict[str, Any]:
    """Train in `folder`/run, export, load -> what was compared: the plain pipeline with the
    exported weights beside the run's model (``velocity`` at each step, ``images``), and ``moved``,
    how far it is from the pipeline as it was."""
    with small():
        return _trained(name, folder, method)


def _trained(name: str, folder: Path, method: str) -> dict[str, Any]:
    model, run = save(name, folder / "model"), folder / "run"
    over = [*overrides(name, folder), *_plan(name, method)]
    config = load_config(composed(method, str(model)), over, PLUGINS)
    summary = train(config, run, quiet=True)
    steps = [row["iteration"] for row in read_rows(run, "metrics.jsonl")]
    export(run, folder / "out", iteration="last", weights="current", plugins=PLUGINS)
    ours: Any = load_run(run, iteration="last", weights="current", plugins=PLUGINS)[0]
    before, after = _plain(name, model), _plain(name, model, folder / "out")
    compare = _beside_call if isinstance(ours, PipelineCall) else _beside_adapter
    found = compare(name, ours, before, after)
    return {
        "iterations": len(steps) if summary["iterations"] == len(steps) else 0,
        "samples": len([*(run / "samples").rglob("*.png"), *(run / "samples").rglob("*.mp4")]),
        "exported": "lora" if config.model.kwargs.get("tune", "lora") == "lora" else "merged",
        **found,
    }


def _plain(name: str, folder: Path, weights: Path | None = None) -> Any:
    """Load a pipeline as a user of diffusers does, with what a run exported."""
    kind: Any = getattr(diffusers, name)
    if weights is not None and (weights / "model_index.json").exists():
        return kind.from_pretrained(weights)
    # parts that the folder was saved without
    index = kind.load_config(folder)
    nothing = [name for name, part in index.items() if part == [None, None]]
    made = kind.from_pretrained(folder, **dict.fromkeys(nothing))
    if weights is not None:
        if hasattr(made, "save_lora_weights"):
            made.load_lora_weights(weights, weight_name=LORA_FILE)
            if (weights / SECOND_LORA_FILE).exists():
                second = {"weight_name": SECOND_LORA_FILE, "load_into_transformer_2": True}
                made.load_lora_weights(weights, **second)
        else:  # diffusers reads no LoRA into the class; peft does
            PeftModel.from_pretrained(made.transformer, weights)
    return made


def _beside_call(name: str, ours: PipelineCall, before: Any, after: Any) -> dict[str, float]:
    """Compare at each state of the plain pipeline's own call."""
    options = {key: value for key, value in TINY[name].options.items() if key != "tune"}
    runs = []
    for plain in (before, after):
        theirs: Any = from_pipeline(plain, adapter=False, tune="none", **options)
        layout = theirs.layout(*SIZE)
        grid = theirs.grid(STEPS, *SIZE)
        runs.append(public_run(theirs, theirs.asked(PROMPTS[0], layout), grid))
    ours.sigmas(STEPS, *SIZE)
    asked = ours.asked(PROMPTS[0], ours.layout(*SIZE))
    gaps = []
    with torch.no_grad():
        for level, x, out in zip(grid.sigmas[:-1], runs[1].x, runs[1].out, strict=True):
            gaps.append(relative(ours.step_at(x, [level], [asked]).out, out))
        images = ours.decode(ours.flow_of(runs[1].after[-1], grid.sigmas[-1]))
    shown = torch.as_tensor(runs[1].images)
    shown = flat(in_unit(shown) if ours.raw_images else shown)
    return {
        "velocity": max(gaps),
        "images": _gap(images, shown),
        "moved": relative(runs[1].out[0], runs[0].out[0]),
    }


def _beside_adapter(name: str, ours: Any, before: Any, after: Any) -> dict[str, float]:
    """Compare the images of an Euler loop with those of the plain pipeline's call."""
    shape = ours.latent_shape(*SIZE)
    x = torch.randn(1, *shape, generator=generator(0, "kit", 0))
    sources: list[Source] = (
        [(torch.full((3, *SIZE), 0.5),)] if getattr(ours, "most_sources", 0) else []
    )
    made = [_called(ours, plain, x, sources) for plain in (before, after)]
    cond = ours.encode_with_sources([PROMPTS[0]], sources) if sources else ours.encode([PROMPTS[0]])
    with torch.no_grad():
        end = sample_ode(
            ours,
            cond,
            sigmas=ours.sigmas(STEPS, *SIZE),
            shape=shape,
            group_size=1,
            generators=[generator(0, "kit", 0)],
        )
        images = ours.decode(end)
    return {"images": _gap(images, made[1]), "moved": relative(made[1], made[0])}


def _called(ours: Any, plain: Any, x: Tensor, sources: list[Source]) -> Tensor:
    """Call a plain pipeline with a model's options and Euler's steps, from standard normal x -> its
    images [1,3,H,W], or videos."""
    pipe = copy.copy(plain)
    pipe.register_modules(scheduler=first_order(copy.deepcopy(ours.pipeline().scheduler)))
    given = {name: getattr(ours.options, name) for name in ours.options.__dataclass_fields__}
    call = ours.facts.arguments(given, *SIZE)
    if sources:
        images = to_pil(sources[0])
        call["image"] = images[0] if len(images) == 1 else images
    made = pipe(
        prompt=[PROMPTS[0]],
        num_inference_steps=STEPS,
        height=SIZE[0],
        width=SIZE[1],
        latents=pack(x) if hasattr(pipe, "_unpack_latents") else x,
        output_type="pt",
        **call,
    )
    found: Tensor = made.images if hasattr(made, "images") else made.frames
    return found[:, 0] if found.ndim == 5 and ours.frames == 1 else found


def _gap(ours: Tensor, theirs: Tensor) -> float:
    theirs = theirs.float().reshape(ours.shape)
    return float((ours - theirs).abs().mean())
