"""Check where the judge is and how it is asked, and make a request's fixed part."""

from __future__ import annotations

from typing import Any

from flowrl.core.errors import ConfigError

from .client import WHO, Server, api_key

_OWN = {"model", "messages", "temperature", "logprobs", "top_logprobs", "max_tokens", "stream"}


def request_settings(
    model: str,
    log_probs: bool,
    max_tokens: int | None,
    extra: dict[str, Any] | None,
    who: str = WHO,
) -> dict[str, Any]:
    """Return the request without its message; with `log_probs` for the likeliest first tokens."""
    taken = sorted(_OWN & set(extra or {}))
    if taken:
        raise ConfigError(f"{who}: extra: {', '.join(taken)} cannot be given here: flowrl sets it")
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"{who}: max_tokens: expected 1 or more, got {max_tokens}")
    likely = {"logprobs": True, "top_logprobs": 20} if log_probs else {}
    most = max_tokens or (1 if likely else 4096)
    # Without a temperature, servers take the model's own default, which samples.
    return {**(extra or {}), "model": model, "temperature": 0, "max_tokens": most, **likely}


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
        raise ConfigError(f"{server.who}: {wrong[0]}")
    api_key(server)  # a missing key is found now, not after the first images
    return server
