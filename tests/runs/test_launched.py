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

from flowrl.core.processes import launched
from flowrl.runs.folder import read_rows
from flowrl.training import checkpoint

pytestmark = pytest.mark.integration
SET = ("train.iterations=3", "checkpoint.every=0", "samples.every=0", "eval.images=1")
PLUGIN = ("--plugin", "toykit")
LAUNCHER_KILLS = 30.0  # seconds after its signal; torch.distributed.elastic says so


def launch(folder: Path, *words: str) -> list[BaseProcess]:
    """Start torchrun with two processes of `flowrl train`."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    command += ["-m", "--", "flowrl", "train", *words]
    return [warm.start(command, folder / "log", folder=folder)]


def as_launched(folder: Path, *words: str) -> list[BaseProcess]:
    """Start two processes of `flowrl train` as torchrun does, only faster."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    shared |= {"TORCHELASTIC_RUN_ID": "none"}
    begun = []
    for rank in "01":
        own = shared | {"RANK": rank, "LOCAL_RANK": rank}
        command = ["-m", "flowrl", "train", *words]
        begun.append(warm.start(command, folder / "log", environment=own, folder=folder))
    return begun


def slow_words(folder: Path) -> list[str]:
    """Return the words of a run in `folder` whose reward sleeps in the second iteration, in the
    process whose rank the file `asleep` names."""
    own = f"file: {folder}/asleep, log: {folder}/run/metrics.jsonl"
    words = [str(write_toy(folder)), *SET, f"rewards={{red: {{fn: toykit.asleep, {own}}}}}"]
    return [*words, "--run", f"{folder}/run", *PLUGIN]


def stop(begun: list[BaseProcess], folder: Path) -> None:
    """Stop a run once its reward sleeps, and look at what it says and leaves."""
    reached, until = folder / "asleep.reached", time.monotonic() + 100
    while not reached.exists() and time.monotonic() < until and begun[0].is_alive():
        time.sleep(0.05)
    said = (folder / "log").read_text()
    assert len(read_rows(folder / "run", "metrics.jsonl")) == 1, said
    time.sleep(0.5)  # another process waits in its collective by now
    for process in begun:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
    for process in begun:
        process.join(LAUNCHER_KILLS - 10)
    said = (folder / "log").read_text()
    assert not {None, 0} & {process.exitcode for process in begun}, said
    assert "stopping, with a checkpoint: at once" in said
    run = folder / "run"
    assert f"saved {run}/checkpoints/000001; go on with: flowrl train --resume" in said
    assert [each.name for each in checkpoint.checkpoint_folders(run)] == ["000001"]
    reached.unlink()


def test_a_stop_inside_a_slow_reward_is_saved_and_resumed_to_the_bit(tmp_path: Path) -> None:
    """The reward of one process sleeps in the second iteration; with rank 1, process 0, which
    writes, waits for it in a collective. The checkpoint is that of the iteration's start, the same
    with both."""
    run, words = tmp_path / "run", slow_words(tmp_path)
    # a run that nobody disturbs, of two processes without a launcher
    ends = run_pair("-m", "flowrl", "train", *words)
    assert [code for code, _ in ends] == [0, 0], ends
    whole, left = contents(run), []
    for rank, start in (("0", as_launched), ("1", launch)):
        shutil.rmtree(run)
        (tmp_path / "asleep").write_text(rank)
        (tmp_path / "log").unlink(missing_ok=True)
        stop(start(tmp_path, *words), tmp_path)
        left.append(contents(run))
    assert left[0] == left[1]
    # resumed, it ends as if nobody had disturbed it
    (tmp_path / "asleep").unlink()
    ends = run_pair("-m", "flowrl", "train", "--resume", str(run), *PLUGIN)
    assert [code for code, _ in ends] == [0, 0], ends
    found = contents(run)
    assert {name for name in whole if found.get(name) != whole[name]} == set()
    more = {name.rsplit("/", 1)[0] for name in found if name not in whole}
    assert more == {"checkpoints/000001"}


def test_a_stop_by_what_kills_soon_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of one process that is cancelled while a reward sleeps for minutes: saved at once."""
    for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"):
        assert not launched()
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert launched()
    words = ["-m", "flowrl", "train", *slow_words(tmp_path)]
    (tmp_path / "asleep").write_text("0")
    begun = warm.start(words, tmp_path / "log", environment={"SLURM_JOB_ID": "1"})
    stop([begun], tmp_path)
    assert begun.exitcode == 130


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
