"""Votes of people: nothing is lost, nothing is counted twice."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from flowrl.core.errors import RunError
from flowrl.evaluation.votes import (
    append_vote,
    ask_people,
    keep_image,
    opinions,
    pair_of,
    questions,
    read_votes,
    withdraw,
)


def vote(label: float = 1, voter: str = "a" * 8, **more: Any) -> dict[str, Any]:
    record = {"prompt": "p", "image_0": "images/1.png", "image_1": "images/2.png"}
    return {**record, "label_0": label, "voter": voter, **more}


def many(folder: Path, voter: str) -> None:
    for number in range(50):
        append_vote(folder, vote(voter=voter, prompt=f"p{number} " + "x" * 5000))


def test_votes_of_several_processes_at_once_are_all_there(tmp_path: Path) -> None:
    """Four writers of 50 long lines each; every line is whole."""
    started = []
    for number in range(4):
        process = multiprocessing.get_context("fork").Process(
            target=many, args=(tmp_path, f"{number:08x}")
        )
        process.start()
        started.append(process)
    for process in started:
        process.join()
    found = read_votes(tmp_path)
    assert len({(row["voter"], row["prompt"]) for row in found}) == len(found) == 200


def test_a_torn_line_was_never_confirmed(tmp_path: Path) -> None:
    append_vote(tmp_path, vote())
    with (tmp_path / "votes.jsonl").open("a") as file:
        file.write('{"prompt": "torn')
    assert len(read_votes(tmp_path)) == 1
    append_vote(tmp_path, vote(0))
    assert [row["label_0"] for row in read_votes(tmp_path)] == [1, 0]


@pytest.mark.parametrize("line", ["{}", "[1]", json.dumps(vote(0.3)), json.dumps(vote(prompt=1))])
def test_what_is_no_vote_is_named(tmp_path: Path, line: str) -> None:
    append_vote(tmp_path, vote())
    with (tmp_path / "votes.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RunError, match="votes.jsonl, line 2: expected a vote"):
        read_votes(tmp_path)


def test_the_last_vote_of_a_voter_counts_from_either_side() -> None:
    swapped = {**vote(1, "b" * 8), "image_0": "images/2.png", "image_1": "images/1.png"}
    said = opinions([vote(1), vote(0), swapped, vote(0.5, "c" * 8)])
    # a changed their mind to 0, b prefers the other image, c has a tie
    assert said == {pair_of("p", "images/2.png", "images/1.png"): [0, 0, 0.5]}


def test_a_vote_on_an_edit_is_on_its_sources_too(tmp_path: Path) -> None:
    """The same two images from another source are another pair; a vote that names none, as earlier
    ones do, stays one on the pair without."""
    append_vote(tmp_path, vote(0, source=["images/3.png"]))
    append_vote(tmp_path, vote(0.5, source=["images/4.png"]))
    append_vote(tmp_path, vote(1))
    images = ("images/1.png", "images/2.png")
    assert opinions(read_votes(tmp_path)) == {
        pair_of("p", *images, ["images/3.png"]): [0],
        pair_of("p", *images, ["images/4.png"]): [0.5],
        pair_of("p", *images): [1],
    }
    with (tmp_path / "votes.jsonl").open("a") as file:
        file.write(json.dumps(vote(source="images/3.png")) + "\n")
    with pytest.raises(RunError, match="line 4: expected a vote.*source is a list of texts"):
        read_votes(tmp_path)


def test_a_question_on_an_edit_names_its_sources(tmp_path: Path) -> None:
    """One without sources is written as it always was: a resumed run asks under the same name."""
    one, two, source = (keep_image(tmp_path, data) for data in (b"one", b"two", b"source"))
    edit = ask_people(tmp_path, [pair_of("p", one, two, [source])])
    assert questions(tmp_path) == [edit]
    withdraw(tmp_path, edit)
    plain = ask_people(tmp_path, [pair_of("p", one, two)])
    assert questions(tmp_path) == [plain] and plain.key != edit.key
    written = json.loads((tmp_path / "questions" / f"{plain.key}.json").read_text())
    assert written == {"pairs": [["p", *sorted((one, two))]]}
    bad = {"pairs": [["p", one, two, ["../a.png"]]]}
    (tmp_path / "questions" / "bad.json").write_text(json.dumps(bad))
    assert questions(tmp_path) == [plain]


def test_a_question_stands_until_it_is_withdrawn(tmp_path: Path) -> None:
    name = keep_image(tmp_path, b"png")
    assert name == keep_image(tmp_path, b"png") and (tmp_path / name).read_bytes() == b"png"
    pair = pair_of("p", name, keep_image(tmp_path, b"other"))
    question = ask_people(tmp_path, [pair])
    assert ask_people(tmp_path, [pair]) == question and questions(tmp_path) == [question]
    (tmp_path / "questions" / "bad.json").write_text(
        '{"pairs": [["p", "../a.png", "images/b.png"]]}'
    )
    (tmp_path / "questions" / "torn.json").write_text('{"pa')
    assert questions(tmp_path) == [question]
    withdraw(tmp_path, question)
    assert questions(tmp_path) == []
