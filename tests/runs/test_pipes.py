"""A pipe in the place of a file that is read is refused: nobody would ever write into it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl.core.errors import FlowRLError
from flowrl.evaluation.image_grids import load_strip
from flowrl.models.files.loading import _check_part
from flowrl.runs.compare.compare import saved_result
from flowrl.runs.folder import SUMMARY, read_evals, read_object, read_prompts, read_verdicts
from flowrl.runs.report.page import html_report
from flowrl.training.checkpoint import verify

READERS: dict[str, Callable[[Path], Any]] = {
    "summary.json": lambda folder: read_object(folder, SUMMARY),
    "environment.json": lambda folder: read_object(folder, "environment.json"),
    "samples/prompts.json": read_prompts,
    "samples/verdicts.json": read_verdicts,
    "samples/000001.png": lambda folder: load_strip(folder / "samples/000001.png", 1),
    "manifest.json": verify,
    "tokenizer/tokenizer_config.json": lambda folder: _check_part(
        folder / "tokenizer", "Tokenizer"
    ),
    "config.yaml": html_report,
    "eval.jsonl": read_evals,
    "result.json": lambda folder: saved_result(folder / "result.json"),
}


def test_a_log_that_is_a_device_is_not_read(tmp_path: Path) -> None:
    """A link in a stranger's run folder: /dev/zero would never end."""
    (tmp_path / "eval.jsonl").symlink_to("/dev/zero")
    with pytest.raises(FlowRLError, match="expected a file, got a pipe or a device"):
        read_evals(tmp_path)


@pytest.mark.parametrize("name", READERS)
def test_pipes_are_not_waited_for(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    (file.parent / "tokenizer.json").write_text("{}")
    (tmp_path / "metrics.jsonl").touch()
    os.mkfifo(file)
    with pytest.raises(FlowRLError, match=f"{file}.*expected a file, got a pipe or a device"):
        READERS[name](tmp_path)
