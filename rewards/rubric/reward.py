"""Reward images by a learnt rubric, whose rules a judge checks one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.core.types import RewardBatch

from .._common.scorer import local
from .._judge.ask import Judge
from .checks import Checks
from .file import WHO, load_rubric


class rubric:
    """Score images [L, 3, H, W] by ``sum_j w_j s_j`` -> [L] float32, NaN = an answer is missing.

    s_j in [0, 1] is the judge's P(yes) to "does the image keep rule j?", w_j the rule's weight. So
    the range is from the sum of the negative weights to that of the positive ones. AutoRubric-T2I
    (2605.17602); `file` is what `scripts/assets/learn_rubric.py` writes. **Reconstruction:** its code and
    prompts are not public; the question is in flowrl's own words, unless `wording` has others, with
    {criterion} for the rule and {prompt} for the caption. Raises ConfigError for a file that is no
    rubric, or of another version.
    """

    judges_singly = True

    def __init__(
        self,
        *,
        file: str,
        wording: str = "",
        variants: bool = False,
        url: str = "http://localhost:8080",
        model: str = "judge",
        api_key_env: str | None = None,
        timeout: float = 120.0,
        retries: int = 5,
        backoff: float = 1.0,
        workers: int = 16,
        max_failed: float = 0.1,
        encoding: Literal["jpeg", "png"] = "png",
        cache: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.rules = load_rubric(Path(local(file)))
        # the judge that checks the rules on an image
        judge = Judge(
            WHO,
            url=url,
            model=model,
            api_key_env=api_key_env,
            timeout=timeout,
            retries=retries,
            backoff=backoff,
            workers=workers,
            max_failed=max_failed,
            encoding=encoding,
            cache=cache,
            extra=extra,
        )
        self.checks = Checks(judge, wording, variants)

    def probe(self) -> None:
        """Ask the server for its models. Raises RunError."""
        self.checks.judge.probe()

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image; all rules of all images are asked at once."""
        kept = self.checks(batch.images, batch.prompts, [rule.text for rule in self.rules])
        weights = torch.tensor([rule.weight for rule in self.rules], dtype=torch.float64)
        return (kept @ weights).float().to(batch.images.device)
