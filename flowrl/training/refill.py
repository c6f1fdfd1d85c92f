"""A second draw for prompts that teach nothing, since all their images got one reward."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from flowrl.algorithms.rollout.join import merge, of_prompt
from flowrl.core.abilities import Visit
from flowrl.training.collect import Collected, collect
from flowrl.training.prompt_visits import instead, visits
from flowrl.training.reward_batch import reward_batch
from flowrl.training.setup import Setup


class Refilled(NamedTuple):
    """An iteration in which prompts without a signal were replaced."""

    found: Collected  # of this process
    rows: list[int]  # of all processes
    dropped: list[Visit]  # what was drawn in vain, by all processes


def refill(run: Setup, found: Collected, rows: list[int], places: range) -> Refilled:
    """Draw other prompts in place of those whose images all got one reward, up to `train.refill`
    times.

    DAPO's dynamic sampling (2503.14476). A new prompt takes the place of the old one, with noise of
    its own; what still has no signal after the last draw stays. **Differs:** DAPO takes the next
    prompts of the epoch, whole batches at a time, and ends the run if there are too many; here only
    as many are drawn as are missing. All processes call it, and all come to the same rows.
    """
    dropped: list[Visit] = []
    for attempt in range(1, run.config.train.refill + 1):
        shares = run.world.gather(_without_signal(run, found, rows))
        unsignalled = {place: visit for some in shares for place, visit in some.items()}
        if not unsignalled:
            break
        dropped += unsignalled.values()
        rows = instead(run, rows, sorted(unsignalled), attempt)
        mine = [place for place in sorted(unsignalled) if place in places]
        found = run.world.together(partial(_drawn_again, run, found, rows, mine, attempt))
    return Refilled(found, rows, dropped)


def _without_signal(run: Setup, found: Collected, rows: list[int]) -> dict[int, Visit]:
    """Return this process' prompts whose scored images all got one reward, by place."""
    ro, most = found.rollout, run.config.train.refill_spread
    reward = run.reward_set.judged(found.values, found.batch, ro.leaf, ro.tree)
    seen = visits(reward, ro.tree.group[ro.leaf], rows)
    return {place: it for place, it in seen.items() if it.images > 1 and it.std <= most}


def _drawn_again(
    run: Setup, found: Collected, rows: list[int], places: list[int], attempt: int
) -> Collected:
    """Sample and score the prompts at `places` of this process, and put them where the old ones
    were."""
    if not places:
        return found
    parts = _by_place(found) | _by_place(collect(run, rows, places, attempt=attempt))
    ordered = [parts[place] for place in sorted(parts)]
    ro, _, order = merge([part.rollout for part in ordered])
    order = order.cpu()
    images = torch.cat([part.batch.images for part in ordered])[order]
    values = {}
    for name in found.values:
        values[name] = torch.cat([part.values[name] for part in ordered])[order]
    return Collected(ro, reward_batch(run, ro, images, rows), values)


def _by_place(found: Collected) -> dict[int, Collected]:
    """Take a process' prompts apart. Of the batch only the images are kept true."""
    parts, group = {}, found.rollout.tree.group[found.rollout.leaf].cpu()
    for place in group.unique().tolist():
        mine = group == place
        parts[place] = Collected(
            of_prompt(found.rollout, place),
            found.batch._replace(images=found.batch.images[mine]),
            {name: row[mine] for name, row in found.values.items()},
        )
    return parts
