"""Images that are trained on without their prompt, so that guidance keeps its other branch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowrl.core.seeds import generator
from flowrl.core.types import Rollout
from flowrl.evaluation.sources import encode_rows
from flowrl.training.guidance import encoding_guidance, no_prompt
from flowrl.training.setup import Setup


def without_some_prompts(run: Setup, ro: Rollout, rows: Sequence[int], attempt: int = 0) -> Rollout:
    """Take the prompt from ``train.empty_prompts`` of an iteration's prompts, drawn for each by its
    place in the iteration; how they were sampled, and what rewards see, is not touched.

    rows: the training prompts of the whole iteration.
    """
    config, share = run.config, run.config.train.empty_prompts
    if not share:
        return ro
    places: list[int] = ro.group_ids.tolist()
    mine, again = [rows[place] for place in places], (attempt,) if attempt else ()
    texts = []
    for place, row in zip(places, mine, strict=True):
        drawn = generator(config.seed, "empty prompt", run.iteration, place, *again)
        gone = torch.rand((), generator=drawn).item() < share
        texts.append(no_prompt(run.model) if gone else run.train_set.texts[row])
    # all in one call, so that models which pad to the longest text pad all alike
    with run.phase("rollout"), encoding_guidance(config, run.model):
        return ro._replace(cond=encode_rows(run.model, run.train_set, mine, run.size, texts))
