"""What a judge says, and what its likeliest first tokens say: yes or no, and the mean of digits."""

from __future__ import annotations

import math
from typing import NamedTuple

DOUBT = 1e-3  # how far a score may be off because a server lists only the most likely tokens


class Answer(NamedTuple):
    """What a server said to one question."""

    text: str
    # the likeliest first tokens with their log-probs; empty where not asked for
    top: list[tuple[str, float]]
    cut: bool = False  # it ended at max_tokens


def yes_no(answer: Answer, *, variants: bool = False) -> float | str:
    """Return sigmoid(lp(Yes) - lp(No)) of the first token (PaCo-Reward) -> [0, 1]; `variants` adds
    yes, YES, " Yes"...

    If only one is listed, the other is less likely than all that are: the score is 1 or 0 if that
    leaves DOUBT at most, else missing. **Differs:** theirs takes the limit always, and 0 where
    neither is listed.
    """
    yes, no = (_log_prob(answer.top, word, variants) for word in ("Yes", "No"))
    floor = min((lp for _, lp in answer.top), default=math.inf)
    if max(yes, no) == -math.inf or (
        min(yes, no) == -math.inf and _sigmoid(floor - max(yes, no)) > DOUBT
    ):
        return "no log-probs of Yes and No for the first token"
    return _sigmoid(yes - no)


def level(answer: Answer) -> float | str:
    """Return the mean digit / 5 under the first token's probabilities of 0 ... 5 (UniWorld-V2's
    reward) -> [0, 1]."""
    lps = [_log_prob(answer.top, str(digit), False) for digit in range(6)]
    known = math.fsum(math.exp(lp) for lp in lps)
    # a digit that is not listed is at most as likely as the last one that is
    least = math.exp(min((lp for _, lp in answer.top), default=0.0))
    unlisted = sum(lp == -math.inf for lp in lps) * least
    if known == 0 or unlisted / known > DOUBT:
        return "no log-probs of the digits 0 to 5 for the first token"
    return math.fsum(digit * math.exp(lp) for digit, lp in enumerate(lps)) / known / 5


def _log_prob(top: list[tuple[str, float]], word: str, variants: bool) -> float:
    """Return the log of the summed probabilities of a word's tokens; -inf where none is listed."""
    lps = []
    for token, lp in top:
        if token == word or (variants and token.strip().lower() == word.lower()):
            lps.append(lp)
    if not lps:
        return -math.inf
    return max(lps) + math.log(math.fsum(math.exp(lp - max(lps)) for lp in lps))


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    small = math.exp(max(x, -700.0))
    return small / (1 + small)
