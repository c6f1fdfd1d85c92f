"""Run folders that a stranger may have written: every file of a run, with texts, lists, numbers
that no float holds, bytes, and nests without an end in the place of what is expected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from reportkit import BEFORE, answer_here, make_run
from starlette.testclient import TestClient

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError, FlowRLError, RunError
from flowrl.core.files import parse_json, read_json, shaped
from flowrl.evaluation.suites.image_folder import (
    image_path,
    judge_of,
    read_lines,
    read_setting,
    scored_line,
)
from flowrl.evaluation.votes import questions, read_votes
from flowrl.runs.report.page import html_report
from flowrl.runs.view.app import make_app

DIGITS = "9" * 400
DEEP = "[" * 100_000
BAD = {
    "nothing": "",
    "a text": '"text"',
    "a list": "[1, 2]",
    "a number": "3",
    "400 digits": '{"iteration": ' + DIGITS + "}",
    "5,000 digits": '{"iteration": ' + "9" * 5000 + "}",
    "infinite": '{"iteration": 0, "score": "s", "s": 1e999}',
    "bytes": "\xff\xfe{}",
    "deep": DEEP,
    "deep and whole": DEEP + "]" * 100_000,
    "deep in an object": '{"iteration": 0, "prompts": ' + "[" * 500 + "]" * 500 + "}",
    "a key twice": '{"iteration": 0, "iteration": 1}',
    "half a letter": '{"iteration": 0, "x": "\\ud800"}',
    "texts for numbers": json.dumps(
        {"iteration": 0, "score": "s", "s": "high", "reward": [], "total": "x", "before": 3}
        | {"prompts": "ab", "height": "8", "width": 8, "0": "yes", "monitor": 3, "best": {}}
    ),
    "an odd shape": json.dumps(
        {"iteration": 0, "reward": {"a": 1}, "score": ["s"], "best": {"score": "x"}}
        | {"stopped": 3, "prompts": [1], "height": 0, "width": 10**30, "counts": 3}
    ),
}
FILES = (
    *("metrics.jsonl", "eval.jsonl", "timing.jsonl", "findings.jsonl", "histograms.jsonl"),
    *("summary.json", "environment.json", "doctor.json"),
    *("samples/prompts.json", "samples/verdicts.json", "config.yaml"),
)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_here(monkeypatch)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two runs that can be looked at; a test damages the second."""
    for name in ("good", "other"):
        make_run(tmp_path / name)
    return tmp_path


def put(file: Path, text: str) -> None:
    """Write one damaged thing, with a line end as whole lines have it."""
    file.write_bytes((text + "\n").encode("latin-1"))


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_spoils_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of fifteen runs, each damaged in another way: it is read, or said with its name; the good run
    is told as ever."""
    monkeypatch.setattr("flowrl.runs.view.listing.LOOK", 600.0)  # all runs in one answer
    make_run(tmp_path / "good", iterations=5, samples=2)
    for what, text in BAD.items():
        shutil.copytree(tmp_path / "good", tmp_path / what)
        put(tmp_path / what / name, text)
    refused = set()
    with TestClient(make_app(tmp_path, tmp_path / "votes"), base_url="http://localhost") as client:
        listed = {run["id"]: run for run in client.get("/api/runs").json()}
        assert {*listed} == {"good", *BAD}
        assert listed["good"]["score"] == 0.7 and "error" not in listed["good"]
        assert client.get("/api/story", params={"run": "good"}).status_code == 200
        for run in BAD:
            answer = client.get("/api/story", params={"run": run})
            assert answer.status_code in (200, 422) and "NaN" not in answer.text
            if answer.status_code == 422:
                # what says no reason leaves something out silently
                assert Path(name).name in answer.json()["error"]
                refused.add(run)
            if listed[run].get("error"):
                assert name in listed[run]["error"] and listed[run]["state"] == "damaged"
            asked = {"voter": "0123456789abcdef", "one": "good@0", "two": f"{run}@20"}
            assert client.post("/api/ballot", json=asked).status_code in (200, 422)
    page = html_report(tmp_path / "good", *(tmp_path / run for run in BAD), show_damaged=True)
    said = page.partition('id="damaged"')[2]
    assert "good" in page
    assert {run for run in refused if f"{tmp_path / run}<" not in said} == set()


LONG = "train: {iterations: 100000}\n"
EXTREMES = {
    "a whole number that is nearly too large": {
        "config.yaml": LONG,
        "timing.jsonl": '{"iteration": 0, "total": 1' + "0" * 308 + "}",
    },
    "a sum that is too large": {
        "config.yaml": LONG,
        "timing.jsonl": '{"iteration": 0, "total": 1.7e308}\n{"iteration": 1, "total": 1.7e308}',
    },
    "iterations of 400 digits": {"config.yaml": f"train: {{iterations: {DIGITS}}}"},
    "5,000 digits in base 16": {"config.yaml": "a: 0x" + "f" * 5000},
    "a step of 5,000 digits": {
        "metrics.jsonl": '{"iteration": 0, "ratio/step' + "9" * 5000 + '": 1}'
    },
    "a limit without end": {"config.yaml": "monitors: {ratio: {spread: .inf}}"},
}


@pytest.mark.parametrize("what", EXTREMES)
def test_numbers_at_the_end_of_their_range_spoil_no_page(home: Path, what: str) -> None:
    """Each may be read; what is worked out with it may be no number."""
    for name, text in EXTREMES[what].items():
        put(home / "other" / name, text)
    with TestClient(make_app(home, home / "votes"), base_url="http://localhost") as client:
        listed = {run["id"]: run for run in client.get("/api/runs").json()}
        assert listed["good"]["score"] == 0.7
        assert client.get("/api/story", params={"run": "other"}).status_code in (200, 422)
    assert "good" in html_report(home / "good", home / "other", show_damaged=True)


def test_the_reason_stands_on_the_page(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(home / "other" / "summary.json", '{"before": {}, "after": 3, "x": "<script>"}')
    with pytest.raises(RunError, match="summary.json: after: input should be a valid dict"):
        html_report(home / "good", home / "other")
    out = home / "page.html"
    runs = [str(home / "good"), str(home / "other")]
    assert main(["report", *runs, "--out", str(out), "--json", str(home / "told.json")]) == 0
    page = out.read_text()
    assert "summary.json: after: input should be" in page.partition('id="damaged"')[2]
    told = json.loads((home / "told.json").read_text())["runs"]
    assert "summary.json: after" in told[runs[1]]["damaged"] and "before" in told[runs[0]]
    # alone there is nothing to show it beside
    assert main(["report", runs[1]]) == 2


def bomb(levels: int = 9) -> str:
    """Return YAML of 500 bytes that unfolds to 9 ** levels texts."""
    lines = ["a0: &a0 [" + ", ".join(["lol"] * 9) + "]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [" + ", ".join([f"*a{level - 1}"] * 9) + "]")
    return "\n".join(lines) + "\n"


def test_aliases_of_a_run_are_refused(home: Path) -> None:
    (home / "other" / "config.yaml").write_text(bomb())
    with TestClient(make_app(home, home / "votes"), base_url="http://localhost") as client:
        answer = client.get("/api/story", params={"run": "other"})
        assert answer.status_code == 422 and "aliases" in answer.json()["error"]
        asked = {"voter": "0123456789abcdef", "one": "good@0", "two": "other@20"}
        answer = client.post("/api/ballot", json=asked)
        assert answer.status_code == 422 and "aliases" in answer.json()["error"]
    (home / "other" / "config.yaml").write_text("a: " + "x" * 2**21)
    with pytest.raises(RunError, match="at most 1048576 characters"):
        html_report(home / "other")


@pytest.mark.parametrize("what", BAD)
def test_readers_of_suites_and_votes(tmp_path: Path, what: str) -> None:
    (tmp_path / "questions").mkdir()
    for name in ("setting.json", "scores.jsonl", "votes.jsonl", "questions/a.json"):
        put(tmp_path / name, BAD[what])
    for read in (read_setting, read_lines, read_votes):
        try:
            read(tmp_path)
        except FlowRLError as error:
            assert str(tmp_path) in str(error)
        else:
            assert what in ("nothing", "texts for numbers", "an odd shape") or read is read_setting
    with pytest.warns(UserWarning, match="a question is left out: .*a.json"):
        assert questions(tmp_path) == []


@pytest.mark.parametrize(
    "change",
    [{"label_0": True}, {"name_0": ["a"]}, {"label_0": "1"}, {"voter": 3}, {"source": "a"}],
)
def test_what_a_vote_must_be(tmp_path: Path, change: dict[str, Any]) -> None:
    vote = {"prompt": "p", "image_0": "a", "image_1": "b", "label_0": 1, "voter": "v"}
    put(tmp_path / "votes.jsonl", json.dumps(vote))
    assert read_votes(tmp_path) == [vote]
    put(tmp_path / "votes.jsonl", json.dumps(vote | change))
    with pytest.raises(RunError, match=r"votes\.jsonl, line 1: expected a vote"):
        read_votes(tmp_path)


def test_a_score_of_a_suite_is_a_number(tmp_path: Path) -> None:
    """Also where the line's own digest fits."""
    put(tmp_path / "setting.json", json.dumps({"rewards": {}}))
    image = image_path(tmp_path, 0, 0)
    image.parent.mkdir(parents=True)
    image.write_bytes(b"an image")
    name, judge = image.relative_to(tmp_path).as_posix(), judge_of(read_setting(tmp_path))

    def scored(scores: Any) -> dict[str, Any]:
        line = {"file": name, "prompt": 0, "image": 0, "scores": scores}
        return scored_line(tmp_path, line, judge)

    line = scored({"s": 0.5, "t": None})
    put(tmp_path / "scores.jsonl", json.dumps(line))
    assert read_lines(tmp_path) == {(0, 0): line}
    cases: list[Any] = [{"s": "high"}, [], {"s": [1]}, {"s": True}, {"s": 10**400}]
    for scores in cases:
        put(tmp_path / "scores.jsonl", json.dumps(scored(scores)))
        with pytest.raises(FlowRLError, match=r"scores\.jsonl, line 1: expected the scores"):
            read_lines(tmp_path)


def test_json_as_it_is_read(tmp_path: Path) -> None:
    """What is whole stays what it is."""
    value = {
        "a": [1, 2.5, None, True, "ü\u2028"],
        "b": {"c": 10**300, "d": -(2**63)},
        "e": "\U0001f600",
    }
    assert parse_json(json.dumps(value), "x") == value
    assert parse_json(b"\xef\xbb\xbf[1]", "x") == [1]
    nested: Any = 1
    for _ in range(64):
        nested = [nested]
    assert parse_json(json.dumps(nested), "x") == nested
    with pytest.raises(RunError, match="x: expected JSON, got lists or objects nested too deeply"):
        parse_json(json.dumps([nested]), "x")
    with pytest.raises(RunError, match="NaN is no number"):
        parse_json("[NaN]", "x")
    assert str(parse_json("[NaN]", "x", constants=True)) == "[nan]"
    with pytest.raises(ConfigError, match="x, line 2, column 4: expected JSON, got a fault"):
        parse_json("[1,\n 2 3]", "x", error=ConfigError)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")
    assert shaped(BEFORE, dict[str, Any], "x") is BEFORE
    with pytest.raises(RunError, match="x: a.1: input should be a valid number, got 'b'"):
        shaped({"a": [1, "b"]}, dict[str, list[float]], "x")
