"""What a function of a method wants made for it, said in one line above the function.

A loss or a penalty gets one record (`flowrl.core.types.LossInput`). Most of it costs nothing; the
rest is made only for functions that ask for it by name:

==================  ==============================================================================
``old_log_prob``    log-prob under the weights that sampled: kept by the rollout, else evaluated
``old_mean``        its mean, likewise
``old``             a whole `Eval` under the weights that sampled
``ref``             a whole `Eval` under the weights from before training
``ema``             a whole `Eval` under the averaged weights (``train.ema`` must be on)
``slow``            a whole `Eval` under the slow copy (the section ``slow`` must be there)
``fake``            a whole `Eval` under the weights of the section ``fake``
``surrogate``       a whole `Eval` under the weights of the section ``surrogate``
``teacher``         a whole `Eval` under the weights of each of the row's teachers
``best``            the best leaf below each state, and its advantage
``data``            the velocity on noised real images of the rows' prompts, which records name
``reward``          the rewards of the images that the likelihood makes, with their gradient
``siblings``        how many trained nodes the row's prompt has in all, and which rows were scored
``zero_advantage``  rows of advantage 0 too: by default they are counted but not computed
``shared_noise``    nothing; images of a prompt must be noised alike, or the config is refused
==================  ==============================================================================

A part of your own may provide another name, for functions of your own: it puts what it made into
``LossInput.extra``.

A credit may ask for ``log_prob``, the rollout's log-prob of every node [V], ``prompts``, the text
of each leaf [L], of an edit with the files that it starts from, or ``state``, what likelihood
`prior` says of each leaf's noise [L, D], as a keyword. With ``moved`` its `update` gets the mean
absolute change of the log-prob of what was drawn at the last visit of each leaf's prompt [L], NaN
at a first one. ``sigma_rewards`` gives it nothing: all rewards that count must look at the sigma of
what they judge.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
COMMON = frozenset(("old_log_prob", "old_mean", "zero_advantage", "shared_noise", "sigma_rewards"))
"""What the loop itself sees to; all other names are provided by a part (`flowrl.core.part`)."""
SNAPSHOTS = ("old", "ref", "ema", "slow", "fake", "surrogate")


def needs(*names: str) -> Callable[[F], F]:
    """Declare what a function wants made for it; a run refuses a name that no part provides.

    Example::

        @needs("old_log_prob", "ref")
        def my_loss(data: LossInput, *, strength: float) -> tuple[Tensor, dict[str, Tensor]]: ...
    """

    def declare(function: F) -> F:
        function.needs = frozenset(names)  # type: ignore[attr-defined]
        return function

    return declare


def needs_of(function: Callable[..., Any] | None) -> frozenset[str]:
    """Return what a function, a partial of one, or an instance of a class has declared."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "needs", frozenset())
