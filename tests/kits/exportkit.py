"""Tiny models with LoRA weights as after training, for the tests of exports."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import (
    DDIMScheduler,
    FluxPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from modelkit import edit, perturb
from PIL import Image
from tiny import tiny_flux, tiny_sd3, tiny_sd15, tiny_sdxl
from torch import Tensor
from toykit import toy

from flowrl.cli.main import main
from flowrl.config.load import Config
from flowrl.models.adapter import first_order
from flowrl.models.flux import flux
from flowrl.models.sd3 import sd3
from flowrl.models.sd15 import sd15
from flowrl.models.sdxl import sdxl
from flowrl.runs.export.export import FORMATS, TrainedPart, trained_part
from flowrl.runs.export.usage import CardFacts
from flowrl.runs.train import train

LORA: dict[str, Any] = {"rank": 4, "alpha": 14.0}  # the update is scaled by 3.5
UNET = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "time_embedding.linear_1"]


class Kind(NamedTuple):
    """A model, how to load it and how to call its pipeline."""

    folder: Callable[[Path], Path]
    load: Callable[..., Any]
    pipeline: Any
    network: str
    targets: list[str] | None
    call: dict[str, Any]


def whole_sd15(folder: Path) -> Path:
    """Save a tiny SD1.5 that the plain pipeline class loads: its index names no safety checker."""
    tiny_sd15(folder)
    edit("model_index.json", safety_checker=[None, None])(folder)
    return folder


KINDS = {
    "sd3": Kind(
        lambda f: tiny_sd3(f, t5=True, dual=True),
        sd3,
        StableDiffusion3Pipeline,
        "transformer",
        None,
        {"guidance": 3.0},
    ),
    "flux": Kind(tiny_flux, flux, FluxPipeline, "transformer", None, {"guidance": 2.0}),
    "sd15": Kind(whole_sd15, sd15, StableDiffusionPipeline, "unet", UNET, {"guidance": 3.0}),
    "sdxl": Kind(tiny_sdxl, sdxl, StableDiffusionXLPipeline, "unet", UNET, {"guidance": 3.0}),
}


class Tuned(NamedTuple):
    """A model with LoRA weights as after training, and one image of it."""

    kind: Kind
    base: Path
    model: Any
    trained: TrainedPart
    image: Tensor


def draw(pipeline: Any, scale: float) -> Tensor:
    """Draw one image of 32 pixels with a pipeline, the UNets by DDIM as flowrl does."""
    if "unet" in pipeline.components:
        pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, clip_sample=False)
    pipeline.set_progress_bar_config(disable=True)
    options = {
        "height": 32,
        "width": 32,
        "num_inference_steps": 2,
        "guidance_scale": scale,
        "output_type": "pt",
    }
    image: Tensor = pipeline(
        "a red dot", generator=torch.Generator().manual_seed(0), **options
    ).images
    return image


def tuned(name: str, folder: Path, targets: list[str] | None) -> Tuned:
    kind = KINDS[name]
    base = kind.folder(folder / "base")
    lora = LORA | ({"targets": targets} if targets else {})
    model = kind.load(str(base), lora=lora, **kind.call)
    perturb(model)
    trained = trained_part(model, name="tiny")
    return Tuned(kind, base, model, trained, draw(model.pipeline(), kind.call["guidance"]))


def plain(case: Tuned, folder: Path | None = None) -> Any:
    """Load a pipeline by its class and path as anyone would."""
    return case.kind.pipeline.from_pretrained(folder or case.base)


def assert_same_image(case: Tuned, pipeline: Any) -> None:
    torch.testing.assert_close(
        draw(pipeline, case.kind.call["guidance"]), case.image, rtol=0, atol=1e-5
    )


def run_code(text: str) -> list[Any]:
    """Run the one block of Python of a card, from a seed -> its image, or the frames of its
    video."""
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    made: dict[str, Any] = {}
    # not earlier: peft draws, too
    seeded = re.sub(r"\n(image|video) =", r"\ntorch.manual_seed(3)\n\1 =", code)
    exec(compile(seeded, "README.md", "exec"), made)
    return list(made["video"]) if "video" in made else [made["image"]]


def assert_code_draws(
    text: str, model: Any, prompt: str, options: dict[str, Any], *, apart: int = 0
) -> int:
    """Compare what a card's code draws with a model's own pipeline, by levels of 256 -> how many
    frames that are."""
    found = np.stack([np.asarray(one) for one in run_code(text)]).astype(int)
    pipeline = model.pipeline()
    pipeline.register_modules(scheduler=first_order(pipeline.scheduler))
    torch.manual_seed(3)
    drawn = pipeline(prompt=prompt, **{"height": 32, "width": 32, **options})
    frames = drawn.frames[0] if hasattr(drawn, "frames") else drawn.images[:1]
    want = np.stack([np.asarray(one) for one in frames]).astype(int)
    assert want.std() > 1 and found.shape == want.shape and np.abs(found - want).max() <= apart
    if len(found) == 1:
        assert np.array_equal(np.asarray(Image.open("image.png")), found[0])
    return len(found)


class ExportedRun(NamedTuple):
    """A trained run, and the folder that the command wrote from it."""

    folder: Path
    out: Path
    said: str


def exported_run(home: Path) -> ExportedRun:
    """Train SD3 for two iterations and export all formats, by the command."""
    base = tiny_sd3(home / "base", t5=True)
    model = f"model={{fn: sd3, path: {base}, lora: {{rank: 4, alpha: 14}}, max_sequence_length: 8}}"
    small = ["train.iterations=2", "train.group=2", "eval.images=1", "eval.steps=2"]
    moved = ["train.ema=0.5", "eval.weights=ema", "optimizer.lr=0.05", "checkpoint.every=1"]
    config = toy(home, model, "image={height: 32, width: 32}", *small, *moved)
    train(config, home / "run", quiet=True)
    out, said = home / "new" / "tiny-red", io.StringIO()
    argv = ["export", str(home / "run"), "--out", str(out), "--plugin", "toykit"]
    with contextlib.redirect_stdout(said):
        assert main([*argv, *(word for name in FORMATS for word in ("--format", name))]) == 0
    return ExportedRun(home / "run", out, said.getvalue())


def exported_facts(
    config: Config, trained: TrainedPart, form: str, home: Path, *, dtype: str = "float32"
) -> CardFacts:
    """Export to the folder "out" -> what its card tells."""
    (home / "out").mkdir()
    FORMATS[form](trained, home / "out")
    return CardFacts(
        config=config,
        run=home,
        iteration=4,
        weights="current",
        folder="out",
        formats=[form],
        pipeline=trained.pipeline,
        network=trained.network,
        numbers=1,
        lora=trained.lora,
        base="",
        kohya="toy-kohya.safetensors",
        dtype=dtype,
        second=trained.second is not None,
    )
