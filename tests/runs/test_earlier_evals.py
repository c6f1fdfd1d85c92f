"""A run that goes on with another `eval` or `samples` section: what is compared was judged alike,
and what stands side by side was drawn alike."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toykit import toy, write_toy

from flowrl.config.load import load_config
from flowrl.core.errors import RunError
from flowrl.runs.folder import EARLIER_EVALS, EVALS, METRICS, SUMMARY, TIMING, read_rows, try_lock
from flowrl.runs.train import train
from flowrl.training.trainer import Trainer

pytestmark = pytest.mark.integration
SHORT = ("train.iterations=1", "samples.every=0", "eval.images=1", "train.prompts=1")
LONGER = (*SHORT, "train.iterations=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for one iteration -> the run."""
    folder = tmp_path_factory.mktemp("trained")
    train(toy(folder, *SHORT), folder / "run", quiet=True)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of a run of one iteration; its prompts are those of the folder above."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / "run/config.yaml").read_text()
    (tmp_path / "run/config.yaml").write_text(text.replace(str(trained), str(tmp_path)))
    return tmp_path / "run"


def rewrite(run: Path, name: str, change: Callable[[list[str]], list[str]]) -> None:
    """Change the lines of a log."""
    file = run / name
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("eval.steps=2",), "steps 4 -> 2"),
        (("eval.seed=5", "eval.images=2"), "images 1 -> 2, seed 1234 -> 5"),
        (("eval.score=strict",), "score 'red' -> 'strict'"),
        (("eval.weights=current",), "weights 'ema' -> 'current'"),
        (("eval.best_of=2",), "best_of 1 -> 2, best_by '' -> 'red'"),
        (("prompts.test={folder}/train.jsonl",), ""),
    ],
)
def test_before_and_after_are_judged_alike(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: tuple[str, ...], said: str
) -> None:
    """A run with another `eval` section ends with the evaluations of one that always had it: the
    one before training is made anew, and the old ones are kept apart."""
    change = tuple(text.format(folder=tmp_path) for text in change)
    always = train(toy(tmp_path, *LONGER, *change), tmp_path / "always", quiet=True)
    old, first = (run / EVALS).read_bytes(), read_rows(run, EVALS)[0]
    if not said:  # the prompts are no section that is free: the run's own config is edited
        text = (run / "config.yaml").read_text().replace("/test.jsonl", "/train.jsonl")
        (run / "config.yaml").write_text(text.replace("iterations: 1", "iterations: 2"))
    capfd.readouterr()
    done = train(toy(tmp_path, *LONGER, *change), run, resume=True if not said else "auto")
    assert said in capfd.readouterr().err
    assert [done[key] for key in ("before", "after", "gain")] == [
        always[key] for key in ("before", "after", "gain")
    ]
    assert done["before"] != {key: first[key] for key in first if key != "by_prompt"}
    assert (run / EARLIER_EVALS).read_bytes() == old
    assert [row["iteration"] for row in read_rows(run, EVALS)] == [0, 2]


def test_a_reward_of_the_user_s_own_that_changed_judges_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under its name: the evaluation before training is made anew, and the old ones are kept."""
    monkeypatch.syspath_prepend(str(tmp_path))
    write_toy(tmp_path)

    def goes_on(channel: int, *more: str) -> dict[str, Any]:
        text = f"def mine(batch):\n    return batch.images[:, {channel}].mean((1, 2))\n"
        (tmp_path / "minejudge.py").write_text(text)
        sys.modules.pop("minejudge", None)
        importlib.invalidate_caches()
        own = (*SHORT, "rewards.mine={fn: minejudge.mine}", "eval.score=mine", *more)
        config = load_config(tmp_path / "toy.yaml", own, ("toykit", "minejudge"))
        return train(config, tmp_path / "run", resume="auto", quiet=channel == 0)

    goes_on(0)
    old = (tmp_path / "run" / EVALS).read_bytes()
    done = goes_on(1, "train.iterations=2")
    assert "evaluations of" in (said := capfd.readouterr().err) and "judge '" in said
    assert (tmp_path / "run" / EARLIER_EVALS).read_bytes() == old
    assert [row["iteration"] for row in read_rows(tmp_path / "run", EVALS)] == [0, 2]
    # as it is, nothing is judged anew
    before = (tmp_path / "run" / EVALS).read_bytes()
    goes_on(1, "train.iterations=3")
    assert (tmp_path / "run" / EVALS).read_bytes().startswith(before)
    assert done["before"]["mine"] == read_rows(tmp_path / "run", EVALS)[0]["mine"]


def test_a_smaller_batch_judges_alike(run: Path, tmp_path: Path) -> None:
    """How many images go through the network at once is no part of what is judged."""
    before = (run / EVALS).read_bytes()
    train(toy(tmp_path, *LONGER, "eval.batch=2"), run, resume="auto", quiet=True)
    assert (run / EVALS).read_bytes().startswith(before)
    assert not (run / EARLIER_EVALS).exists()


@pytest.mark.parametrize("change", [lambda lines: lines[::-1], lambda lines: lines + lines])
def test_evaluations_in_another_order_are_those_of_their_iterations(
    run: Path, tmp_path: Path, change: Callable[[list[str]], list[str]]
) -> None:
    """`before` is iteration 0, wherever its line stands."""
    first = read_rows(run, EVALS)[0]
    rewrite(run, EVALS, change)
    done = train(toy(tmp_path, *LONGER), run, resume="auto", quiet=True)
    assert done["before"]["red"] == first["red"] and done["before"]["iteration"] == 0
    assert [row["iteration"] for row in read_rows(run, EVALS)] == [0, 1, 2]


def test_an_evaluation_without_a_score_is_made_anew(run: Path, tmp_path: Path) -> None:
    first = read_rows(run, EVALS)[0]
    rewrite(run, EVALS, lambda lines: [json.dumps({**first, "red": None}) + "\n", *lines[1:]])
    done = train(toy(tmp_path, *LONGER), run, resume="auto", quiet=True)
    assert done["before"]["red"] == first["red"]


def test_a_time_that_is_lost_counts_as_none(run: Path, tmp_path: Path) -> None:
    (run / TIMING).write_text('{"iteration": 0}\n')
    done = train(toy(tmp_path, *LONGER), run, resume="auto", quiet=True)
    assert done["seconds"] >= 0 and done["iterations"] == 2


@pytest.mark.parametrize("name", [EVALS, METRICS, TIMING])
def test_a_pipe_in_the_place_of_a_log_is_one_message(run: Path, tmp_path: Path, name: str) -> None:
    """It would be waited for, for ever."""
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(RunError, match=f"{name}.*pipe"):
        train(toy(tmp_path, *LONGER), run, resume="auto", quiet=True)


def test_a_pipe_in_the_place_of_the_lock_locks_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    first: Any = try_lock(tmp_path)
    assert first is not None and try_lock(tmp_path) is None
    first.release()


@pytest.mark.parametrize("name", ["samples/000000.png", "samples/verdicts.json"])
def test_damaged_samples_end_no_run(run: Path, tmp_path: Path, name: str) -> None:
    """They would end it at every try to go on, with all weights good."""
    (run / name).write_bytes(b"\xff\xfe damaged")
    with pytest.warns(UserWarning) as caught:
        done = train(toy(tmp_path, *LONGER), run, resume="auto", quiet=True)
    said = [str(warning.message) for warning in caught if name in str(warning.message)]
    assert ["grid.png is not drawn" in said[0], "report.html is not" in said[1]] == [True] * 2
    assert done["iterations"] == 2 and done["after"]["iteration"] == 2


DRAWN = ("train.iterations=1", "samples.every=1", "eval.images=1", "train.prompts=1")
DRAWN_LONGER = (*DRAWN, "train.iterations=2")


def strips(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("0*.png"))


@pytest.mark.parametrize("change", ["samples.seed=99", "samples.prompts=2", "eval.height=8"])
def test_only_samples_that_were_drawn_alike_stand_side_by_side(
    tmp_path: Path, change: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(toy(tmp_path, *DRAWN, "samples.prompts=1"), run, quiet=True)
    before = json.loads((run / "samples" / "prompts.json").read_text())
    assert before["seed"] == 7 and len(before["prompts"]) == 1
    changes = ["samples.prompts=1", change, *(["eval.width=8"] if "height" in change else [])]
    train(toy(tmp_path, *DRAWN_LONGER, *changes), run, resume="auto")
    aside = run / "samples-earlier"
    assert f"they are in {aside}" in capfd.readouterr().err
    assert strips(aside) == ["000000.png", "000001.png"]
    assert json.loads((aside / "prompts.json").read_text()) == before
    assert strips(run / "samples") == ["000001.png", "000002.png"]
    assert (run / "grid.png").exists() and (run / "report.html").exists()


def test_samples_of_the_same_prompts_and_noise_stay(tmp_path: Path) -> None:
    """Also where the file does not say the seed of the noise."""
    run = tmp_path / "run"
    train(toy(tmp_path, *DRAWN), run, quiet=True)
    file = run / "samples" / "prompts.json"
    about = json.loads(file.read_text())
    file.write_text(json.dumps({key: about[key] for key in about if key != "seed"}))
    train(toy(tmp_path, *DRAWN_LONGER), run, resume="auto", quiet=True)
    assert strips(run / "samples") == ["000000.png", "000001.png", "000002.png"]
    assert not (run / "samples-earlier").exists() and json.loads(file.read_text()) == about


def test_a_run_that_trains_longer_has_its_end_until_a_checkpoint_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    train(toy(tmp_path, *DRAWN), run, quiet=True)
    step, seen = Trainer.step, []

    def stepping(self: Trainer) -> dict[str, float]:
        seen.append((run / SUMMARY).exists())
        return step(self)

    monkeypatch.setattr(Trainer, "step", stepping)
    train(toy(tmp_path, *DRAWN_LONGER), run, resume="auto", quiet=True)
    assert seen == [True] and json.loads((run / SUMMARY).read_text())["iterations"] == 2
    # one that is at its end keeps it
    train(toy(tmp_path, *DRAWN_LONGER), run, resume="auto", quiet=True)
    assert (run / SUMMARY).exists() and len(seen) == 1


def test_what_runs_below_the_folder_are_writing_stays(tmp_path: Path) -> None:
    """A new run in the folder that holds other runs, one of which writes a checkpoint."""
    draft = tmp_path / "live" / "checkpoints" / "000020.tmp-4242-0a1b2c3d"
    mine = tmp_path / "samples" / "000001.png.tmp-4242-0a1b2c3d"
    for path in (draft, mine):
        path.mkdir(parents=True)
    train(toy(tmp_path / "toy", *DRAWN), tmp_path, quiet=True)
    assert draft.exists()
    # its own are deleted when it goes on
    mine.mkdir(exist_ok=True)
    train(toy(tmp_path / "toy", *DRAWN_LONGER), tmp_path, resume="auto", quiet=True)
    assert draft.exists() and not mine.exists()
