"""What is recorded of the machine and the code of a run."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.core import installation as module
from flowrl.core.installation import environment


def test_environment_is_plain_and_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_TOKEN", "hunter2-hunter2")
    found = environment()
    text = json.dumps(found)
    assert found["python"] == sys.version.split()[0] and found["torch"]
    assert found["cpus"] == os.cpu_count()
    assert "hunter2" not in text and socket.gethostname() not in text
    assert getpass.getuser() not in text.replace(found["platform"], "")


def test_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: `git rev-parse` in a checkout of one empty commit."""

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    monkeypatch.setattr(module, "checkout", lambda: tmp_path)
    assert environment()["commit"] is None
    git("init", "-q", ".")
    git("commit", "-q", "--allow-empty", "-m", "x")
    assert environment()["commit"] == git("rev-parse", "HEAD")
