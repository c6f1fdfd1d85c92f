"""Which checkpoint of a run is the best by held-out score."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.core.errors import CheckpointError, RunError
from flowrl.core.files import is_finite_number
from flowrl.runs.folder import EVALS, read_rows
from flowrl.training import checkpoint

Row = Mapping[str, Any]
Which = int | str | None
BEST, LAST = "best", "last"


def score_of(row: Row) -> float | None:
    """Return the headline score of an evaluation; None where it has none, or no finite one."""
    value: Any = row.get(str(row.get("score")))
    return float(value) if is_finite_number(value) else None


def best_first(rows: Sequence[Row]) -> list[Row]:
    """Sort the evaluations after training began by score, the best first; of equals the earlier.

    Only those of the last one's score count, since a run that goes on may be given another. Those
    of a comparison, which is about the end of a budget, do not.
    """
    rows = [row for row in rows if "marks" not in row]
    if not rows:
        return []
    name = rows[-1].get("score")
    known = []
    for row in rows:
        if row["iteration"] > 0 and row.get("score") == name and score_of(row) is not None:
            known.append(row)
    return sorted(known, key=lambda row: (-(score_of(row) or 0.0), row["iteration"]))


def best_iteration(rows: Sequence[Row]) -> int | None:
    """Return the iteration of the best evaluation; None before there is one."""
    found = best_first(rows)
    return int(found[0]["iteration"]) if found else None


def best_checkpoint(run: Path) -> Path | None:
    """Return the whole checkpoint with the best held-out score; None where none was judged.

    An unreadable `eval.jsonl` is a warning: the weights are there all the same.
    """
    try:
        rows = best_first(read_rows(run, EVALS))
    except RunError as error:
        warnings.warn(f"cannot tell the best checkpoint: {error}", stacklevel=2)
        return None
    for row in rows:
        folder = checkpoint.checkpoint_folder(run, row["iteration"])
        try:
            checkpoint.verify(folder)
        except CheckpointError:
            continue  # pruned by an earlier version, or torn
        return folder
    return None


def chosen_checkpoint(run: Path, which: Which = None) -> Path:
    """Return a checkpoint of a run: a number, ``last``, or ``best``; by default the best, and the
    last where none was judged. Raises CheckpointError."""
    text = BEST if which is None else str(which)
    # a number says which one; whether it is whole is found out when it is read
    if text.isdecimal():
        return checkpoint.checkpoint_folder(run, int(text))
    if text not in (BEST, LAST):
        raise CheckpointError(
            f"{run}: expected the number of an iteration, best or last, got {text!r}"
        )
    # the best needs an evaluation; who asked for none in particular gets the last one instead
    found = best_checkpoint(run) if text == BEST else None
    if found is None and which == BEST:
        raise CheckpointError(
            f"{run}: no checkpoint has a held-out score yet; take the last one, or a numbered one"
        )
    found = found or checkpoint.latest(run)
    if found is None:
        raise CheckpointError(f"{run}: there is no whole checkpoint yet")
    return found


def which_of(run: Path, folder: Path) -> str:
    """Say how a checkpoint stands to the run's last one: "best held out, the last is 45"; nothing
    of the last one."""
    every = checkpoint.checkpoint_folders(run)
    if not every or every[-1] == folder:
        return ""
    kind = "best held out, " if best_checkpoint(run) == folder else ""
    return f"{kind}the last is {int(every[-1].name)}"
