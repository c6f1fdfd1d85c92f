"""The code that CONTRIBUTING prints runs."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

import pytest
from docskit import ROOT, blocks
from toykit import write_toy

from flowrl.cli.main import main
from flowrl.runs.folder import METRICS, read_rows

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.integration
def test_the_loss_of_ones_own_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, but on the toy: the ratio is 1 at the first update, so nothing is capped."""
    (code,) = (text for text in blocks(PAGE, "python") if "def capped" in text)
    (line,) = (text for text in blocks(PAGE, "sh") if "my_losses" in text)
    (tmp_path / "my_losses.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    words = shlex.split(line)[2:]
    more = ["--plugin", "toykit", "--run", "run", "train.iterations=2", "train.updates=1"]
    assert main(["train", str(write_toy(tmp_path)), *words[1:], *more, "--quiet"]) == 0
    first = read_rows(tmp_path / "run", METRICS)[0]
    assert first["ratio"] == pytest.approx(1, abs=1e-5) and first["capped"] == 0
