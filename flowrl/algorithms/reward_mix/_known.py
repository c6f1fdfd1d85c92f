"""Names of rewards that an aggregator's options give."""

from __future__ import annotations

from collections.abc import Iterable

from flowrl.core.errors import ConfigError
from flowrl.core.types import Scores


def check_known(where: str, names: Iterable[str], scores: Scores) -> None:
    """Raise ConfigError for a name that no reward has."""
    strange = [name for name in names if name not in scores.values]
    if strange:
        raise ConfigError(
            f"{where}: there is no reward {strange[0]!r} (there is: {', '.join(scores.values)})"
        )
