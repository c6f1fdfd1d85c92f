"""What the pages need scipy for, each in a process of its own that ends: so the server, which may
stand beside a training for days, stays small."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from flowrl.evaluation.statistics import Result, Strength

Found = TypeVar("Found")


def verdict_apart(run: Path) -> list[str]:
    """Return what `flowrl.runs.report.page.verdict_of` says of a run. Raises RunError."""
    return _apart(_verdict, run)


def strengths(results: Sequence[Result], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the Bradley-Terry strengths of `names` for a page, the first one's 0."""
    return _apart(_strengths, results, names)


def _apart(function: Callable[..., Found], *arguments: Any) -> Found:
    context = multiprocessing.get_context("spawn")  # threads of the server may hold locks
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(function, *arguments).result()


def _verdict(run: Path) -> list[str]:
    from flowrl.runs.report.page import verdict_of

    return verdict_of(run)


def _strengths(results: Sequence[Result], names: Sequence[str]) -> list[dict[str, Any]]:
    from flowrl.evaluation.statistics import bradley_terry  # by scipy

    return [_plain(found) for found in bradley_terry(results, names)]


def _plain(found: Strength) -> dict[str, Any]:
    """Return a strength as JSON has it: no NaN."""
    share, low, high = found.share()
    values = {"score": found.score, "low": found.low, "high": found.high}
    values |= {"share": share, "share_low": low, "share_high": high}
    known = {key: None if value != value else round(value, 4) for key, value in values.items()}
    return {"name": found.name, "votes": found.votes, **known}
