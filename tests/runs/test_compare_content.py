"""Comparisons whose model, rewards or prompts change under their names."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from comparekit import no_training, plan, tick

from flowrl.core.errors import ConfigError
from flowrl.runs.compare.compare import Comparison, run_comparison
from flowrl.runs.compare.one_run import spend
from flowrl.runs.stop import StopSignal

Change = Callable[[Comparison], None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comparison]:
    """A finished comparison of one toy, whose reward is a file of the user's."""
    folder = tmp_path_factory.mktemp("done")
    with pytest.MonkeyPatch.context() as patch:
        tick(patch)
        patch.syspath_prepend(str(folder))
        write_reward("0")
        what = plan(folder)
        write_transform("2")
        mine = "rewards.mine={fn: minecolors.mine, transform: {fn: minesteps.times}}"
        own = (*what.overrides, mine, "eval.score=mine")
        what = what._replace(overrides=own, plugins=("toykit", "minecolors", "minesteps"))
        run_comparison(what, quiet=True)
        yield what


@pytest.fixture
def done(made: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Comparison]:
    """Lend it to a test, after which all files are as they were."""
    tick(monkeypatch)
    home = made.runs.parent
    shutil.copytree(home, tmp_path / "kept")
    yield made
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "kept", home)
    write_reward("0")
    write_transform("2")


def write_reward(channel: str) -> None:
    """Write a reward that looks at one colour, to be imported anew."""
    file = Path(sys.path[0]) / "minecolors.py"
    text = f"def mine(batch):\n    return batch.images[:, {channel}].mean((1, 2))\n"
    file.write_text(text)
    sys.modules.pop("minecolors", None)
    importlib.invalidate_caches()


def write_transform(factor: str) -> None:
    """Write what is done to that reward's values in training, to be imported anew."""
    text = f"def times(values, batch):\n    return {factor} * values\n"
    (Path(sys.path[0]) / "minesteps.py").write_text(text)
    sys.modules.pop("minesteps", None)
    importlib.invalidate_caches()


def another_prompt(what: Comparison) -> None:
    file = what.runs.parent / "test.jsonl"
    file.write_text(file.read_text().replace("a red dot", "a white dot"))


def test_what_has_not_changed_is_taken_again(
    done: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_training(monkeypatch)
    before = done.out.read_bytes()
    run_comparison(done, quiet=True)
    assert done.out.read_bytes() == before
    kept = json.loads((done.runs / "base" / "result.json").read_text())["content"]
    assert (
        kept.keys() == {"model", "reward", "prompts", "files of prompts"}
        and kept["reward"]["source"].keys()
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: write_reward("1"), r"reward\.source\.minecolors"),
        (another_prompt, "prompts: [0-9a-f]+ and [0-9a-f]+"),
    ],
    ids=["the reward's source", "the prompt file"],
)
def test_a_base_model_that_was_judged_otherwise(
    done: Comparison, change: Change, said: str
) -> None:
    """Under the same names: no old score, nothing deleted; so for the base model, for a run of
    which the base was deleted, and for a result file with other runs."""
    files = {file: file.read_bytes() for file in done.runs.rglob("*.json*")}
    result = done.out.read_bytes()
    change(done)
    with pytest.raises(ConfigError, match=rf"runs: the base model there was judged.*{said}"):
        run_comparison(done, quiet=True)
    shutil.move(done.runs / "base", done.runs.parent / "kept")
    config = done.load(done.configs[0], "seed=0")
    with StopSignal() as stop, pytest.raises(ConfigError, match=rf"seed0 holds.*{said}"):
        spend(config, done.runs / "toy-a" / "seed0", done.budgets, stop=stop, quiet=True)
    if change is not another_prompt:  # the white dot is drawn and judged as the red one was
        with pytest.raises(ConfigError, match=rf"result\.json was begun with.*{said}"):
            run_comparison(done._replace(runs=done.runs.parent / "more"), quiet=True)
    shutil.move(done.runs.parent / "kept", done.runs / "base")
    assert {file: file.read_bytes() for file in done.runs.rglob("*.json*")} == files
    assert done.out.read_bytes() == result


def test_a_function_of_the_user_s_own_that_changed(done: Comparison) -> None:
    """The base model is judged as before, but seeds of two methods are no seeds of one: neither is
    a run taken again, nor a seed added to a result file."""
    write_transform("3")
    said = r"functions\.rewards\.mine\.transform\.minesteps: \w+ and \w+"
    files = {file: file.read_bytes() for file in done.runs.rglob("*.json*")}
    with pytest.raises(ConfigError, match=rf"holds a comparison under other settings.*{said}"):
        run_comparison(done._replace(seeds=(0, 1)), quiet=True)
    config = done.load(done.configs[0], "seed=0")
    with StopSignal() as stop, pytest.raises(ConfigError, match=rf"seed0 holds.*{said}"):
        spend(config, done.runs / "toy-a" / "seed0", done.budgets, stop=stop, quiet=True)
    assert {file: file.read_bytes() for file in done.runs.rglob("*.json*")} == files
    write_transform("2")
    run_comparison(done, quiet=True)
