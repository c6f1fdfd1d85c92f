"""Look at images a few at a time, in several threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

CHUNK = 128
"""Images at a time: few enough for the processor's cache."""


def in_chunks(look: Callable[[np.ndarray], tuple[Any, ...]], pixels: np.ndarray) -> list[Any]:
    """Call `look` on a few of the images [N, ...] at a time, in torch's number of threads -> its
    columns, each joined along its first axis; None where they are None.

    Right only for what says of one image nothing that depends on the others.
    """
    parts = [pixels[i : i + CHUNK] for i in range(0, max(len(pixels), 1), CHUNK)]
    threads = min(torch.get_num_threads(), len(parts))
    if threads == 1:
        found = [look(part) for part in parts]
    else:
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(look, parts))
    columns = zip(*found, strict=True)
    return [None if rows[0] is None else np.concatenate(rows) for rows in columns]
