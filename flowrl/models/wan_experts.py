"""Wan 2.2's two networks, one for high and one for low noise, as one network that is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import ModelError
from flowrl.core.processes import sharded, world

HIGH, LOW = "transformer", "transformer_2"  # as the pipeline names them
Ask = Callable[[str, Tensor], Tensor]
"""``ask(expert, rows [b]) -> v [b, *]``: one expert's velocity of some rows of a batch."""


class Experts(nn.Module):
    """Both networks under the pipeline's names, so that parameters are told apart by name.

    What a network is asked to do when it is tuned and set up, both are. A call names the expert.
    """

    def __init__(self, high: nn.Module, low: nn.Module) -> None:
        super().__init__()
        self.transformer, self.transformer_2 = high, low

    @property
    def both(self) -> tuple[Any, Any]:
        """Return the two networks."""
        return self.transformer, self.transformer_2

    @property
    def config(self) -> Any:
        """Return the settings that both have in common."""
        return self.transformer.config

    @property
    def attn_processors(self) -> dict[str, Any]:
        """Return what computes the attention of each layer of both."""
        found: dict[str, Any] = {}
        for name, network in zip((HIGH, LOW), self.both, strict=True):
            found |= {f"{name}.{key}": one for key, one in network.attn_processors.items()}
        return found

    def forward(self, *, expert: str, **inputs: Any) -> Any:
        """Call one of the networks."""
        return getattr(self, expert)(**inputs)

    def add_adapter(self, config: Any) -> None:
        """Put LoRA on both."""
        for network in self.both:
            network.add_adapter(config)

    def enable_gradient_checkpointing(self, *args: Any) -> None:
        """Let both compute their activations again."""
        for network in self.both:
            network.enable_gradient_checkpointing(*args)

    def set_attention_backend(self, name: str) -> None:
        """Let both attend by a back end."""
        for network in self.both:
            network.set_attention_backend(name)

    def compile_repeated_blocks(self, **how: Any) -> None:
        """Compile the blocks of both."""
        for network in self.both:
            network.compile_repeated_blocks(**how)


def by_expert(low: Tensor, ask: Ask) -> Tensor:
    """Ask each expert about its own rows -> v [B, *]; low [B] bool: which rows are the second's.

    No call straddles the boundary: a batch that does is two calls, put together in its own order.
    Under FSDP the processes ask an expert in step: one without a row for an expert that another
    process asks does so with a spare row, which counts nothing.
    """
    rows = torch.arange(len(low), device=low.device)
    count = int(low.sum())
    mine = {HIGH: rows[~low] if count else rows, LOW: rows[low] if count < len(low) else rows}
    asked = [HIGH] * (count < len(low)) + [LOW] * (count > 0)
    wanted = {name for names in world().gather(asked) for name in names} if sharded() else asked
    found = []
    nothing: Tensor | None = None
    for name in (HIGH, LOW):
        if name in asked:
            found.append(ask(name, mine[name]))
        elif name in wanted:
            nothing = 0 * ask(name, rows[:1]).sum()
    whole = found[0] if len(found) == 1 else torch.cat(found)[torch.cat([*mine.values()]).argsort()]
    return whole if nothing is None else whole + nothing


def check_experts(pipeline: Any, path: str) -> bool:
    """Say whether a pipeline has two experts. Raise ModelError where network and boundary do not
    fit together."""
    # two networks need a level at which one takes over from the other
    second, boundary = getattr(pipeline, LOW, None), pipeline.config.boundary_ratio
    if (second is None) != (boundary is None):
        has = "no transformer_2" if second is None else "a transformer_2"
        raise ModelError(
            f"{path}/model_index.json: expected transformer_2 and boundary_ratio together, as Wan "
            f"2.2 has them, got {has} with boundary_ratio {boundary}"
        )
    if second is None:
        return False
    # the same latents and texts go to both
    one, two = pipeline.transformer.config, second.config
    for name in ("in_channels", "out_channels", "patch_size", "text_dim"):
        if one[name] != two[name]:
            raise ModelError(
                f"{path}/transformer_2/config.json: expected {name} {one[name]} as in transformer, "
                f"got {two[name]}"
            )
    return True
