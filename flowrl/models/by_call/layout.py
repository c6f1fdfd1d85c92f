"""How a pipeline wants latents handed in, learned from what it does with them.

Inside, x is what the scheduler's ``step`` sees: latents, or tokens that the pipeline packed. What
its ``latents`` argument takes may have another order. One is a permutation of the other, and it is
learned by handing in numbers from 0 on. Where a pipeline has no such argument, or leaves out what
belongs to its own latents if it is used, x stands in for the noise that it draws.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import diffusers.utils.torch_utils as drawing
import torch
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.models.adapter import pack

DIGIT = 128  # whole numbers below it are exact in every dtype


class Layout(NamedTuple):
    """The shapes of one sample on both sides, and how they belong together."""

    inner: tuple[int, ...]  # as `step` sees it, without the batch dimension
    entry: tuple[int, ...]  # as the argument ``latents`` takes it
    dtype: torch.dtype  # of the pipeline's own sample
    height: int  # pixels
    width: int
    order: Tensor | None = None  # [N] int64: inner position of each entry position; None: the same
    draw: int | None = None  # the draw that x stands in for; None: it is the argument ``latents``

    def to_entry(self, x: Tensor) -> Tensor:
        """Return x [B, *inner] as the pipeline takes it, in its dtype."""
        x = x.to(self.dtype)
        if self.order is None:
            return x
        rows = x.flatten(1)[:, self.order.to(x.device)]
        return rows.unflatten(1, self.entry)

    def from_entry(self, x: Tensor) -> Tensor:
        """Return what the pipeline takes, x [B, *entry], as `step` sees it: the inverse."""
        if self.order is None:
            return x
        return x.flatten(1)[:, self.order.argsort().to(x.device)].unflatten(1, self.inner)

    def from_latents(self, x: Tensor) -> Tensor:
        """Return latents [B, *] of the class's adapter as `step` sees them."""
        if tuple(x.shape[1:]) == self.inner:
            return x
        if tuple(x.shape[1:]) != self.entry:
            x = pack(x)
        return self.from_entry(x)


@contextmanager
def drawing_by(pipeline: Any, change: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Let ``change(place, noise)`` say what a pipeline's draws return while the block runs."""
    count = 0
    real = drawing.randn_tensor

    def draw(*args: Any, **named: Any) -> Tensor:
        nonlocal count
        count += 1
        return change(count - 1, real(*args, **named))

    # every module that the class comes from has a name of its own for the function
    homes = {kind.__module__ for kind in type(pipeline).__mro__}
    modules = [sys.modules[home] for home in sorted(homes)]
    having = [module for module in modules if getattr(module, "randn_tensor", None) is real]
    try:
        for module in having:
            module.randn_tensor = draw  # type: ignore[attr-defined]
        yield
    finally:
        for module in having:
            module.randn_tensor = real  # type: ignore[attr-defined]


@contextmanager
def drawn(pipeline: Any) -> Iterator[list[Tensor]]:
    """Collect the noise that a pipeline draws while the block runs."""
    found: list[Tensor] = []

    def keep(place: int, noise: Tensor) -> Tensor:
        found.append(noise.detach().clone())
        return noise

    with drawing_by(pipeline, keep):
        yield found


@contextmanager
def handed(pipeline: Any, layout: Layout, x: Tensor) -> Iterator[dict[str, Tensor]]:
    """Yield the arguments that hand x [B, *inner] in, or let it stand in for a draw."""
    entry = layout.to_entry(x)
    if layout.draw is None:
        yield {"latents": entry}
        return

    def change(place: int, noise: Tensor) -> Tensor:
        return entry.to(noise.device) if place == layout.draw else noise

    with drawing_by(pipeline, change):
        yield {}


def learn_layout(
    name: str,
    sample: Tensor,
    draws: list[Tensor],
    seen: Callable[[Layout, Tensor], Tensor],
    *,
    height: int,
    width: int,
) -> Layout:
    """Find which of the drawn tensors, or the sample itself, a pipeline takes back as ``latents``,
    or else in place of which draw.

    ``sample`` [1, *] is what the first step saw; ``seen(layout, entry)`` is what it sees of others.
    Raise ModelError where the pipeline changes what is handed in.
    """
    plain = Layout(tuple(sample.shape[1:]), (), sample.dtype, height, width)
    ways = [(entry, plain) for entry in (sample, *draws)]
    ways += [(entry, plain._replace(draw=place)) for place, entry in enumerate(draws)]
    tried = []
    for entry, layout in ways:
        if entry.numel() != sample.numel() or entry.shape[0] != 1:
            continue
        way = f"{[*entry.shape]}"
        if layout.draw is not None:
            way += f" as draw {layout.draw}"
        layout = layout._replace(entry=tuple(entry.shape[1:]))
        try:
            again = seen(layout, entry)
        except Exception as error:  # each pipeline refuses other shapes in its own way
            tried.append(f"{way}: {error}")
            continue
        kept = entry.shape != sample.shape or torch.equal(again.float(), entry.float())
        if again.shape == sample.shape and torch.equal(again.float(), sample.float()) and kept:
            break
        tried.append(f"{way}: its first step sees other numbers")
    else:
        raise ModelError(
            f"{name}: its first step does not see the latents that it is given (tried "
            f"{'; '.join(tried) or 'none'}). Latents that are scaled by the scheduler, drawn in "
            "pieces or ignored are no velocity field that can be asked; this pipeline needs an "
            "adapter"
        )
    if entry.shape == sample.shape:
        return layout
    return layout._replace(order=_order(name, entry, lambda digits: seen(layout, digits)))


def _order(name: str, entry: Tensor, seen: Callable[[Tensor], Tensor]) -> Tensor:
    """Return for each position of the entry its place inside. Raise ModelError if it has none."""
    count = entry.numel()
    positions = torch.arange(count)
    inner_to_entry, unit = torch.zeros(count, dtype=torch.int64), 1
    while unit < count:
        digits = (positions // unit % DIGIT).to(entry).reshape(entry.shape)
        got = seen(digits).flatten().round().long().cpu()
        inner_to_entry += got * unit
        unit *= DIGIT
    if not torch.equal(inner_to_entry.sort().values, positions):
        raise ModelError(
            f"{name}: what its first step sees is no rearrangement of the latents that it is given"
        )
    return inner_to_entry.argsort()
