"""Advantages without a group: an image against what its prompt was worth so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.credit._groups import check_unit, sample_std
from flowrl.algorithms.forest import subtree_mean
from flowrl.algorithms.losses._groups import check_positive
from flowrl.algorithms.prompt_memory import PromptMemory
from flowrl.core.errors import ConfigError, DataError
from flowrl.core.prompts import load_prompts
from flowrl.core.types import Tree


class single_stream(PromptMemory):
    """Subtract from rewards in [0, 1] [L] what their prompt was worth so far, and standardise over
    the batch -> advantage per node [V] float32; `train.group` may be 1.

    Single-stream policy optimisation (2509.13232) and its code: a prompt is worth ``alpha / (alpha
    + beta)``; a visit adds its rewards to ``keep alpha`` and what they lack of 1 to ``keep beta``.
    With N = 1 / (1 - keep) and scores of n images that were made beforehand, which sum to k, they
    start at ``N (k + 1/2) / (n + 1)`` and ``N (n - k + 1/2) / (n + 1)``; the code has n = 8.

    Args:
        keep: how much of what was known stays, where `half` is not given.
        half: forget by how far the policy has moved: ``keep = 2^(-D / half)`` within `least` and
            `most`, and 1 / (1 - least) is N. D is the mean absolute change of the log-prob of what
            was drawn at the prompt's last visit; a first visit has none and takes `least`. In the
            code 0.06 for the log-probs of words. Those of latents are means over so many numbers
            that their changes are far smaller: the metric `moved` is the mean D.
        least, most: with `half`, the range of `keep`.
        scores: a list of prompts, as `prompts.train`, whose records have `scores`, the rewards of
            images of the model that training starts from; "": none, n = 0, so that every prompt is
            worth 1/2 at first.

    Its other half, which prompts are drawn, is the sampler `success_spread`.

    **Differs:** without `half` the number `keep` stands for it; D is of one image, and the code has
    its answer's words. NaN = not scored: advantage 0.

    Raises: ConfigError for `keep`, `least` or `most` outside (0, 1), `half` not above 0, rewards
    outside [0, 1], or a prompt that `scores` does not have; DataError for scores that are none.
    """

    def __init__(
        self,
        *,
        keep: float = 0.9,
        half: float | None = None,
        least: float = 0.875,
        most: float = 0.96,
        scores: str = "",
    ) -> None:
        if not (0 < keep < 1 and 0 < least <= most < 1):
            raise ConfigError(
                "single_stream: expected 0 < keep < 1 and 0 < least <= most < 1, got "
                f"{keep=}, {least=}, {most=}"
            )
        if half is not None:
            check_positive("single_stream", half=half)
            self.needs = self.needs | {"moved"}
        super().__init__({"alpha": 1, "beta": 1})
        self.keep, self.half, self.least, self.most = keep, half, least, most
        self.scores = scores

    def start(self, prompts: list[str]) -> None:
        """Know of each prompt what `scores` says."""
        super().start(prompts)
        keep = self.keep if self.half is None else self.least
        begun = first_beliefs(list(self._row), self.scores, keep, "credit single_stream")
        self.kept["alpha"][:, 0], self.kept["beta"][:, 0] = begun

    def __call__(
        self, reward: Tensor, leaf: Tensor, tree: Tree, *, prompts: Sequence[str] = ()
    ) -> Tensor:
        """Compare each reward; prompts [L]: the text of each leaf."""
        value, place = reward.double(), self.places(prompts)
        check_unit("single_stream", value[~value.isnan()])
        alpha, beta = (self.kept[name][place, 0] for name in ("alpha", "beta"))
        gap = value - (alpha / (alpha + beta)).to(value.device)
        known = gap[~gap.isnan()]
        if len(known):
            gap = (gap - known.mean()) / (sample_std(known) + 1e-8)
        return subtree_mean(gap, leaf, tree).nan_to_num().float()

    def update(
        self,
        reward: Tensor,
        leaf: Tensor,
        tree: Tree,
        *,
        prompts: Sequence[str],
        moved: Tensor | None = None,
    ) -> None:
        """Add the rewards [L] of an iteration, from 0 to 1; NaN = not scored. moved [L]: how far
        the policy has moved since the prompt's last visit, NaN at a first one."""
        for prompt, mine, new in self.visited(reward.cpu(), prompts):
            keep = self.keep
            if self.half is not None and moved is not None:
                keep = forgetting(float(moved[mine][0]), self.half, self.least, self.most)
            for name, add in (("alpha", new.sum()), ("beta", (1 - new).sum())):
                self.kept[name][prompt, 0] = keep * self.kept[name][prompt, 0] + add


def forgetting(moved: float, half: float, least: float, most: float) -> float:
    """Return ``2^(-moved / half)`` within `least` and `most`; `least` for NaN."""
    return least if moved != moved else min(max(2 ** (-moved / half), least), most)


def first_beliefs(texts: list[str], scores: str, keep: float, who: str) -> tuple[Tensor, Tensor]:
    """Return alpha and beta [N] float64 of N prompts before a visit, as `single_stream` says.

    Raises: ConfigError for a prompt that the file `scores` does not have; DataError as `scores_of`.
    """
    known = scores_of(scores) if scores else {}
    strange = next((text for text in texts if known and text not in known), None)
    if strange is not None:
        raise ConfigError(
            f"{who}: {scores} has no scores of {strange!r}, which is in prompts.train; score "
            "images of every prompt, or leave `scores` out"
        )
    seen = [known.get(text, []) for text in texts]
    count = torch.tensor([len(rewards) for rewards in seen], dtype=torch.float64)
    right = torch.tensor([sum(rewards) for rewards in seen], dtype=torch.float64)
    share = 1 / (1 - keep) / (count + 1)
    return share * (right + 0.5), share * (count - right + 0.5)


def scores_of(path: str) -> dict[str, list[float]]:
    """Read the rewards of images that were made beforehand -> {prompt: rewards in [0, 1]}, those of
    records with one prompt together. Raises DataError with file and line, or as `load_prompts`."""
    found: dict[str, list[float]] = {}
    listed = load_prompts(path)
    for text, record, where in zip(listed.texts, listed.records, listed.places, strict=True):
        scores = record.get("scores")
        if not (isinstance(scores, list) and all(map(_is_score, scores))):
            raise DataError(
                f"{where}: expected `scores`, a list of numbers from 0 to 1, the rewards of images "
                f"of this prompt; got {scores!r}"
            )
        found.setdefault(text, []).extend(map(float, scores))
    return found


def _is_score(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
