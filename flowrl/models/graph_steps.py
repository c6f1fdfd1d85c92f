"""When CUDA graphs of a network may write over what they computed in its last call."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


class _Ticket:
    """Lives as long as the graph of a call that wanted a gradient; ``done`` once that passed."""

    done = False


class GraphSteps:
    """Tell torch's CUDA graphs where a new call of the network begins.

    A graph computes in memory of its own, and the same memory again in the next call. Within a call
    the blocks read what the blocks before them computed, and the backward pass what the forward
    pass kept; torch must be told when all of this is over. It is at a call, unless a gradient still
    has to go back through an earlier one: the reference's velocity, say, is asked for between the
    two passes of the trained network's.
    """

    def __init__(self) -> None:
        self._open: list[weakref.ref[_Ticket]] = []

    def begin(self) -> None:
        """Begin a call: what earlier calls computed may be written over, unless a gradient
        waits."""
        tickets = (one() for one in self._open)
        waiting = [one for one in tickets if one is not None and not one.done]
        self._open = [weakref.ref(one) for one in waiting]
        if not waiting:
            torch.compiler.cudagraph_mark_step_begin()

    def watched(self, out: Tensor) -> Tensor:
        """Return the velocity [B, *] of a call that wants a gradient; until the gradient passed it,
        or nothing holds it any more, nothing is written over."""
        ticket = _Ticket()
        self._open.append(weakref.ref(ticket))
        found: Tensor = _Watched.apply(out, ticket)  # type: ignore[no-untyped-call]
        return found


class _Watched(torch.autograd.Function):
    """The identity, which notes that a gradient passed."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, ticket: _Ticket) -> Tensor:
        """Keep the ticket as long as the graph is kept."""
        ctx.ticket = ticket
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Pass the gradient on."""
        ctx.ticket.done = True
        return grads[0], None
