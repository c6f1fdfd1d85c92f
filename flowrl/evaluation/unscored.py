"""Images without a score: counted, never averaged over, and an error where they are too many."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flowrl.core.errors import RunError
from flowrl.core.prompts import Record


def count_unscored(scores: Mapping[str, Tensor], texts: list[str], most: float) -> dict[str, int]:
    """Count the images without a score by reward, where there are any. Raises RunError if they are
    more than the share `most`."""
    counts: dict[str, int] = {}
    for name, values in scores.items():
        missing = values.isnan().nonzero()[:, 0].tolist()
        if len(missing) / len(values) > most:
            raise RunError(
                f"evaluation: reward {name!r} gave no score for an image of {texts[missing[0]]!r} "
                f"({len(missing)} of {len(values)} images have none: the image is not finite, or "
                f"the reward gave NaN). train.max_unscored={most} is the share that may be left "
                "out so; raise it to go on"
            )
        if missing:
            counts[name] = len(missing)
    return counts


def check_tasks(every: list[Record], scored: list[Record], headline: str) -> None:
    """Raise RunError if a task has no scored image: the mean over tasks would be another one."""
    tags = {str(record.get("tag", "all")) for record in scored}
    for record in every:
        tag = str(record.get("tag", "all"))
        if tag not in tags:
            raise RunError(
                f"evaluation: reward {headline!r} scored no image of the task {tag!r}, so there is "
                "no mean over tasks. Mend the reward, or take the task's prompts out of the list "
                "(prompts.test)"
            )
