"""Ask a judge whether images keep rules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.core.errors import DataError

from .._common.scorer import to_pil
from .._judge.answer import Answer
from .._judge.ask import Job, Judge
from .._judge.first_token import yes_no
from .._judge.wordings import fill, wordings
from .file import WHO

ASK = (
    'The image was made from this caption: "{prompt}"\nDoes it keep this rule? {criterion}\n'
    'Begin the answer with "Yes" or "No".'
)


class Checks:
    """P(yes) of each image and rule, from the first token's log-probs."""

    def __init__(self, judge: Judge, wording: str = "", variants: bool = False) -> None:
        given = {"wording": wording} if wording else None
        self.words = wordings({"wording": ASK}, given, WHO)["wording"]
        self.judge, self.variants = judge, variants

    def __call__(self, images: Tensor, prompts: Sequence[str], rules: Sequence[str]) -> Tensor:
        """Return s [L, R] float64 in [0, 1] of images [L, 3, H, W]; NaN = no readable answer."""
        if len(prompts) != len(images):
            raise DataError(f"{WHO}: expected {len(images)} prompts, got {len(prompts)}")
        shown, jobs = to_pil(images), []
        for i, prompt in enumerate(prompts):
            for rule in rules:
                text = fill(self.words, prompt=prompt, criterion=rule)
                jobs.append(Job(f"image {i}, rule {rule[:80]!r}", (i,), text))

        def read(answer: Answer) -> float | str:
            return yes_no(answer, variants=self.variants)

        found = [math.nan if one is None else one for one in self.judge.ask(shown, jobs, read)]
        return torch.tensor(found, dtype=torch.float64).reshape(len(prompts), len(rules))
