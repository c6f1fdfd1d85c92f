"""A run whose checkpoints, logs or study are away loses nothing: what is not there is no leave to
delete what is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from comparekit import plan, tick
from toykit import toy, write_toy

from flowrl.config.load import Config
from flowrl.core.errors import CheckpointError, ConfigError, FlowRLError, RunError
from flowrl.runs.compare.compare import run_comparison
from flowrl.runs.compare.tune import Tuning, run_tuning
from flowrl.runs.folder import read_rows
from flowrl.runs.milestones import begin_samples
from flowrl.runs.train import train
from flowrl.training import checkpoint

pytestmark = pytest.mark.integration
FEW = ("train.iterations=3", "samples.every=0", "eval.images=1", "checkpoint={every: 1, keep: 1}")


def few(folder: Path, *overrides: str) -> Config:
    return toy(folder, *FEW, *overrides)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(few(folder), folder / "run", quiet=True)
    return folder / "run"


def contents(run: Path) -> dict[str, bytes]:
    """Return all files of a run but its lock."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def away(run: Path, way: str) -> None:
    """Let the checkpoints of a run be away."""
    place = run / "checkpoints"
    if way == "torn":
        for file in place.glob("*/manifest.json"):
            file.unlink()
        return
    shutil.rmtree(place)
    if way == "a file":
        place.write_text("")
    if way == "empty":
        place.mkdir()
    if way == "a disk":
        place.symlink_to(run / "not mounted")


@pytest.mark.parametrize("way", ["deleted", "a file", "empty", "a disk", "torn"])
@pytest.mark.parametrize("ended", [False, True])
def test_nothing_is_deleted_where_checkpoints_are_away(
    tmp_path: Path, whole: Path, way: str, ended: bool
) -> None:
    """By the same command, --resume and --resume auto; what is there is named."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    if not ended:
        (run / "summary.json").unlink()
    away(run, way)
    before = contents(run)
    with pytest.raises(RunError, match="holds a run already"):
        train(few(tmp_path), run, quiet=True)
    resumes: tuple[Any, ...] = (True, "auto")
    for resume in resumes:
        with pytest.raises(CheckpointError, match="checkpoints .*metrics.jsonl with 3 lines.*same"):
            train(few(whole.parent), run, resume=resume, quiet=True)
    assert contents(run) == before


def test_a_run_without_its_config_is_not_written_over(tmp_path: Path, whole: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    for name in ("config.yaml", "summary.json"):
        (run / name).unlink()
    before = contents(run)
    with pytest.raises(RunError, match=r"metrics.jsonl with 3 lines.*config.yaml is not there"):
        train(few(tmp_path), run, quiet=True)
    assert contents(run) == before


def test_without_evaluations_no_checkpoint_is_taken_for_a_worse_one(
    tmp_path: Path, whole: Path
) -> None:
    """Which of them is the best nobody knows any more, so that those that are there stay."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    last = checkpoint.checkpoint_folder(run, 3)
    files, state = checkpoint.load(last)
    checkpoint.save(checkpoint.checkpoint_folder(run, 1), files, {**state, "iteration": 1})
    (run / "eval.jsonl").unlink()
    train(few(tmp_path, "train.iterations=5"), run, resume=True, quiet=True)
    names = [folder.name for folder in checkpoint.checkpoint_folders(run)]
    assert names == ["000001", "000003", "000005"]


def test_samples_that_nothing_names_are_set_aside(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    (folder / "000000.png").write_bytes(b"of unknown prompts")
    moved = begin_samples(tmp_path, {"prompts": ["a"], "height": 8, "width": 8, "seed": 0})
    assert moved is not None
    assert (moved / "000000.png").read_bytes() == b"of unknown prompts"


def test_a_comparison_s_run_is_not_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line of metrics without a checkpoint is a checkpoint that is away."""
    tick(monkeypatch)
    what = plan(tmp_path)
    run_comparison(what, quiet=True)
    run = what.runs / "toy-a" / "seed0"
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints")
    before = contents(run)
    with pytest.raises(FlowRLError, match=r"checkpoints is not there.*metrics.jsonl with 5 lines"):
        run_comparison(what, quiet=True)
    assert contents(run) == before


# ------------------------------------------------------------------------------- lines of the logs


def lines(numbers: list[int]) -> str:
    return "".join(f'{{"iteration": {number}, "reward": 0.5}}\n' for number in numbers)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([0, 2], r"lacks iteration 1\. .* after 1 iterations .*, or go on .*%\.0f}' 1 1`"),
        ([0, 1], r"lacks iteration 2\. .* after 2 iterations .*, or go on .*%\.0f}' 2 2`"),
        ([0, 1, 1, 2], "holds iteration 1 more than once.*delete the lines that are too many"),
        ([1, 2], r"lacks iteration 0\. .*bring the whole file back, or go on .*%\.0f}' 0 0`"),
        ([], r"lacks iterations 0 to 2\. .*bring the whole file back, or go on .* 0 2 > .*jsonl`"),
        (None, r"jsonl, which is not there: .* lacks iterations 0 to 2\. .*bring the whole"),
    ],
)
def test_each_iteration_is_expected_once(
    tmp_path: Path, whole: Path, numbers: list[int] | None, said: str
) -> None:
    """What is missing or double is named before anything is loaded or changed; also where all
    lines are, or the file."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    (run / "metrics.jsonl").unlink()
    if numbers is not None:
        (run / "metrics.jsonl").write_text(lines(numbers))
    before = contents(run)
    with pytest.raises(RunError, match=said) as caught:
        train(few(tmp_path, "train.iterations=4"), run, resume=True, quiet=True)
    assert "each of the 3 iterations before the checkpoint once" in str(caught.value)
    assert contents(run) == before
    # by a line for each, as the message says, it goes on
    command = re.search("`(seq .* > .*)`", str(caught.value))
    if command:
        subprocess.run(command[1], shell=True, check=True)
    else:
        (run / "metrics.jsonl").write_text('{"iteration": 0}\n' + lines([1, 2]))
    train(few(tmp_path, "train.iterations=4"), run, resume=True, quiet=True)
    assert [row["iteration"] for row in read_rows(run, "metrics.jsonl")] == [0, 1, 2, 3]


def test_logs_are_on_the_disk_before_a_checkpoint_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each manifest is synced after the metrics of all iterations before it."""
    synced = list[str]()
    real = os.fsync

    def noted(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real(handle)

    monkeypatch.setattr(os, "fsync", noted)
    train(few(tmp_path), tmp_path / "run", quiet=True)
    kept = [name for name in synced if name in ("metrics.jsonl", "manifest.json")]
    assert kept == ["metrics.jsonl", "manifest.json"] * 4  # at 0 to 3


# -------------------------------------------------------------------- prompts and seed of a resume


def test_another_list_or_seed_is_no_resume(tmp_path: Path, whole: Path) -> None:
    """Both would be a run that is neither the one nor the other."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("seed: 3", "seed: 4", 1))
    more = few(tmp_path, "train.iterations=4", "seed=4")
    with pytest.raises(CheckpointError, match="seed: .* with 3, and the config says 4"):
        train(more, run, resume=True, quiet=True)
    (run / "config.yaml").write_text(text)
    prompts = tmp_path / "train.jsonl"
    own = few(tmp_path, "train.iterations=4")
    kept = prompts.read_text()
    prompts.write_text(kept.replace("red", "purple"))
    with pytest.raises(CheckpointError, match=r"prompts.train: .*train.jsonl is another list"):
        train(own, run, resume=True, quiet=True)
    prompts.write_text(kept)
    assert train(own, run, resume=True, quiet=True)["iterations"] == 4
    assert torch.get_num_threads() == 1


def test_a_search_whose_study_is_away_is_not_begun_anew(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    out = tmp_path / "out"
    (out / "trials" / "a" / "seed0").mkdir(parents=True)
    (out / "best.yaml").write_text("# of before")
    what = Tuning(
        config=str(write_toy(tmp_path)),
        space={},
        seeds=(0,),
        nfe=1e4,
        out=out,
        plugins=("toykit",),
    )
    with pytest.raises(ConfigError, match=r"trials and best.yaml of a search whose study.db"):
        run_tuning(what, quiet=True)
    assert (out / "best.yaml").read_text() == "# of before"
