"""Read YAML strictly: what is ambiguous or dangerous in it is an error."""

from __future__ import annotations

from typing import Any

import yaml

from flowrl.core.errors import ConfigError


def parse_yaml(text: str, where: str) -> Any:
    """Parse one YAML document into plain data.

    Raises ConfigError for tags, anchors, duplicate or non-text keys.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: not a config: nested too deeply") from error


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader without duplicate keys and without aliases.

    Of duplicate keys the last one would win; aliases can grow without bounds.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            problem = "aliases (*name) are not allowed; write it out"
            raise yaml.constructor.ConstructorError(None, None, problem, mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a key that comes twice or is no text."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = f"duplicate key {key!r}" if isinstance(key, str) and key in seen else ""
            if not isinstance(key, str):
                problem = f"expected a text as key, got {key!r}"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
