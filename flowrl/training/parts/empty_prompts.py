"""Images that are trained on without their prompt, so that guidance keeps its other branch."""

from __future__ import annotations

import torch

from flowrl.core.errors import ConfigError
from flowrl.core.part import Part
from flowrl.core.types import Plan, Rollout
from flowrl.evaluation.sources import encode_rows
from flowrl.training.guidance import is_guided, no_prompt
from flowrl.training.run import Run
from flowrl.training.task import Task


class EmptyPrompts(Part):
    """Take the prompt from a share of an iteration's prompts, drawn for each by its place in the
    iteration; how they were sampled, and what rewards see, is not touched."""

    name = "empty prompts"
    when = ("config.train.empty_prompts",)

    def check(self, task: Task, plan: Plan) -> None:
        """Refuse where images cannot be trained on without their prompt, or are anyway."""
        config, share = task.config, task.config.train.empty_prompts
        reason = ""
        if task.method.likelihood.trains != "leaves":
            reason = (
                f"likelihood {config.likelihood.fn} trains what was drawn with the prompt; take a "
                "likelihood of finished images, such as forward"
            )
        elif is_guided(config):
            reason = "with guidance in training each row is seen with and without its prompt"
        if reason:
            raise ConfigError(f"train.empty_prompts={share:g}: {reason}, or leave it out")

    def texts(self, run: Run) -> list[str]:
        """Return the text that stands for no prompt."""
        return [no_prompt(run.model)]

    def sampled(self, run: Run, ro: Rollout, rows: list[int], attempt: int) -> Rollout:
        """Encode the prompts anew, some of them without their text."""
        share = run.config.train.empty_prompts
        places: list[int] = ro.group_ids.tolist()
        mine = [rows[place] for place in places]
        texts = run.train_set.texts_of(mine)
        for k, place in enumerate(places):
            drawn = run.stream("empty prompt", place, attempt)
            if torch.rand((), generator=drawn).item() < share:
                texts[k] = no_prompt(run.model)
        # all in one call, so that models which pad to the longest text pad all alike
        with run.phase("rollout"), run.parts.inside("encoding", run):
            return ro._replace(cond=encode_rows(run.model, run.train_set, mine, run.size, texts))
