"""Prompts of images that are grids: what each cell of the grid has to show."""

from __future__ import annotations

import re

from flowrl.core.errors import DataError

SUB_PROMPT = re.compile(r'[."]\s+[A-Z0-9\-\[\]]+:')
"""Where the text of one cell begins, as in PaCo-RL's prompts: ``. [TOP-LEFT]:``."""


def cell_texts(prompt: str, cells: int, where: str, who: str) -> list[str]:
    """Return the text of each of a prompt's cells, in the prompt's order, without its label and
    with a full stop at its end (PaCo-RL). Raises DataError unless there are `cells` texts, none
    empty."""
    texts = [text.strip() for text in SUB_PROMPT.split(prompt)[1:]]
    if len(texts) != cells or not all(texts):
        raise DataError(
            f"{where}: {who}: expected a text for each of {cells} cells, begun by a label in "
            f"capitals after a full stop, such as '. [LEFT]: a cat', got {len(texts)} of which "
            f"{texts.count('')} are empty, in {prompt[:120]!r}"
        )
    return [text if text.endswith(".") else f"{text}." for text in texts]
