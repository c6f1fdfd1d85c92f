"""What the monitors see in the held-out evaluations of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from flowrl.config.sections import DriftMonitor, HackingMonitor, PlateauMonitor
from flowrl.runs.best import Row, best_first, score_of
from flowrl.runs.monitors.findings import Alarm

SURE = 2.33  # standard errors; chance alone exceeds them once in a hundred times


def plateau(options: PlateauMonitor, rows: Sequence[Row]) -> Alarm | None:
    """Say so if the last `patience` evaluations have brought no gain."""
    since = since_gain(rows, options.min_gain)
    if since < options.patience:
        return None
    name, last = rows[-1]["score"], score_of(rows[-1])
    best = best_first(rows)[0]
    gain = f" of more than {options.min_gain:g}" if options.min_gain else ""
    return Alarm(
        f"no gain{gain} of the held-out {name} in {since} evaluations: {last:.3f} after "
        f"{rows[-1]['iteration']} iterations, {score_of(best):.3f} after {best['iteration']}",
        "More iterations of the same will hardly help: take the best checkpoint, lower "
        "optimizer.lr, or give it more prompts or a larger group",
    )


def since_gain(rows: Sequence[Row], min_gain: float) -> int:
    """Count the evaluations since the score last rose by more than `min_gain` above all before.

    Only those of the last one's score count. Small gains add up: the height to beat is that of the
    last gain.
    """
    top, since = -float("inf"), 0
    for row in rows:
        score = score_of(row) if row.get("score") == rows[-1].get("score") else None
        if score is None:
            continue
        if score > top + min_gain:
            top, since = score, 0
        else:
            since += 1
    return since


def noise_of_change(one: Row, two: Row) -> float:
    """Return the standard error of the change of a held-out score between two evaluations.

    Both are of the same prompts and noises, so it is that of the paired differences per prompt,
    `sqrt(sum over tasks of var / n) / tasks`, with each task's own variance. 0 where the rows do
    not hold the scores of the same prompts.
    """
    first, second = one.get("by_prompt") or {}, two.get("by_prompt") or {}
    variance = 0.0
    for task in first:
        change = []
        for old, new in zip(first[task], second.get(task, ()), strict=False):
            if old is not None and new is not None:
                change.append(new - old)
        if len(change) > 1:
            variance += statistics.variance(change) / len(change)
    return math.sqrt(variance) / max(len(first), 1)


def hacking(
    options: HackingMonitor, rows: Sequence[Row], rewards: Mapping[str, float]
) -> Alarm | None:
    """Say so if the held-out score has fallen while the training reward has risen.

    rewards: {iteration of an evaluation: mean training reward of the iterations before it}; that of
    the evaluation before training is of the first iteration, whose images are the base model's.
    A fall that chance alone brings about once in a hundred times is none: the best of several
    evaluations is also the luckiest.
    """
    name, last = rows[-1]["score"], rows[-1]
    known, of = {}, dict[int, Row]()
    for row in rows:
        same = row.get("score") == name and score_of(row) is not None
        if same and str(row["iteration"]) in rewards:
            known[row["iteration"]], of[row["iteration"]] = score_of(row) or 0.0, row
    if last["iteration"] not in known or len(known) < 2:
        return None
    # the best one before, the earliest of equals
    now = known.pop(last["iteration"])
    best = max(known, key=lambda iteration: (known[iteration], -iteration))
    then, after = rewards[str(best)], rewards[str(last["iteration"])]
    fall = known[best] - now
    if fall < options.drop or after <= then or fall < SURE * noise_of_change(of[best], last):
        return None
    return Alarm(
        f"the held-out {name} fell from {known[best]:.3f} after {best} iterations to {now:.3f}, "
        f"while the training reward rose from {then:.3f} to {after:.3f}",
        "The reward is being hacked: look at the samples; add what the reward overlooks, a kl "
        "section or a lower optimizer.lr, or set monitors.hacking.action to rollback",
    )


def drift(options: DriftMonitor, row: Row) -> Alarm | None:
    """Say so if the velocity is too far from the base model's."""
    moved = row.get("drift")
    if not isinstance(moved, float) or moved <= options.limit:
        return None
    return Alarm(
        f"the velocity has moved by {moved:.2f} of its size from the base model's, more than "
        f"{options.limit:g}",
        "Add a kl section or raise its beta, lower optimizer.lr, or stop earlier; "
        "eval.tuned below 1 leaves the last steps to the base model",
    )
