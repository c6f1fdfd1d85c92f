"""Shipped configs, each loaded once for all tests of a process: they are never changed."""

from __future__ import annotations

from functools import cache

from flowrl.config.load import Config, load_config


@cache
def shipped(name: str) -> Config:
    """Load a shipped config as it stands."""
    return load_config(name)
