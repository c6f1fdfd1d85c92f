"""What ends a run, what it has saved by then, how it goes on, and who has its folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from toykit import redness, toy

from flowrl.api.arguments import config_of
from flowrl.config.load import Config, load_config
from flowrl.core.errors import CheckpointError, ConfigError, RewardError, RunError
from flowrl.core.types import RewardBatch
from flowrl.runs.folder import CONFIG, ENVIRONMENT, EVALS, lock, read_rows, try_lock
from flowrl.runs.milestones import Checkpoints
from flowrl.runs.open_run import load_run
from flowrl.runs.start_run import claimed
from flowrl.runs.stop import Interrupted
from flowrl.runs.train import train
from flowrl.training import checkpoint, rollout
from flowrl.training.optimizer_state import check_settings
from flowrl.training.parts.copies import Copies
from flowrl.training.trainer import Trainer

pytestmark = pytest.mark.integration
SHORT = ("train.iterations=2", "checkpoint.every=0", "samples.every=0", "eval.images=1")


def short(folder: Path, *overrides: str) -> Config:
    return toy(folder, *SHORT, *overrides)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / EVALS).read_text().splitlines()]


def saved(run: Path) -> list[str]:
    return [folder.name for folder in checkpoint.checkpoint_folders(run)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    train(short(folder), folder / "run", quiet=True)
    return folder / "run"


def same(run: Path, whole: Path) -> bool:
    """Say whether a run ended as one that nothing happened to."""
    names = ["metrics.jsonl", EVALS, "checkpoints/000002/current.safetensors"]
    return all((run / name).read_bytes() == (whole / name).read_bytes() for name in names)


# ---------------------------------------------------------------------- what goes wrong in the loop


def test_a_hole_in_an_evaluation_loses_nothing(tmp_path: Path, whole: Path) -> None:
    """The checkpoint is written first, the message says how to go on, and with a higher limit the
    run ends, with the holes counted."""
    run, holes = tmp_path / "run", "rewards.red={fn: toykit.blind, prompt: a teal dot}"
    said = (
        r"(?s)1 of 6 images.*max_unscored=0.0.*saved .*/000000; go on with: flowrl train --resume"
    )
    with pytest.raises(RunError, match=said):
        train(short(tmp_path, holes), run, quiet=True)
    assert saved(run) == ["000000"]
    summary = train(short(tmp_path, holes, "train.max_unscored=0.5"), run, resume=True, quiet=True)
    assert summary["before"]["unscored"] == {"red": 1} and summary["before"]["images"] == 5
    assert saved(run) == ["000002"]  # that of iteration 0 goes when there is another one


@pytest.mark.parametrize(
    ("method", "raised", "kind", "said"),
    [
        ("rows", AssertionError("a fault"), AssertionError, "saved .*/000001"),
        ("learned", AssertionError("a fault"), AssertionError, "/000000 is whole"),
        (
            "learned",
            KeyboardInterrupt(),
            Interrupted,
            "at once in iteration 1; .*/000000 is whole",
        ),
        ("rows", KeyboardInterrupt(), Interrupted, "at once in iteration 1; saved .*/000001"),
        ("rows", ConfigError("wrong"), ConfigError, "wrong\nstopped in iteration 1; settings"),
    ],
)
def test_what_ends_a_run_leaves_what_is_good(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: Path,
    method: str,
    raised: BaseException,
    kind: type[BaseException],
    said: str,
) -> None:
    """`rows` comes before anything moves, what parts have `learned` after the weights have: then
    the checkpoint before is named. Mended, the run ends as one that nothing happened to."""
    owner: Any = Trainer if method == "rows" else Copies
    run, real = tmp_path / "run", getattr(owner, method)

    def failing(self: Any, *given: Any) -> Any:
        trainer = self if method == "rows" else given[0]
        if trainer.iteration == 1:
            raise raised
        return real(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, failing)
        with pytest.raises(kind) as error:
            train(short(tmp_path), run, quiet=True)
    text = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    assert re.search(said, text, re.DOTALL) and f"flowrl train --resume {run}" in text
    train(short(tmp_path), run, resume=True, quiet=True)
    assert same(run, whole)


# ------------------------------------------------------------------------------------------ signals


def test_a_stop_is_heard_inside_an_evaluation(tmp_path: Path, whole: Path) -> None:
    """6 held-out images in 3 batches: the third is never asked for. Resumed, nothing is missing."""
    run, calls = tmp_path / "run", [0]

    def pressing(batch: RewardBatch) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return redness(batch)

    config = config_of(
        short(tmp_path, "eval.batch=2", "rewards.strict=null"), rewards={"red": pressing}
    )
    with pytest.raises(Interrupted, match=r"after iteration 0, saved .*000000; go on with"):
        train(config, run, quiet=True)
    assert calls == [2] and not (run / EVALS).exists()
    train(short(tmp_path, "rewards.strict=null"), run, resume=True, quiet=True)
    assert rows(run)[0]["red"] == pytest.approx(rows(whole)[0]["red"])


# --------------------------------------------------------------------------- how a run begins again


def test_auto_begins_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("runs/toy-seed3")
    for iterations in (1, 2):
        config = short(tmp_path, f"train.iterations={iterations}")
        assert train(config, resume="auto", quiet=True)["iterations"] == iterations
        assert load_config(run / CONFIG, (), ("toykit",)) == config
    assert [path.name for path in Path("runs").iterdir()] == ["toy-seed3"]
    assert [row["iteration"] for row in rows(run)] == [0, 1, 2]
    with pytest.raises(ConfigError, match="another config: optimizer.lr differ"):
        train(short(tmp_path, "optimizer.lr=0.5"), resume="auto", quiet=True)
    with pytest.raises(ConfigError, match="train.iterations=1: .* has done 2 already; raise it"):
        train(short(tmp_path, "train.iterations=1"), run, resume=True, quiet=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_killed_before_its_first_checkpoint_begins_again(
    tmp_path: Path, whole: Path, resume: bool
) -> None:
    """Before it no line of a log is written: the logs are there and empty."""
    run = tmp_path / "run"
    run.mkdir()
    (run / CONFIG).write_text(short(tmp_path).dump())
    (run / ENVIRONMENT).write_text("{}")
    (run / "metrics.jsonl").write_text("")
    train(short(tmp_path), run, resume=resume, quiet=True)
    assert same(run, whole)


def test_a_killed_run_begins_again_from_its_own_config(tmp_path: Path, whole: Path) -> None:
    """What a kill before the first checkpoint leaves: environment and config, as they were
    written. As a new run it is refused, and the message names the command that works."""
    run = tmp_path / "run"
    run.mkdir()
    for name in (CONFIG, "environment.json"):
        shutil.copy(whole / name, run)
    own = load_config(run / CONFIG, (), ("toykit",))
    with pytest.raises(RunError, match=f"again: flowrl train --resume {run} --plugin toykit$"):
        train(own, run, quiet=True)
    train(own, run, resume=True, quiet=True)
    assert same(run, whole)


def test_lost_and_damaged_evaluations(tmp_path: Path, whole: Path) -> None:
    """A lost one is made anew from the weights before training; garbage is named."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    (run / EVALS).unlink()
    summary = train(short(tmp_path), run, resume=True, quiet=True)
    first = {key: value for key, value in rows(whole)[0].items() if key != "by_prompt"}
    assert summary["before"] == first and same(run, whole)
    for text in ("garbage\n", '{"iteration": 0}\n'):
        (run / EVALS).write_text(text)
        with pytest.raises(RunError, match=r"eval.jsonl, line 1: .*then resume"):
            train(short(tmp_path), run, resume=True, quiet=True)


# ------------------------------------------------------------------------------- who has the folder


def test_runs_that_start_at_once_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        found = [stack.enter_context(claimed(short(tmp_path), None, False)) for _ in range(3)]
        names = [start.run.name for start in found]
        assert names == ["toy-seed3", "toy-seed3-2", "toy-seed3-3"]
        for resume in (False, True, "auto"):
            with pytest.raises(RunError, match=f"process {os.getpid()} works in it now; wait"):
                stack.enter_context(claimed(short(tmp_path), found[0].run, resume))  # type: ignore[arg-type]
    with claimed(short(tmp_path), None, False) as start:
        assert start.run.name == "toy-seed3"
    with pytest.raises(RunError, match="File name too long"), lock(tmp_path / ("x" * 300), mend=""):
        pass


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A lock ends with its process: the one that has it is killed, and its child, as a reward forks
    one, lives on."""
    text = (
        "import os, pathlib, sys, time; from flowrl.runs.folder import try_lock\n"
        "held = try_lock(pathlib.Path(sys.argv[1])); child = os.fork()\n"
        "print(child, flush=True) if child else None; time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", text, tmp_path], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert try_lock(tmp_path) is None
    parent.kill()
    parent.wait()
    try:
        os.kill(child, 0)  # it is there
        found = try_lock(tmp_path)
        assert found is not None
        found.release()
    finally:
        os.kill(child, signal.SIGKILL)


class Cancelled(BaseException):
    """As of asyncio: no Exception."""


@pytest.mark.parametrize("where", ["reward", "loop"])
def test_what_is_no_exception_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Raised by a reward it is the reward's error; elsewhere it passes, with a note."""
    run = tmp_path / "run"

    def cancelled(batch: RewardBatch) -> Tensor:
        if where == "reward" and len(read_rows(run, "metrics.jsonl")) == 1:
            raise Cancelled("away")
        return redness(batch)

    real = Trainer.step

    def step(self: Trainer) -> dict[str, float]:
        if where == "loop" and self.iteration == 1:
            raise Cancelled("away")
        return real(self)

    monkeypatch.setattr(Trainer, "step", step)
    config = short(tmp_path, "checkpoint.every=0")
    kind = RewardError if where == "reward" else Cancelled
    with pytest.raises(kind, match="away") as raised:
        train(config_of(config, rewards={"red": cancelled}), run, quiet=True)
    said = "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert f"saved {run}/checkpoints/000001; go on with" in said
    assert saved(run)[-1] == "000001"


# --------------------------------------------------------------------- rewards that are not at hand


def test_a_run_with_a_function_as_its_reward(tmp_path: Path) -> None:
    """It is sampled without the function, and trained and resumed with it."""
    run, config = tmp_path / "run", short(tmp_path, "train.iterations=1")

    def bright(images: Tensor, prompts: list[str]) -> list[float]:
        return images.mean((1, 2, 3)).tolist()

    summary = train(config_of(config, rewards={"bright": bright}), run, quiet=True)
    assert 0 < summary["after"]["bright"] < 1
    assert load_run(run, plugins=("toykit",))[2] == 1
    again = load_config(run / CONFIG, ("train.iterations=2",), ("toykit",))
    with pytest.raises(ConfigError, match=r"over again: flowrl.open\(run, rewards={'bright'"):
        train(again, run, resume=True, quiet=True)
    given = config_of(again, rewards={"bright": bright})
    assert train(given, run, resume=True, quiet=True)["iterations"] == 2


def test_a_run_is_opened_without_the_plugin_of_its_reward(tmp_path: Path) -> None:
    config = short(tmp_path, "train.iterations=1")
    train(config, tmp_path / "run", quiet=True)
    text = (tmp_path / "run" / CONFIG).read_text().replace("toykit.redness", "elsewhere.redness")
    (tmp_path / "run" / CONFIG).write_text(text)
    _, opened, iteration = load_run(tmp_path / "run", plugins=("toykit",))[:3]
    assert iteration == 1 and opened.rewards["red"].fn == "elsewhere.redness"
    with pytest.raises(ConfigError, match="--plugin elsewhere"):
        opened.rewards["red"].make()
    with pytest.raises(ConfigError, match="--plugin elsewhere"):
        load_config(tmp_path / "run" / CONFIG, (), ("toykit",))


def test_a_command_or_the_call_with_the_functions(tmp_path: Path) -> None:
    trainer, run = Trainer(toy(tmp_path)), tmp_path / "my run"
    checkpoints = Checkpoints(trainer, run, None)
    assert f"flowrl train --resume '{run}'" in checkpoints.how_to_go_on()
    handed = config_of(trainer.config, rewards={"b": lambda batch: torch.zeros(len(batch.images))})
    vars(trainer)["config"] = replace(handed, plugins=("toykit",))
    assert checkpoints.how_to_go_on() == (
        f"flowrl.open('{run}', plugins=['toykit'], rewards={{'b': ...}}).resume()"
    )


def test_latents_that_broke_before_anything_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no earlier checkpoint in iteration 0."""
    monkeypatch.setattr(rollout, "prompt_of", lambda *_: "P")
    tree = SimpleNamespace(step=torch.tensor([1]))
    ro: Any = SimpleNamespace(x=torch.full((1, 2), torch.nan), tree=tree, sigmas=torch.zeros(3))
    with pytest.raises(RunError, match="nothing was trained yet: use a wider model.dtype"):
        rollout.check_latents(ro, ["P"], 0)
    with pytest.raises(RunError, match="go on from an earlier checkpoint with a lower"):
        rollout.check_latents(ro, ["P"], 1)


def test_other_settings_of_the_optimizer_are_refused(tmp_path: Path) -> None:
    """Before a weight is changed; the learning rate may be another."""
    trainer = Trainer(toy(tmp_path))
    trainer.save(tmp_path / "saved")
    Trainer(toy(tmp_path, "optimizer.lr=0.5")).load(tmp_path / "saved")
    other = Trainer(toy(tmp_path, "optimizer.betas=[0.5, 0.6]"))
    said = r"optimizer\.betas: the config says \[0.5, 0.6\], .* trained with \[0.9, 0.999\]"
    with pytest.raises(CheckpointError, match=said):
        other.load(tmp_path / "saved")
    check_settings({"eps": 1e-8, "own": 3}, {"groups": [{"eps": 1e-8, "lr": 1.0}]})


def test_a_folder_in_which_nothing_began_goes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where this command made it and has written nothing; the next try has the same name."""
    monkeypatch.chdir(tmp_path)
    broken = toy(tmp_path, "train.start=nowhere.safetensors")
    before = sorted(tmp_path.iterdir())
    for run in (None, "one/two"):
        with pytest.raises(ConfigError, match="nowhere"):
            train(broken, run, quiet=True)
        assert sorted(tmp_path.iterdir()) == before
    # a folder that was there stays, and so does what somebody put into a new one
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "notes").touch()
    for run in ("one", "one/two"):
        with pytest.raises(ConfigError, match="nowhere"):
            train(broken, run, quiet=True)
    assert (tmp_path / "one" / "notes").exists() and not (tmp_path / "one" / "two").exists()
    for name in ("notes", "samples/000000.png"):
        with claimed(broken, tmp_path / "new", False) as start:
            (start.run / name).touch()
        assert (start.run / name).exists()
        shutil.rmtree(start.run)


def test_a_lock_on_a_folder_that_has_just_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first owner left between opening and locking the file: the lock is on a new one."""
    first, flock = try_lock(tmp_path / "new"), fcntl.flock
    assert first is not None

    def leaving(handle: int, how: int) -> None:
        first.leave()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", leaving)
    second = try_lock(tmp_path / "new")
    assert second is not None and (tmp_path / "new" / ".lock").exists()
    assert try_lock(tmp_path / "new") is None
    second.release()


def test_a_lock_on_a_folder_that_somebody_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first owner left and a third process has it anew: two must not have it."""
    first, flock = try_lock(tmp_path / "new"), fcntl.flock
    assert first is not None
    third = []

    def leaving(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.leave()
        third.append(try_lock(tmp_path / "new"))
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", leaving)
    assert try_lock(tmp_path / "new") is None
    assert third[0] is not None
    third[0].release()


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has none, somebody else may have begun in the folder."""

    def none(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", none)
    first, second = try_lock(tmp_path / "new"), try_lock(tmp_path / "new")
    assert first is not None and second is not None
    first.leave()
    assert (tmp_path / "new" / ".lock").exists()
    second.release()
