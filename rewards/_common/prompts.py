"""What prompts hold: the text of each cell of an image that is a grid, and words put in front, for
rewards that compare what a scorer says of two."""

from __future__ import annotations

import re

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch

SUB_PROMPT = re.compile(r'[."]\s+[A-Z0-9\-\[\]]+:')
"""Where the text of one cell begins, as in PaCo-RL's prompts: ``. [TOP-LEFT]:``."""

AXES = (("TOP", "BOTTOM"), ("LEFT", "RIGHT"))
"""What labels call the two ends of rows and of columns; PaCo-RL's prompts have MIDDLE, too."""

MIDDLE = {"MIDDLE", "CENTER", "CENTRE"}


def cell_texts(prompt: str, grid: tuple[int, int], where: str, who: str) -> list[str]:
    """Return the text of each cell of a grid of (rows, columns), without its label and with a full
    stop at its end (PaCo-RL).

    The texts belong to the cells row by row, in the prompt's order; labels decide nothing. Raises
    DataError unless there is a text for each cell, none empty, and for a label that names another
    place than its cell's.
    """
    rows, columns = grid
    cells = rows * columns
    texts = [text.strip() for text in SUB_PROMPT.split(prompt)[1:]]
    if len(texts) != cells or not all(texts):
        raise DataError(
            f"{where}: {who}: expected a text for each of {cells} cells, begun by a label in "
            f"capitals after a full stop, such as '. [LEFT]: a cat', got {len(texts)} of which "
            f"{texts.count('')} are empty, in {prompt[:120]!r}"
        )
    _check_labels(prompt, grid, where, who)
    return [text if text.endswith(".") else f"{text}." for text in texts]


def _check_labels(prompt: str, grid: tuple[int, int], where: str, who: str) -> None:
    """Raise DataError for the first label of a place, such as [TOP]-[LEFT], that is not where its
    cell is. Labels of no place, such as A1, are not looked at."""
    for number, found in enumerate(SUB_PROMPT.finditer(prompt)):
        place = divmod(number, grid[1])
        label = found[0][1:-1].strip()
        if not _fits(label, place, grid):
            raise DataError(
                f"{where}: {who}: expected the texts of a {grid[0]}x{grid[1]} grid row by row, got "
                f"{label} for row {place[0] + 1}, column {place[1] + 1}: put them in that order, "
                f"or call them A1, A2, ..., in {prompt[:120]!r}"
            )


def _fits(label: str, place: tuple[int, int], grid: tuple[int, int]) -> bool:
    """Say whether a label can name the cell at (row, column): LEFT is in the left half, so that
    MIDDLE-LEFT can be the second of four columns."""
    words = set(re.findall("[A-Z]+", label))
    for (first, last), index, count in zip(AXES, place, grid, strict=True):
        beyond = 2 * index - (count - 1)  # below 0 in the first half
        if count > 1 and ((first in words and beyond >= 0) or (last in words and beyond <= 0)):
            return False
    if not words & MIDDLE:
        return True
    # in the middle of an axis that has one; beside TOP or BOTTOM alone, of the columns
    both = [*zip(place, grid, strict=True)]
    axes = both[1:] if words & {*AXES[0]} and not words & {*AXES[1]} else both
    inside = [0 < index < count - 1 for index, count in axes if count > 2]
    return any(inside) or not inside


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
