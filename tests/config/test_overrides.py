"""Overrides, and the place that a message names."""

from __future__ import annotations

import string
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flowrl.config.overrides import Source, apply_override, parse_override
from flowrl.core.errors import ConfigError

text = st.text(string.printable)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text
names = st.text(string.ascii_letters, min_size=1)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner),
    max_leaves=6,
)
keys = st.lists(st.from_regex(r"[a-z_][a-z0-9_-]{0,8}", fullmatch=True), min_size=1, max_size=3)


@given(keys, values)
def test_override_round_trip(parts: list[str], value: Any) -> None:
    text = f"{'.'.join(parts)}={yaml.safe_dump(value, default_flow_style=True, width=10**6)}"
    assert parse_override(text) == (parts, value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.group", "expected key.subkey=value, for example optimizer.lr=1e-4"),
        ("=1", "expected key.subkey=value"),
        ("train.group=[1", "not valid YAML"),
        ("train.group=!!python/object/apply:os.getcwd []", "not valid YAML"),
        ("train.group.x=1", "train.group is '8' (a text) and has no keys of its own"),
        ("rewards.sahpes=null", "rewards has no reward 'sahpes'; did you mean 'shapes'?"),
    ],
)
def test_what_is_no_override(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_override({"train": {"group": "8"}, "rewards": {"shapes": {}}}, override)
    assert message in str(caught.value) and repr(override) in str(caught.value)


def test_the_last_override_of_a_key_is_named() -> None:
    source = Source("a.yaml", ("plan.size=1", "plan={fn: full}", "rewards.x.weight=2"))
    assert source.at("plan.size") == "override 'plan={fn: full}': plan.size"
    assert source.at("train.ema") == "a.yaml: train.ema"
    assert source.at("rewards.x") == "a.yaml: rewards.x"
    assert source.below("rewards") == "override 'rewards.x.weight=2': rewards"
