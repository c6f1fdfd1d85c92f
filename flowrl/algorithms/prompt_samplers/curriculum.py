"""Draw prompts by how much they can teach now: those whose images differ most in reward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.algorithms.credit.single_stream import first_beliefs
from flowrl.algorithms.prompt_samplers._table import PromptTable, check_share, drawn_by
from flowrl.core.abilities import PromptDraw, Visit
from flowrl.core.errors import ConfigError


class _weighted(PromptTable):
    """Draw a share of the prompts by weight, the others in shuffled epochs."""

    def __init__(self, *columns: str, share: float) -> None:
        check_share(type(self).__name__, "share", share)
        super().__init__(*columns)
        self.share = share

    def __call__(self, draw: PromptDraw) -> list[int]:
        """Return first those drawn by weight, then the next ones of the epochs."""
        weighted = int(draw.places * self.share)
        plain = draw.places - weighted
        rows = drawn_by(self.weights(), weighted, draw)
        return rows + draw.stream(draw.iteration * plain, plain) if plain else rows

    def weights(self) -> Tensor:
        """Return the weight of each prompt [N]."""
        raise NotImplementedError


class variance_weighted(_weighted):
    """Draw a share of the prompts with odds of the variance of their rewards, the others evenly.

    MMR1's variance-aware sampling (2509.21268) and its code (LengSicong/MMR1 at d8161a0):
    ``int(share count)`` with replacement, weights ``p (1 - p)`` scaled so that the least is 0 and
    the largest 1, `momentum` of the older weight; share 0.5 and momentum 0 there. The variance of
    rewards (divisor n) is ``p (1 - p)`` for rewards of 0 and 1, and fits any other reward.

    **Differs:** the code measures all prompts again every 4 iterations, with 8 images each; here a
    weight is what the prompt's own images said when it was last trained on, which costs nothing,
    and a prompt that was never drawn weighs as much as the mean. The paper's second part of the
    weight, the diversity of texts, is not in the code either.

    Raises: ConfigError for share outside [0, 1], or momentum outside [0, 1).
    """

    def __init__(self, *, share: float = 0.5, momentum: float = 0.0) -> None:
        super().__init__("variance", share=share)
        if not 0 <= momentum < 1:
            raise ConfigError(f"variance_weighted: expected 0 <= momentum < 1, got {momentum}")
        self.momentum = momentum

    def weights(self) -> Tensor:
        """Return the scaled variances [N]."""
        variance = self.column("variance")
        known = variance[~variance.isnan()]
        if not len(known):
            return torch.ones_like(variance)
        scaled = (variance - known.min()) / (known.max() - known.min() + 1e-8)
        return torch.where(scaled.isnan(), scaled.nanmean(), scaled)

    def update(self, draw: PromptDraw, visits: Sequence[Visit]) -> None:
        """Remember how much the rewards of each prompt differed."""
        variance = self.column("variance")
        for visit in visits:
            if visit.images > 1:
                new, old = visit.std**2, float(variance[visit.row])
                kept = new if old != old else self.momentum * old + (1 - self.momentum) * new
                variance[visit.row] = kept


class gaussian_curriculum(_weighted):
    """Draw prompts with odds ``exp(-(p - 1/2)^2 / (2 width^2))``, p the mean reward of a prompt's
    images when it was last drawn.

    FG-ExPO's Gaussian curriculum sampling (2605.11403), known by its abstract. Reconstruction:
    `width`, what a prompt weighs that was never drawn (as much as at 1/2), and that all of a batch
    is drawn so, with replacement. Its other half, a KL that follows the accuracy, is not here: the
    function is not in what we could read; `monitors.adaptive_kl` is another such rule.

    Raises: ConfigError unless width > 0 and share in [0, 1]; in a run for mean rewards outside
    [0, 1].
    """

    def __init__(self, *, width: float, share: float = 1.0) -> None:
        super().__init__("rate", share=share)
        if not width > 0:
            raise ConfigError(f"gaussian_curriculum: expected width > 0, got {width}")
        self.width = width

    def weights(self) -> Tensor:
        """Return the height of the bell at each prompt's rate [N]."""
        apart = (self.column("rate").nan_to_num(nan=0.5) - 0.5) / self.width
        return (-apart.square() / 2).exp()

    def update(self, draw: PromptDraw, visits: Sequence[Visit]) -> None:
        """Remember the mean reward of each prompt."""
        for visit in self.rates(visits):
            self.column("rate")[visit.row] = visit.mean


class success_spread(_weighted):
    """Draw prompts with odds ``sqrt(v (1 - v)) / n^gamma + floor``, the spread of a success that is
    worth v by what was seen of the prompt so far.

    Single-stream policy optimisation (2509.13232), its prompt sampler, and its code (verl-recipe at
    48ea0a7, `spo`): ``v = alpha / (alpha + beta)`` and ``n = alpha + beta`` of the belief that
    credit `single_stream` keeps, with the same update and start; floor 0.05.

    Args:
        keep: how much of what was known stays at a visit.
        gamma: how much less a prompt weighs that much is known of. 0, the code's, leaves n out;
            the paper divides by n^gamma, whose gamma was not found.
        floor: what is added to each weight: a prompt that always succeeds comes again at times.
        scores: rewards that were made beforehand, as for credit `single_stream`.
        share: of the places that are drawn by weight; the others come in shuffled epochs.

    **Differs:** a sampler sees rewards alone, so the belief forgets by `keep`, not by how far the
    policy has moved; take the credit's `keep` for both, or what its `half` comes to. Equal texts in
    the list are rows of their own. Drawn with replacement.

    Raises: ConfigError for `keep` outside (0, 1), `gamma` or `floor` below 0, share outside [0, 1],
    or a prompt that `scores` does not have; in a run for mean rewards outside [0, 1]. DataError for
    scores that are none.
    """

    def __init__(
        self,
        *,
        keep: float = 0.9,
        gamma: float = 0.0,
        floor: float = 0.05,
        scores: str = "",
        share: float = 1.0,
    ) -> None:
        super().__init__("alpha", "beta", share=share)
        if not (0 < keep < 1 and gamma >= 0 and floor >= 0):
            raise ConfigError(
                "success_spread: expected 0 < keep < 1, gamma >= 0 and floor >= 0, got "
                f"{keep=}, {gamma=}, {floor=}"
            )
        self.keep, self.gamma, self.floor, self.scores = keep, gamma, floor, scores

    def start(self, prompts: list[str]) -> None:
        """Know of each prompt what `scores` says."""
        super().start(prompts)
        begun = first_beliefs(prompts, self.scores, self.keep, "sampler success_spread")
        self.kept["alpha"][:, 0], self.kept["beta"][:, 0] = begun

    def weights(self) -> Tensor:
        """Return the odds of each prompt [N]."""
        alpha, beta = self.column("alpha"), self.column("beta")
        known = alpha + beta
        return (alpha * beta).sqrt() / known / known**self.gamma + self.floor

    def update(self, draw: PromptDraw, visits: Sequence[Visit]) -> None:
        """Forget a part of each visited prompt once, and add its rewards."""
        known = self.rates(visits)
        for row in {visit.row for visit in known}:
            for name in ("alpha", "beta"):
                self.column(name)[row] *= self.keep
        for visit in known:
            right = visit.images * min(max(visit.mean, 0.0), 1.0)
            self.column("alpha")[visit.row] += right
            self.column("beta")[visit.row] += visit.images - right
