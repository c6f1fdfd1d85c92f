"""How a sliding window moves over the iterations."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from typing import Literal


def window_start(
    iteration: int,
    *,
    start: int,
    stride: int,
    every: int,
    last: int,
    steps: int,
    roll_back: bool,
    pace: Literal["constant", "linear", "exponential"] = "constant",
    hold: int = 13,
    decay: float = 0.1,
    least: int = 1,
) -> int:
    """Say at which step the window starts: `start`, then `stride` further whenever its stay is over
    (2507.21802).

    After the last start that is at most `last` it goes back to step 0, or without `roll_back` moves
    to `last` and remains; stride 0 freezes it. The window stays at step l for so many iterations,
    at least 1 (MixGRPO's code):

    - constant: `every`;
    - linear: ``max(least, int(every (1 - p) + least p))`` with ``p = l / (steps - 2)``; `steps` are
      the denoising steps (the code has 10 and 1 for `every` and `least`);
    - exponential: ``ceil(every exp(-decay max(0, l - hold)))``.

    **Differs:** the code goes back to `start`.
    """
    if stride == 0:
        return start

    def stay(at: int) -> int:
        if pace == "linear":
            share = at / max(1, steps - 2)
            return max(least, int(every * (1 - share) + least * share))
        if pace == "exponential":
            return max(1, math.ceil(every * math.exp(-decay * max(0, at - hold))))
        return every

    # the starts of the first round, and of later ones, which begin at step 0
    ahead, again = range(start, last + 1, stride), range(0, last + 1, stride)
    # the iteration at which each stay is over; the first one that is not tells the start
    ends = list(accumulate(map(stay, ahead)))
    if iteration < ends[-1]:
        return ahead[bisect_right(ends, iteration)]
    if not roll_back:
        return last
    # later rounds are all alike: count from the end of the first, modulo their length
    left, ends = iteration - ends[-1], list(accumulate(map(stay, again)))
    return again[bisect_right(ends, left % ends[-1])]
