"""Preference data that is damaged, or was written by halves, and files that people have, as
`flowrl pairs` and `flowrl score` take them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowrl.core.errors import DataError, RunError
from flowrl.core.prompts import load_prompts
from flowrl.evaluation.image_files import find_images, match_prompts
from flowrl.evaluation.preference_pairs import convert_pairs
from flowrl.evaluation.score_images import prompted_images
from flowrl.evaluation.suites.image_folder import REWARDS, prepare
from flowrl.evaluation.votes import append_vote, keep_image


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


# --------------------------------------------------------------------------- files that people have


def painted(path: Path, colour: str) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16), colour).save(path)
    return path.read_bytes()


def votes(folder: Path, **columns: list[Any]) -> Path:
    """Write Pick-a-Pic's columns: a vote, a tie, a row that nobody voted on, a null caption."""
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    red, blue, green = (painted(folder / f"{c}.jpg", c) for c in ("red", "blue", "green"))
    rows = {
        "caption": ["a red square", "a tie", "never voted on", None],
        "jpg_0": [red, red, green, red],
        "jpg_1": [blue, green, blue, green],
        "label_0": [1.0, 0.5, 0.0, 1.0],
        "has_label": [True, True, False, True],
    } | columns
    parquet.write_table(pyarrow.table(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def test_what_nobody_voted_on_is_no_vote(tmp_path: Path) -> None:
    done = convert_pairs(votes(tmp_path), tmp_path / "out", drop=True)
    [record] = [json.loads(line) for line in done.file.read_text().splitlines()]
    assert (record["prompt"], record["label_0"]) == ("a red square", 1.0)
    assert (done.kept, done.ties, done.unlabelled) == (1, 1, 1)
    [reason] = done.dropped
    assert reason.endswith("row 4: the prompt is empty")


def test_a_null_caption_is_no_prompt(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 4: the prompt is empty\. Or leave .* --drop"):
        convert_pairs(votes(tmp_path), tmp_path / "out")
    empty = votes(tmp_path, has_label=[None, True, False, False])
    with pytest.raises(DataError, match=r"no pair is left \(1 ties, 3 without a vote, 0 that"):
        convert_pairs(empty, tmp_path / "out")
    rows = [{"prompt": 3, "image_0": "red.jpg", "image_1": "blue.jpg", "label_0": 1}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with pytest.raises(DataError, match="entry 1: expected a text as prompt, got 3"):
        convert_pairs(tmp_path / "rows.json", tmp_path / "out")


def suite(folder: Path, prompts: list[str], images: int) -> Path:
    """Lay images out as GenEval and `flowrl eval --suite` do."""
    for number, prompt in enumerate(prompts):
        for image in range(images):
            painted(folder / f"{number:05}" / "samples" / f"{image:04}.png", "red")
        record = {"prompt": prompt, "tag": f"t{number}"}
        (folder / f"{number:05}" / "metadata.jsonl").write_text(json.dumps(record) + "\n")
    return folder


def test_images_of_a_suite_find_their_prompts(tmp_path: Path) -> None:
    """Two images of each prompt: by order they would be as many images as twice the records."""
    images = find_images([suite(tmp_path / "out", ["a", "b"], 2)])
    own = match_prompts(images, None, None)
    assert own.prompts.texts == ["a", "a", "b", "b"] and own.has_prompts
    assert [record["tag"] for record in own.prompts.records] == ["t0", "t0", "t1", "t1"]
    (tmp_path / "p.txt").write_text("a\nb\nc\n")
    given = match_prompts(images, None, str(tmp_path / "p.txt"))
    assert given.prompts.texts == ["a", "a", "b", "b"] and given.unused == 1
    assert match_prompts(images, "x", None).prompts.texts == ["x"] * 4
    (tmp_path / "q.txt").write_text("b\na\n")
    with pytest.raises(DataError, match=r"metadata\.jsonl as record 1, 'a', got 'b'; leave"):
        match_prompts(images, None, str(tmp_path / "q.txt"))
    (tmp_path / "q.txt").write_text("a\n")
    with pytest.raises(DataError, match="as record 2, 'b', got 1 records"):
        match_prompts(images, None, str(tmp_path / "q.txt"))


def test_sheets_of_geneval_s_own_code_are_no_samples(tmp_path: Path) -> None:
    """Its `diffusers_generate.py` draws 00000/grid.png of a prompt's samples beside them; a
    picture of that name elsewhere is an image like any other."""
    folder = suite(tmp_path / "out", ["a", "b"], 2)
    painted(folder / "00000" / "grid.png", "green")
    painted(folder / "grid.png", "green")
    names = [image.name for image in find_images([folder])]
    assert names[:2] == [f"00000/samples/{n:04}.png" for n in (0, 1)]
    assert names[2:] == [f"00001/samples/{n:04}.png" for n in (0, 1)] + ["grid.png"]


def test_sources_of_a_suite_are_found_without_its_list(tmp_path: Path) -> None:
    """A record names what it starts from as seen from its list, which a suite's folder is not."""
    painted(tmp_path / "lists" / "start.png", "blue")
    listed = tmp_path / "lists" / "edits.jsonl"
    listed.write_text(json.dumps({"prompt": "make it red", "source": "start.png"}) + "\n")
    out = tmp_path / "out"
    prepare(out, {"suite": "mine", REWARDS: {}}, load_prompts(listed))
    painted(out / "00000" / "samples" / "0000.png", "red")
    images = find_images([out])
    [item] = prompted_images(images, match_prompts(images, None, None).prompts, {})
    [start] = item.sources()
    assert start[:, 0, 0].tolist() == [0, 0, 1]


def test_metadata_of_an_image_folder(tmp_path: Path) -> None:
    """As `datasets` reads it: file_name and text, in any order."""
    for name in ("1.png", "2.png"):
        painted(tmp_path / name, "red")
    lines = [{"file_name": f"{n}.png", "text": f"number {n}"} for n in (2, 1)]
    file = tmp_path / "metadata.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = match_prompts(find_images([tmp_path]), None, str(file))
    assert found.prompts.texts == ["number 1", "number 2"]


def test_a_pair_of_json_that_nobody_voted_on(tmp_path: Path) -> None:
    for name in ("red", "blue"):
        painted(tmp_path / f"{name}.jpg", name)
    row = {"prompt": "a", "image_0": "red.jpg", "image_1": "blue.jpg", "label_0": 0}
    rows = [row, {**row, "prompt": "b", "has_label": False}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    done = convert_pairs(tmp_path / "rows.jsonl", tmp_path / "out")
    assert (done.kept, done.ties, done.unlabelled) == (1, 0, 1)
