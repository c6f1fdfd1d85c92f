"""Random streams that depend on what they are for, never on what ran before: resume and world size change nothing."""

from __future__ import annotations

import hashlib

import torch


def seed_of(*keys: int | str) -> int:
    """Hash keys such as (seed, "rollout", iteration, prompt) to a seed below 2**63, the same on every machine."""
    text = "/".join(str(key) for key in keys)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*keys: int | str) -> torch.Generator:
    """Return a CPU generator seeded by `seed_of(*keys)`: noise drawn on the host is the same on every device."""
    return torch.Generator().manual_seed(seed_of(*keys))
