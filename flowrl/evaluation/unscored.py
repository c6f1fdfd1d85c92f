"""Images without a score: counted, never averaged over, and an error where they are too many."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flowrl.core.errors import RewardError, RunError
from flowrl.core.prompts import Record


def count_unscored(
    scores: Mapping[str, Tensor], texts: list[str], broken: Tensor, most: float | None
) -> dict[str, int]:
    """Count the images without a score by reward, where there are any; `broken` [n] are not finite.

    Raises an error if they are more than the share `most` of all, or any where `most` is None: a
    RunError if the broken images alone are so many, or else a RewardError.
    """
    counts: dict[str, int] = {}
    limit = most or 0.0
    for name, values in scores.items():
        missing = values.isnan().nonzero()[:, 0].tolist()
        if len(missing) / len(values) > limit:
            own = broken.double().mean().item() <= limit
            said = (
                f"evaluation: reward {name!r} gave no score for an image of {texts[missing[0]]!r} "
                f"({len(missing)} of {len(values)} images have none: {int(broken.sum())} are not "
                f"finite, to the others the reward gave NaN). {_rule(most, own)}"
            )
            raise RewardError(said) if own else RunError(said)
        if missing:
            counts[name] = len(missing)
    return counts


def _rule(most: float | None, own: bool) -> str:
    """Say how many images may be without a score, and what helps; `own`: the reward is at fault."""
    if most is not None:
        return f"train.max_unscored={most} is the share that may be left out so; raise it to go on"
    mend = "mend the reward to go on" if own else "`flowrl doctor` looks for the cause"
    return f"A comparison needs every image scored, whatever train.max_unscored allows; {mend}"


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
