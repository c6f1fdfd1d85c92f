"""The script that measures many settings in one call, on tiny models and a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from queuekit import tiny_config
from scriptkit import script_module

from flowrl.core.installation import environment


@pytest.mark.integration
@pytest.mark.skipif(torch.cuda.is_available(), reason="rehearses what a CPU refuses")
def test_rows_are_measured_in_turn_and_one_that_fails_takes_none_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """flash needs a GPU and says so; what has figures is not measured again."""
    script, out = script_module("performance_queue"), tmp_path / "queue.json"
    argv = ["q", "--model", f"sd3={tiny_config(tmp_path)}", "--out", str(out)]
    monkeypatch.setattr("sys.argv", [*argv, "--rows", "sd3 native,sd3 flash,nccl"])
    assert script.main() == 0
    rows = {row["row"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["sd3 native", "nccl", "sd3 flash"]
    assert rows["sd3 native"]["result"]["seconds"]["train"] > 0
    assert rows["sd3 native"]["result"]["runtime"]["attention"] == "native"
    assert rows["nccl"]["result"]["right"] is True
    assert "'flash' does not work here" in rows["sd3 flash"]["stderr"][-1]
    assert "'flash' does not work here" in rows["sd3 flash"]["failed"]
    said = capsys.readouterr().out
    assert "gloo on cpu: right" in said and "sd3 native" in said

    asked: list[str] = []

    def played(row: Any, *_: Any) -> dict[str, Any]:
        asked.append(row.name)
        return dict(rows[row.name])

    monkeypatch.setattr(script, "run", played)
    monkeypatch.setattr("sys.argv", [*argv, "--rows", "sd3 native,sd3 flash", "--go-on"])
    assert script.main() == 0
    assert asked == ["sd3 flash"]
    again = json.loads(out.read_text())["rows"]
    assert {row["row"] for row in again} == set(rows)  # also the one that was not asked for


class Played:
    """Stands in for the process of a row."""

    out = Path("nowhere")

    def __init__(self, script: str, words: list[str], option: str, *, waits: bool) -> None:
        self.words, self.waits, self.ended = words, waits, False
        MADE.append(self)

    def end(self) -> None:
        self.ended = True

    def told(self) -> list[str]:
        return ["at the end"]


MADE: list[Any] = []


def test_the_time_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is played here: 10 minutes, of which each row takes its own limit of 4; the fourth
    and all after it are left out and named."""
    script, out, clock, limits = script_module("performance_queue"), tmp_path / "a.json", [0.0], []

    class Hangs(Played):
        def finish(self, seconds: float) -> tuple[float, str]:
            limits.append(seconds)
            clock[0] += seconds
            return seconds, f"ended after {seconds:.0f} s"

    monkeypatch.setattr(script, "Process", Hangs)
    monkeypatch.setattr(script.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("sys.argv", ["q", "--out", str(out), "--minutes", "10"])
    assert script.main() == 1
    assert limits == [240, 240, 120]
    found = json.loads(out.read_text())
    assert [row["failed"] for row in found["rows"]] == ["ended after 240 s"] * 2 + [
        "ended after 120 s"
    ]
    assert found["left_out"] == [row.name for row in script.QUEUE[3:]]


def test_the_next_row_begins_early_where_there_are_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a row measures the next one waits for its turn; NCCL's never does, and what still waits
    at the end is stopped."""
    MADE.clear()
    for cores, waits in ((2, [False] * 4), (8, [False, True, True, False])):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        out = tmp_path / f"{cores}.json"
        found = called(monkeypatch, out, "--rows", "sd3 native,flux native,wan native,nccl")
        assert found == (0, ["sd3 native", "flux native", "wan native", "nccl"])
        assert [made.waits for made in MADE] == waits
        assert not any(made.ended for made in MADE)
        MADE.clear()
    # when the time is up the one that waits is stopped
    script = script_module("performance_queue")
    monkeypatch.setattr(script, "Process", Played)
    with script.Early(script.QUEUE[:2], script.MODELS) as early:
        early.turn(script.QUEUE[0])
    assert [(made.waits, made.ended) for made in MADE] == [(False, False), (True, True)]


HERE = environment()  # of the machine that tests run on, as a row's process finds it
SUM = {"said": "gloo on cpu: right", "environment": HERE}  # a result of collectives.py


def called(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> tuple[int, list[str]]:
    """Run the queue with rows that are measured at once -> its exit code, and which were. Where
    this is, is known; the rehearsal above asks a process for it."""
    script, asked = script_module("performance_queue"), []
    told = CompletedProcess([], 0, stdout=json.dumps(HERE).encode())
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: told)

    def played(row: Any, models: dict[str, list[str]], *_: Any) -> dict[str, Any]:
        asked.append(row.name)
        return {"row": row.name, **script.asked_for(row, models), "wall_s": 1.0, "result": SUM}

    monkeypatch.setattr(script, "Process", Played)
    monkeypatch.setattr(script, "run", played)
    monkeypatch.setattr("sys.argv", ["q", "--out", str(out), *words])
    return script.main(), asked


def test_a_file_is_not_overwritten_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    assert called(monkeypatch, out, "--rows", "sd3 native,nccl") == (0, ["sd3 native", "nccl"])
    before = out.read_text()
    assert called(monkeypatch, out, "--rows", "nccl") == (2, [])
    said = capsys.readouterr().err
    assert f"{out} is there: --go-on keeps" in said and "--anew measures" in said
    assert out.read_text() == before
    assert called(monkeypatch, out, "--rows", "nccl", "--anew") == (0, ["nccl"])
    assert [row["row"] for row in json.loads(out.read_text())["rows"]] == ["nccl"]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("gpus", ["H1"], "its figures are of gpus ['H1'], here is "),
        ("torch", "1.0", "its figures are of torch 1.0, here is "),
        ("commit", "f00", "its figures are of commit f00, here is "),
        ("", None, ""),
    ],
)
def test_figures_of_another_place_are_measured_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    value: Any,
    message: str,
) -> None:
    """What was not asked for stays, and so does a row for which there is no time."""
    out = tmp_path / "a.json"
    called(monkeypatch, out, "--rows", "sd3 native,nccl")
    found = json.loads(out.read_text())
    for row in found["rows"]:
        row["result"]["environment"] = HERE | ({place: value} if place else {})
    out.write_text(json.dumps(found))
    code, asked = called(monkeypatch, out, "--rows", "nccl", "--go-on", "--minutes", "0")
    assert (code, asked) == (1 if place else 0, [])
    assert json.loads(out.read_text()) == found
    capsys.readouterr()
    assert called(monkeypatch, out, "--rows", "nccl", "--go-on") == (0, ["nccl"] if place else [])
    said = capsys.readouterr().out
    assert ("nccl: measured again: " in said) == bool(place) and message in said
    assert [row["row"] for row in json.loads(out.read_text())["rows"]] == ["sd3 native", "nccl"]


def test_figures_of_another_config_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another one, the same with another content, and the same as it was."""
    out, config = tmp_path / "a.json", tmp_path / "it.yaml"
    config.write_text("a: 1")
    words = ["--rows", "sd3 native,nccl"]
    called(monkeypatch, out, *words)
    words += ["--go-on", "--model", f"sd3={config}"]
    for content, asked in (("a: 1", ["sd3 native"]), ("a: 2", ["sd3 native"]), ("a: 2", [])):
        config.write_text(content)
        assert called(monkeypatch, out, *words) == (0, asked)
    said = capsys.readouterr().out
    assert "sd3 native: measured again: its words were ['sd3/flow_grpo_fast', " in said
    assert "sd3 native: measured again: its config_sha256 were " in said


def test_a_wrong_sum_keeps_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """collectives.py writes what it found, and ends with 1; it is tried again."""
    script, out = script_module("performance_queue"), tmp_path / "a.json"
    found = SUM | {"right": False, "said": "gloo on cpu: WRONG", "all_reduce_s": [0.5]}

    class Wrong(Played):
        out = tmp_path / "result.json"

        def finish(self, seconds: float) -> tuple[float, str]:
            self.out.write_text(json.dumps(found))
            return 0.1, "exit code 1"

    monkeypatch.setattr(script, "Process", Wrong)
    monkeypatch.setattr("sys.argv", ["q", "--out", str(out), "--rows", "nccl"])
    assert script.main() == 1
    (row,) = json.loads(out.read_text())["rows"]
    assert row["failed"] == "gloo on cpu: WRONG; exit code 1" and row["result"] == found
    assert called(monkeypatch, out, "--rows", "nccl", "--go-on") == (0, ["nccl"])
    (row,) = json.loads(out.read_text())["rows"]
    assert "failed" not in row


FIGURES = {
    "seconds": {"rollout": 1, "train": 2},
    "images_per_s": 1,
    "mfu": None,
    "memory": {"rollout": {"measured": 5, "estimate": None}},
    "environment": {},
}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[]", "all of it"),
        ("{", "all of it"),
        ("[" * 100_000, "all of it"),
        ('{"rows": [{"result": {}}]}', "rows.0.row"),
        ('{"rows": [{"row": 3}]}', "rows.0.row"),
        ('{"rows": [{"row": "a", "result": {"said": 3, "environment": {}}}]}', "result.said"),
        ({"mfu": ...}, "rows.0.result.mfu"),
        ({"memory": {"train": {"measured": "5"}}}, "rows.0.result.memory.train.measured"),
        ({"seconds": {"rollout": 1}}, "rows.0.result.seconds.train"),
        ({"images_per_s": float("nan")}, "rows.0.result.images_per_s"),
        ({"environment": 3}, "rows.0.result.environment"),
    ],
)
def test_files_of_another_kind_are_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: Any,
    key: str,
) -> None:
    """By what is changed in a whole row; `...` is left out."""
    out = tmp_path / "a.json"
    if isinstance(text, dict):
        changed = FIGURES | text
        result = {name: value for name, value in changed.items() if value is not ...}
        text = json.dumps({"rows": [{"row": "sd3 native", "result": result}]})
    out.write_text(text)
    assert called(monkeypatch, out, "--rows", "nccl", "--go-on") == (2, [])
    said = capsys.readouterr().err
    assert f"--go-on: {out}: " in said and f"{key}: expected a file that this command wro" in said
    assert "--anew" in said and len(said.splitlines()) == 1 and out.read_text() == text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--rows", "sdxl"],
            "--rows: no row begins with 'sdxl'; there are sd3 native, sd3 written-out norms",
        ),
        (["--model", "sdxl=a.yaml"], "--model: expected sd3|flux|wan|qwen_image=CONFIG, got"),
        (["--rows", "nccl", "--out", "/"], "--out: / is there: --go-on keeps its rows"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["q", "--out", str(tmp_path / "a.json"), *words])
    assert script_module("performance_queue").main() == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1
