"""A memory of the monitors that no run wrote is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl.training.checkpoint_state import checked_memory


def test_a_memory_as_runs_write_it() -> None:
    found = {"rewards": {"0": 0.5}, "judged": -1, "told": ["drift"], "norms": [1.0], "own": {}}
    assert checked_memory({**found, "stopped": None}) == {**found, "stopped": None}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kl_factor", "x"),
        ("norms", 3),
        ("start", {"diversity": 1.0}),
        ("lasting", []),
        ("rewards", {"0": "x"}),
        ("judged", "x"),
        ("firing", {"drift": 1.5}),
        ("findings", 1.5),
        ("stopped", ["drift"]),
        ("stopped", {"monitor": ["drift"]}),
        ("kl_factor", -1.0),
        ("lr_factor", 1e300),
        ("norms", [-1.0]),
        ("rest", {"drift": -1}),
        ("refreshed", {"slow": 1.5}),
    ],
)
def test_a_wrong_kind_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"monitors\.{key}"):
        checked_memory({key: value})
    with pytest.raises(ValueError, match="monitors: expected an object"):
        checked_memory([key])
