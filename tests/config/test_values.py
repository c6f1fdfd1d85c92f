"""Values against annotations. Expected values are what YAML 1.2 and the annotation say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Interval, MinLen
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from typing_extensions import TypedDict

from flowrl.config.overrides import parse_override
from flowrl.config.values import convert, schema_of, type_words
from flowrl.core.errors import ConfigError

Share = Annotated[float, Interval(ge=0, lt=1)]


class Lora(TypedDict, total=False):
    """Options of a section of their own."""

    rank: Annotated[int, Ge(1)]
    targets: Sequence[str]


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, float, 1.0),
        ("1e-4", float, 1e-4),
        ("-12", int, -12),
        ("1", int | str, "1"),  # the exact member of a union comes first
        ("1", float | None, 1.0),
        (1, float | int, 1),
        ([1, "2"], tuple[float, ...], (1.0, 2.0)),
        ((1,), Sequence[int], [1]),
        ({"a": "3"}, dict[str, int] | None, {"a": 3}),
        ({"rank": "3"}, Lora | None, {"rank": 3}),
        ("x", Path, Path("x")),
        (math.inf, float, math.inf),
        (object, Any, object),
        (None, Annotated[int, Ge(1)] | None, None),
    ],
)
def test_convert(value: Any, hint: Any, expected: Any) -> None:
    got = convert(value, hint, "key")
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        (True, int, "key: expected a whole number, got True (true or false)"),
        (2.0, int, "key: expected a whole number, got 2.0 (a number)"),
        (True, float, "key: expected a number, got True (true or false)"),
        (1, bool, "key: expected true or false, got 1 (a whole number)"),
        (1, str, "key: expected a text, got 1 (a whole number)"),
        ("nan", float, "key: expected a number, got 'nan' (a text)"),
        (math.nan, float, "key: expected a number, got nan (a number)"),
        ("inf", float, "key: expected a number, got 'inf' (a text)"),
        ("1_000", float, "key: expected a number, got '1_000' (a text)"),
        ("1e3", int, "key: expected a whole number, got '1e3' (a text)"),
        (10**400, float, "... (a whole number)"),
        (True, Literal[1, 2], "key: expected one of 1, 2, got True (true or false)"),
        ("ema2", Literal["ema", "old"], "expected one of 'ema', 'old', got 'ema2' (a text); did"),
        ("men", Literal["mean"] | float, "one of 'mean' or a number, got 'men' (a text); did you"),
        ("ab", list[str], "key: expected a list, each a text, got 'ab' (a text)"),
        ([1], tuple[int, int], "key: expected a list of 2 values, each a whole number, got [1]"),
        ([], Annotated[list[int], MinLen(1)], "expected a list that is not empty, each a whole"),
        ("", Annotated[str, MinLen(1)], "key: expected a text that is not empty, got ''"),
        (0, Annotated[int, Ge(1)], "key: expected a whole number >= 1, got 0 (a whole number)"),
        ([0.5, 1], tuple[Share, Share], "key[1]: expected a number >= 0 and < 1, got 1 (a whole"),
        (4, dict[str, int] | None, "key: expected a mapping to a whole number or null, got 4"),
        ({"a": "x"}, float | dict[str, float], "key.a: expected a number, got 'x' (a text)"),
        (4, Lora | None, "key: expected a mapping of rank, targets or null, got 4 (a whole"),
        ({"rnk": 4}, Lora | None, "key.rnk: key has no option 'rnk'; did you mean 'rank'? (there"),
        ({"rank": 0}, Lora, "key.rank: expected a whole number >= 1, got 0 (a whole number)"),
    ],
)
def test_what_is_refused(value: Any, hint: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(value, hint, "key")
    assert message in str(caught.value)


def test_everything_that_is_wrong_inside_a_value_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        convert({"rnk": 4, "rank": "x", "targets": ["a", 1]}, Lora | None, "model.lora")
    said = str(caught.value)
    assert said.startswith("3 mistakes:\n") and "model.lora.targets[1]: expected a text" in said
    assert "model.lora.rnk: model.lora has no option" in said and "model.lora.rank: exp" in said


@pytest.mark.parametrize("hint", [Tensor | None, Callable[[int], int], dict[str, Tensor]])
def test_what_yaml_cannot_hold_has_no_schema(hint: Any) -> None:
    with pytest.raises(TypeError, match="cannot be written in YAML"):
        schema_of(hint)


def test_schema_and_words() -> None:
    """The schema is JSON schema 2020-12 without references; words are made from it."""
    inner = {"type": "integer", "minimum": 1}
    names = {"type": "array", "items": {"type": "string"}}
    options = {"rank": inner, "targets": names}
    mapping = {"type": "object", "properties": options, "additionalProperties": False}
    assert schema_of(Lora | None) == {"anyOf": [mapping, {"type": "null"}]}
    assert type_words(schema_of(Path)) == "a path" and type_words(schema_of(Any)) == "any value"
    assert (
        type_words(schema_of(list)) == "a list"
        and type_words(schema_of(dict[str, Any])) == "a mapping"
    )


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_python_writing_of_a_number_is_a_number(value: float) -> None:
    parts, read = parse_override(f"x={value!r}")
    assert parts == ["x"]
    assert convert(read, float, "x") == value  # 1e-05 is a text to YAML 1.1
