"""The commands that draw: `flowrl sample` and `flowrl grid`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from flowrl.cli.main import main
from flowrl.config.load import load_config
from flowrl.evaluation.held_out import score_all
from flowrl.evaluation.image_grids import save_page
from flowrl.runs.evaluate import best_by, sample_all

pytestmark = pytest.mark.integration
FOLDERS = (
    "export nowhere --out -",
    "eval nowhere --suite shapes --out -",
    "sweep nowhere --suite shapes --out -",
    "train shapes/awm --run -",
    "train shapes/awm --run ./-",
    "compare shapes/awm --runs -",
    "compare shapes/awm --figures -",
    "pairs nowhere --out -",
    "doctor shapes/awm --run -",
    "view . --votes -",
)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["sample", "nowhere", "a dot", "--out", "-", "--json", "-"], "cannot both go to standard"),
        (["grid", "nowhere", "--out", "-", "--json", "-"], "cannot both go to standard"),
        (["report", "nowhere", "--out", "-", "--json", "-"], "cannot both go to standard"),
        (["sample", "nowhere", "a dot", "--out", "x.mkv"], "no image can be written as .mkv"),
        (["grid", "nowhere", "--out", "x.mkv"], "no image can be written as .mkv"),
        *((argv.split(), "a folder cannot go to standard output") for argv in FOLDERS),
        (["compare", "nowhere", "--out", "-"], "goes on with this file, so it cannot go to stand"),
        (["compare", "nowhere", "--out", "."], "expected a file, got the folder ."),
        (["train", "nowhere", "--json", "."], "expected a file, got the folder ."),
        (["train", "nowhere", "--json", "loop"], "Too many levels of symbolic links"),
    ],
)
def test_where_nothing_can_be_written(
    argv: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Said before anything is looked for, let alone made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert main(argv) == 2
    assert said in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["loop"]


@pytest.mark.parametrize(
    ("name", "kind"), [("x.jpg", "JPEG"), ("x.GIF", "GIF"), ("x.webp", "WEBP"), ("x", "PNG")]
)
def test_a_page_is_what_its_name_says(name: str, kind: str, tmp_path: Path) -> None:
    save_page(Image.new("RGB", (8, 8)), tmp_path / name)
    with Image.open(tmp_path / name) as image:
        assert (image.format, image.size) == (kind, (8, 8))


def test_a_page_of_images_is_no_film(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found once the model is known, before anything is drawn."""
    out = ["--images", "1", "--plugin", "toykit", "--out"]
    assert main(["sample", f"{home}/whole", "a dot", *out, f"{tmp_path}/x.mp4"]) == 2
    assert "no image can be written as .mp4" in capsys.readouterr().err
    assert main(["sample", f"{home}/whole", "a dot", *out, f"{tmp_path}/x.jpg"]) == 0
    with Image.open(tmp_path / "x.jpg") as image:
        assert image.format == "JPEG"


def test_sample_and_grid(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "s.png"
    prompts = ["a red dot", "a dot"]
    options = ["--images", "3", "--out", str(out), "--json", f"{tmp_path}/s.json"]
    options += ["--plugin", "toykit"]
    assert main(["sample", f"{home}/whole", *prompts, *options]) == 0
    assert f"6 images of {home}/whole at iteration 4: {out}" in capsys.readouterr().out
    told = json.loads((tmp_path / "s.json").read_text())
    assert (told["file"], told["prompts"], told["images"]) == (str(out), prompts, 3)
    with Image.open(out) as image:  # three columns, two rows of at least 96 pixels
        assert image.width > 3 * 96 and image.height > 2 * 96
    grid = f"{tmp_path}/g.png"
    capsys.readouterr()
    assert main(["grid", f"{home}/whole", "--out", grid, "--json", "-"]) == 0
    assert Path(grid).read_bytes() == (home / "whole" / "grid.png").read_bytes()
    drawn = json.loads(capsys.readouterr().out)
    files = sorted((home / "whole" / "samples").glob("0*.png"))
    assert drawn == {"grid": grid, "iterations": [int(file.stem) for file in files], "right": {}}


def test_the_best_of_several(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the very images that `--images 6` draws, each prompt's best of the first and of the last
    three: sampled in full, scored and chosen here by hand."""
    pages: list[dict[str, Tensor]] = []

    def page(columns: dict[str, Tensor], *_: Any, **__: Any) -> Image.Image:
        pages.append(columns)
        return Image.new("RGB", (8, 8))

    monkeypatch.setattr("flowrl.evaluation.image_grids.labelled_grid", page)
    prompts = ["a red dot", "a dot"]
    options = [
        *prompts,
        "--out",
        f"{tmp_path}/s.png",
        "--plugin",
        "toykit",
        "--set",
        "eval.batch=7",
    ]
    run = ["sample", f"{home}/whole", *options, "--images"]
    assert main([*run, "6"]) == 0
    best = ["--best-of", "3", "--best-by", "red"]
    assert main([*run, "2", *best, "--json", f"{tmp_path}/s.json"]) == 0
    said = capsys.readouterr().out
    assert f"4 images of {home}/whole at iteration 4, each the best of 3 by red: " in said
    told = json.loads((tmp_path / "s.json").read_text())
    assert (told["images"], told["best_of"], told["best_by"]) == (2, 3, "red")
    every, kept = (torch.stack([*columns.values()], dim=1) for columns in pages)  # [2, n, 3, H, W]
    red = every[:, :, 0].mean((2, 3)) - every[:, :, 1].mean((2, 3))
    for prompt in range(2):
        places = [part * 3 + int(red[prompt, 3 * part : 3 * part + 3].argmax()) for part in (0, 1)]
        assert torch.equal(kept[prompt], every[prompt, places])
    # without a name the headline chooses; one of a file that says so needs no option
    assert main([*run, "1", "--set", "eval.best_of=2", "--set", "eval.score=strict"]) == 0
    assert "each the best of 2 by strict" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--best-of", "3", "--best-by", "blue"], "eval.best_by: the config has no reward 'blue'"),
        (["--best-by", "red"], "--best-by red chooses among the images of --best-of"),
        (["--best-of", "0"], "eval.best_of"),
        (["--best-of", "9999", "--images", "9999"], "images drawn of a prompt"),
        (
            ["--best-of", "2", "--set", "rewards.red={fn: toykit.of_latents}"],
            "reward 'red' judges latents, not images; take another, one of strict",
        ),
        (
            ["--best-of", "2", "--set", "rewards.red={fn: toykit.faulty, value: nan, count: 9}"],
            "reward 'red' scored none of 2 images of 'a dot'",
        ),
        (["--best-of", "2", "--set", "rewards.red={fn: shapes}"], "prompt 'a dot'"),
    ],
)
def test_nothing_to_choose_by(
    options: list[str], said: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", f"{tmp_path}/s.png", "--plugin", "toykit"]
    assert main(["sample", f"{home}/whole", "a dot", *options, *out]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_best_on_the_embedded_model() -> None:
    """A prompt of the config's list has the list's record, so the checker can choose: of each
    prompt the image with the highest score of the four that are drawn."""
    config = load_config("shapes/awm", ["eval.steps=6", "eval.best_of=4", "eval.best_by=shapes"])
    model, texts = config.call("model")(), ["a black circle", "a triangle above a circle"]
    by = best_by(model, config, texts)
    assert by.name == "shapes" and all(record["include"] for record in by.records)
    drawn = sample_all(model, config, texts, seed=5, images=4).unflatten(0, (2, 4))
    chosen = sample_all(model, config, texts, seed=5, by=by)
    for images, record, best in zip(drawn, by.records, chosen, strict=True):
        scores = score_all({"shapes": by.reward}, images, [record] * 4)["shapes"]
        assert len(scores.unique()) > 1 and torch.equal(best, images[scores.argmax()])
