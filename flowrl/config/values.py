"""Values of a config against annotations: pydantic checks, messages speak as YAML does.

A bool is no int and an int is a float. The text of a number, as YAML 1.1 reads ``1e-4``, is a
number where one is expected; NaN never is. Limits are those of annotated_types:
``Annotated[int, Ge(1)]``. All mistakes of a config are one message (`Collector`).
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
)
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from typing_extensions import TypedDict, is_typeddict

from flowrl.core.errors import ConfigError, near, unknown
from flowrl.core.files import shortened

Schema = dict[str, Any]  # a JSON schema without references
MOST = 1e300  # a limit that only keeps infinity out

_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "null": "null",
}
_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}
_SAID = {2**31: "2**31", 2**63: "2**63"}
_INT = re.compile(r"[+-]?[0-9]{1,99}")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def convert(value: Any, hint: Any, key: str = "", at: Callable[[str], str] = str) -> Any:
    """Return `value` as the annotated type.

    Raises Mistakes with one line for each thing that is wrong in it; `at` says where a dotted key
    was set.
    """
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        raise Mistakes(_lines(error, value, schema_of(hint), key, at)) from None


@functools.cache
def schema_of(hint: Any) -> Schema:
    """Return the JSON schema of an annotation. Raises TypeError if YAML cannot hold the type."""
    try:
        schema = _adapter(hint).json_schema()
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema) as error:
        raise TypeError(f"{hint} cannot be written in YAML") from error
    return typing.cast(Schema, _inlined(schema, schema.pop("$defs", {})))


def type_words(schema: Schema) -> str:
    """Name a type in the words of someone who writes YAML."""
    # the most telling part first: alternatives, then listed values
    if "anyOf" in schema:
        return " or ".join(map(type_words, schema["anyOf"]))
    if choices(schema):
        return "one of " + ", ".join(map(repr, choices(schema)))
    if schema.get("format") == "path":
        return "a path"
    # what holds other values names their type, too
    kind = schema.get("type", "")
    if kind == "array":
        return _words_of_list(schema)
    if kind == "object":
        return _words_of_mapping(schema)
    if schema.get("minLength") == 1:
        return "a text that is not empty"
    # limits of numbers; MOST only says "finite"
    limits = {sign: schema[name] for name, sign in _LIMITS.items() if name in schema}
    words = _WORDS.get(kind, "any value")
    if max(limits.values(), default=0) == MOST:
        words = "a finite number"
    said = [f"{sign} {_SAID.get(n, n)}" for sign, n in limits.items() if abs(n) != MOST]
    return f"{words} {' and '.join(said)}".rstrip()


def choices(schema: Schema) -> list[Any]:
    """Return the values that a schema lists, in a union those of all members."""
    listed: list[Any] = []
    for branch in schema.get("anyOf", ()):
        listed += choices(branch)
    listed += schema.get("enum", ())
    if "const" in schema:
        listed.append(schema["const"])
    return listed


def show(value: Any) -> str:
    """Write a value for a message: cut where it is long, and with its kind."""
    kind = _WORDS.get(_TYPES.get(type(value), ""), type(value).__name__)
    return f"{shortened(repr(value), 80)} ({kind})"


def plain(value: Any) -> Any:
    """Copy into what YAML can hold and compare; raise TypeError for anything else."""
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            raise TypeError("keys must be text")
        return {name: plain(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child) for child in value]
    if isinstance(value, Path):
        return str(value)
    if type(value) not in _TYPES or value != value:
        raise TypeError(f"{value!r} cannot be written in YAML")
    return value


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(_strict(hint))


def _strict(hint: Any, *limits: Any) -> Any:
    """Return the annotation that makes pydantic as strict as the head of this file says."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    base = origin or hint
    # limits in the annotation go along to the type inside
    if origin is Annotated:
        return _strict(args[0], *args[1:], *limits)
    # YAML 1.1 reads 1e-4 as a text, so a number may come as the text of one
    if base in (int, float):
        reader = BeforeValidator(_whole if base is int else _number)
        return Annotated[hint, Strict(), *limits, reader]
    if base in (str, bool):
        return Annotated[hint, Strict(), *limits]
    if base is Literal:
        return Annotated[hint, BeforeValidator(functools.partial(_one_of, args))]
    if base in (Union, types.UnionType):
        return _strict_union(args, limits)
    # what holds other values: their types are made strict in turn
    if base in (list, collections.abc.Sequence):
        inner: Any = _strict(args[0]) if args else Any
        return Annotated[list[inner], *limits, BeforeValidator(_list)]
    if base is tuple and args:
        members = [member if member is ... else _strict(member) for member in args]
        row: Any = tuple[*members]  # type: ignore[valid-type]
        return Annotated[row, *limits, BeforeValidator(_list)]
    if base in (dict, collections.abc.Mapping):
        return dict[str, _strict(args[1]) if args else Any]  # type: ignore[misc]
    # records of options; anything else is taken as it is
    if is_typeddict(hint) or (inspect.isclass(hint) and issubclass(hint, BaseModel)):
        return _strict_options(hint)
    return Any if isinstance(hint, str) or hint is inspect.Parameter.empty else hint


def _strict_union(members: tuple[Any, ...], limits: tuple[Any, ...]) -> Any:
    # a text stays a text in `int | str`, and 1 is whole in `float | int`
    order = {str: 1, bool: 2, int: 3, float: 4}
    strict = []
    for member in sorted(dict.fromkeys(members), key=lambda member: order.get(member, 0)):
        own = () if member is type(None) else limits
        strict.append(_strict(member, *own))
    if len(strict) == 2 and type(None) in strict:
        return Union[*strict]
    return Annotated[Union[*strict], Field(union_mode="left_to_right")]


def _strict_options(hint: Any) -> Any:
    """Return the mapping that a record of pydantic or a TypedDict is made of."""
    hints = typing.get_type_hints(hint, include_extras=True)
    fields = {name: _strict(inner) for name, inner in hints.items()}
    total = getattr(hint, "__total__", False)
    made = TypedDict(hint.__name__, fields, total=total)  # type: ignore[misc]
    setattr(made, "__pydantic_config__", ConfigDict(extra="forbid"))  # noqa: B010
    return made


def _whole(value: Any) -> Any:
    return int(value) if type(value) is str and _INT.fullmatch(value) else value


def _number(value: Any) -> Any:
    if type(value) is int or (type(value) is str and _FLOAT.fullmatch(value)):
        try:
            value = float(value)
        except OverflowError:
            raise ValueError("too large") from None
    if value != value:
        raise ValueError("not a number")
    return value


def _one_of(known: tuple[Any, ...], value: Any) -> Any:
    if not any(type(value) is type(choice) and value == choice for choice in known):
        raise ValueError("no choice")
    return value


def _list(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError("no list")
    return value


def _lines(
    error: ValidationError, value: Any, schema: Schema, key: str, at: Callable[[str], str]
) -> list[str]:
    """Turn pydantic's errors into lines; in a union the member counts whose inside is wrong."""
    kinds = {_path(row["loc"], value): row["type"] for row in reversed(error.errors())}
    deep = {path: kind for path, kind in kinds.items() if path} or kinds
    lines = []
    for path, kind in sorted(deep.items(), key=str):
        # the part of the value and of the schema that the path leads to
        owner, here, got, where = {}, schema, value, key
        for step in path:
            owner, here, got = here, _inside(here, step), got[step]
            where += f"[{step}]" if isinstance(step, int) else f".{step}"
        if kind == "extra_forbidden":
            section = where.rpartition(".")[0]
            known = _branch(owner, "properties").get("properties", {})
            lines.append(f"{at(where)}: {section} {unknown(path[-1], known, 'option')}")
        else:
            hint = near(got, map(str, choices(here)))
            lines.append(f"{at(where)}: expected {type_words(here)}, got {show(got)}{hint}")
    return lines


def _path(loc: tuple[int | str, ...], value: Any) -> tuple[int | str, ...]:
    """Return the keys and indices of a location; pydantic also puts names of union members in."""
    path: list[int | str] = []
    for step in loc:
        inside = isinstance(value, dict) and step in value
        inside |= isinstance(value, list | tuple) and isinstance(step, int) and step < len(value)
        if inside:
            path.append(step)
            value = value[step]
    return tuple(path)


def _branch(schema: Schema, *names: str) -> Schema:
    """Return the member of a union that has one of these keys, or the schema itself."""
    branches = schema.get("anyOf", [schema])
    for branch in branches:
        if any(name in branch for name in names):
            return branch
    return schema


def _inside(schema: Schema, step: int | str) -> Schema:
    """Return the schema of one item or key."""
    if isinstance(step, int):
        found = _branch(schema, "items", "prefixItems")
        listed = found.get("prefixItems", ())
        return listed[step] if step < len(listed) else found.get("items", {})
    found = _branch(schema, "properties", "additionalProperties")
    inner = found.get("properties", {}).get(step, found.get("additionalProperties"))
    return inner if isinstance(inner, dict) else {}


def _words_of_list(schema: Schema) -> str:
    if "prefixItems" in schema:
        each = dict.fromkeys(map(type_words, schema["prefixItems"]))
        return f"a list of {len(schema['prefixItems'])} values, each {' or '.join(each)}"
    words = "a list"
    if schema.get("minItems"):
        words += " that is not empty"
    if schema.get("items"):
        words += f", each {type_words(schema['items'])}"
    return words


def _words_of_mapping(schema: Schema) -> str:
    words = "a mapping"
    inner = schema.get("additionalProperties")
    if isinstance(inner, dict) and inner:
        words += f" to {type_words(inner)}"
    if schema.get("properties"):
        words += f" of {', '.join(schema['properties'])}"
    return words


def _inlined(node: Any, known: dict[str, Any]) -> Any:
    """Put what references point to in their place, and drop the titles."""
    if isinstance(node, list):
        return [_inlined(child, known) for child in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(known[node["$ref"].rpartition("/")[2]], known)
    out = {}
    for key, value in node.items():
        if key in _LIMITS:
            out[key] = _short(value)
        elif key != "title" or isinstance(value, dict):
            out[key] = _inlined(value, known)
    return out


def _short(limit: float) -> float:
    """Return 0 for 0.0: equal annotations are one to the cache, whichever came first."""
    return int(limit) if abs(limit) < 1e15 and limit == int(limit) else limit


# ---------------------------------------------------------------------- all mistakes in one message


class Mistakes(ConfigError):
    """One or more mistakes of a config, one line for each."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = list(lines)
        message = self.lines[0]
        if len(self.lines) > 1:
            message = f"{len(self.lines)} mistakes:\n  " + "\n  ".join(self.lines)
        super().__init__(message)


class Collector:
    """Goes on after a mistake, so that a config shows all of its mistakes at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        """Note a mistake."""
        self.lines.append(line)

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Note the mistakes of a block that raises ConfigError, and go on after it."""
        try:
            yield
        except Mistakes as error:
            self.lines += error.lines
        except ConfigError as error:
            self.add(str(error))

    def close(self) -> None:
        """Raise Mistakes if there was one."""
        if self.lines:
            raise Mistakes(self.lines)
