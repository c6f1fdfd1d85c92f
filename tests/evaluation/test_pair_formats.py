"""Preference data that is damaged, or was written by halves: what `convert_pairs` makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowrl.core.errors import DataError, RunError
from flowrl.core.votes import append_vote, keep_image
from flowrl.evaluation.preference_pairs import convert_pairs


def paint(file: Path, seed: int) -> Path:
    """Write noise as a PNG, which is no few bytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    return file


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a list with one pair."""
    first, second = (paint(tmp_path / "source" / f"{seed}.png", seed) for seed in (0, 1))
    row = {"prompt": "a dot", "path1": first.name, "path2": second.name}
    file = tmp_path / "source" / "list.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return file


def test_a_vote_on_a_prompt_with_a_line_separator(tmp_path: Path) -> None:
    """U+2028 is a letter of a text for JSON, and no end of a line."""
    box, prompt = tmp_path / "votes", "a red\u2028circle\u0085"
    one, two = (keep_image(box, paint(tmp_path / "x.png", s).read_bytes()) for s in (0, 1))
    vote = {"prompt": prompt, "image_0": one, "image_1": two, "label_0": 1.0, "voter": "ab" * 4}
    append_vote(box, vote)
    done = convert_pairs(box / "votes.jsonl", tmp_path / "out")
    assert json.loads(done.file.read_text(encoding="utf-8"))["prompt"] == prompt


def test_a_torn_image_is_written_again(source: Path, tmp_path: Path) -> None:
    """As a conversion leaves it that a power cut ended."""
    images = tmp_path / "out" / "images"
    assert convert_pairs(source, images.parent).kept == 1
    for file in images.iterdir():
        whole = file.read_bytes()
        file.write_bytes(whole[:900])
    convert_pairs(source, images.parent)
    known = {file.read_bytes() for file in source.parent.glob("*.png")}
    assert {file.read_bytes() for file in images.iterdir()} == known and whole in known


def test_an_image_is_written_whole_or_not_at_all(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def disk_is_full(self: Path, data: bytes) -> int:
        write(self, data[:900])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", disk_is_full)
        with pytest.raises(RunError, match="cannot write .*png: No space left on device"):
            convert_pairs(source, tmp_path / "out")
    assert list((tmp_path / "out" / "images").iterdir()) == []


def test_what_is_not_utf8(source: Path, tmp_path: Path) -> None:
    """A list, and the prompt of a folder's pair: the message names the file and the line."""
    source.write_bytes(source.read_bytes() + b"\xff\xfe{}\n")
    with pytest.raises(DataError, match=r"list\.jsonl, line 2: expected UTF-8 text, got .*0xff"):
        convert_pairs(source, tmp_path / "out")
    folder = source.parent
    for side, seed in (("better", 0), ("worse", 1)):
        paint(folder / side / "x.png", seed)
    (folder / "x.txt").write_bytes("\xe9t\xe9".encode("latin-1"))
    with pytest.raises(DataError, match=r"x\.txt, line 1: expected UTF-8 text, got .*0xe9"):
        convert_pairs(folder, tmp_path / "out")


def test_what_is_no_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "part-0.parquet").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"part-0\.parquet: expected a parquet file"):
        convert_pairs(tmp_path, tmp_path / "out")


HPD = {"prompt": "a cat", "image_path": ["a.png", "b.png"], "human_preference": [0, 1]}
OWN = {"prompt": "a cat", "image_0": "a.png", "image_1": "b.png", "label_0": 1}


def listed(folder: Path, row: dict[str, Any]) -> Path:
    for seed, name in enumerate(("a.png", "b.png")):
        paint(folder / name, seed)
    (folder / "list.jsonl").write_text(json.dumps(row) + "\n")
    return folder / "list.jsonl"


@pytest.mark.parametrize("said", [False, "false", "False", 0, "0", None])
def test_nobody_voted_however_it_is_written(tmp_path: Path, said: Any) -> None:
    with pytest.raises(DataError, match=r"no pair is left \(0 ties, 1 without a vote"):
        convert_pairs(listed(tmp_path, OWN | {"has_label": said}), tmp_path / "out")


@pytest.mark.parametrize("said", [True, "true", 1, "1"])
def test_somebody_voted_however_it_is_written(tmp_path: Path, said: Any) -> None:
    assert convert_pairs(listed(tmp_path, OWN | {"has_label": said}), tmp_path / "out").kept == 1


@pytest.mark.parametrize(
    "row",
    [
        HPD | {"human_preference": [1, 0, 0]},
        HPD | {"human_preference": [1]},
        OWN | {"label_0": 0.7},
    ],
)
def test_no_vote_is_made_of_what_is_none(tmp_path: Path, row: dict[str, Any]) -> None:
    """Of three numbers the first two are no vote."""
    with pytest.raises(DataError, match=r"list\.jsonl, entry 1"):
        convert_pairs(listed(tmp_path, row), tmp_path / "out")
