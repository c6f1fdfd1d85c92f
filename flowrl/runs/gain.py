"""Which evaluation of a run is the best, and what training changed on the test prompts: the
difference with its interval, in one sentence. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flowrl.core.files import is_finite_number
from flowrl.runs.folder import EVALS, RunPath, read_rows

Row = Mapping[str, Any]


def score_of(row: Row) -> float | None:
    """Return the headline score of an evaluation; None where it has none, or no finite one."""
    value: Any = row.get(str(row.get("score")))
    if not is_finite_number(value):
        return None
    return float(value)


def best_first(rows: Sequence[Row]) -> list[Row]:
    """Sort the evaluations after training began by score, the best first; of equals the earlier.

    Only those of the last one's score count, since a run that goes on may be given another. Those
    of a comparison, which is about the end of a budget, do not.
    """
    after = [row for row in rows if "marks" not in row and row["iteration"] > 0]
    return scored_first(after)


def scored_first(rows: Sequence[Row]) -> list[Row]:
    """Sort the evaluations that have the last one's score by it, the best first; of equals the
    earlier."""
    known = []
    for row in rows:
        if row.get("score") == rows[-1].get("score") and score_of(row) is not None:
            known.append(row)
    return sorted(known, key=_rank)


def _rank(row: Row) -> tuple[float, int]:
    """Return the place of an evaluation that has a score: the best first, then the earlier."""
    return -(score_of(row) or 0.0), row["iteration"]


def best_iteration(rows: Sequence[Row]) -> int | None:
    """Return the iteration of the best evaluation; None before there is one."""
    found = best_first(rows)
    if not found:
        return None
    return int(found[0]["iteration"])


EXACT = 1e-4  # means of prompts are kept with six digits


class Gain(NamedTuple):
    """The change of the headline score on the test prompts, from before training to the last
    evaluation."""

    score: str  # name of the headline reward
    before: float
    after: float
    change: float
    interval: tuple[float, float] | None  # 95 %, prompts paired; None where nobody knows it
    iteration: int  # of the last evaluation
    prompts: int  # that both evaluations scored
    images: int  # of each evaluation
    points: bool  # the score is a share of right images: differences are points of a hundred

    @property
    def certain(self) -> bool:
        """Say whether chance alone explains no such change: 0 is outside of the interval."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    @property
    def sentence(self) -> str:
        """Say it in one sentence."""
        if self.interval is None:
            return (
                f"{self.score} changed by {self._said(self.change, sign=True)}; whether by chance, "
                "these evaluations do not tell (those of two test prompts or more do)"
            )
        low, high = self.interval
        images = f"{self.images:,} images of {self.prompts:,} test prompts"
        if low == high == 0:
            return f"{self.score} did not change ({images})"
        if self.certain:
            ends, verb = sorted((abs(low), abs(high))), "loses"
            if low > 0:
                verb = "gains"
            of = self._said(ends[0], unit=False)
            return f"{self.score} {verb} {of} to {self._said(ends[1])} (95 % interval, {images})"
        half = (high - low) / 2
        if self.points and half >= 1:  # no two shares are further apart
            return (
                f"the change of {self.score} by {self._said(self.change, sign=True)} cannot be "
                f"told from chance: {images} are too few to tell any"
            )
        decides = self._said(half)
        return (
            f"the change of {self.score} by {self._said(self.change, sign=True)} cannot be told "
            f"from chance: {images} decide differences above {decides}"
        )

    @property
    def short(self) -> str:
        """Say it in few letters, for a line of progress: ``+12.3±7.1 points``, with half of the
        interval."""
        if self.interval is None:
            return self._said(self.change, sign=True)
        low, high = self.interval
        return f"{self._said(self.change, sign=True, unit=False)}±{self._said((high - low) / 2)}"

    def __repr__(self) -> str:
        """Show the sentence: what a notebook prints."""
        return f"Gain({self.sentence})"

    def _said(self, value: float, *, sign: bool = False, unit: bool = True) -> str:
        """Write a difference in the unit of the score."""
        shown = 100 * value if self.points else value
        if shown == 0 or not math.isfinite(shown):
            text = "0"
        else:
            # one digit of a point, three digits of anything else
            digits = 1 if self.points else max(0, 2 - math.floor(math.log10(abs(shown))))
            text = f"{shown:{'+' if sign else ''}.{digits}f}"
        if "." in text:
            text = text.rstrip("0").rstrip(".")
        if self.points and unit:
            text += " points"
        return text


def gain_of(rows: Sequence[Mapping[str, Any]]) -> Gain | None:
    """Compare the first evaluation of a run, before training, with its last one; None without
    both, or where their scores have different names."""
    if len(rows) < 2 or rows[0].get("iteration") != 0:
        return None
    first, last = rows[0], rows[-1]
    before, after, name = score_of(first), score_of(last), str(last.get("score"))
    if before is None or after is None or first.get("score") != name:
        return None
    # the prompts that both scored, each with its task
    tags, one, two = _pairs(first.get("by_prompt"), last.get("by_prompt"))
    change, interval = after - before, None
    if len(tags) > 1:
        import numpy as np

        from flowrl.evaluation.statistics import paired_difference  # by scipy

        later, earlier = np.array(two, float)[:, None], np.array(one, float)[:, None]
        found = paired_difference(later, earlier, tags)
        change, (low, high) = found["difference"], found["interval"]
        if low is not None and high is not None:
            interval = (low, high)
    images = last.get("images")
    if not isinstance(images, int):
        images = len(tags)
    return Gain(
        score=name,
        before=before,
        after=after,
        change=change,
        interval=interval,
        iteration=int(last["iteration"]),
        prompts=len(tags),
        images=images,
        points=bool(tags) and _are_shares([*one, *two], images / len(tags)),
    )


def run_gain(run: RunPath) -> Gain | None:
    """Return the gain of a run folder as `gain_of` does. Raises RunError for a damaged log."""
    return gain_of(_judged(run))


def verdict_lines(gain: Gain | None, run: RunPath) -> list[str]:
    """Say what training changed on the test prompts, and where the base model of a run stays the
    best. Raises RunError for a damaged log."""
    lines, best = [], base_is_best(run)
    if gain is not None:
        lines.append(gain.sentence)
    if best:
        lines.append(best)
    return lines


def base_is_best(run: RunPath) -> str:
    """Say that no checkpoint of a run is above the model that it began with, "" where one is.

    Raises RunError for a damaged log.
    """
    rows = _judged(run)
    found = best_first(rows)
    if not found or rows[0].get("iteration") != 0 or rows[0].get("score") != found[0].get("score"):
        return ""
    before, best = score_of(rows[0]), score_of(found[0])
    if before is None or best is None or best > before:
        return ""
    return (
        f"no checkpoint is better than the base model: {found[0]['score']} {before:.3f} before "
        f"training, {best:.3f} at the best checkpoint ({found[0]['iteration']} iterations)"
    )


def _judged(run: RunPath) -> list[dict[str, Any]]:
    """Read the evaluations of a run without those of a comparison's budgets."""
    return [row for row in read_rows(run, EVALS) if "marks" not in row]


def _pairs(first: Any, last: Any) -> tuple[list[str], list[float], list[float]]:
    """Return the task of each prompt that both evaluations scored, and its two means; nothing where
    the two are of other prompts, or do not say."""
    tags, one, two = list[str](), list[float](), list[float]()
    if not isinstance(first, Mapping) or not isinstance(last, Mapping) or [*first] != [*last]:
        return tags, one, two
    for task, means in first.items():
        others = last[task]
        lists = isinstance(means, list) and isinstance(others, list)
        if not lists or len(means) != len(others):
            return [], [], []
        for a, b in zip(means, others, strict=True):
            if is_finite_number(a) and is_finite_number(b):
                tags.append(task)
                one.append(float(a))
                two.append(float(b))
    return tags, one, two


def _are_shares(means: Sequence[float], each: float) -> bool:
    """Say whether the means of prompts with `each` images are shares of right images."""
    for mean in means:
        hits = mean * each
        if not 0 <= mean <= 1 or abs(hits - round(hits)) > EXACT * max(each, 1):
            return False
    return True
