"""What all commands have in common: overrides anywhere, lists, help, wrong names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from flowrl.cli.grammar import Command, is_override
from flowrl.cli.main import GROUPS, app, main
from flowrl.core.errors import near
from flowrl.core.shipped_files import list_configs

pytestmark = pytest.mark.integration
EVERY = [name for group in GROUPS.values() for name in group]
TOY = ["--plugin", "toykit"]


def command(name: str) -> Command:
    found = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    assert isinstance(found, Command)
    return found


def parsed(name: str, line: list[str]) -> dict[str, object]:
    """Parse a command's arguments, and run nothing."""
    return dict(command(name).make_context(name, line).params)


# what makes the command's line whole, of all that take overrides
TARGETS = {
    **dict.fromkeys(("doctor", "train", "estimate", "bench", "serve-rewards", "eval"), ["x"]),
    **dict.fromkeys(("compare", "tune", "export", "score"), ["x"]),
    "sweep": ["x", "--suite", "shapes"],
    "sample": ["x", "a prompt"],
}


@pytest.mark.parametrize("name", [name for name in EVERY if name in TARGETS])
def test_one_grammar_of_overrides(name: str) -> None:
    """Bare, after --set, and several after one --set, before and after the arguments: in their
    order, and none is taken for an argument."""
    target = TARGETS[name]
    line = ["train.group=8", target[0], "--set", "eval.images=2", "seed=3", *target[1:], "name=a"]
    found = parsed(name, line)
    assert found["changes"] == ["train.group=8", "eval.images=2", "seed=3", "name=a"]
    assert not found.get("overrides")
    plain = parsed(name, target)
    for key in ("name", "config", "configs", "prompts", "run", "images"):
        assert found.get(key) == plain.get(key)


def test_every_command_with_overrides_is_tried() -> None:
    has = []
    for name in EVERY:
        has += [name for each in command(name).params if "--set" in each.opts]
    assert sorted(has) == sorted(TARGETS)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_command_that_reads_a_config_takes_a_profile(name: str) -> None:
    assert parsed(name, [*TARGETS[name], "--profile", "24gb"])["profile"] == "24gb"


def test_what_is_no_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, a path, a file that is there, a word after --, the value of an option."""
    monkeypatch.chdir(tmp_path)
    Path("train.x=1.png").touch()
    assert (
        is_override("train.x=1") and is_override("seed=1") and is_override("rewards.a-b.weight=2")
    )
    assert not any(map(is_override, ("E=mc2", "a sign: a=b", "im/a.b=c.png", "train.x=1.png", "=")))
    found = parsed("sample", ["run", "E=mc2", "--seed", "3", "--", "seed=4"])
    assert found["prompts"] == ["E=mc2", "seed=4"] and found["changes"] == []
    found = parsed("score", ["x.png", "mode=strict", "--reward=shapes"])
    assert found["images"] == [Path("x.png")] and found["changes"] == ["mode=strict"]
    found = parsed("score", ["x.png", "--prompt", "train.x=1", "--reward=jpeg"])
    assert found["prompt"] == "train.x=1" and found["changes"] == []


def test_lists() -> None:
    """Several values after one option; an override ends no list of tries."""
    found = parsed("compare", ["a", "b", "--seeds", "0", "1", "seed=3", "--lr-search", "0.5", "2"])
    assert found["seeds"] == [0, 1] and found["lr_search"] == [0.5, 2.0]
    assert found["changes"] == ["seed=3"] and found["configs"] == ["a", "b"]
    found = parsed(
        "tune", ["a", "--try", "optimizer.lr=1,2", "train.group=4,8", "--quiet", "seed=3"]
    )
    assert found["tries"] == ["optimizer.lr=1,2", "train.group=4,8"] and found["changes"] == [
        "seed=3"
    ]


def test_a_bare_override_of_eval(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["eval", f"{home}/whole", "eval.images=1", "eval.steps=2", "--json", "-", *TOY]
    assert main(line) == 0
    setting = json.loads(capsys.readouterr().out)["setting"]
    assert (setting["images"], setting["steps"]) == (1, 2)


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        # one edit of four letters by Damerau, and two of six: by difflib girdle is nearer
        ("gird", ["girdle", "grid"], "; did you mean 'grid' or 'girdle'?"),
        ("shapes/flow_gpro", list_configs(), "; did you mean 'shapes/flow_grpo'"),
        # up to three, the nearest first
        ("cat", ["bat", "rat", "hat", "mat"], "; did you mean 'bat', 'hat' or 'mat'?"),
        (
            "flow_grpo",
            list_configs(),
            "; did you mean 'flux/flow_grpo', 'sd3/flow_grpo' or 'shapes/",
        ),
        ("xyz", ["abc"], ""),
        ("a", [], ""),
    ],
)
def test_names_that_were_meant(name: str, known: list[str], said: str) -> None:
    found = near(name, known)
    assert found.startswith(said) and bool(found) == bool(said)
