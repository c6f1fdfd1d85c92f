"""What a run tells of itself: grid, curves, table and page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gridkit import box
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from reportkit import BEFORE, TICKS, evaluated, lines, make_run

from flowrl.core.errors import DataError, RunError
from flowrl.runs.folder import read_rows
from flowrl.runs.report import samples as report_samples
from flowrl.runs.report.columns import Series
from flowrl.runs.report.curves import _smooth, curves, tick_texts
from flowrl.runs.report.page import before_after_table, html_report, story
from flowrl.runs.report.samples import run_grid


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def panels(figure: Figure) -> dict[str, Axes]:
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def test_run_grid_takes_first_last_and_evenly_spaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_samples, "COLUMNS", 3)
    run = make_run(tmp_path / "run", samples=11)
    (run / "samples" / "notes.png").write_bytes(b"not a strip")
    grid = run_grid(run)
    shown = [i for i in range(11) if (np.asarray(grid) == (i * 20, 250, 1)).all(-1).any()]
    assert shown == [0, 5, 10]
    lefts = [box(grid, (i * 20, 250, 1))[0] for i in shown]
    assert lefts == sorted(lefts)


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


# curves


def test_curves_draw_what_was_measured_and_skip_the_rest(run: Path) -> None:
    drawn = panels(curves(run))
    # no ratio_std in the metrics
    kinds = ["Policy change per iteration", "Gradient norm", "Time per iteration"]
    assert list(drawn) == ["Held-out prompts", "Training reward", *kinds]
    raw, smooth = drawn["Training reward"].get_lines()
    np.testing.assert_allclose(np.asarray(raw.get_ydata()), np.arange(45) / 100)
    # 45 // 20 = 2, made odd: a window of 3. The centred mean of a straight line is the line, but
    # for both ends.
    ends = [0.005, *np.arange(1, 44) / 100, 0.435]
    np.testing.assert_allclose(np.asarray(smooth.get_ydata()), ends)
    held = drawn["Held-out prompts"]
    np.testing.assert_allclose(np.asarray(held.get_lines()[-1].get_xydata()), [[0, 0.4], [40, 0.7]])
    whiskers = [np.asarray(segment)[:, 1] for segment in held.collections[0].get_segments()]  # type: ignore[attr-defined]
    np.testing.assert_allclose(whiskers, [[0.38, 0.42], [0.68, 0.72]])
    assert {text.get_text() for text in held.texts} == {"all", "colors", "position"}
    # total 3.5 s, of which rollout and update are 3 s
    texts = [text.get_text() for text in drawn["Time per iteration"].texts]
    assert texts == ["rollout 2 s", "update 1 s", "other 0.5 s"]
    assert drawn["Training reward"].get_xlabel() == "iteration"
    assert drawn["Time per iteration"].get_ylabel() == "seconds"


@pytest.mark.parametrize(("spread", "drawn"), [(2e-6, False), (2e-4, True)])
def test_curves_that_cannot_move_are_left_out(run: Path, *, spread: float, drawn: bool) -> None:
    """A std of the ratio within the gap before the first step (3e-6) is rounding and no curve."""
    rows = read_rows(run, "metrics.jsonl")
    more = {"ratio_std": spread, "on_policy_gap": 3e-6}
    lines = [json.dumps({**row, **more}) for row in rows]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    titles = set(panels(curves(run)))
    ratio = {"Policy change per iteration", "Spread of the likelihood ratio"}
    assert (ratio <= titles, bool(ratio & titles)) == (drawn, drawn)


def test_one_task_has_one_entry_of_the_legend(run: Path) -> None:
    """It is all images: drawn and named once, in the picture and on the page."""
    lines(run / "eval.jsonl", [evaluated(0, 0.4, dots=0.4), evaluated(40, 0.7, dots=0.7)])
    (held,) = (axes for title, axes in panels(curves(run)).items() if title == "Held-out prompts")
    assert [text.get_text() for text in held.texts] == ["dots"] and len(held.get_lines()) == 1
    (panel,) = (one for one in story(run)["panels"] if one["title"].startswith("Held-out"))
    assert [line["name"] for line in panel["lines"]] == ["all"]


@pytest.mark.parametrize(("values", "texts"), TICKS)
def test_ticks_go_by_the_span_of_the_axis(values: list[float], texts: str) -> None:
    assert tick_texts(values) == texts.split()


def test_end_labels_do_not_overlap(run: Path) -> None:
    lines(run / "eval.jsonl", [evaluated(0, 0.5, **{f"task {i}": 0.5 for i in range(6)})])
    heights = sorted(
        text.get_position()[1] for text in panels(curves(run))["Held-out prompts"].texts
    )
    assert len(heights) == 7 and min(np.diff(heights)) > 0.06 and heights[-1] <= 1


def test_smoothing_leaves_gaps_out_of_the_mean() -> None:
    y = np.ones(100)
    y[30:50] = np.nan  # a window of 5 around 40 sees nothing
    smooth = _smooth(Series(np.arange(100.0), y)).y
    assert np.isnan(smooth[32:48]).all()
    np.testing.assert_allclose(np.delete(smooth, range(32, 48)), 1.0)


@pytest.mark.parametrize("drawer", [curves, html_report])
def test_a_malformed_line_is_named(run: Path, drawer: Any) -> None:
    good = '{"iteration": 0, "reward": 1}\n'
    torn = '{"iteration": 1, "rew\n'
    for bad in (torn, "[1]\n", '{"reward": 1}\n', '{"iteration": true}\n', "\xff\n"):
        (run / "metrics.jsonl").write_text(good + bad + good)
        with pytest.raises(RunError, match=r"metrics.jsonl, line 2: expected"):
            drawer(run)
    (run / "metrics.jsonl").write_text(good + '{"iteration": 1, "reward": "high"}\n')
    words = "line 2: reward: .* valid number, got 'high'"
    with pytest.raises(RunError, match=words):
        drawer(run)


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
        curves(run)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    for drawer in (curves, html_report):
        with pytest.raises(RunError, match="is not a run folder: expected metrics.jsonl"):
            drawer(tmp_path)
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(RunError, match="nothing to draw yet"):
        curves(tmp_path)


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
