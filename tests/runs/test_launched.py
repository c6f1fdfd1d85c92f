"""Runs under a launcher, which kills 30 s after its signal, however long an iteration takes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killkit import contents
from processkit import KITS, free_port, run_both
from toykit import write_toy

from flowrl.runs.folder import read_rows
from flowrl.training import checkpoint

pytestmark = pytest.mark.integration
SET = ("train.iterations=3", "checkpoint.every=0", "samples.every=0", "eval.images=1")
LAUNCHER_KILLS = 30.0  # seconds after its signal; torch.distributed.elastic says so


def launch(folder: Path, log: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start torchrun with two processes of `flowrl train`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    shared = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{KITS.parents[1]}{os.pathsep}{KITS}"}
    command += ["-m", "--", "flowrl", "train", *words, "--plugin", "toykit"]
    with log.open("w") as said:
        return subprocess.Popen(
            command, stdout=said, stderr=said, env={**os.environ, **shared}, cwd=folder
        )


def ended(launched: subprocess.Popen[bytes], log: Path, seconds: float) -> int:
    """Wait for the end of a launcher -> its exit code."""
    try:
        return launched.wait(seconds)
    except subprocess.TimeoutExpired:
        launched.kill()
        pytest.fail(f"still there after {seconds:g} s\n{log.read_text()}")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_inside_a_slow_reward_is_saved_and_resumed_to_the_bit(
    tmp_path: Path, rank: int
) -> None:
    """The reward of one process sleeps in the second iteration; with rank 1, process 0, which
    writes, waits for it in a collective. The checkpoint is that of the iteration's start."""
    asleep, reached = tmp_path / "asleep", tmp_path / "asleep.reached"
    log, run = tmp_path / "log", tmp_path / "run"
    own = f"file: {asleep}, log: {run}/metrics.jsonl, rank: {rank}"
    words = [str(write_toy(tmp_path)), *SET, f"rewards={{red: {{fn: toykit.asleep, {own}}}}}"]
    # a run that nobody disturbs
    plain = launch(tmp_path, log, *words, "--run", str(run))
    assert ended(plain, log, 200) == 0, log.read_text()
    whole = contents(run)
    shutil.rmtree(run)
    # one that is stopped while a reward of its second iteration sleeps
    asleep.touch()
    begun = launch(tmp_path, log, *words, "--run", str(run))
    until = time.monotonic() + 100
    while not reached.exists() and time.monotonic() < until and begun.poll() is None:
        time.sleep(0.05)
    assert len(read_rows(run, "metrics.jsonl")) == 1, log.read_text()
    time.sleep(0.5)  # the other one waits in its collective by now
    begun.send_signal(signal.SIGTERM)
    assert ended(begun, log, LAUNCHER_KILLS - 10) != 0
    said = log.read_text()
    assert "stopping, with a checkpoint: at once" in said
    assert f"saved {run}/checkpoints/000001; go on with: flowrl train --resume" in said
    assert [folder.name for folder in checkpoint.checkpoint_folders(run)] == ["000001"]
    # resumed, it ends as if nobody had disturbed it
    asleep.unlink()
    again = launch(tmp_path, log, "--resume", str(run))
    assert ended(again, log, 200) == 0, log.read_text()
    found = contents(run)
    assert {name for name in whole if found.get(name) != whole[name]} == set()
    assert {name.rsplit("/", 1)[0] for name in found if name not in whole} == {"checkpoints/000001"}


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"])
def test_a_stop_by_what_kills_soon_after_it(tmp_path: Path, variable: str) -> None:
    """A job of one process that is cancelled while a reward sleeps for minutes: saved at once."""
    asleep, reached = tmp_path / "asleep", tmp_path / "asleep.reached"
    log, run = tmp_path / "log", tmp_path / "run"
    own = f"file: {asleep}, log: {run}/metrics.jsonl, rank: 0"
    asleep.touch()
    words = [str(write_toy(tmp_path)), *SET, f"rewards={{red: {{fn: toykit.asleep, {own}}}}}"]
    command = [sys.executable, "-m", "flowrl", "train", *words, "--plugin", "toykit"]
    shared = {"PYTHONPATH": f"{KITS.parents[1]}{os.pathsep}{KITS}", variable: "1"}
    with log.open("w") as told:
        begun = subprocess.Popen(
            [*command, "--run", str(run)], stdout=told, stderr=told, env={**os.environ, **shared}
        )
    until = time.monotonic() + 100
    while not reached.exists() and time.monotonic() < until and begun.poll() is None:
        time.sleep(0.05)
    begun.send_signal(signal.SIGTERM)
    assert ended(begun, log, LAUNCHER_KILLS - 10) == 130, log.read_text()
    said = log.read_text()
    assert "stopping, with a checkpoint: at once" in said
    assert f"saved {run}/checkpoints/000001; go on with: flowrl train --resume" in said


# ----------------------------------------------------------------------- processes that are not one


PAIR = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}


def ranks(port: str) -> list[dict[str, str]]:
    shared = {**PAIR, "MASTER_PORT": port}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("seed=4", "process 1 of 2 has seed 4, and process 0 has 3: start all processes with the"),
        ("optimizer.lr=0.5", "process 1 of 2 has optimizer.lr 0.5, and process 0 has 0.01"),
        ("prompts.train={folder}/more.jsonl", "process 1 of 2 has prompts.train with the hash"),
    ],
)
def test_processes_of_two_runs_are_told(tmp_path: Path, other: str, said: str) -> None:
    """Both end with one message, and nothing is written."""
    toy = str(write_toy(tmp_path))
    lines = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "more.jsonl").write_text(lines.replace("pink", "purple"))
    words = ["-m", "flowrl", "train", toy, "--run", str(tmp_path / "run"), "--plugin", "toykit"]
    commands = [words, [*words, other.format(folder=tmp_path)]]
    for code, text in run_both(commands, ranks(free_port())):
        assert code == 2 and said in text
    assert not (tmp_path / "run").exists()


def test_processes_of_two_suites_are_told(tmp_path: Path) -> None:
    """Each would draw its share of the images by its own settings, into one folder."""
    toy = str(write_toy(tmp_path))
    words = ["-m", "flowrl", "eval", toy, "--suite", "aesthetic", "--plugin", "toykit"]
    words += ["--prompts", str(tmp_path / "test.jsonl"), "--out", str(tmp_path / "out")]
    words += ["--set", "rewards={red: {fn: toykit.redness}}"]
    commands = [words, [*words, "--seed", "4"]]
    for code, text in run_both(commands, ranks(free_port())):
        assert code == 2, text
        assert "process 1 of 2 has another suite than process 0, there and here: seed: " in text
    assert not (tmp_path / "out").exists()


ALONE = """
import threading, time
from flowrl.core import processes
processes.JOINED_AFTER = 1.0
processes.world()
"""


def test_a_process_that_does_not_come_is_told(tmp_path: Path) -> None:
    """After a minute, here a second, not after the hours that a slow reward may take."""
    shared = {"PYTHONPATH": f"{KITS.parents[1]}{os.pathsep}{KITS}", **ranks(free_port())[0]}
    log = tmp_path / "log"
    with log.open("w") as told:
        waits = subprocess.Popen(
            [sys.executable, "-c", ALONE], stderr=told, env={**os.environ, **shared}
        )
    until = time.monotonic() + 60
    while "still waits" not in log.read_text() and time.monotonic() < until:
        time.sleep(0.1)
    waits.kill()
    waits.wait()
    assert "flowrl: process 0 of 2 still waits for others to join it at 127.0.0.1:" in (
        log.read_text()
    )
