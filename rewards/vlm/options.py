"""Check the options of rewards/vlm/judge.py, and make a request's fixed part of them."""

from __future__ import annotations

import re
from typing import Any

from flowrl.core.errors import ConfigError

from .answers import ReadingOptions
from .client import Server, api_key
from .templates import LOG_PROB, WORDING

_USES = {  # the reading options that a template has; another one would do nothing
    "acs": {"axes"},
    "pair_score": {"axes"},
    "flex": {"w_overall", "w_dims"},
    "rating": {"pattern", "low", "high"},
    "yes_no": {"variants"},
    "consistency": {"variants"},
}
_OWN = {"model", "messages", "temperature", "logprobs", "top_logprobs", "max_tokens", "stream"}


def request_settings(
    model: str, template: str, max_tokens: int | None, extra: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the request without its message."""
    taken = sorted(_OWN & set(extra or {}))
    if taken:
        raise ConfigError(
            f"rewards.vlm: extra: {', '.join(taken)} cannot be given here: flowrl sets it"
        )
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"rewards.vlm: max_tokens: expected 1 or more, got {max_tokens}")
    likely = {"logprobs": True, "top_logprobs": 20} if template in LOG_PROB else {}
    most = max_tokens or (1 if likely else 4096)
    # Without a temperature, servers take the model's own default, which samples.
    return {**(extra or {}), "model": model, "temperature": 0, "max_tokens": most, **likely}


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


def check_server(server: Server) -> Server:
    """Return the options; raises ConfigError for one that is wrong, or a key that is not there."""
    wrong = [
        f"{name}: expected {expected}, got {getattr(server, name)}"
        for name, expected, right in [
            ("timeout", "seconds > 0", server.timeout > 0),
            ("retries", "0 or more", server.retries >= 0),
            ("backoff", "seconds >= 0", server.backoff >= 0),
            ("workers", "1 or more", server.workers >= 1),
            ("max_failed", "a share from 0 to 1", 0 <= server.max_failed <= 1),
        ]
        if not right
    ]
    if wrong:
        raise ConfigError(f"rewards.vlm: {wrong[0]}")
    api_key(server)  # a missing key is found now, not after the first images
    return server
