"""The doctor names what is wrong with a run, and is silent where nothing is.

Expected: the finding that stands beside each fault in doctorfaults. A fault is put into flowrl's
own code, or into a reward, credit or loss that a config names; the doctor is told nothing of it.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doctorfaults import FAULTS
from doctorkit import prompts_with, sound

from flowrl.core.errors import ConfigError
from flowrl.doctor import before_loading
from flowrl.doctor.examine import SECTIONS, examine
from flowrl.doctor.findings import CATALOGUE, Checkup


@pytest.fixture(scope="module")
def model() -> Any:
    """Load the shapes model once; the doctor puts its weights back."""
    return sound().call("model")()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Leaks between lists are wanted here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def names(checkup: Checkup) -> list[str]:
    return [finding.id for finding in checkup.findings]


def test_it_is_silent_on_a_sound_run_and_leaves_no_trace(model: Any) -> None:
    before = {name: p.detach().clone() for name, p in model.trainable().items()}
    checkup = examine(sound(), model=model, only=[name for name in SECTIONS if name != "memory"])
    assert checkup.findings == []
    assert all(torch.equal(p, before[name]) for name, p in model.trainable().items())
    (ratio,) = [s.figures["ratio"] for s in checkup.sections if s.name == "ratio"]
    assert max(gap for column, gap in ratio.items() if "bfloat16" not in column) < 1e-5
    assert [*ratio] == ["micro_batch 8", "in calls of 1", "in calls of 3", "bfloat16, calls of 1"]


@pytest.mark.parametrize("name", FAULTS)
def test_it_names_the_fault(name: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    if fault.patch is not None:
        fault.patch(monkeypatch, model)
    checkup = examine(sound(*fault.overrides), model=model, only=fault.sections)
    assert names(checkup) == [fault.finding]
    assert checkup.findings[0].change == CATALOGUE[fault.finding].change


@pytest.mark.parametrize(
    ("change", "finding", "section"),
    [("copies", "prompts/duplicates", "prompts"), ("length", "prompts/cut", "texts")],
)
def test_it_names_faults_of_prompt_lists(
    change: str, finding: str, section: str, model: Any, tmp_path: Path
) -> None:
    config = sound(prompts_with(tmp_path, change))
    assert names(examine(config, model=model, only=[section])) == [finding]


def test_it_is_silent_on_a_credit_that_compares_prompts_until_it_remembers(model: Any) -> None:
    """DDPO's takes the whole batch for a prompt with fewer than 16 rewards, as published."""
    credit = "credit={fn: history_norm, buffer: 32, least: 16}"
    assert names(examine(sound(credit), model=model, only=["credit"])) == []


def test_it_names_faults_of_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old package, another one of the same name, a small card and a full disk."""
    only = ["environment", "memory"]
    monkeypatch.setattr(before_loading, "_requirements", lambda: ["torch>=99", "no-such-package"])
    monkeypatch.setattr(before_loading, "other_package", lambda: "there are two")
    # the remedies are worked out by fit_card, which has tests of its own and takes its time
    monkeypatch.setattr(before_loading, "verdict", lambda found, gigabytes: ["fits: no"])
    full = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    found = names(examine(sound(), only=only, card=1.2))
    assert found == ["env/package", "env/version", "env/version", "memory/card", "env/disk"]


def test_every_finding_was_shown() -> None:
    shown = {fault.finding for fault in FAULTS.values()}
    shown |= {"prompts/duplicates", "prompts/cut"}
    shown |= {"env/package", "env/version", "env/disk", "memory/card"}
    assert shown == set(CATALOGUE)
    assert {section for fault in FAULTS.values() for section in fault.sections} <= set(SECTIONS)


def test_what_is_known_is_not_said_again(model: Any) -> None:
    fault = FAULTS["updates that do not divide"]
    config = sound(*fault.overrides)
    assert names(examine(config, only=["batch"], known=[fault.finding])) == []
    with pytest.raises(ConfigError, match="std/lost.*did you mean"):
        examine(config, known=["std/lost"])
    with pytest.raises(ConfigError, match="ratios.*did you mean"):
        examine(config, only=["ratios"])
