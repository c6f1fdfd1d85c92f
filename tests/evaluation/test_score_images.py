"""Scoring images of any size by any reward, `flowrl score`, and the table, figures and grid of the
scores."""

from __future__ import annotations

import csv
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import brokenkit
import numpy as np
import pytest
import scipy.ndimage
import torch
from brokenkit import red
from PIL import Image
from torch import Tensor
from toykit import write_toy

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError, DataError, RewardError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.reward_tests.checks import noise
from flowrl.evaluation.reward_tests.selftest import rendered
from flowrl.evaluation.score_images import PromptedImage, RewardScores, batches, score_images
from flowrl.evaluation.scorecard import (
    best_and_worst,
    places_best_first,
    score_summary,
    scorecard,
    scorecard_table,
)
from rewards.shapes import shapes


def item(number: int, size: tuple[int, int] = (4, 4), group: int | None = None) -> PromptedImage:
    image = torch.rand(3, *size, generator=torch.Generator().manual_seed(number))
    group = number if group is None else group
    return PromptedImage(lambda: image, size, {"prompt": "a dot"}, group, f"{number}.png")


def scores(reward: Any, items: list[PromptedImage], **options: Any) -> list[float]:
    return score_images({"it": reward}, items, **options)["it"].values.tolist()


def test_images_of_any_sizes_and_groups_keep_their_order() -> None:
    """Each score is that of the image alone, computed without any batch."""
    sizes = [(4, 4), (5, 3), (4, 4), (5, 3), (5, 3), (2, 2), (4, 4)]
    seen: list[tuple[int, ...]] = []

    def watching(batch: RewardBatch) -> Tensor:
        seen.append(tuple(batch.images.shape))
        return red(batch)

    sized = [item(i, size) for i, size in enumerate(sizes)]
    mixed = [item(i, group=g) for i, g in enumerate([0, 1, 0, 2, 1, 0])]
    for items, batch in ((sized, 2), (mixed, 6)):
        alone = [one.load()[0].mean().item() for one in items]
        assert scores(watching, items, batch=batch) == pytest.approx(alone)
    assert sorted(seen[:-1]) == [(1, 3, s, s) for s in (2, 4)] + [
        (1, 3, 5, 3), (2, 3, 4, 4), (2, 3, 5, 3),
    ]  # fmt: skip


def test_groups_come_together() -> None:
    items = [item(i, group=g) for i, g in enumerate([0, 1, 0, 2, 1, 0])]
    assert list(batches(items, 6, False)) == [([0, 2, 5, 1, 4, 3], False)]
    assert list(batches(items, 3, False)) == [([0, 2, 5], False), ([1, 4, 3], False)]
    split = [([0, 2], True), ([5], True), ([1, 4], False), ([3], False)]
    assert list(batches(items, 2, False)) == split
    assert [rows for rows, _ in batches(items, 1, True)] == [[0, 2, 5], [1, 4], [3]]


@pytest.mark.parametrize(
    ("reward", "reads"),
    [
        (red, set()),
        (lambda batch: red(batch) + len(batch.prompts), {"prompts"}),
        (
            lambda batch: red(batch._replace(sigma=batch.sigma)) + batch.group * len(batch.meta),
            {"group", "meta"},
        ),
        # by place: seen by its effect only
        (lambda batch: red(batch) * torch.tensor([len(p) for p in batch[1]]), set()),
    ],
)
def test_what_a_reward_reads_is_noticed(reward: Any, reads: set[str]) -> None:
    assert score_images({"it": reward}, [item(0), item(1)])["it"].reads == reads


def test_a_reward_that_reads_the_prompt_needs_one() -> None:
    with pytest.raises(ConfigError, match="'deaf' reads the prompt: give --prompt"):
        score_images({"deaf": brokenkit.deaf}, [item(0)], has_prompts=False)
    assert len(scores(brokenkit.sharp, [item(0)], has_prompts=False)) == 1


def test_a_reward_that_compares_needs_the_whole_group() -> None:
    def centred(batch: RewardBatch) -> Tensor:
        means = [red(batch)[batch.group == g].mean() for g in batch.group]
        return red(batch) - torch.stack(means)

    items = [item(i, group=0) for i in range(3)]
    assert sum(scores(centred, items, batch=3)) == pytest.approx(0, abs=1e-6)
    with pytest.raises(ConfigError, match="larger --batch"):
        scores(centred, items, batch=2)
    with pytest.raises(ConfigError, match="of several sizes"):
        scores(centred, [item(0, group=0), item(1, (5, 5), group=0)], batch=9)
    alone = scores(lambda batch: red(batch) + 0 * batch.group, items, batch=2, split=True)
    assert alone == scores(red, items)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            lambda batch: red(batch) / 0,
            "gave inf for image [01], prompt .*infinity is never allowed",
        ),
        (brokenkit.picky, "no images of 'a dot' please"),
    ],
)
def test_a_reward_that_fails_is_named_with_its_images(reward: Any, message: str) -> None:
    with pytest.raises(RewardError, match=rf"0\.png to 1\.png: reward 'it'.*{message}"):
        scores(reward, [item(0), item(1)])


# ----------------------------------------------------------------------------------- the figures


def scored(**columns: list[float]) -> dict[str, RewardScores]:
    return {name: RewardScores(torch.tensor(values)) for name, values in columns.items()}


def test_figures_are_those_of_the_statistics_module() -> None:
    values = [0.25, 3.0, -1.5, 0.0]
    found = score_summary(torch.tensor([*values, torch.nan]))
    assert found["mean"] == pytest.approx(statistics.mean(values))
    assert found["std"] == pytest.approx(statistics.stdev(values))
    assert (found["min"], found["max"], found["scored"], found["not_scored"]) == (-1.5, 3.0, 4, 1)
    assert score_summary(torch.tensor([2.0]))["std"] is None
    assert score_summary(torch.tensor([torch.nan]))["mean"] is None


def test_a_table_is_aligned_and_says_what_was_not_scored() -> None:
    """Std: sqrt(1.125), and statistics.stdev([1234.5, -1, 0]) = 713.03."""
    columns = scored(a=[0.5, torch.nan, 2.0], bb=[1234.5, -1.0, 0.0])
    card = scorecard([item(i) for i in range(3)], columns, has_prompts=True)
    assert scorecard_table(card).splitlines() == [
        "file                 a      bb",
        "------------------------------",
        "0.png           0.5000  1234.5",
        "1.png       not scored    -1.0",
        "2.png           2.0000     0.0",
        "------------------------------",
        "mean            1.2500   411.2",
        "std             1.0607   713.0",
        "min             0.5000    -1.0",
        "max             2.0000  1234.5",
        "not scored           1       0",
    ]


def test_sorting_puts_the_best_first_and_the_unscored_last() -> None:
    said = scored(a=[1.0, torch.nan, 3.0, 1.0])
    assert places_best_first(said, "a") == [2, 0, 3]
    card = scorecard([item(i) for i in range(4)], said, has_prompts=False, sort="a")
    assert [row["file"] for row in card["images"]] == ["2.png", "0.png", "3.png", "1.png"]
    assert [row["scores"]["a"] for row in card["images"]] == [3.0, 1.0, 1.0, None]
    with pytest.raises(ConfigError, match="--sort: expected one of the rewards a, got 'b'"):
        places_best_first(said, "b")


def test_the_grid_shows_the_best_left_and_the_worst_below() -> None:
    """Flat images whose grey is their score are found in the grid by their colour."""
    levels = [0.2, 0.8, 0.4, 0.6, 0.1, 0.9]
    items = []
    for i, level in enumerate(levels):
        flat = partial(torch.full, (3, 64, 64), level)
        items.append(item(i)._replace(load=flat, size=(64, 64)))
    page = np.array(best_and_worst(items, scored(a=levels), ["a"]).convert("L"))
    places = []
    for level in sorted(levels, reverse=True):
        exact = (page == round(255 * level)).astype(float)
        rows, columns = np.nonzero(scipy.ndimage.uniform_filter(exact, 40) > 0.999)
        places.append((bool(rows.mean() > page.shape[0] / 2), columns.mean()))
    assert places == sorted(places)
    assert [below for below, _ in places] == [False] * 3 + [True] * 3
    mixed = best_and_worst([*items, item(6, (32, 128))], scored(a=[*levels, 0.5]), ["a"])
    assert mixed.width > 3 * 192
    with pytest.raises(DataError, match="at least 2 images scored by 'a', got 1"):
        best_and_worst(items[:2], scored(a=[1.0, torch.nan]), ["a"])


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
