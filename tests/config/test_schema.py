"""The committed JSON schema is the code's, and editors can trust it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from flowrl.config.schema import ABOUT, config_schema, functions
from flowrl.config.sections import SECTIONS
from flowrl.core.shipped_files import list_configs, resource

SCHEMA: dict[str, Any] = json.loads(resource("configs/schema.json").read_text(encoding="utf-8"))


def errors(config: Any) -> list[str]:
    """Return what the schema has against a config."""
    found = Draft202012Validator(SCHEMA).iter_errors(config)
    return [f"{error.json_path}: {error.message}" for error in found]


def shipped(name: str) -> dict[str, Any]:
    """Read a shipped config as plain data."""
    found: dict[str, Any] = yaml.safe_load(resource(f"configs/{name}.yaml").read_text("utf-8"))
    return found


def test_the_committed_schema_is_the_one_of_the_code() -> None:
    """If not: `flowrl schema --out configs/schema.json`."""
    made = json.dumps(config_schema(), indent=2) + "\n"
    assert made == resource("configs/schema.json").read_text(encoding="utf-8")
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", list_configs())
def test_shipped_configs_fit_and_name_it(name: str) -> None:
    text = resource(f"configs/{name}.yaml").read_text(encoding="utf-8")
    assert text.splitlines()[0] == "# yaml-language-server: $schema=../schema.json"
    assert errors(yaml.safe_load(text)) == []


@pytest.mark.parametrize(
    ("section", "change", "part"),
    [
        ("plan", {"sise": 3}, "$.plan: Additional properties are not allowed ('sise' was unexp"),
        ("plan", {"steps": "ten"}, "$.plan.steps: 'ten' is not of type 'integer'"),
        ("credit", {"std": "all"}, "$.credit.std: 'all' is not one of ['group', 'global']"),
        ("model", {"lora": {"rnk": 4}}, "$.model.lora: {'rnk': 4} is not valid"),
        ("loss", {"fn": "ppo"}, "$.loss.fn: 'ppo' is not valid"),
        ("optimizer", {"lr": 0}, "$.optimizer"),
        ("train", {"lr": 1e-4}, "$.train: Additional properties are not allowed ('lr' was unexp"),
        ("train", {"group": 0}, "$.train.group: 0 is less than the minimum of 1"),
        ("parts", {"mine": {"fn": "Mine"}}, "$.parts.mine.fn: 'Mine' is not valid"),
        ("grid", {}, "$: Additional properties are not allowed ('grid' was unexpected)"),
    ],
)
def test_mistakes_are_marked(section: str, change: dict[str, Any], part: str) -> None:
    config = shipped("shapes/flow_grpo")
    config[section] = {**config.get(section, {}), **change}
    assert any(part in error for error in errors(config)), errors(config)


def test_what_may_be_left_out_or_stand_in_a_list() -> None:
    """Without fn the optimizer is AdamW; null is off; arguments of a plugin are open."""
    config = shipped("shapes/flow_grpo")
    config |= {"optimizer": {"lr": 1e-4}, "kl": None, "select": [{"fn": "fraction", "share": 0.5}]}
    config["plan"] = {"fn": "my_package.plans.mine", "anything": 1}
    config["parts"] = {"mine": {"fn": "my_package.Mine", "anything": 1}}
    config["rewards"]["shapes"]["transform"] = [{"fn": "rank"}, {"fn": "clip", "low": 0}]
    assert errors(config) == []
    config["optimizer"] = {"lr": 1e-4, "momentum": 1}
    assert any("momentum" in error for error in errors(config))


def test_every_key_says_what_it_is_for() -> None:
    assert all(it["description"] for it in SCHEMA["properties"].values()), SCHEMA["properties"]
    for key in SECTIONS:
        keys = SCHEMA["properties"][key]["properties"]
        assert [name for name, it in keys.items() if not it["description"]] == []
    # parts are of plugins alone
    assert all(functions(axis) for axis in ABOUT if axis not in ("name", "seed", "parts"))
