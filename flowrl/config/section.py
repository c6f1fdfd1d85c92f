"""What all plain sections of a config have in common."""

from __future__ import annotations

import typing
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Interval
from pydantic import ConfigDict

from flowrl.config.mistakes import Collector
from flowrl.config.values import convert, plain

Positive = Annotated[int, Ge(1)]
Count = Annotated[int, Ge(0)]
Seed = Annotated[int, Interval(ge=0, lt=2**63)]
Share = Annotated[float, Interval(ge=0, le=1)]


@dataclass(frozen=True)
class Section:
    """A plain section; its values are checked whenever one is made. Raises ConfigError."""

    __pydantic_config__: ClassVar = ConfigDict(use_attribute_docstrings=True)
    key: ClassVar[str] = ""

    def __post_init__(self) -> None:
        found, inner = Collector(), self.inner()
        for name, hint in typing.get_type_hints(type(self), include_extras=True).items():
            if name in inner:  # has checked itself
                continue
            if typing.get_origin(hint) is not ClassVar and hint is not ClassVar:
                with found.catch():
                    convert(getattr(self, name), hint, f"{self.key}.{name}")
        found.close()

    @classmethod
    def inner(cls) -> dict[str, type[Section]]:
        """Return the keys that are sections of their own, which null leaves out."""
        out = {}
        for name, hint in typing.get_type_hints(cls).items():
            for member in typing.get_args(hint) or (hint,):
                if isinstance(member, type) and issubclass(member, Section):
                    out[name] = member
        return out

    def to_dict(self) -> dict[str, Any]:
        """Return the section as plain data."""
        out = {}
        for each in fields(self):
            value = getattr(self, each.name)
            out[each.name] = value.to_dict() if isinstance(value, Section) else plain(value)
        return out
