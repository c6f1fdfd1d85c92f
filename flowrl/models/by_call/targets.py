"""Which layers of a network get LoRA where no list of names is published: found by structure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from flowrl.core.errors import ModelError

ATTENTION = re.compile(r"(^|[._])(attn|attention|self_attn|cross_attn)\d*($|[._])")


def lora_targets(network: nn.Module) -> tuple[str, ...]:
    """Return the names of the linear layers inside of attention; of a network that names nothing
    so, of all that are in repeated blocks. Short names where they mean the same layers. Raise
    ModelError where there are none."""
    linear = [name for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    found = [name for name in linear if ATTENTION.search(name)]
    found = found or [name for name in linear if re.search(r"\.\d+\.", name)]
    if not found:
        raise ModelError(
            f"lora.targets: no linear layer of {type(network).__name__} is in attention or a "
            "repeated block; name the layers"
        )
    return short_names(found, linear)


def short_names(found: Sequence[str], linear: Sequence[str]) -> tuple[str, ...]:
    """Return the ends behind the last number of a block, where no other layer has the same, else
    whole names."""
    ends: dict[str, None] = {}
    chosen = set(found)
    for name in found:
        end = re.sub(r"^.*?\.\d+\.(?=[^.]*\D)", "", name)
        same = {one for one in linear if one == end or one.endswith(f".{end}")}
        ends[end if same <= chosen else name] = None
    return tuple(ends)
