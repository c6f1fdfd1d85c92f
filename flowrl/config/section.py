"""What all plain sections of a config have in common."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from annotated_types import Interval
from pydantic import ConfigDict

from flowrl.config.mistakes import Collector
from flowrl.config.values import convert, plain

Positive = Annotated[int, Interval(ge=1, lt=2**31)]
Count = Annotated[int, Interval(ge=0, lt=2**31)]
Steps = Annotated[int, Interval(ge=1, le=1000)]  # of a sampler
Seed = Annotated[int, Interval(ge=0, lt=2**63)]
Share = Annotated[float, Interval(ge=0, le=1)]


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
