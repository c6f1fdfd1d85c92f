"""`flowrl new`: every stub is a file whose test passes and which trains at once."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from docskit import parse

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.runs.stubs import STUBS, write_stub

pytestmark = pytest.mark.integration


def test_the_tests_of_stubs_pass_and_their_commands_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the stubs' folder, as a user would: the tests, each of which rehearses its stub, in a
    process of their own. Each command names what its test has rehearsed; one is run."""
    made = [write_stub(kind, f"my_{kind}", tmp_path) for kind in STUBS]
    assert all(file.exists() for one in made for file in one.files)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    words += [word for one in made for word in one.test[1:]]
    code, said = warm.run(words, tmp_path / "log", folder=tmp_path)
    assert code == 0 and f"{2 * len(STUBS)} passed" in said, said
    # the commands
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for one in made:
        given, tested = parse(one.train), runpy.run_path(str(tmp_path / one.test[-1]))
        assert given["config"] in (tested["CONFIG"], Path(tested["CONFIG"]).name)
        assert [*given["overrides"], *given["changes"]] == tested["OVERRIDES"]
        assert [*given["plugin"]] == tested["PLUGINS"]
    assert main([*made[0].train[1:], "--rehearse", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["iterations"] == 1


def test_stubs_keep_the_rules_of_style(tmp_path: Path) -> None:
    for kind in STUBS:
        write_stub(kind, f"own_{kind}", tmp_path)
    own = ", ".join(f'"own_{kind}"' for kind in STUBS)
    (tmp_path / "ruff.toml").write_text(
        'line-length = 100\nlint.select = ["E", "F", "I", "UP", "B", "SIM"]\n'
        f'lint.isort.known-first-party = [{own}]\nlint.isort.known-third-party = ["flowrl"]\n'
    )
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--no-cache", "."],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("My-Reward", "expected a name like my_reward"),
        ("class", "expected a name like my_reward"),
        ("torch", "'torch' is the name of an installed package"),
        ("rewards", "'rewards' is the name of an installed package"),
    ],
)
def test_names_that_are_taken(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        write_stub("reward", name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first stub says what to do with it; the second is refused."""
    line = ["new", "reward", "mine", "--folder", f"{tmp_path}"]
    assert main(line) == 0
    said = capsys.readouterr().out
    assert "pytest test_mine.py" in said and "--plugin mine --rehearse" in said
    (tmp_path / "mine.py").write_text("own")
    assert main(line) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "mine.py").read_text() == "own"
