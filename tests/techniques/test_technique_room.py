"""The room of techniques: configs find what is in it by name, and none that is shipped does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowrl.config.axes import AXES
from flowrl.config.calls import Call, fits, offers
from flowrl.core.errors import ConfigError
from flowrl.training.parts import shipped

ROOT = Path(__file__).resolve().parents[2]
ROOM = "flowrl.techniques."


def test_every_file_belongs_to_one_axis() -> None:
    named = []
    for axis in AXES.values():
        named += [name for name in (axis.package, *axis.techniques) if name.startswith(ROOM)]
    files = {f"{ROOM}{file.stem}" for file in (ROOT / "flowrl/techniques").glob("*.py")}
    # parts belong to the training loop
    parts = {part.__module__ for part in shipped() if part.__module__.startswith(ROOM)}
    assert len(parts) == 3
    assert sorted(named) == sorted(files - parts - {f"{ROOM}__init__"})


def test_no_shipped_config_names_a_technique() -> None:
    techniques = set()
    for axis in AXES.values():
        for path, function in offers(axis, "here").items():
            if path.startswith(ROOM) and fits(axis, function):
                techniques.add(path.rpartition(".")[2])
    shipped = set()
    for file in (ROOT / "configs").rglob("*.yaml"):
        shipped |= set(re.findall(r"\bfn: (\w+)", file.read_text(encoding="utf-8")))
    assert len(techniques) > 25 and techniques & shipped == set()


def test_they_are_found_by_a_bare_name_and_by_the_whole_one_of_their_axis() -> None:
    whole = f"{ROOM}group_credits.median_norm"
    for fn in ("median_norm", whole):
        assert Call.bind("credit", {"fn": fn}).path == whole
    with pytest.raises(ConfigError, match="neither in flowrl.algorithms.losses nor"):
        Call.bind("loss", {"fn": whole})
    with pytest.raises(ConfigError, match="did you mean 'median_norm'"):
        Call.bind("credit", {"fn": "median_nrm"})
