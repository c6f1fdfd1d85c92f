"""One part of a pipeline, as its files describe it."""

from __future__ import annotations

from typing import Any, NamedTuple


class WeightlessPart(NamedTuple):
    """One part of a pipeline, without weights."""

    library: str  # diffusers or transformers
    kind: str  # name of the class
    settings: dict[str, Any]  # its config.json
