"""Runs on failing disks, with damaged checkpoints and under a jumping clock end as undisturbed
ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.integration
def test_faults_do_no_harm(tmp_path: Path) -> None:
    """Three moments of the disk, and every other fault; the script compares every byte that holds
    no time with the undisturbed run."""
    out = tmp_path / "disks.json"
    script = str(ROOT / "scripts" / "research" / "disks.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, "--every", "100", "--out", str(out)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    kinds = {row["fault"].split()[0] for row in found["rows"]}
    assert {"ENOSPC", "EROFS", "EIO", "torn", "altered", "lost", "swapped", "clock"} <= kinds
    assert found["did_harm"] == 0
