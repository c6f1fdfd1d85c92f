"""Words that are put in front of prompts, for rewards that compare what a scorer says of two."""

from __future__ import annotations

from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch


def check_words(words: list[str] | None, who: str) -> list[str]:
    """Return a reward's words, none for None. Raises ConfigError for a list without words, or an
    empty word."""
    if words is None:
        return []
    fits = isinstance(words, list) and all(isinstance(word, str) for word in words)
    if not fits or not words or not all(word.strip() for word in words):
        raise ConfigError(
            f"{who}: words: expected a list of words for the front of a prompt, such as [Real, "
            f"Detailed], got {words!r}"
        )
    return [word.strip() for word in words]


def with_words(batch: RewardBatch, words: list[str]) -> RewardBatch:
    """Put one of the words, and a full stop, in front of each prompt: the first in front of those
    of group 0, and so on in turn."""
    if not words:
        return batch
    turns = (batch.group % len(words)).tolist()
    prompts = zip(turns, batch.prompts, strict=True)
    return batch._replace(prompts=[f"{words[turn]}. {prompt}" for turn, prompt in prompts])
