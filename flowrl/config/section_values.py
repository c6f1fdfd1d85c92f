"""From the keys and values of a plain section to the checked record."""

from __future__ import annotations

import typing
from typing import Any

from flowrl.config.arguments import arguments, settable
from flowrl.config.mistakes import Collector, renamed
from flowrl.config.overrides import Source
from flowrl.config.section import Section
from flowrl.config.values import show
from flowrl.core.errors import ConfigError, unknown


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
                said = renamed(below) or f"{key} {unknown(name, inner, 'section')}"
                raise ConfigError(f"{source.at(below)}: {said}")
            # null is allowed where the annotation says `| None`
            left_out = child is None and hints[name] is not inner[name]
            made = None if left_out else make_section(inner[name], child, below, source)
            built[name] = made
    found.close()
    return section(**built)
