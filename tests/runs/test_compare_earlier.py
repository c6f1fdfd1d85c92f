"""Files of comparisons that an earlier version wrote: keys that came later are their defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from comparekit import SMALL, plan, tick

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.runs.compare import earlier_files
from flowrl.runs.compare.budgets import different
from flowrl.runs.compare.compare import run_comparison as compare
from flowrl.runs.compare.earlier_files import config_then, setting_then
from flowrl.runs.compare.result_file import setting, without_seed

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("gone", "now", "said"),
    [
        ("rewards.shapes.mode", "rewards.shapes.mode=graded", "rewards.shapes.mode"),
        ("train.threads", "train.threads=3", "train.threads (None and 3)"),
        ("train", "train.threads=3", "train"),
        ("samples", "samples.seed=77", "samples"),
        ("eval", "eval.seed=77", "eval"),
        ("model", "model.path=assets/shapes-sdxl", "model"),
    ],
)
def test_what_has_to_be_equal_is_not_taken_from_today(gone: str, now: str, said: str) -> None:
    """A key that came later has its default; a section that is missing is no section."""
    equal = setting(load_config("shapes/awm", ["eval.score=shapes"]))
    section, *inner = gone.split(".")
    part = equal
    for key in [section, *inner][:-1]:
        part = part[key]
    del part[gone.split(".")[-1]]
    other = load_config("shapes/awm", ["eval.score=shapes", now])
    (found,) = different(setting_then(equal, other, setting), setting(other))
    assert found.startswith(said)


def test_keys_inside_a_list_of_sections() -> None:
    """One of two selections lacks a key: it is that selection's default. A list of another length
    stays as it is."""
    select = "[{fn: nonzero}, {fn: largest, share: 0.5}]"
    now = load_config("shapes/awm", [f"select={select}"])
    whole = without_seed(now)
    kept = {**whole, "select": [{"fn": "nonzero"}, {"fn": "largest", "share": 0.5}]}
    assert kept["select"] != whole["select"]
    assert config_then(kept, now, without_seed) == whole
    other = {"select": kept["select"][1:]}
    assert earlier_files._with_missing(other, whole)["select"] == other["select"]


def _without(stored: dict[str, Any], *keys: str) -> None:
    """Take keys out, as if they were of a later version."""
    for key in keys:
        section, name = key.split(".")
        del stored[section][name]


@pytest.mark.integration
def test_a_file_of_an_earlier_version_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result file and the base model's lack keys that have their defaults now."""
    tick(monkeypatch)
    what = plan(tmp_path, "toy-a", seeds=(0,), overrides=(*SMALL, "eval.score=red"))
    compare(what, quiet=True)
    base = what.runs / "base" / "result.json"
    kept, judged = (json.loads(file.read_text()) for file in (what.out, base))
    _without(kept["configs"][0]["config"], "train.empty_prompts", "eval.best_of", "credit.eps")
    for equal in (kept["settings"]["equal"], judged["setting"]):
        _without(equal, "eval.best_of", "samples.seed")
    what.out.write_text(json.dumps(kept))
    base.write_text(json.dumps(judged))
    more = compare(what._replace(seeds=(0, 1)), quiet=True)
    assert [run["seed"] for run in more["configs"][0]["seeds"]] == [0, 1]
    # a default that is another one now is not taken for what there was
    eps = what._replace(overrides=(*what.overrides, "credit.eps=0.01"), seeds=(2,))
    with pytest.raises(ConfigError, match=r"toy-a: credit.eps \(0.0001 and 0.01\)"):
        compare(eps, quiet=True)


def test_what_cannot_be_loaded_today_stays_as_it_is() -> None:
    now = load_config("shapes/awm")
    gone = without_seed(now) | {"credit": {"fn": "gone_by_now"}}
    del gone["train"]["empty_prompts"]
    assert config_then(gone, now, without_seed) == gone
    assert setting_then({"eval": {"gone": 1}}, now, setting) == {"eval": {"gone": 1}}
