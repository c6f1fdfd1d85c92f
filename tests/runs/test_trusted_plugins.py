"""A plugin is allowed once for a run; other content asks again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.runs.kept_inputs import trust, trusted

pytestmark = pytest.mark.integration


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a plugin of two files, which is found."""
    package = tmp_path / "two_files"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "reward.py").write_text("def red(images, prompts): ...")
    monkeypatch.syspath_prepend(tmp_path)
    return package


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make a folder of a run."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_what_was_allowed_need_not_be_named_again(plugin: Path, run: Path) -> None:
    """For this run alone; a run at another place has nothing of it, not even a copy."""
    assert trusted(run, []) == []
    assert trusted(run, ["two_files"]) == ["two_files"]
    assert trusted(run, []) == ["two_files"]
    shutil.copytree(run, run.with_name("copy"))
    assert trusted(run.with_name("copy"), []) == []


@pytest.mark.parametrize("change", ["edit", "add", "remove"])
def test_other_content_asks_again(plugin: Path, run: Path, change: str) -> None:
    """In any of its files; named again, it is allowed as it is now."""
    trust(run, ["two_files"])
    file = plugin / "reward.py"
    if change == "edit":
        file.write_text(file.read_text() + "#")
    elif change == "add":
        (plugin / "more.py").write_text("")
    else:
        file.unlink()
    with pytest.raises(ConfigError, match="is not what it was.*allow it again: --plugin two_files"):
        trusted(run, [])
    assert trusted(run, ["two_files"]) == ["two_files"] == trusted(run, [])


def test_a_folder_that_keeps_nothing_stops_nobody(
    plugin: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file where the folder should be, and what is damaged: both allow nothing."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", f"{tmp_path}/file")
    assert trusted(run, ["two_files"]) == ["two_files"] and trusted(run, []) == []
    monkeypatch.setenv("XDG_STATE_HOME", f"{tmp_path}/state")
    trust(run, ["two_files"])
    (kept,) = (tmp_path / "state").rglob("*.json")
    kept.write_text("{")
    assert trusted(run, []) == []


def test_a_run_remembers_its_plugins(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`train` names the plugin once; `eval` and a resume need not. What was trained before anything
    was allowed says what to name."""
    run = tmp_path / "mine"
    line = [f"{home}/toy.yaml", "train.iterations=1", "eval.images=1", "--run", f"{run}", "--quiet"]
    assert main(["train", *line, "--plugin", "toykit"]) == 0
    assert main(["eval", f"{run}", "eval.images=1"]) == 0
    assert main(["train", "--resume", f"{run}", "--quiet"]) == 0
    shutil.move(run, tmp_path / "moved")
    capsys.readouterr()
    assert main(["eval", f"{tmp_path}/moved"]) == 2
    assert "--plugin toykit" in capsys.readouterr().err
