"""The commands that draw: `flowrl sample` and `flowrl grid`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from flowrl.cli.main import main

pytestmark = pytest.mark.integration


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
