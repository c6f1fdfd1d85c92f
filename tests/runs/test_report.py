"""What a run tells of itself: grid, table and page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gridkit import box
from reportkit import BEFORE, evaluated, lines, make_run

from flowrl.core.errors import DataError, RunError
from flowrl.runs.folder import read_rows
from flowrl.runs.report.page import before_after_table, html_report, story
from flowrl.runs.report.samples import run_grid


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def test_run_grid_takes_first_last_and_evenly_spaced(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", samples=11)
    (run / "samples" / "notes.png").write_bytes(b"not a strip")
    grid = run_grid(run, max_columns=3)
    shown = [i for i in range(11) if (np.asarray(grid) == (i * 20, 250, 1)).all(-1).any()]
    assert shown == [0, 5, 10]
    lefts = [box(grid, (i * 20, 250, 1))[0] for i in shown]
    assert lefts == sorted(lefts)
    with pytest.raises(DataError, match="max_columns >= 2"):
        run_grid(run, max_columns=1)


def test_run_grid_says_what_is_missing(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such folder"):
        run_grid(tmp_path / "nowhere")
    record = run / "samples" / "prompts.json"
    record.write_text(json.dumps({"prompts": ["a", "b"], "height": 16, "width": 8}))
    size = r"000000.png: expected 2 images of height and width \(16, 8\)"
    with pytest.raises(RunError, match=size):
        run_grid(run)
    for text in ("{", "{}", '{"prompts": [1], "height": 8, "width": 8}'):
        record.write_text(text)
        with pytest.raises(RunError, match="prompts.json: expected"):
            run_grid(run)
    for file in (run / "samples").glob("*.png"):
        file.unlink()
    with pytest.raises(RunError, match="holds no samples"):
        run_grid(run)


def test_one_task_has_one_entry_of_the_legend(run: Path) -> None:
    """It is all images: named once."""
    lines(run / "eval.jsonl", [evaluated(0, 0.4, dots=0.4), evaluated(40, 0.7, dots=0.7)])
    (panel,) = (one for one in story(run)["panels"] if one["title"].startswith("Held-out"))
    assert [line["name"] for line in panel["lines"]] == ["all"]


def test_a_malformed_line_is_named(run: Path) -> None:
    good = '{"iteration": 0, "reward": 1}\n'
    torn = '{"iteration": 1, "rew\n'
    for bad in (torn, "[1]\n", '{"reward": 1}\n', '{"iteration": true}\n', "\xff\n"):
        (run / "metrics.jsonl").write_text(good + bad + good)
        with pytest.raises(RunError, match=r"metrics.jsonl, line 2: expected"):
            html_report(run)
    (run / "metrics.jsonl").write_text(good + '{"iteration": 1, "reward": "high"}\n')
    words = "line 2: reward: .* valid number, got 'high'"
    with pytest.raises(RunError, match=words):
        html_report(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": "absent"}, "one of the keys"),
        ({"interval": [0.1]}, "interval"),
        ({"tasks": [1]}, "tasks"),
        ({"tasks": {"colors": {"mean": "x"}}}, "tasks.colors.mean: .* valid number, got 'x'"),
        (
            {"tasks": {"colors": {"mean": 1, "images": 2.5}}},
            "colors.images: .* valid integer",
        ),
    ],
)
def test_a_malformed_evaluation_is_named(run: Path, change: dict[str, Any], message: str) -> None:
    lines(run / "eval.jsonl", [evaluated(0, 0.4), evaluated(40, 0.5) | change])
    with pytest.raises(RunError, match=f"eval.jsonl, line 2: .*{message}"):
        html_report(run)


def test_a_torn_last_line_is_left_out(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 45, "rew')
    assert len(read_rows(run, "metrics.jsonl")) == 45


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder: expected metrics.jsonl"):
        html_report(tmp_path)


# table and page


def test_table_says_before_after_and_change() -> None:
    before, after = BEFORE, evaluated(40, 0.7, colors=0.9, counting=0.2)
    after["tasks"]["counting"]["interval"] = None
    after["tasks"]["colors"]["images"] = 48
    table = before_after_table({"before": before, "after": after})
    written = [line for line in table.splitlines() if not line.startswith("-")]
    cells = [re.split(r"\s{2,}", line.strip()) for line in written]
    assert cells == [
        ["task", "before", "after", "change", "images"],
        ["colors", "0.500 [0.450, 0.550]", "0.900 [0.850, 0.950]", "+0.400", "24 / 48"],
        ["position", "0.300 [0.250, 0.350]", "-", "-", "24 / -"],
        ["counting", "-", "0.200", "-", "- / 24"],
        ["all (strict)", "0.400 [0.380, 0.420]", "0.700 [0.680, 0.720]", "+0.300", "48 / 72"],
    ]
    assert len({len(line) for line in table.splitlines()}) == 1  # aligned: no ragged line


def test_table_needs_two_evaluations_of_one_score() -> None:
    row = evaluated(0, 0.4)
    with pytest.raises(DataError, match="got no 'after'"):
        before_after_table({"before": row})
    with pytest.raises(DataError, match="got 'strict' and 'graded'"):
        before_after_table({"before": row, "after": row | {"score": "graded", "graded": 1}})
    unmoved = before_after_table({"before": row, "after": evaluated(9, 0.39999)})
    assert "+0.000" in unmoved and "-0.000" not in unmoved
    zero = evaluated(9, -1e-9) | {"interval": [-1e-9, 1e-9]}
    assert "0.000 [0.000, 0.000]" in before_after_table({"before": row, "after": zero})
