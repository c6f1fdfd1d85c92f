"""The mutation check can put its faults in: each place is there exactly once, and has a test."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ROOT / "scripts" / "bench" / "faults.yaml"


def test_every_place_is_there_once() -> None:
    """Whether the tests notice the faults is in assets/results/faults.json; this says early that
    code has moved away from under one."""
    for fault in yaml.safe_load(FAULTS.read_text(encoding="utf-8")):
        text = (ROOT / fault["file"]).read_text(encoding="utf-8")
        assert text.count(fault["old"]) == 1, (fault["claim"], fault["file"])
        assert (ROOT / fault["tests"].split()[0]).exists(), fault["claim"]
