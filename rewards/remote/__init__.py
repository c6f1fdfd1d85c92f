"""Rewards over HTTP: the client that a config names, and the server of ``flowrl serve-rewards``."""

from .client import remote

__all__ = ["remote"]
