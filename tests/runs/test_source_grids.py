"""What a run's images start from, in its grid: beside a video, and several of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from editkit import EditFlow
from gridkit import box, size
from PIL import Image
from tiny import tiny_i2v, tiny_ti2v
from torch import Tensor
from toykit import toy

from flowrl.core.errors import DataError
from flowrl.core.types import Cond, Source
from flowrl.evaluation.image_grids import labelled_grid
from flowrl.runs.report.samples import run_grid, source_images
from flowrl.runs.train import train

RED, GREEN = (200, 10, 10), (10, 200, 10)


class TwoFlow(EditFlow):
    """The editing toy, of two sources; it looks at the first."""

    fewest_sources = most_sources = 2

    def encode_with_sources(self, prompts: list[str], sources: Sequence[Source]) -> Cond:
        return super().encode_with_sources(prompts, [source[:1] for source in sources])


def edits(folder: Path, side: int, *names: str | list[str]) -> None:
    """Write the toy's lists anew, of edits of a red and a green image."""
    for name, colour in (("red", RED), ("green", GREEN)):
        Image.new("RGB", (side, side), colour).save(folder / f"{name}.png")
    rows = [{"prompt": f"let it move {i}", "source": name} for i, name in enumerate(names)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(text)


@pytest.mark.parametrize(
    ("make", "side"), [(lambda at: tiny_i2v(at, experts=True), 32), (tiny_ti2v, 64)]
)
@pytest.mark.filterwarnings("ignore::flowrl.training.run.OverlapWarning")
def test_a_video_stands_beside_the_image_that_it_starts_from(
    make: Callable[[Path], Any], side: int, tmp_path: Path
) -> None:
    """Sources are drawn as large as a frame: 32 pixels are enlarged to 128, 64 stay 64 x 2."""
    make(tmp_path / "base")
    changes = (
        f"model={{fn: wan_i2v, path: {tmp_path}/base, frames: 5}}",
        f"image={{height: {side}, width: {side}}}",
        *("plan.steps=2", "eval.steps=2", "eval.images=1", "train.iterations=1", "train.group=2"),
        *("rewards.red.frames=first", "rewards.strict.frames=first"),
    )
    config = toy(tmp_path, *changes)
    edits(tmp_path, side, "red.png", "green.png")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="grid.png is not drawn")
        train(config, run=tmp_path / "run", quiet=True)
    with Image.open(tmp_path / "run" / "grid.png") as page:
        red, green = box(page, RED), box(page, GREEN)
    assert size(red) == size(green) == (128, 128)
    assert red[0] == green[0] and green[1] > red[1] + 128


@pytest.mark.filterwarnings("ignore::flowrl.training.run.OverlapWarning")
def test_all_sources_of_a_prompt_stand_side_by_side(tmp_path: Path) -> None:
    """16 pixels are enlarged to 128; the second prompt has them the other way round."""
    config = toy(tmp_path, "train.iterations=1")
    edits(tmp_path, 16, ["red.png", "green.png"], ["green.png", "red.png"])
    train(config, run=tmp_path / "run", quiet=True, model=TwoFlow())
    starts = source_images(tmp_path / "run")
    assert starts is not None and starts.shape == (2, 2, 3, 16, 16)
    levels = (starts.mean((3, 4)) * 255).round().int().tolist()
    assert levels == [[[*RED], [*GREEN]], [[*GREEN], [*RED]]]
    page = run_grid(tmp_path / "run")
    first = page.crop((0, 0, page.width, page.height - 20 - 128))  # without the second row
    red, green = box(first, RED), box(first, GREEN)
    assert size(red) == size(green) == (128, 128)
    assert green[:2] == (red[0] + 130, red[1])  # two pixels of paper between them


def still(*shape: int) -> Tensor:
    return torch.full(shape, 0.5)


def test_sources_beside_large_samples() -> None:
    """Samples of 512 x 384 are drawn 256 x 192 and frames of videos 128 x 96, and so are sources;
    those of other heights are refused."""
    for samples, wanted in (
        (still(1, 3, 384, 512), (256, 192)),
        (still(1, 9, 3, 384, 512), (128, 96)),
    ):
        starts = torch.zeros(1, 2, 3, 384, 512)
        starts[:, 1] = torch.tensor(RED)[:, None, None] / 255
        page = labelled_grid({"before": samples}, ["p"], starts=starts)
        assert size(box(page, RED)) == wanted
    with pytest.raises(DataError, match=r"as high as the samples, got \[1, 2, 3, 384, 512\]"):
        labelled_grid({"before": still(1, 3, 32, 32)}, ["p"], starts=starts)
