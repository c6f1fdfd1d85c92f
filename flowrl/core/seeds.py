"""Random streams that depend on what they are for, never on what ran before: resume and world size
change nothing."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from flowrl.core.devices import on_host

# torch's CPU generator is MT19937; where its state of bytes has the 624 words, 8 bytes for each
N_WORDS = 624
WORDS = slice(24, 24 + 8 * N_WORDS)


def seed_of(*keys: int | str) -> int:
    """Hash keys such as (seed, "rollout", iteration, prompt) to a seed below 2**63, the same on
    every machine."""
    text = "/".join(map(str, keys))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*keys: int | str) -> torch.Generator:
    """Return a CPU generator that depends on the keys alone: noise drawn on the host is the same on
    every device.

    All 19,968 bits of its state come from a hash of the keys (SHAKE-128), since `manual_seed` would
    read the lower 32 bits of `seed_of(*keys)` only: of 2**16 streams two would be alike with odds
    of 0.4.
    """
    text = "/".join(map(str, keys))
    words = np.frombuffer(hashlib.shake_128(text.encode()).digest(4 * N_WORDS), dtype="<u4")
    stream = torch.Generator().manual_seed(seed_of(*keys))
    state = stream.get_state()
    state.numpy()[WORDS].view(np.int64)[:] = words
    return stream.set_state(state)


class NodeStreams:
    """Streams for what training draws anew at the nodes of a forest, such as fresh noise.

    A node's stream follows from the keys, its prompt and its place among the prompt's nodes. So it
    depends neither on the network call that the node is in nor on the process that has it.
    """

    def __init__(self, group: Tensor, *keys: int | str) -> None:
        """Group [V] int64: the prompt of each node; keys: what the streams are for."""
        self.group, self.keys = on_host(group), keys

    def of(self, nodes: Tensor, *, shared: bool = False) -> list[torch.Generator]:
        """Return one CPU generator per node [B]; with `shared` those of one prompt draw alike."""
        nodes = on_host(nodes)
        group, place = self.group[nodes].tolist(), self._places()[nodes].tolist()
        if shared:
            return [generator(*self.keys, g) for g in group]
        return [generator(*self.keys, g, p) for g, p in zip(group, place, strict=True)]

    def _places(self) -> Tensor:
        """Number the nodes of each prompt in their order -> [V]."""
        ordered, order = torch.sort(self.group, stable=True)
        first = torch.searchsorted(ordered, ordered)
        return torch.empty_like(order).scatter(0, order, torch.arange(len(order)) - first)
