"""Draw prompts of medium difficulty again before the list comes round to them."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.algorithms.prompt_samplers._table import PromptTable, check_share
from flowrl.core.abilities import PromptDraw, Visit
from flowrl.core.errors import ConfigError


class prompt_replay(PromptTable):
    """Fill up to `share` of an iteration with prompts that were drawn before and are neither too
    easy nor too hard, nearest to a mean reward of 1/2 first; the others come in shuffled epochs.

    Prompt Replay (2603.21177): only the prompt is used again, its images are new, so training stays
    on-policy. A prompt waits `cooldown` iterations and is drawn again at most `reuse` times between
    two turns in the epochs. Reconstruction: the abstract names the rule, the numbers are ours; so
    is that a mean reward strictly between `low` and `high` is medium.

    Raises: ConfigError for numbers out of range; in a run for mean rewards outside [0, 1].
    """

    def __init__(
        self,
        *,
        share: float = 0.5,
        cooldown: int = 5,
        reuse: int = 3,
        low: float = 0.0,
        high: float = 1.0,
    ) -> None:
        check_share("prompt_replay", "share", share)
        if not (cooldown >= 0 and reuse >= 1 and 0 <= low < high <= 1):
            raise ConfigError(
                "prompt_replay: expected cooldown >= 0, reuse >= 1 and 0 <= low < high <= 1, got "
                f"{cooldown=}, {reuse=}, {low=}, {high=}"
            )
        super().__init__("rate", "last", "reused", "fresh")
        self.share, self.cooldown, self.reuse = share, cooldown, reuse
        self.low, self.high = low, high

    def __call__(self, draw: PromptDraw) -> list[int]:
        """Return first those drawn again, then the new ones."""
        again, fresh = self._parts(draw)
        return again + fresh

    def update(self, draw: PromptDraw, visits: Sequence[Visit]) -> None:
        """Remember what each prompt was worth, and how often it was drawn."""
        again, fresh = self._parts(draw)
        for row in again:
            self.column("reused")[row] += 1
        for row in fresh:
            self.column("fresh")[row] = self.column("fresh")[row].nan_to_num() + 1
            self.column("reused")[row] = 0
        for visit in self.rates(visits):
            self.column("rate")[visit.row] = visit.mean
            self.column("last")[visit.row] = draw.iteration
            reused = self.column("reused")  # one that came in the second draw of an iteration
            reused[visit.row] = reused[visit.row].nan_to_num()

    def _parts(self, draw: PromptDraw) -> tuple[list[int], list[int]]:
        """Return the rows that are drawn again, and the new ones."""
        rate, last, reused = (self.column(name) for name in ("rate", "last", "reused"))
        medium = (rate > self.low) & (rate < self.high)  # false where nothing is known
        ready = medium & (draw.iteration - last > self.cooldown) & (reused < self.reuse)
        rows = ready.nonzero().flatten().tolist()
        rows.sort(key=lambda row: (abs(float(rate[row]) - 0.5), row))
        again = rows[: int(draw.places * self.share)]
        taken = int(self.column("fresh").nansum())
        return again, draw.stream(taken, draw.places - len(again))
