"""All mistakes of a config in one message: each line says where, what was expected, what came."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from flowrl.core.errors import ConfigError, unknown

_MOST_MEANT = 3  # keys of sections that are named for one that stands alone


class Mistakes(ConfigError):
    """One or more mistakes of a config, one line for each."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = list(lines)
        several = f"{len(self.lines)} mistakes:\n  " + "\n  ".join(self.lines)
        super().__init__(several if len(self.lines) > 1 else self.lines[0])


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


def unknown_section(
    key: str, known: Sequence[str], raw: Mapping[str, Any], sections: Mapping[str, type]
) -> str:
    """Say that a config has no such section; a few sections that have a key of that name are named
    in place of all sections."""
    owners = [name for name in known if isinstance(raw.get(name), dict) and key in raw[name]]
    for name, section in sections.items():
        if key in {each.name for each in fields(section)}:
            owners.append(name)
    meant = [f"{name}.{key}" for name in dict.fromkeys(owners)]
    if 0 < len(meant) <= _MOST_MEANT:
        return f"the config has no section {key!r}; did you mean {' or '.join(meant)}?"
    return f"the config {unknown(key, known, 'section')}"
