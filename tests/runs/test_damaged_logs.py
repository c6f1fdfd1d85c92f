"""Logs of a run that hold what no run writes: one message that names the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.core.errors import RunError
from flowrl.runs.folder import (
    EVALS,
    FINDINGS,
    HISTOGRAMS,
    METRICS,
    TIMING,
    read_evals,
    read_prompts,
    read_rows,
)
from flowrl.runs.log import RunLogger
from flowrl.runs.open_run import best_iteration


@pytest.mark.parametrize("line", ['{"iteration": 0, "total": "a"}', '{"iteration": {}}'])
def test_times_that_are_no_numbers_are_found_before_training(tmp_path: Path, line: str) -> None:
    (tmp_path / TIMING).write_text(f'{line}\n{{"iteration": 1, "total": 0.5}}\n')
    with pytest.raises(RunError, match=r"timing\.jsonl, line 1: expected an object with a whole"):
        RunLogger(tmp_path, 1, tensorboard=False, quiet=True)


def test_a_number_beyond_float64(tmp_path: Path) -> None:
    (tmp_path / HISTOGRAMS).write_text('{"iteration": 0, "reward": [1e400]}\n')
    with pytest.raises(RunError, match=r"histograms\.jsonl, line 1: .*1e400 is no finite number"):
        read_rows(tmp_path, HISTOGRAMS)


def test_a_setting_that_is_none(tmp_path: Path) -> None:
    row = {"iteration": 0, "score": "red", "red": 0.5, "setting": "x"}
    (tmp_path / EVALS).write_text(json.dumps(row) + "\n")
    with pytest.raises(RunError, match=r"eval\.jsonl, line 1: \"setting\": expected an object"):
        read_evals(tmp_path)


@pytest.mark.parametrize("height", ["1e400", "0", '"x"'])
def test_sizes_of_samples(tmp_path: Path, height: str) -> None:
    (tmp_path / "samples").mkdir()
    text = f'{{"prompts": ["a"], "height": {height}, "width": 8}}'
    (tmp_path / "samples" / "prompts.json").write_text(text)
    with pytest.raises(RunError, match=r"prompts\.json: expected"):
        read_prompts(tmp_path)


@pytest.mark.parametrize("name", [METRICS, TIMING, HISTOGRAMS, FINDINGS])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_what_json_lacks(tmp_path: Path, name: str, value: str) -> None:
    """Only evaluations may hold it; then they have no score that could be the best."""
    line = f'{{"iteration": 1, "score": "red", "red": {value}}}\n'
    (tmp_path / name).write_text(line)
    with pytest.raises(RunError, match=rf"{name}, line 1: .*{value} is no number of JSON; write"):
        read_rows(tmp_path, name)
    (tmp_path / EVALS).write_text(line)
    assert best_iteration(read_rows(tmp_path, EVALS)) is None
