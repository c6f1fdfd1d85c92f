"""Rewards over HTTP: the client that a config names, and the server of ``flowrl serve-rewards``."""

from rewards.remote.client import remote

__all__ = ["remote"]
