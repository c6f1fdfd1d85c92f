"""`flowrl score`: the same numbers in table, JSON and CSV, its options, and its mistakes."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import brokenkit
import numpy as np
import pytest
import torch
from PIL import Image
from toykit import write_toy

from flowrl.cli.main import main
from flowrl.core.types import RewardBatch
from flowrl.evaluation.reward_tests.damage import noise
from flowrl.evaluation.reward_tests.selftest import rendered
from rewards.shapes import shapes

PLUGIN = ["--plugin", "brokenkit"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with pics/00.png ... 05.png, the odd ones noisy, and prompts.jsonl."""
    home = tmp_path_factory.mktemp("home")
    (home / "pics").mkdir()
    records = []
    for i, scene in enumerate(rendered(6)):
        image = noise(scene.load(), i) if i % 2 else scene.load()
        pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(home / "pics" / f"0{i}.png")
        records.append(json.dumps({**scene.record, "file": f"0{i}.png"}))
    (home / "prompts.jsonl").write_text("\n".join(records[::-1]) + "\n")
    return home


def records_of(folder: Path) -> list[dict[str, Any]]:
    """Read the records of the images, in the images' order."""
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[::-1]]


def test_the_same_numbers_everywhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rewards, called directly on what Pillow reads, give those of table, JSON and CSV."""
    argv = f"score --prompts {folder}/prompts.jsonl --batch 4 --reward shapes".split()
    argv += ["--reward", "brokenkit.scaled", "--set", "scaled.factor=2e1", *PLUGIN]
    for kind in ("json", "csv", "grid"):
        argv += [f"--{kind}", str(tmp_path / f"out.{kind.replace('grid', 'png')}")]
    assert main([*argv, "--sort", "shapes", str(folder / "pics")]) == 0
    # by hand
    files, records = sorted((folder / "pics").iterdir()), records_of(folder)
    pixels = np.stack([np.array(Image.open(file)) for file in files])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    texts = [record["prompt"] for record in records]
    batch = RewardBatch(images, texts, torch.arange(6), records, torch.zeros(6))
    columns = shapes()(batch).tolist(), brokenkit.scaled(factor=20)(batch).tolist()
    names = [file.name for file in files]
    right = dict(zip(names, zip(*columns, strict=True), strict=True))
    # JSON, with the undamaged ones first
    card = json.loads((tmp_path / "out.json").read_text())
    scores = {row["file"]: tuple(row["scores"].values()) for row in card["images"]}
    assert scores == right and list(scores)[:3] == ["00.png", "02.png", "04.png"]
    assert card["rewards"]["scaled"]["factor"] == 20 and card["summary"]["shapes"]["scored"] == 6
    # CSV, table and grid
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["file"]: (float(row["shapes"]), float(row["scaled"])) for row in rows} == right
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[2:8]] == list(scores)
    assert f"{right['01.png'][0]:.4f}" in text
    assert Image.open(tmp_path / "out.png").size > (300, 200)


def test_what_has_no_score_is_not_a_number(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, files = f"{folder}/prompts.jsonl", [tmp_path / "o.json", tmp_path / "o.csv"]
    argv = ["score", f"{folder}/pics", "--reward", "brokenkit.half", "--prompts", prompts, *PLUGIN]
    assert main([*argv, "--json", str(files[0]), "--csv", str(files[1])]) == 0
    missing = sum(len(record["include"]) > 1 for record in records_of(folder))
    card = json.loads(files[0].read_text())
    assert card["summary"]["half"]["not_scored"] == missing > 0
    assert [row["scores"]["half"] for row in card["images"]].count(None) == missing
    assert capsys.readouterr().out.count("not scored") == missing + 1
    assert "nan" not in files[1].read_text().lower()


def test_all_rewards_of_a_config(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = f"score {folder}/pics --config {write_toy(tmp_path)} --plugin toykit --prompt dot"
    changes = ["--set", "rewards.bytes={fn: jpeg, scale: 500}", "--set", "rewards.strict=null"]
    assert main([*argv.split(), *changes]) == 0
    assert capsys.readouterr().out.split()[:3] == ["file", "red", "bytes"]


def test_reading_notes_are_printed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGBA", (8, 8), (255, 0, 0, 128)).save(tmp_path / "a.png")
    argv = f"score {tmp_path}/a.png {folder}/pics/00.png --reward brokenkit.contrast".split()
    assert main([*argv, *PLUGIN]) == 0
    assert f"transparency laid on white: 1 of 2 ({tmp_path}/a.png)" in capsys.readouterr().out


MISTAKES = [
    ("PICS", "expected either --reward NAME"),
    ("PICS --reward shapes --config shapes/flow_grpo", "expected either --reward NAME"),
    ("PICS --reward shape", "did you mean 'shapes'"),
    ("PICS --reward brokenkit.sharp", "allow it with --plugin brokenkit"),
    ("PICS --reward gone_kit.a --plugin gone_kit", "cannot import gone_kit"),
    ("PICS --reward shapes --set mode=lax --prompt x", "'strict', got 'lax'"),
    ("PICS --reward shapes --set mod=strict --prompt x", "has no argument 'mod'"),
    ("PICS --reward shapes --reward jpeg --set mode=strict", "with a NAME of shapes, jpeg"),
    ("PICS --reward shapes --reward rewards.shapes.shapes", "names that differ"),
    ("PICS --reward shapes", "00.png, without --prompts: expected a GenEval record"),
    ("PICS --reward shapes --prompts TMP/p.jsonl", "line 6: expected a GenEval record"),
    ("PICS --reward brokenkit.deaf --plugin brokenkit", "'deaf' reads the prompt: give --prompt"),
    ("PICS --reward shapes --sort jpeg", "--sort: expected one of the rewards shapes"),
    ("PICS --reward jpeg --count 3", "belong to --selftest"),
    ("PICS --reward jpeg --batch 0", "batch of at least 1"),
    ("TMP/gone.png --reward jpeg", "gone.png: cannot be read as an image"),
    ("--reward shapes", "expected images or folders"),
    ("--selftest --reward shapes --csv x.csv", "leave out --csv"),
    ("--selftest --reward shapes --prompt x", "leave out --prompt "),
    ("--selftest --reward shapes --skip shape.blur", "expected a reward of shapes"),
    ("--selftest --reward shapes --count 1", "at least 2 images"),
    ("PICS --reward jpeg --json TMP/p.jsonl/out", "cannot write TMP/p.jsonl/out"),
    ("PICS --reward jpeg --csv TMP/p.jsonl/out", "cannot write TMP/p.jsonl/out"),
    ("PICS --reward jpeg --grid TMP/p.jsonl/out", "cannot write TMP/p.jsonl/out"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES, ids=[argv for argv, _ in MISTAKES])
def test_mistakes_are_explained(
    argv: str, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One message and exit code 2; nothing on the standard output before images are scored."""
    records = records_of(folder)[::-1]
    records[-1].pop("include")
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, records)))
    given = argv.replace("PICS", f"{folder}/pics").replace("TMP", str(tmp_path))
    assert main(["score", *given.split()]) == 2
    out, error = capsys.readouterr()
    assert message.replace("TMP", str(tmp_path)) in error and error.startswith("\nflowrl: ")
    assert out == "" or "cannot write" in message


def test_selftest_of_images_of_the_user(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--count takes every second of the six, the undamaged; --skip is for one reward."""
    argv = f"score --selftest {folder}/pics --prompts {folder}/prompts.jsonl --count 3".split()
    argv += f"--reward shapes --reward jpeg --skip jpeg.blur --json {tmp_path}/o.json".split()
    assert main(argv) == 0
    rows = json.loads((tmp_path / "o.json").read_text())["checks"]
    found = {(row["reward"], row["check"]): row for row in rows}
    expected = {"scored": 3, "images": 3, "mean": 1, "std": 0, "min": 1, "max": 1}
    assert found["shapes", "answers"]["figures"] == pytest.approx(expected)
    assert found["jpeg", "blur"]["verdict"] == "skipped" != found["shapes", "blur"]["verdict"]
    assert "\nnothing fails\n" in capsys.readouterr().out


def test_a_broken_reward_ends_the_selftest_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["score", "--selftest", "--count", "16", "--reward", "brokenkit.zero", *PLUGIN]) == 1
    )
    out, error = capsys.readouterr()
    assert out.endswith("zero: NaN image: broken\n") and "Traceback" not in out + error


MINE = """
def brightness(batch, *, scale: float = 1.0):
    return scale * batch.images.mean((1, 2, 3))


class glow:
    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, batch):
        return brightness(batch, scale=self.scale)
"""


def test_a_reward_from_the_folder_that_one_works_in(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function and a class of a file there; the pixels' mean is numpy's."""
    (tmp_path / "my_rewards.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    # the installed command does not look into the working folder
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    argv = "score --plugin my_rewards --reward my_rewards.brightness --reward my_rewards.glow"
    argv += f" --set glow.scale=2 --json o.json {folder}/pics"
    assert main(argv.split()) == 0
    for row in json.loads((tmp_path / "o.json").read_text())["images"]:
        mean = (np.array(Image.open(folder / "pics" / row["file"])) / 255).mean()
        assert row["scores"] == pytest.approx({"brightness": mean, "glow": 2 * mean}, rel=1e-5)
