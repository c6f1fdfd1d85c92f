"""What a judge says."""

from __future__ import annotations

from typing import NamedTuple


class Answer(NamedTuple):
    """What a server said to one question."""

    text: str
    # the likeliest first tokens with their log-probs; empty where not asked for
    top: list[tuple[str, float]]
    cut: bool = False  # it ended at max_tokens
