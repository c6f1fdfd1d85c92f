"""Check the options of the client."""

from __future__ import annotations

from typing import Any

from flowrl.core.errors import ConfigError

from .._common.http_client import split_url, without_password

WHO = "rewards.remote"


def check_url(url: str) -> str:
    """Return the address without a slash at its end. Raises ConfigError, without showing a password
    in it."""
    parts = split_url(url)
    if parts is None or parts.username is not None:
        raise ConfigError(
            f"{WHO}: urls: expected addresses like http://10.0.0.5:8321, got "
            f"{without_password(url)!r}; no user names, passwords or queries: a token goes into an "
            "environment variable that token_env names"
        )
    return url.rstrip("/")


def check_urls(urls: list[str]) -> list[str]:
    """Return the addresses as `check_url` does. Raises ConfigError for none, or one twice."""
    checked = [check_url(url) for url in urls]
    fine = 0 < len(set(checked)) == len(urls)
    check("urls", fine, "one address or more, each once", urls)
    return checked


def check_seconds(**seconds: float) -> None:
    """Raise ConfigError for a time below 0, or a timeout of 0."""
    for name, value in seconds.items():
        zero = name != "timeout"
        text = f"a number of seconds {'>=' if zero else '>'} 0"
        check(name, value > 0 or (zero and value == 0), text, value)


def check(name: str, fine: bool, expected: str, got: Any) -> None:
    """Raise ConfigError unless an argument is fine."""
    if not fine:
        raise ConfigError(f"{WHO}: {name}: expected {expected}, got {got!r}")
