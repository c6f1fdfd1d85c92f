"""What the card of an exported video model says: its code, run, and its task."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from exportkit import assert_code_draws, exported_facts
from modelkit import perturb
from PIL import Image
from tiny import tiny_i2v, tiny_ti2v, tiny_wan, tiny_wan22
from toykit import toy

from flowrl.runs.export.export import trained_part
from flowrl.runs.export.usage import task_of, usage


class Film(NamedTuple):
    """A tiny pipeline, the config's `model`, and what the code must call the pipeline with."""

    make: Callable[[Path], Any]
    chosen: str
    call: dict[str, Any]
    tag: str
    side: int = 32


TEXT = "fn: wan, max_sequence_length: 64"
FILMS = {
    "text": Film(
        tiny_wan,
        f"{TEXT}, frames: 5, guidance: 3.0, flow_shift: 7.0",
        {"num_frames": 5, "guidance_scale": 3.0, "max_sequence_length": 64},
        "text-to-video",
    ),
    "an image": Film(
        tiny_wan,
        f"{TEXT}, frames: 1",
        {"num_frames": 1, "guidance_scale": 1.0, "max_sequence_length": 64},
        "text-to-image",
    ),
    "experts": Film(
        tiny_wan22,
        f"{TEXT}, frames: 5, guidance: 4.0, guidance_2: 2.0",
        {
            "num_frames": 5,
            "guidance_scale": 4.0,
            "guidance_scale_2": 2.0,
            "max_sequence_length": 64,
        },
        "text-to-video",
    ),
    "from an image": Film(
        lambda folder: tiny_i2v(folder, experts=False),
        "fn: wan_i2v, frames: 5",
        {"num_frames": 5, "guidance_scale": 1.0, "max_sequence_length": 512},
        "image-to-video",
    ),
    "a held image": Film(
        tiny_ti2v,
        "fn: wan_i2v, frames: 5, guidance: 2.0",
        {"num_frames": 5, "guidance_scale": 2.0, "max_sequence_length": 512},
        "image-to-video",
        64,
    ),
}


@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "lora") for name in FILMS), *product(("text", "experts"), ("kohya", "merged"))],
)
def test_the_code_makes_the_run_s_video(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Run as it stands in the card, and beside the trained pipeline, by Euler's steps: frame by
    frame. So both experts' LoRA, the shift and the source are in it."""
    film = FILMS[name]
    film.make(tmp_path / "base")
    image = f"image={{height: {film.side}, width: {film.side}}}"
    model_ = f"model={{{film.chosen}, path: {tmp_path}/base}}"
    config = toy(tmp_path, model_, image)
    model = config.call("model")()
    perturb(model, 0.02)
    trained = trained_part(model, name="toy")
    facts = exported_facts(config, trained, form, tmp_path)
    if form == "kohya":
        names = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
        ends = ["-high-noise", "-low-noise"] if name == "experts" else [""]
        assert names == [f"toy-kohya{end}.safetensors" for end in ends]
        facts = facts._replace(kohya=names[0])
    levels = torch.randint(0, 256, (film.side, film.side, 3), generator=torch.Generator())
    source = Image.fromarray(levels.byte().numpy())
    source.save(tmp_path / "source.png")
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"image": source} if film.tag == "image-to-video" else {}
    options |= {"height": film.side, "width": film.side, "output_type": "pil", **film.call}
    options["num_inference_steps"] = config.eval.steps
    prompt = "a red circle and a blue square"
    frames = assert_code_draws(usage(facts), model, prompt, options, apart=1)
    assert frames == film.call["num_frames"] and task_of(facts) == film.tag
    with Image.open("video.gif" if frames > 1 else "image.png") as film_:
        assert film_.size == (film.side, film.side)
