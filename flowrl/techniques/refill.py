"""A second draw for prompts that teach nothing, since all their images got one reward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flowrl.algorithms.forest import merge, of_prompt
from flowrl.core.abilities import Visit
from flowrl.core.errors import ConfigError
from flowrl.core.part import Part
from flowrl.core.seeds import seed_of
from flowrl.core.types import Plan
from flowrl.techniques.chosen_prompts import visits


class Refill(Part):
    """Draw other prompts in place of those whose images all got one reward, up to `train.refill`
    times.

    DAPO's dynamic sampling (2503.14476). A new prompt takes the place of the old one, with noise of
    its own; what still has no signal after the last draw stays. **Differs:** DAPO takes the next
    prompts of the epoch, whole batches at a time, and ends the run if there are too many; here only
    as many are drawn as are missing. All processes come to the same rows.
    """

    name = "refill"
    rank = 90  # its figures count what all others cost
    when = ("config.train.refill",)
    fsdp = "a second draw (train.refill), of which processes make different numbers,"

    def check(self, task: Any, plan: Plan) -> None:
        """Refuse where an iteration cannot have a second draw: there must be something to draw,
        images that differ, and places that are one prompt's."""
        config, times = task.config, task.config.train.refill
        if plan.stored is not None:
            raise ConfigError(
                f"train.refill={times}: plan {config.plan.fn} samples nothing, so nothing can be "
                "drawn again; set it to 0"
            )
        if config.train.group < 2:
            raise ConfigError(
                f"train.refill={times}: with train.group=1 no prompt's images differ; set it to 0"
            )
        if config.sampler is not None and config.sampler.make().joins:
            raise ConfigError(
                f"train.refill={times}: replaces prompts place by place, and sampler "
                f"{config.sampler.fn} gives a prompt several; set it to 0"
            )

    def scored(self, run: Any, it: Any) -> None:
        """Replace prompts without a signal; ``it.visits`` keeps what was drawn in vain."""
        for attempt in range(1, run.config.train.refill + 1):
            unsignalled: dict[int, Visit] = {}
            for share in run.world.gather(_without_signal(run, it.found, it.rows)):
                unsignalled |= share
            if not unsignalled:
                break
            it.visits += unsignalled.values()
            it.rows = instead(run, it.rows, sorted(unsignalled), attempt)
            mine = [place for place in sorted(unsignalled) if place in it.places]
            again = partial(_drawn_again, run, it.found, it.rows, mine, attempt)
            it.found = run.world.together(again)

    def after_iteration(self, run: Any, it: Any) -> None:
        """Count what was drawn in vain: it cost as much as what was not."""
        dropped, prompts, m = len(it.visits), len(it.rows), it.metrics
        m["refilled"] = float(dropped)
        m["nfe"] += dropped * run.cost.nfe / prompts
        for name in ("decoded", "scored"):
            m[name] += dropped * m[name] / prompts


def instead(run: Any, rows: list[int], places: list[int], attempt: int) -> list[int]:
    """Return the rows of an iteration with others at `places`: evenly drawn of those that are not
    in it, of the same value of `train.balance` where that is set; any where there are too few."""
    key, c = run.config.train.balance, run.config
    records, rows = run.train_set.records, list(rows)
    order = sorted(
        range(len(records)),
        key=lambda row: seed_of(c.seed, "refill", run.iteration, attempt, row),
    )
    used = set(rows)
    for place in places:
        tag = records[rows[place]].get(key) if key else None
        alike = [row for row in order if not key or records[row].get(key) == tag]
        new = next((row for row in alike if row not in used), alike[0])
        rows[place] = new
        used.add(new)
    return rows


def _without_signal(run: Any, found: Any, rows: list[int]) -> dict[int, Visit]:
    """Return this process' prompts whose scored images all got one reward, by place."""
    ro, most = found.rollout, run.config.train.refill_spread
    reward = run.reward_set.judged(found.values, found.batch, ro.leaf, ro.tree)
    seen = visits(reward, ro.tree.group[ro.leaf], rows)
    return {place: it for place, it in seen.items() if it.images > 1 and it.std <= most}


def _drawn_again(run: Any, found: Any, rows: list[int], places: list[int], attempt: int) -> Any:
    """Sample and score the prompts at `places` of this process, and put them where the old ones
    were."""
    if not places:
        return found
    parts = _by_place(found) | _by_place(run.collect(rows, places, attempt))
    ordered = [parts[place] for place in sorted(parts)]
    ro, _, order = merge([part.rollout for part in ordered])
    order = order.cpu()
    images = torch.cat([part.batch.images for part in ordered])[order]
    values = {}
    for name in found.values:
        values[name] = torch.cat([part.values[name] for part in ordered])[order]
    return found._replace(rollout=ro, batch=run.reward_batch(ro, images, rows), values=values)


def _by_place(found: Any) -> dict[int, Any]:
    """Take a process' prompts apart. Of the batch only the images are kept true."""
    parts, group = {}, found.rollout.tree.group[found.rollout.leaf].cpu()
    for place in group.unique().tolist():
        mine = group == place
        values = {name: row[mine] for name, row in found.values.items()}
        batch = found.batch._replace(images=found.batch.images[mine])
        ro = of_prompt(found.rollout, place)
        parts[place] = found._replace(rollout=ro, batch=batch, values=values)
    return parts
