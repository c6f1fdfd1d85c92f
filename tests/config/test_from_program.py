"""What a program hands over by mistake is one message, before anything is loaded or written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toykit import redness, toy, write_toy

import flowrl
from flowrl.core.errors import ConfigError


@pytest.mark.parametrize("takes", [flowrl.train, flowrl.estimate, flowrl.Trainer])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("shapes/awm", r"as flowrl.load_config\('shapes/awm'\) gives it, got 'shapes/awm'"),
        (Path("my.yaml"), r"as flowrl.load_config\('my.yaml'\) gives it"),
        (None, "as flowrl.load_config gives it, got None"),
        ({"name": "toy"}, "as flowrl.load_config gives it, got {'name': 'toy'}"),
    ],
    ids=["name", "path", "none", "dict"],
)
def test_what_is_no_config(
    takes: Callable[[Any], Any],
    given: Any,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"expected a config, {said}"):
        takes(given)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run": ""}, "run: expected the path of a folder, got ''"),
        ({"run": 3}, "run: expected the path of a folder, got 3"),
        ({"resume": "yes"}, "resume: expected True, False or \"auto\", got 'yes'"),
        ({"rewards": redness}, r"rewards: expected \{name: function\}, got <function redness"),
        ({"rewards": [redness]}, r"rewards: expected \{name: function\}, got \["),
        ({"rewards": {3: redness}}, "rewards: expected a name of letters, digits, - and _, got 3"),
        ({"rewards": {"a/b": redness}}, "rewards: expected a name of letters.*got 'a/b'"),
    ],
)
def test_what_training_is_told(
    options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy(tmp_path / "toy")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        flowrl.train(config, quiet=True, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((None,), "expected the name of a shipped config or the path of a YAML file, got None"),
        (({"name": "toy"},), "the path of a YAML file, got {'name': 'toy'}"),
        (("{file}", "seed=1"), r"overrides: expected a list of texts, got 'seed=1' .*\['seed=1'\]"),
        (("{file}", {"seed": 1}), "overrides: expected a list of texts, got {'seed': 1}"),
        (("{file}", [3]), r"overrides: expected a list of texts, got \[3\]"),
        (("{file}", [], "toykit"), r"plugins: expected a list .*write \['toykit'\]"),
    ],
)
def test_what_a_config_is_loaded_from(given: Any, said: str, tmp_path: Path) -> None:
    first = str(write_toy(tmp_path)) if given[0] == "{file}" else given[0]
    with pytest.raises(ConfigError, match=said):
        flowrl.load_config(first, *given[1:])
