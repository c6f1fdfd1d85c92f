"""Check the options of rewards/vlm/judge.py that say how answers are read."""

from __future__ import annotations

import re

from flowrl.core.errors import ConfigError

from .answers import ReadingOptions
from .templates import WORDING

_USES = {  # the reading options that a template has; another one would do nothing
    "acs": {"axes"},
    "pair_score": {"axes"},
    "flex": {"w_overall", "w_dims"},
    "rating": {"pattern", "low", "high"},
    "yes_no": {"variants"},
    "consistency": {"variants"},
}


def check_reading(how: ReadingOptions) -> ReadingOptions:
    """Return the options; raises ConfigError for one that is wrong or that the template has no use
    for."""
    # a template, and only options that it reads
    if how.template not in WORDING:
        raise ConfigError(
            f"rewards.vlm: template: expected one of {', '.join(WORDING)}, got {how.template!r}"
        )
    for name, default in ReadingOptions._field_defaults.items():
        if getattr(how, name) != default and name not in _USES.get(how.template, set()):
            label = "alignment, coherence, style" if name == "axes" else name
            raise ConfigError(
                f"rewards.vlm: the template {how.template} makes no use of {label}; leave it out"
            )
    # numbers in their ranges
    if min(how.axes) < 0 or sum(how.axes) <= 0:
        raise ConfigError(
            "rewards.vlm: alignment, coherence, style: expected weights >= 0, not all 0, got "
            f"{how.axes}"
        )
    if min(how.w_overall, how.w_dims) < 0 or how.w_overall + how.w_dims <= 0:
        got = f"{how.w_overall} and {how.w_dims}"
        raise ConfigError(
            f"rewards.vlm: w_overall, w_dims: expected weights >= 0, not both 0, got {got}"
        )
    if not how.low < how.high:
        raise ConfigError(
            f"rewards.vlm: low, high: expected low < high, got {how.low} and {how.high}"
        )
    # a pattern with one number
    try:
        groups = re.compile(how.pattern).groups
    except re.error as error:
        raise ConfigError(
            f"rewards.vlm: pattern: expected a regular expression, got {how.pattern!r}: {error}"
        ) from None
    if groups != 1:
        raise ConfigError(
            f"rewards.vlm: pattern: expected one group in {how.pattern!r}, the number; got {groups}"
        )
    return how
