"""What a run writes while it trains: metrics, timing, progress, events."""

from __future__ import annotations

import errno
import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from toykit import toy

from flowrl.core.errors import RunError
from flowrl.runs import log as log_module
from flowrl.runs.folder import (
    EVALS,
    FINDINGS,
    HISTOGRAMS,
    METRICS,
    TIMING,
    read_evals,
    read_rows,
)
from flowrl.runs.gain import best_iteration
from flowrl.runs.log import RunLogger
from flowrl.runs.train import train


def plain(folder: Path, **options: Any) -> RunLogger:
    return RunLogger(folder, tensorboard=False, quiet=True, **options)


def run(folder: Path, start: int, stop: int, resume: int | None = None) -> None:
    with plain(folder, resume_from_iteration=resume) as logger:
        for iteration in range(start, stop):
            with logger.phase("rollout"):
                pass
            kl = torch.tensor(iteration * 0.1)
            logger.log(iteration, {"reward": iteration / 3, "approx_kl": kl}, images=4)


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_numbers_are_written_exactly_and_nan_as_null(tmp_path: Path) -> None:
    third = torch.tensor(1 / 3)
    numbers = {"a": 0.1 + 0.2, "t": third, "n": numpy.int64(3)}
    with plain(tmp_path) as logger:
        logger.log(0, {**numbers, "nan": math.nan, "inf": torch.tensor(-torch.inf)})
    [row] = rows(tmp_path / "metrics.jsonl")
    read = {"a": 0.1 + 0.2, "t": third.item(), "n": 3, "nan": None, "inf": None}
    assert row == {"iteration": 0, **read}


@pytest.mark.parametrize("torn", [b"", b'{"iteration": 5, "rew', b"\xff\xfe"])
def test_resumed_metrics_equal_uninterrupted(tmp_path: Path, torn: bytes) -> None:
    run(tmp_path / "whole", 0, 6)
    run(tmp_path / "parts", 0, 5)
    with (tmp_path / "parts" / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    run(tmp_path / "parts", 3, 6, resume=3)
    whole, parts = (tmp_path / name / "metrics.jsonl" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes() and len(rows(whole)) == 6
    timing = rows(tmp_path / "parts" / "timing.jsonl")
    assert [row["iteration"] for row in timing] == [*range(6)]
    files = {item.name for item in (tmp_path / "parts").iterdir()}
    assert files == {"metrics.jsonl", "timing.jsonl", "histograms.jsonl"}


def test_a_second_run_does_not_overwrite_the_first(tmp_path: Path) -> None:
    run(tmp_path, 0, 2)
    with pytest.raises(RunError, match="holds another run"):
        plain(tmp_path)
    assert len(rows(tmp_path / "metrics.jsonl")) == 2


def test_damage_in_the_middle_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0}\nrubbish\n{"iteration": 2}\n')
    with pytest.raises(RunError, match="line 2"):
        plain(tmp_path, resume_from_iteration=2)
    assert "rubbish" in (tmp_path / "metrics.jsonl").read_text()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write to the run folder"):
        plain(tmp_path / "file")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a file on a full disk")
def test_a_full_disk_is_one_clear_error_to_the_end(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match=r"metrics\.jsonl: No space left on device"),
        plain(tmp_path / "run") as logger,
    ):
        logger._files["metrics.jsonl"] = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails again
        logger.log(0, {})


def test_phases_add_up_and_survive_exceptions(tmp_path: Path) -> None:
    with plain(tmp_path) as logger:
        for _ in range(2):
            with logger.phase("rollout"):
                time.sleep(0.01)
        with pytest.raises(ValueError, match="inside"), logger.phase("train"):
            raise ValueError("inside")
        logger.log(0, {}, images=10)
        logger.log(1, {})
    first, second = rows(tmp_path / "timing.jsonl")
    assert first["rollout"] >= 0.02 and first["total"] >= first["rollout"] + first["train"] - 1e-5
    assert first["images_per_s"] == pytest.approx(10 / first["total"], rel=1e-3)
    assert "rollout" not in second and second["images_per_s"] is None


def test_the_headline_reward_has_its_own_name_in_the_line() -> None:
    """Also where that is the name of another column."""
    assert log_module.headline_label("jpeg") == "jpeg"
    assert log_module.headline_label("reward") == "reward alone"


def test_plain_progress_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 s of evaluation, which the time left does not count, and 2 s of work in the first of 4
    iterations: 3 x 2 s are left."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    values = {"reward": 0.25, "accuracy": 0.5, "ratio": 1.0, "approx_kl": math.nan}
    with RunLogger(tmp_path, tensorboard=False, total=4) as logger:
        for name, seconds in (("eval", 10), ("rollout", 2)):
            with logger.phase(name):
                clock[0] += seconds
        logger.log(0, values, images=8)
    out, err = capsys.readouterr()
    assert out == "" and "kl" not in err and err.count("\n") == 1
    assert err.startswith(
        "iteration 1/4  ETA 0:00:06  0.667 img/s  reward 0.25  acc 0.5  ratio 1  "
    )
    assert "  [eval" in err and "rollout" in err


def test_the_time_left_has_the_evaluations_to_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iterations of 2 s, evaluations of 10 s after each second one of five and at the end: after
    the first are left 4 x 2 s and those after 2, 4 and 5; after the second, whose evaluation is
    due, 3 x 2 s and as many. Samples never come again but at the end."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    every = {"eval": 2, "samples": 0}
    with RunLogger(tmp_path, tensorboard=False, total=5, every=every) as logger:
        for iteration, phases in enumerate(
            ({"eval": 10, "samples": 3, "rollout": 2}, {"rollout": 2})
        ):
            for name, seconds in phases.items():
                with logger.phase(name):
                    clock[0] += seconds
            logger.log(iteration, {"reward": 0.25}, images=8)
    left = re.findall(r"ETA (\S+)", capsys.readouterr().err)
    assert left == ["0:00:41", "0:00:39"]


def test_one_long_wait_does_not_change_the_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iterations of 2 s, one of which took 1000 s while the machine slept: 2 x 2 s are left."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    with RunLogger(tmp_path, tensorboard=False, total=5) as logger:
        for iteration, seconds in enumerate((2, 1000, 2)):
            with logger.phase("rollout"):
                clock[0] += seconds
            logger.log(iteration, {"reward": 0.25, "approx_kl": 0.5}, images=8)
    last = capsys.readouterr().err.splitlines()[-1]
    assert "ETA 0:00:04" in last and "approx_kl 0.5  [" in last


def test_bar_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with RunLogger(tmp_path, tensorboard=False, total=2, columns={"x": "loss"}) as logger:
        logger.log(0, {"loss": 1.5})
        logger.say("hello")
        logger.log(1, {"loss": 2.5})
    err = capsys.readouterr().err
    assert "2/2" in err and "x 2.5" in err and "hello\n" in err


def within(logger: RunLogger, clock: list[float]) -> None:
    """Run a phase of three steps, a second each, of which the last two come at once."""
    with logger.phase("rollout"):
        for done, seconds in ((1, 1.0), (2, 1.0), (3, 0.0)):
            clock[0] += seconds
            logger.progress(done, 3)


def test_a_running_phase_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name as it begins, then how much is done, beside the last iteration's seconds; what comes
    within a fifth of a second is shown only if it is the last."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    clock = [10.0]
    monkeypatch.setattr("flowrl.runs.log.time.monotonic", lambda: clock[0])
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0}\n')
    with RunLogger(tmp_path, resume_from_iteration=1, tensorboard=False, total=3) as logger:
        within(logger, clock)
        before = capsys.readouterr().err
        logger.log(1, {"reward": 1.0})
        with logger.phase("reward"):
            logger.progress(1, 1)
            logger.progress(1, 9)
        after = capsys.readouterr().err
    assert " 1/3 [" in before and "2/3 [" in after
    for text in ("rollout", "rollout 1/3", "rollout 2/3", "rollout 3/3"):
        assert text in before, text
    assert "reward  before: rollout " in after and "reward 1/" not in after


@pytest.mark.parametrize(("quiet", "terminal"), [(False, False), (True, False), (True, True)])
def test_a_running_phase_is_no_line_of_a_log_file(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    quiet: bool,
    terminal: bool,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with RunLogger(tmp_path, tensorboard=False, quiet=quiet) as logger:
        within(logger, [0.0])
    assert capsys.readouterr() == ("", "")


def test_a_log_file_hears_every_thirty_seconds_how_far_a_phase_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 20 s: a line after 40 s and after 80 s. A rollout of 16 images tells these, of which
    half are done after 2 of 4 steps; training tells what it counts, an evaluation its images. The
    line of a finished iteration counts as one."""
    clock = [0.0]
    monkeypatch.setattr("flowrl.runs.log.time.monotonic", lambda: clock[0])
    images = {"rollout": 16, "eval": 528}

    def work(logger: RunLogger, phase: str, total: int) -> None:
        with logger.phase(phase):
            for done in range(1, 5):
                clock[0] += 20.0
                logger.progress(done * total // 4, total)

    with RunLogger(tmp_path, tensorboard=False, total=3, images=images) as logger:
        work(logger, "eval", 176)
        work(logger, "rollout", 4)
        logger.log(0, {"reward": 1.0})
        clock[0] += 20.0
        work(logger, "train", 24)
    said = capsys.readouterr().err.splitlines()
    first, last = said[:4], said[5:]
    assert first == [
        "eval: 264 of 528 images",
        "eval: 528 of 528 images",
        "iteration 1/3  rollout: 8 of 16 images",
        "iteration 1/3  rollout: 16 of 16 images",
    ]
    assert said[4].startswith("iteration 1/3  ETA")
    assert last == ["iteration 2/3  train: 6 of 24", "iteration 2/3  train: 18 of 24"]


def test_eighty_columns_have_the_time_left_and_the_speed_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the reward, of a run of 20,000 iterations, too, and what is gained so far."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda _: (80, 24))
    metrics = {"reward": 0.53125, "accuracy": 0.5, "ratio": 1.0, "approx_kl": 0.001}
    for total, told in ((20_000, r"  reward 0\.53"), (63, r"  reward 0\.5312  gain \+12\.3±7\.1")):
        with RunLogger(tmp_path / f"{total}", tensorboard=False, total=total) as logger:
            logger.gained("+12.3±7.1 points")
            with logger.phase("rollout"):
                pass
            logger.log(total - 40, metrics, images=8)
        shown = max(capsys.readouterr().err.split("\r"), key=lambda line: "img/s" in line)
        assert re.search(rf"ETA \d+:\d\d:\d\d  \S+ img/s{told}", shown), shown
        assert len(shown.rstrip()) <= 80


def test_a_run_says_how_far_its_iterations_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 prompts of 4 images in two turns of 4 steps each; 4 leaves a turn are decoded two at a
    time; two rewards answer in two turns, one after the other; 24 decisions in calls of 8 states
    are trained by 2 updates of 12; 6 held-out prompts of 2 images are judged two at a time."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(log_module, "PAUSE", -1.0)
    more = ("train.parts=2", "train.overlap=false", "train.rollout_batch=2", "eval.batch=4")
    train(toy(tmp_path, "train.iterations=1", *more), tmp_path / "run")
    said = capsys.readouterr().err
    for phase, counts in {
        "rollout": [f"{k}/8" for k in range(1, 9)],
        "decode": ["2/4", "4/4"],
        "reward": [f"{k}/4" for k in range(1, 5)],
        "train": ["8/24", "12/24", "20/24", "24/24"],
        "eval": ["4/12 images", "8/12 images", "12/12 images"],
    }.items():
        for count in counts:
            assert f"{phase} {count}" in said, (phase, count)


def test_quiet_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with plain(tmp_path, total=1) as logger:
        logger.log(0, {"reward": 1.0})
        logger.say("hello")
    assert capsys.readouterr() == ("", "")


def test_tensorboard_scalars_and_purge_on_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resume, iterations in ((None, (0, 1, 2)), (1, (1,))):
        with RunLogger(tmp_path, resume, quiet=True) as logger:
            for iteration in iterations:
                values = {"reward": iteration + 0.5, "nan": math.nan}
                logger.log(iteration, values, images=1)
            logger.image("grid", torch.zeros(3, 4, 4), 0)
        # files are read in the order of their names: the second, then a count that sorts as text
        time.sleep(1.01)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(0, 0.5), (1, 1.5)]
    assert "nan" not in events.Tags()["scalars"] and "time/total" in events.Tags()["scalars"]


def test_events_that_cannot_be_written_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that fails under TensorBoard costs its events; metrics.jsonl has every iteration."""
    pytest.importorskip("tensorboard")
    with RunLogger(tmp_path, None) as mine:
        mine.log(0, {"reward": 0.5}, images=1)

        def fail(*_: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", fail)
        for iteration in (1, 2):
            mine.log(iteration, {"reward": 0.5}, images=1)
        assert "the run goes on without it" in capsys.readouterr().err
    assert [row["iteration"] for row in read_rows(tmp_path, "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize("line", ['{"iteration": 0, "total": "a"}', '{"iteration": {}}'])
def test_times_that_are_no_numbers_are_found_before_training(tmp_path: Path, line: str) -> None:
    (tmp_path / TIMING).write_text(f'{line}\n{{"iteration": 1, "total": 0.5}}\n')
    with pytest.raises(RunError, match=r"timing\.jsonl, line 1: "):
        RunLogger(tmp_path, 1, tensorboard=False, quiet=True)


def test_a_setting_that_is_none(tmp_path: Path) -> None:
    row = {"iteration": 0, "score": "red", "red": 0.5, "setting": "x"}
    (tmp_path / EVALS).write_text(json.dumps(row) + "\n")
    with pytest.raises(RunError, match=r"eval\.jsonl, line 1: evaluation: setting: "):
        read_evals(tmp_path)


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
