"""Runs under a launcher, which kills 30 s after its signal, however long an iteration takes."""

from __future__ import annotations

import os
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import warm
from killkit import contents
from processkit import free_port, run_both, run_pair
from toykit import write_toy

from flowrl.runs.folder import read_rows
from flowrl.training import checkpoint

pytestmark = pytest.mark.integration
SET = ("train.iterations=3", "checkpoint.every=0", "samples.every=0", "eval.images=1")
LAUNCHER_KILLS = 30.0  # seconds after its signal; torch.distributed.elastic says so


def launch(folder: Path, log: Path, *words: str) -> BaseProcess:
    """Start torchrun with two processes of `flowrl train`."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    log.unlink(missing_ok=True)
    return warm.start([*command, "-m", "--", "flowrl", "train", *words], log, folder=folder)


def test_a_stop_inside_a_slow_reward_is_saved_and_resumed_to_the_bit(tmp_path: Path) -> None:
    """The reward of one process sleeps in the second iteration; with rank 1, process 0, which
    writes, waits for it in a collective. The checkpoint is that of the iteration's start."""
    asleep, reached = tmp_path / "asleep", tmp_path / "asleep.reached"
    log, run = tmp_path / "log", tmp_path / "run"
    own = f"file: {asleep}, log: {run}/metrics.jsonl"
    plugin = ("--plugin", "toykit")
    words = [str(write_toy(tmp_path)), *SET, f"rewards={{red: {{fn: toykit.asleep, {own}}}}}"]
    words += ["--run", str(run), *plugin]
    # a run that nobody disturbs, of two processes without a launcher
    ends = run_pair("-m", "flowrl", "train", *words)
    assert [code for code, _ in ends] == [0, 0], ends
    whole = contents(run)
    for rank in (0, 1):
        shutil.rmtree(run)
        # one that is stopped while a reward of its second iteration sleeps
        asleep.write_text(str(rank))
        begun = launch(tmp_path, log, *words)
        until = time.monotonic() + 100
        while not reached.exists() and time.monotonic() < until and begun.is_alive():
            time.sleep(0.05)
        assert len(read_rows(run, "metrics.jsonl")) == 1, log.read_text()
        time.sleep(0.5)  # the other one waits in its collective by now
        assert begun.pid is not None
        os.kill(begun.pid, signal.SIGTERM)
        begun.join(LAUNCHER_KILLS - 10)
        said = log.read_text()
        assert begun.exitcode not in (None, 0), said
        assert "stopping, with a checkpoint: at once" in said
        assert f"saved {run}/checkpoints/000001; go on with: flowrl train --resume" in said
        assert [folder.name for folder in checkpoint.checkpoint_folders(run)] == ["000001"]
        # resumed, it ends as if nobody had disturbed it
        asleep.unlink()
        reached.unlink()
        ends = run_pair("-m", "flowrl", "train", "--resume", str(run), *plugin)
        assert [code for code, _ in ends] == [0, 0], ends
        found = contents(run)
        assert {name for name in whole if found.get(name) != whole[name]} == set()
        more = {name.rsplit("/", 1)[0] for name in found if name not in whole}
        assert more == {"checkpoints/000001"}


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"])
def test_a_stop_by_what_kills_soon_after_it(tmp_path: Path, variable: str) -> None:
    """A job of one process that is cancelled while a reward sleeps for minutes: saved at once."""
    asleep, reached = tmp_path / "asleep", tmp_path / "asleep.reached"
    log, run = tmp_path / "log", tmp_path / "run"
    own = f"file: {asleep}, log: {run}/metrics.jsonl"
    asleep.write_text("0")
    words = [str(write_toy(tmp_path)), *SET, f"rewards={{red: {{fn: toykit.asleep, {own}}}}}"]
    words = ["-m", "flowrl", "train", *words, "--plugin", "toykit", "--run", str(run)]
    begun = warm.start(words, log, environment={variable: "1"})
    until = time.monotonic() + 100
    while not reached.exists() and time.monotonic() < until and begun.is_alive():
        time.sleep(0.05)
    assert begun.pid is not None
    os.kill(begun.pid, signal.SIGTERM)
    begun.join(LAUNCHER_KILLS - 10)
    said = log.read_text()
    assert begun.exitcode == 130, said
    assert "stopping, with a checkpoint: at once" in said
    assert f"saved {run}/checkpoints/000001; go on with: flowrl train --resume" in said


def test_processes_of_two_suites_are_told(tmp_path: Path) -> None:
    """Each would draw its share of the images by its own settings, into one folder."""
    toy = str(write_toy(tmp_path))
    words = ["-m", "flowrl", "eval", toy, "--suite", "aesthetic", "--plugin", "toykit"]
    words += ["--prompts", str(tmp_path / "test.jsonl"), "--out", str(tmp_path / "out")]
    words += ["--set", "rewards={red: {fn: toykit.redness}}"]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    for code, text in run_both([words, [*words, "--seed", "4"]], ranks):
        assert code == 2, text
        assert "process 1 of 2 has another suite than process 0, there and here: seed: " in text
    assert not (tmp_path / "out").exists()


ALONE = """
from flowrl.core import processes
processes.JOINED_AFTER = 1.0
processes.world()
"""


def test_a_process_that_does_not_come_is_told(tmp_path: Path) -> None:
    """After a minute, here a second, not after the hours that a slow reward may take."""
    shared = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    log = tmp_path / "log"
    (tmp_path / "alone.py").write_text(ALONE)
    waits = warm.start([f"{tmp_path}/alone.py"], log, environment=shared)
    until = time.monotonic() + 60
    while not (log.exists() and "still waits" in log.read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    waits.kill()
    assert "flowrl: process 0 of 2 still waits for others to join it at 127.0.0.1:" in (
        log.read_text()
    )
