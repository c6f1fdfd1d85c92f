"""What all plain sections of a config have in common, and how keys and values become checked
arguments: those of a section, and those of a function by its signature."""

from __future__ import annotations

import copy
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from annotated_types import Interval
from pydantic import ConfigDict

from flowrl.config.overrides import Source
from flowrl.config.values import Collector, Mistakes, convert, plain, schema_of, show
from flowrl.core.errors import ConfigError, unknown

Positive = Annotated[int, Interval(ge=1, lt=2**31)]
Count = Annotated[int, Interval(ge=0, lt=2**31)]
Steps = Annotated[int, Interval(ge=1, le=1000)]  # of a sampler
Seed = Annotated[int, Interval(ge=0, lt=2**63)]
Share = Annotated[float, Interval(ge=0, le=1)]

Parameters = dict[str, inspect.Parameter]


@dataclass(frozen=True)
class Section:
    """A plain section; its values are checked whenever one is made. Raises ConfigError."""

    __pydantic_config__: ClassVar = ConfigDict(use_attribute_docstrings=True)
    key: ClassVar[str] = ""

    def __post_init__(self) -> None:
        found = Collector()
        for name, hint in _checked_here(type(self)).items():
            with found.catch():
                convert(getattr(self, name), hint, f"{self.key}.{name}")
        found.close()

    @classmethod
    def inner(cls) -> Mapping[str, type[Section]]:
        """Return the keys that are sections of their own, which null leaves out."""
        return _inner(cls)

    def to_dict(self) -> dict[str, Any]:
        """Return the section as plain data."""
        out = {}
        for each in fields(self):
            value = getattr(self, each.name)
            out[each.name] = value.to_dict() if isinstance(value, Section) else plain(value)
        return out


_INNER: dict[type, Mapping[str, type[Section]]] = {}
_HINTS: dict[type, Mapping[str, Any]] = {}
"""What `_inner` and `_checked_here` have said of a class: to work its hints out takes longer than
to check its values."""


def _inner(section: type[Section]) -> Mapping[str, type[Section]]:
    """Return the keys of a section that are sections of their own."""
    if section not in _INNER:
        out = {}
        for name, hint in typing.get_type_hints(section).items():
            for member in typing.get_args(hint) or (hint,):
                if isinstance(member, type) and issubclass(member, Section):
                    out[name] = member
        _INNER[section] = MappingProxyType(out)
    return _INNER[section]


def _checked_here(section: type[Section]) -> Mapping[str, Any]:
    """Return the hints of the values that a section itself checks: inner ones check themselves."""
    if section not in _HINTS:
        out = {}
        for name, hint in typing.get_type_hints(section, include_extras=True).items():
            constant = typing.get_origin(hint) is ClassVar or hint is ClassVar
            if name not in _inner(section) and not constant:
                out[name] = hint
        _HINTS[section] = MappingProxyType(out)
    return _HINTS[section]


def make_section(section: type[Section], value: Any, key: str, source: Source) -> Section:
    """Make a plain section; null leaves out one that is inside another.

    Raises Mistakes with a line for each key that is unknown, wrong or missing.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{source.at(key)}: expected keys and values, got {show(value)}")
    # a section either holds values, or only sections, as `monitors` does
    inner = section.inner()
    if not inner:
        return section(**arguments(value, settable(section, everything=True), key, key, source))
    found, built, hints = Collector(), {}, typing.get_type_hints(section)
    for name, child in value.items():
        below = f"{key}.{name}"
        with found.catch():
            if name not in inner:
                said = unknown(name, inner, "section")
                raise ConfigError(f"{source.at(below)}: {key} {said}")
            # null is allowed where the annotation says `| None`
            left_out = child is None and hints[name] is not inner[name]
            made = None if left_out else make_section(inner[name], child, below, source)
            built[name] = made
    found.close()
    return section(**built)


def settable(function: Callable[..., Any], *, everything: bool) -> Parameters:
    """Return the parameters that a config may set, with evaluated annotations.

    They are those of types that YAML can hold, and keyword-only unless `everything` is set; a
    keyword like ``log_prob: Tensor | None`` is what the training loop hands over.
    """
    return dict(_settable(function, everything))


@lru_cache(maxsize=1024)  # the same few functions are asked about for every config
def _settable(function: Callable[..., Any], everything: bool) -> Parameters:
    kinds = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    if not everything:
        kinds.remove(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = vars(sys.modules[inspect.unwrap(function).__module__])
    out = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = _evaluated(parameter.annotation, names)
        if parameter.kind in kinds and _writable(hint):
            out[name] = parameter.replace(annotation=hint)
    return out


def arguments(
    given: Mapping[str, Any],
    known: Parameters,
    key: str,
    owner: str,
    source: Source,
    besides: Sequence[str] = (),
) -> dict[str, Any]:
    """Check the arguments of a section and fill in the defaults.

    A default that YAML cannot hold stays with the function. Raises Mistakes with a line for each
    unknown, wrong and missing argument; `besides` names further keys that may have been meant.
    """
    found, out, missing = Collector(), {}, []

    # names that the function does not have
    for name in given:
        if name in known:
            continue
        said = unknown(name, [*known, *besides], "argument")
        found.add(f"{source.at(f'{key}.{name}')}: {owner} {said}")

    # values, and defaults where there is none
    for name, parameter in known.items():
        if name in given:
            with found.catch():
                out[name] = _value(given[name], parameter, f"{key}.{name}", source)
        elif parameter.default is not inspect.Parameter.empty:
            _fill_in(out, parameter)
        else:
            missing.append(name)

    if missing:
        needs = f"needs {' and '.join(missing)}; it takes {', '.join(known)}"
        found.add(f"{source.at(key)}: {owner} {needs}")
    found.close()
    return out


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, names, include_extras=True)["it"]
    except (NameError, AttributeError):
        return annotation  # only a type checker can see that name; the value stays unchecked


def _writable(hint: Any) -> bool:
    try:
        schema_of(hint)
    except TypeError:
        return False
    return True


def _value(value: Any, parameter: inspect.Parameter, key: str, source: Source) -> Any:
    try:
        return convert(value, parameter.annotation, key, source.at)
    except Mistakes:
        # A default may break its own annotation (`size: int = None`): what dump() writes must load.
        default = parameter.default
        written = list(default) if isinstance(default, tuple) else default
        if type(value) is type(written) and value == written:
            return copy.deepcopy(default)
        raise


def _fill_in(out: dict[str, Any], parameter: inspect.Parameter) -> None:
    try:
        plain(parameter.default)
    except TypeError:
        return
    try:
        out[parameter.name] = convert(parameter.default, parameter.annotation)
    except Mistakes:
        out[parameter.name] = copy.deepcopy(parameter.default)
