"""The table of estimates: its result file, rows that are counted anew, and measured peaks."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
from estimatekit import sizes
from scriptkit import script_module

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.cost.architecture import tuning_of
from flowrl.cost.memory import count_weights
from flowrl.cost.meta_run import workload_of


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_module("results/estimates")


def test_the_result_file_is_of_these_configs(script: ModuleType) -> None:
    """All of them; and what is cheap to count again, of a config of each kind: parameters, and the
    parts that are kept."""
    result = json.loads(script.PLAIN.read_text(encoding="utf-8"))
    assert list(result["configs"]) == script.released_configs()
    for name in ("sd3/flow_grpo", "flux/grpo_guard", "sd15/dance_grpo"):
        config, row = load_config(name), result["configs"][name]
        assert row["kept"] == sizes(config), name
        architecture = workload_of(config).architecture
        counted = count_weights(architecture, tuning_of(config))
        assert row["parameters"]["network"] == counted.network
        assert row["parameters"]["trained"] == counted.trained


def test_some_configs_are_counted_anew_and_the_rest_is_kept(script: ModuleType) -> None:
    old = {"libraries": {"torch": "2"}, "configs": {"sd3/awm": 1, "sd3/gone": 2, "sd3/crd": 3}}
    new = {"libraries": {"torch": "2"}, "configs": {"flux/g2rpo": 4, "sd3/crd": 5}}
    assert list(script.merged(old, new)["configs"].items()) == [
        ("flux/g2rpo", 4),
        ("sd3/awm", 1),
        ("sd3/crd", 5),
    ]


def test_rows_of_other_libraries_join_where_both_give_the_same(script: ModuleType) -> None:
    """A row that both count alike vouches for the new ones, which say what they were counted
    with."""
    same, more = {"peak": 1}, {"peak": 2}
    old = {"libraries": {"torch": "2"}, "configs": {"sd3/awm": {**same, "measured": 7}}}
    new = {"libraries": {"torch": "3"}, "configs": {"sd3/awm": same, "flux/g2rpo": more}}
    joined = script.merged(old, new)
    assert joined["libraries"] == old["libraries"]
    assert joined["configs"] == {
        "flux/g2rpo": {**more, "libraries": {"torch": "3"}},
        "sd3/awm": {**same, "measured": 7},
    }
    lines = script.libraries_of(joined)
    said = (
        "Counted with torch 2. With torch 3, which gives the same numbers where both were tried: "
        "`flux/g2rpo`."
    )
    assert " ".join(lines) == said and max(map(len, lines)) <= 100
    # one that differs, or none in both
    other = {"libraries": {"torch": "3"}, "configs": {"sd3/awm": more, "flux/g2rpo": more}}
    with pytest.raises(ConfigError, match="and sd3/awm differ; name two"):
        script.merged(old, other)
    with pytest.raises(ConfigError, match="no config is in both"):
        script.merged(old, {**new, "configs": {"flux/g2rpo": more}})


def test_a_measured_peak_takes_its_place(script: ModuleType) -> None:
    result = json.loads(script.PLAIN.read_text(encoding="utf-8"))
    page = script.PAGE.read_text(encoding="utf-8")
    # the page has some of the rows, here it gets all
    assert page.count("not measured |") == len(script.SHOWN)
    page = script.put_into_page(page, result)
    assert page.count("not measured |") == len(result["configs"])
    next(iter(result["configs"].values()))["measured"] = 3 * 2**30
    filled = script.put_into_page(page, result)
    there = page.count(" 3.0 GiB |")  # estimates of that size
    assert filled.count(" 3.0 GiB |") == there + 1
    assert script.put_into_page(filled, result) == filled
