"""The commands that draw: `flowrl sample` and `flowrl grid`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from flowrl.cli.main import main
from flowrl.evaluation.image_pages import save_page

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
