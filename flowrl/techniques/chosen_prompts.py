"""Prompt samplers with a memory: the config's section `sampler` chooses the prompts of each
iteration by what earlier ones showed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.core.abilities import PromptDraw, PromptSampler, Visit
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs_of
from flowrl.core.part import Part, PartState
from flowrl.core.prompts import stream
from flowrl.core.seeds import generator
from flowrl.core.types import Plan


class ChosenPrompts(Part):
    """Let a sampler choose the prompts, and show it what their images were worth."""

    name = "sampler"
    rank = 80  # after rewards have learned
    when = ("config.sampler",)

    def check(self, task: Any, plan: Plan) -> None:
        """Refuse where something else of the config wants to choose prompts."""
        config = task.config
        if config.train.balance:
            raise ConfigError(
                f"train.balance={config.train.balance!r} and sampler {config.sampler.fn}: both "
                "choose the prompts of an iteration; leave one out"
            )
        # a prompt at several places: what works place by place would see a part of its images
        joins = config.sampler.make().joins
        whole_prompt = config.segment is not None and config.segment.fn == "prompt"
        if joins and (whole_prompt or "siblings" in needs_of(task.method.loss)):
            raise ConfigError(
                f"sampler {config.sampler.fn}: gives prompts several places of an iteration, and "
                f"loss {config.loss.fn} compares the images of a prompt in one network call, which "
                "has those of one place; take another sampler"
            )

    def begin(self, prepared: Any) -> None:
        """Make the sampler, which knows nothing yet, and draw once: a wrong list is found before
        the model is loaded."""
        config = prepared.config
        self.sampler: PromptSampler = config.sampler.make()
        self.sampler.start(prepared.train_set.texts)
        chosen = self.sampler(draw_of(prepared, 0))
        if len(chosen) != config.train.prompts:
            raise ConfigError(
                f"sampler {config.sampler.fn}: expected train.prompts={config.train.prompts} rows "
                f"of the list, got {len(chosen)}"
            )

    def rows(self, run: Any, iteration: int) -> list[int]:
        """Return the prompts that the sampler would choose now."""
        return self.sampler(draw_of(run, iteration))

    def joined(self, run: Any, it: Any) -> None:
        """Make places of one prompt one group, where the sampler wants that."""
        if not self.sampler.joins:
            return
        first: dict[int, int] = {}
        for place, row in enumerate(it.rows):
            first.setdefault(row, place)
        group = torch.tensor([first[row] for row in it.rows], device=it.tree.group.device)
        it.tree = it.tree._replace(group=group[it.tree.group])

    def credited(self, run: Any, it: Any) -> None:
        """Show the sampler this iteration's rewards, and those of prompts drawn in vain."""
        leaf, tree = it.forest.whole.leaf, it.tree
        reward = run.reward_set.judged(it.values, it.batch, leaf, tree)
        seen = visits(reward, tree.group[leaf], it.rows)
        self.sampler.update(draw_of(run, run.iteration), [*it.visits, *seen.values()])

    def state_dict(self, run: Any) -> PartState:
        """Return what the sampler remembers."""
        return PartState({"sampler": self.sampler.state_dict()})

    def load_state_dict(self, run: Any, state: PartState, where: Path) -> None:
        """Put it back."""
        self.sampler.load_state_dict(dict(state.files["sampler"]))


def draw_of(run: Any, iteration: int) -> PromptDraw:
    """Say what a sampler may look at."""
    config, prompts = run.config, run.train_set
    return PromptDraw(
        iteration,
        config.train.prompts,
        config.train.group,
        lambda first, count: stream(prompts, seed=config.seed, first=first, count=count),
        generator(config.seed, "sampler", iteration),
    )


def visits(reward: Tensor, group: Tensor, rows: list[int]) -> dict[int, Visit]:
    """Say of each group what its images were worth; reward [L], group [L]: places."""
    found, reward, group = {}, reward.double().cpu(), group.cpu()
    for place in group.unique().tolist():
        mine = reward[group == place]
        mine = mine[~mine.isnan()]
        count = len(mine)
        mean = float(mine.mean()) if count else 0.0
        std = float(mine.std(correction=0)) if count else 0.0
        found[place] = Visit(rows[place], mean, std, count)
    return found
