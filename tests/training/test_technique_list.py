"""The group techniques that scripts/research/techniques.py compares: each can be trained on the
toy, and loads on shapes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from scriptkit import script_module

from flowrl.training.rehearsal import check_plan
from flowrl.training.trainer import Trainer

MODULE, LIST = script_module("techniques"), script_module("technique_list")
ARMS = MODULE.arms([*MODULE.TECHNIQUES])


@pytest.mark.parametrize("name", ARMS)
def test_an_iteration_of_each_on_the_toy(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controls as well; as many images as plain GRPO has, but for what replaces prompts."""
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
    wanted |= {"Balanced Aggregation", "DCPO, its bounds", "NormGuard", "UniGRPO, its velocity KL"}
    assert wanted <= names
    assert len(names) == len(MODULE.TECHNIQUES)


@pytest.mark.parametrize("name", MODULE.TECHNIQUES)
def test_a_control_lacks_the_technique_alone(name: str) -> None:
    """All that the control sets is in the technique's config but for the keys that the technique
    itself changes; SALT changes none, so its control has its very config."""
    control, own = MODULE.TECHNIQUES[name].control, MODULE.TECHNIQUES[name].changes
    shared = {*MODULE.changes_of(name)} - {*own}
    keys = {change.partition("=")[0] for change in own}
    left = {change for change in MODULE.changes_of(control) if change.partition("=")[0] not in keys}
    assert shared == left
    assert (MODULE.changes_of(name) == MODULE.changes_of(control)) == (name == "salt")


def test_what_lets_more_than_the_range_teach_is_held_to_a_wide_one() -> None:
    """A loss other than `ppo_clip` of the narrow range has a control with the wide one, unless its
    own range is the narrow one."""
    narrow = {"rec", "aspo"}
    for name, one in MODULE.TECHNIQUES.items():
        losses = [change for change in one.changes if change.startswith("loss=")]
        if losses and name not in narrow and not one.name.startswith("none: "):
            assert LIST.WIDE in MODULE.changes_of(one.control)
    assert all(MODULE.TECHNIQUES[name].control == "plain" for name in narrow)


def earlier(tmp_path: Path, **other: Any) -> Path:
    """A result file with a run of each of two techniques, and of one that is no longer known."""
    known = ("salt", "ce_gppo", "gone")
    changes = {"salt": [LIST.TREE], "ce_gppo": ["loss={fn: ppo_clip}"], "gone": []}
    text = {
        "ground": "toy",
        "nfe": 100,
        "techniques": {name: {"changes": changes[name]} for name in known},
        "runs": {name: [{"name": name, "seed": 0, "score": 0.5}] for name in known},
        "environment": {"commit": "abc"},
    }
    file = tmp_path / "before.json"
    file.write_text(json.dumps(text | other))
    return file


def test_runs_of_the_result_file_count_where_the_config_is_the_same(tmp_path: Path) -> None:
    """SALT's is; CE-GPPO's was another one then, and what is not in the list is left out."""
    folder = tmp_path / "runs"
    MODULE.unpack(earlier(tmp_path), folder, "toy", 100)
    assert [file.name for file in folder.iterdir()] == ["salt-0.json"]
    run = json.loads((folder / "salt-0.json").read_text())
    alike = {"changes": [LIST.TREE]}
    assert run == {"name": "salt", "seed": 0, "score": 0.5, "commit": "abc", **alike}
    # a run that is there already stays, and one keeps the commit that it names itself
    own = {"name": "tree", "seed": 0, "score": 0.25, "commit": "def"}
    again = earlier(
        tmp_path,
        controls={"tree": {"changes": [LIST.TREE]}},
        runs={"salt": [own], "tree": [own], "ce_gppo": [], "gone": []},
    )
    MODULE.unpack(again, folder, "toy", 100)
    assert json.loads((folder / "salt-0.json").read_text()) == run
    assert json.loads((folder / "tree-0.json").read_text()) == own | alike
    # a file of another config is no run of this name
    (folder / "tree-0.json").write_text(json.dumps(own | {"changes": []}))
    assert not MODULE.is_of(folder / "tree-0.json", "tree")
    MODULE.unpack(again, folder, "toy", 100)
    assert MODULE.is_of(folder / "tree-0.json", "tree")


def test_runs_of_another_budget_do_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    MODULE.unpack(earlier(tmp_path), folder, "toy", 200)
    MODULE.unpack(earlier(tmp_path), folder, "shapes", 100)
    MODULE.unpack(tmp_path / "none.json", folder, "toy", 100)
    assert not folder.exists()
