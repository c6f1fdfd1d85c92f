"""Trackers are told what the run folder holds, by the real packages, offline; none ends a run."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl.core.errors import ConfigError
from flowrl.runs import trackers as tracker_module
from flowrl.runs.log import RunLogger

ROOT = Path(__file__).resolve().parents[2]
REWARDS = (0.0, 0.25, 0.5)


SCRIPT = """
import sys
import torch
from pathlib import Path
from flowrl.runs.log import RunLogger
from flowrl.runs.trackers import trackers_given
name, folder = sys.argv[1:]
trackers_given([name])
options = dict(tensorboard=False, quiet=True, config={"seed": 3})
with RunLogger(Path(folder), track=[name], **options) as log:
    [tracker] = log._trackers
    log.image("samples", torch.rand(3, 8, 8), 0)
    for iteration, reward in enumerate((0.0, 0.25, 0.5)):
        log.log(iteration, {"reward": reward})
    assert not tracker._ended
"""


def in_wandb(folder: Path) -> list[tuple[int, float]]:
    """Its log has LevelDB's format: after 7 bytes, records with a header of 7 bytes (checksum,
    length, type), in blocks of 32 KB; this one is shorter than a block."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.glob("run/wandb/offline-run-*/*.wandb")
    data, at, found = file.read_bytes(), 7, []
    assert len(data) < 2**15
    while at + 7 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        record = Record.FromString(data[at + 7 : at + 7 + size])
        at += 7 + size
        values = {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
        if "reward" in values:
            found.append((json.loads(values["_step"]), json.loads(values["reward"])))
    assert list(folder.glob("run/wandb/offline-run-*/files/media/images/samples*.png"))
    return found


def in_trackio(folder: Path) -> list[tuple[int, float]]:
    with sqlite3.connect(folder / "trackio" / "flowrl.db") as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
    told = [(step, json.loads(text)) for step, text in rows]
    assert "samples" in told[0][1]
    return [(step, values["reward"]) for step, values in told if "reward" in values]


def in_swanlab(folder: Path) -> list[tuple[int, float]]:
    [file] = folder.glob("run/swanlab/run-*/*.swanlab")
    assert file.read_bytes().count(b"reward") >= 3
    assert list(folder.glob("run/swanlab/run-*/media/image/*.png"))
    return list(enumerate(REWARDS))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "read"), [("wandb", in_wandb), ("trackio", in_trackio), ("swanlab", in_swanlab)]
)
def test_the_real_package_keeps_it_offline(
    tmp_path: Path,
    name: str,
    read: Callable[[Path], list[tuple[int, float]]],
) -> None:
    pytest.importorskip(name, reason=f'no {name}: pip install -e ".[{name}]"')
    offline = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "WANDB_SILENT": "true"}
    offline |= {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, name, str(tmp_path / "run")]
    environment = {**os.environ, **offline}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path) == list(enumerate(REWARDS))


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Any] = []

    def refuse(values: Any, at: int) -> None:
        told.append(at)
        if at == 1:
            raise ConnectionError("no answer")

    opened = tracker_module.Open(refuse, lambda levels: levels, lambda: told.append("closed"))
    monkeypatch.setitem(tracker_module.TRACKERS, "wandb", lambda run, config: opened)
    monkeypatch.setitem(tracker_module.TRACKERS, "trackio", lambda run, config: 1 / 0)
    with RunLogger(tmp_path, tensorboard=False, track=["wandb", "trackio"]) as log:
        for iteration in range(4):
            log.log(iteration, {"reward": 1.0})
    said = capsys.readouterr().err
    assert "wandb: no answer; the run goes on without it" in said and "trackio: division" in said
    assert told == [0, 1] and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_what_cannot_be_tracked_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="track: .*wandb"):
        tracker_module.trackers_given(["wandbb"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install -e "\.\[swanlab\]" in a checkout'):
        tracker_module.trackers_given(["swanlab"])
