"""Choose prompts as a bandit would: by what is believed of each, drawn from that belief."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowrl.algorithms.prompt_samplers._table import PromptTable
from flowrl.core.abilities import PromptDraw, Visit
from flowrl.core.errors import ConfigError


class difficulty_bandit(PromptTable):
    """Choose the prompts of largest ``p (1 - p)``, p drawn from what is believed of each prompt's
    rate of success, ``Beta(alpha, beta)``.

    VADE (2511.18902): a Beta belief per prompt, Thompson sampling, and two speeds of forgetting.
    Reconstruction, the paper's abstract is all that we have of the rule: after an iteration
    ``alpha <- 1 + keep (alpha - 1)`` for all prompts, times `keep_visited` for those that were
    drawn, which then add their rewards to alpha and what these lack of 1 to beta. All start at
    1, 1.

    Raises: ConfigError for keep or keep_visited outside [0, 1]; in a run for rewards outside
    [0, 1], or for more places than prompts.
    """

    def __init__(self, *, keep: float = 0.99, keep_visited: float = 0.9) -> None:
        if not (0 <= keep <= 1 and 0 <= keep_visited <= 1):
            raise ConfigError(
                "difficulty_bandit: expected keep and keep_visited from 0 to 1, got "
                f"{keep=}, {keep_visited=}"
            )
        super().__init__("alpha", "beta")
        self.keep, self.keep_visited = keep, keep_visited

    def start(self, prompts: list[str]) -> None:
        """Believe any rate of each prompt."""
        super().start(prompts)
        for rows in self.kept.values():
            rows.fill_(1.0)

    def __call__(self, draw: PromptDraw) -> list[int]:
        """Choose by one draw from each belief; ties go by the order of the list."""
        alpha, beta = self.column("alpha"), self.column("beta")
        if draw.places > len(alpha):
            raise ConfigError(
                f"sampler difficulty_bandit: chooses {draw.places} different prompts, and the list "
                f"has {len(alpha)}; lower train.prompts"
            )
        a, b = (torch._standard_gamma(x, generator=draw.generator) for x in (alpha, beta))
        p = a / (a + b)
        order = torch.argsort(-(p * (1 - p)), stable=True)
        rows: list[int] = order[: draw.places].tolist()
        return rows

    def update(self, draw: PromptDraw, visits: Sequence[Visit]) -> None:
        """Forget a little, and count the iteration's successes."""
        known = self.rates(visits)
        for name in ("alpha", "beta"):
            belief = self.column(name)
            belief.copy_(1 + self.keep * (belief - 1))
            for row in {visit.row for visit in known}:
                belief[row] = 1 + self.keep_visited * (belief[row] - 1)
        for visit in known:
            self.column("alpha")[visit.row] += visit.images * visit.mean
            self.column("beta")[visit.row] += visit.images * (1 - visit.mean)
