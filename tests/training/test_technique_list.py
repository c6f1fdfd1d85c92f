"""The group techniques that scripts/research/techniques.py compares: each can be trained on the
toy, and loads on shapes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from scriptkit import script_module

from flowrl.training.rehearsal import check_plan
from flowrl.training.trainer import Trainer

MODULE = script_module("techniques")
ARMS = MODULE.arms([*MODULE.TECHNIQUES])


@pytest.mark.parametrize("name", ARMS)
def test_an_iteration_of_each_on_the_toy(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain runs as well; as many images as plain GRPO has, but for what replaces prompts."""
    monkeypatch.syspath_prepend(str(Path(MODULE.__file__ or "").parent))  # the toy is a plugin
    trainer = Trainer(MODULE.config_of("toy", name, 0, tmp_path))
    metrics = trainer.step()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["trained"] > 0 and metrics["grad_norm"] > 0
    train = trainer.config.train
    assert train.prompts * train.group == 64


@pytest.mark.parametrize("name", ARMS)
def test_each_loads_on_shapes(tmp_path: Path, name: str) -> None:
    """The plan of all its iterations can be trained, without a model."""
    config = MODULE.config_of("shapes", name, 0, tmp_path)
    check_plan(config)
    assert config.train.prompts * config.train.group == 128


def test_every_technique_that_was_asked_for_is_in_the_list() -> None:
    names = {one.name for one in MODULE.TECHNIQUES.values()}
    wanted = {"Reg-GRPO", "Single-stream", "SALT, on a tree", "TRPA", "SimPO", "P3O, pairs"}
    assert wanted | {"Balanced Aggregation", "DCPO, its bounds"} <= names
    assert len(names) == len(MODULE.TECHNIQUES)
