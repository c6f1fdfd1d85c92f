"""Prompts as conditioning: encoded once, one at a time, and kept on the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flowrl.errors import ConfigError, DataError
from flowrl.types import Cond

CACHE_BYTES = 4 * 2**30  # one prompt of SD3.5 with T5 takes 2.7 MB in bfloat16, one of FLUX with 512 tokens 4.2 MB
NEGATIVE = "negative_"
Encode = Callable[[str], dict[str, Tensor]]
"""From one prompt to {name: [...]}, without a batch dimension."""


class Texts:
    """A cache of text embeddings that forgets the oldest beyond CACHE_BYTES."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Tensor]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def cond(self, prompts: list[str], encode: Encode, *, device: torch.device, negative: str | None = None) -> Cond:
        """Return {name: [G, ...]} on the device, and the same for ``negative``, if any, as ``negative_<name>``."""
        if not prompts:
            raise DataError("encode: expected at least one prompt, got none")
        cond = self._stack(prompts, encode, device)
        if negative is not None:
            rows = self._stack([negative] * len(prompts), encode, device)
            cond |= {NEGATIVE + name: row for name, row in rows.items()}
        return cond

    def _stack(self, prompts: list[str], encode: Encode, device: torch.device) -> Cond:
        texts = [self._text(prompt, encode) for prompt in prompts]
        return {name: torch.stack([text[name] for text in texts]).to(device) for name in texts[0]}

    def _text(self, prompt: str, encode: Encode) -> dict[str, Tensor]:
        if prompt in self._known:
            return self._known[prompt]
        # One prompt at a time: in a batch its last bits would depend on which others were not yet cached, and a
        # resumed run, whose cache starts empty, would not repeat an unbroken one.
        with torch.no_grad():
            text = {name: row.cpu() for name, row in encode(prompt).items()}
        self._known[prompt] = text
        self.bytes += _bytes(text)
        while self.bytes > CACHE_BYTES and len(self._known) > 1:
            self.bytes -= _bytes(self._known.pop(next(iter(self._known))))
        return text


def halves(cond: Cond) -> tuple[Cond, Cond]:
    """Split conditioning into (negative, positive), both under the positive's names."""
    positive = {name: rows for name, rows in cond.items() if not name.startswith(NEGATIVE)}
    return {name: cond[NEGATIVE + name] for name in positive}, positive


def check_tokens(max_sequence_length: int) -> None:
    """Raise ConfigError unless T5 gets a number of tokens that diffusers allows."""
    if not 1 <= max_sequence_length <= 512:
        raise ConfigError(f"max_sequence_length: expected 1 to 512 tokens, got {max_sequence_length!r}")


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
