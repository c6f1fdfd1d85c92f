"""Images that are trained on without their prompt, so that guidance keeps its other branch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowrl.core.abilities import conditioning
from flowrl.core.seeds import generator
from flowrl.core.types import Rollout
from flowrl.evaluation.sources import sources_of
from flowrl.training.guidance import encoding_guidance, no_prompt
from flowrl.training.setup import Setup


def without_some_prompts(run: Setup, ro: Rollout, rows: Sequence[int], attempt: int = 0) -> Rollout:
    """Take the prompt from ``train.empty_prompts`` of an iteration's prompts, drawn for each by its
    place in the iteration; how they were sampled, and what rewards see, is not touched.

    rows: the training prompts of the whole iteration.
    """
    share = run.config.train.empty_prompts
    if not share:
        return ro
    texts, mine = [], [rows[place] for place in ro.group_ids.tolist()]
    again = (attempt,) if attempt else ()
    for place, row in zip(ro.group_ids.tolist(), mine, strict=True):
        drawn = generator(run.config.seed, "empty prompt", run.iteration, place, *again)
        gone = torch.rand((), generator=drawn).item() < share
        texts.append(no_prompt(run.model) if gone else run.train_set.texts[row])
    size = (run.config.image.height, run.config.image.width)
    starts = hasattr(run.model, "encode_with_sources")
    sources = sources_of(run.train_set, mine, size) if starts else []
    # all in one call, so that models which pad to the longest text pad all alike
    with encoding_guidance(run.config, run.model):
        return ro._replace(cond=conditioning(run.model, texts, sources))
