"""What the images of an iteration's prompts were worth, and what follows for the next draw."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flowrl.core.abilities import Visit
from flowrl.core.seeds import seed_of
from flowrl.core.types import RewardBatch, Tree
from flowrl.training.prompt_choice import draw_of
from flowrl.training.setup import Setup


def instead(run: Setup, rows: list[int], places: list[int], attempt: int) -> list[int]:
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


def join_places(run: Setup, tree: Tree, rows: list[int]) -> Tree:
    """Return the tree in which places of one prompt are one group, where the sampler wants that."""
    if run.sampler is None or not run.sampler.joins:
        return tree
    first: dict[int, int] = {}
    for place, row in enumerate(rows):
        first.setdefault(row, place)
    group = torch.tensor([first[row] for row in rows], device=tree.group.device)
    return tree._replace(group=group[tree.group])


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


def show_sampler(
    run: Setup,
    values: dict[str, Tensor],
    batch: RewardBatch,
    leaf: Tensor,
    tree: Tree,
    rows: list[int],
    earlier: list[Visit],
) -> None:
    """Show the sampler an iteration's rewards, {name: [L]} of the leaves [L], and those of prompts
    that were drawn in vain."""
    if run.sampler is None:
        return
    reward = run.reward_set.judged(values, batch, leaf, tree)
    seen = visits(reward, tree.group[leaf], rows)
    draw = draw_of(run.config, run.train_set, run.iteration)
    learn = partial(run.sampler.update, draw)
    learn([*earlier, *seen.values()])
