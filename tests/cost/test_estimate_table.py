"""The table of estimates: its result file, and rows that are counted anew."""

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


def test_rows_of_other_libraries_are_refused(script: ModuleType) -> None:
    old = {"libraries": {"torch": "2"}, "configs": {"sd3/awm": 1}}
    with pytest.raises(ConfigError, match="estimate all anew"):
        script.merged(old, {"libraries": {"torch": "3"}, "configs": {"sd3/awm": 2}})


def test_a_row_of_the_page_by_hand(script: ModuleType) -> None:
    """The first config that the page shows, with a peak of 3 GiB in its first phase."""
    result = json.loads(script.PLAIN.read_text(encoding="utf-8"))
    name = script.SHOWN[0]
    row = result["configs"][name]
    row["peak"][next(iter(row["peak"]))] = 3 * 2**30
    page = script.put_into_page(script.PAGE.read_text(), {**result, "configs": {name: row}})
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")][:1]
    assert "| 3.0 GiB |" in line
