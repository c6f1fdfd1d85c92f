"""Prompt lists that are made by code: a config or ``--suite`` names one, no file is needed.

All that is asked for is put in order by a digest of itself, so a list never changes, on no machine
and in no version of a library.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from flowrl.core.prompt_lists import geneval, motion, ocr

MADE: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "geneval/test": geneval.test_records,
    "geneval/train": geneval.train_records,
    "motion/test": motion.test_records,
    "motion/train": motion.train_records,
    "ocr/test": ocr.test_records,
    "ocr/train": ocr.train_records,
}
"""Name of a list -> what makes its records."""


@cache
def _records(name: str) -> list[dict[str, Any]]:
    return MADE[name]()


def made_records(name: str) -> list[dict[str, Any]]:
    """Return the records of a list of `MADE`, each with its prompt; they are the caller's own."""
    return [{**record} for record in _records(name)]
