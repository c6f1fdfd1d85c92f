"""The minutes that a comparison still takes."""

from __future__ import annotations

import math
import time


class TimeLeft:
    """Tell how many minutes the whole comparison still takes, from the work done since it was
    started."""

    def __init__(self, todo: float) -> None:
        self.todo, self.done, self.size, self.first = todo, 0.0, 0.0, math.nan
        self.began = time.perf_counter()

    def start(self, size: float) -> None:
        """Begin a run of `size` units of work."""
        self.size, self.first = size, math.nan

    def finish(self) -> None:
        """End the run."""
        self.todo -= self.size
        self.done += 0.0 if math.isnan(self.first) else self.size * (1 - self.first)

    def __call__(self, used: float) -> float:
        """Return the minutes left when the run has used a share of its budgets; NaN before it is
        known."""
        # a resumed run starts somewhere; the first report is already one iteration on
        if math.isnan(self.first):
            self.first = used
        done = self.done + self.size * (used - self.first)
        minutes = (time.perf_counter() - self.began) / 60
        return minutes * (self.todo - self.size * used) / done if done else math.nan
