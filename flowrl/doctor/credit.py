"""Do better images make the draws that led to them worth more, and those of other prompts not?"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.nodes import leaf_kinds, trained_nodes
from flowrl.algorithms.prompt_memory import PromptMemory
from flowrl.core.needs import needs_of
from flowrl.core.seeds import generator
from flowrl.doctor.examined_run import ExaminedRun
from flowrl.doctor.findings import ReportSection
from flowrl.evaluation.sources import prompt_keys

LIKE = 0.95  # cosine; a spread of all prompts' images may bend advantages a little, as in RWR
ROUNDS = 16  # iterations of two images each that fill any shipped credit's memory


def look_at_credit(examined: ExaminedRun) -> ReportSection:
    """Give made-up rewards, and look whose advantages move when some of them change."""
    section, ro = ReportSection("credit"), examined.rollout
    _look_at_words(examined, section)
    reward = made_up(examined)
    base = advantages_of(examined, reward)
    nodes = trained_nodes(ro, examined.trainer.method.likelihood.trains)
    # one prompt's images become better; the other's must be as before, but for a factor
    group, leaf_group = ro.tree.group, ro.tree.group[ro.leaf].cpu()
    if len(ro.group_ids) > 1:
        first, second = ro.group_ids[:2].tolist()
        moved = advantages_of(examined, reward + 0.3 * (leaf_group == first))
        mine = nodes[group[nodes] == second]
        like = cosine(base[mine], moved[mine])
        section.figures["other_prompt"] = like
        if like < LIKE:
            section.find(
                "credit/groups",
                f"better images of one prompt change the advantages of another (cosine {like:.3f})",
            )
    # a middling image becomes the best of its prompt
    gains = [_gain(examined, reward, base, place) for place in _middling(examined, reward)]
    section.figures["gains"] = gains
    if gains and sum(gain < 0 for gain in gains) > len(gains) / 2:
        section.find(
            "credit/sign", f"an image made the best moves its advantages by {gains[0]:.3g}"
        )
    spread = base[nodes]
    section.lines.append(
        f"{len(nodes)} trained nodes, advantages from {float(spread.min()):.3g} to "
        f"{float(spread.max()):.3g}, {int((spread == 0).sum())} of them 0 (made-up rewards)"
    )
    return section


def made_up(examined: ExaminedRun) -> Tensor:
    """Return rewards [L] from 0.2 to 0.6, all different within a prompt, in mixed order."""
    group = examined.rollout.tree.group[examined.rollout.leaf].cpu()
    ranks = torch.zeros(len(group))
    for number in group.unique().tolist():
        mine = (group == number).nonzero().flatten()
        order = torch.randperm(len(mine), generator=generator(0, "doctor", number))
        ranks[mine] = order.float() / max(1, len(mine) - 1)
    return 0.2 + 0.4 * ranks


def advantages_of(examined: ExaminedRun, reward: Tensor) -> Tensor:
    """Return the advantages [V] that the run gives for rewards [L], the same from all rewards."""
    run, batch, ro = examined.trainer, examined.found.batch, examined.rollout
    values = {}
    for name, weight in run.reward_set.weights.items():
        values[name] = reward.float() if weight >= 0 else 1 - reward.float()
    fn = _experienced(examined, run.method.credit)
    if "log_prob" in needs_of(fn):
        fn = partial(fn, log_prob=ro.log_prob)
    if "prompts" in needs_of(fn):
        fn = partial(fn, prompts=prompt_keys(batch.prompts, batch.meta))
    nothing = torch.zeros(len(ro.group_ids))
    return run.reward_set.advantages(values, batch, ro.leaf, ro.tree, fn, distance=nothing)[0]


def _experienced(examined: ExaminedRun, fn: Any) -> Any:
    """Return a copy of a credit that remembers prompts, with a full memory: before that it may
    compare images of all prompts, as DDPO's does."""
    if not isinstance(fn, PromptMemory):
        return fn
    ro, batch = examined.rollout, examined.found.batch
    keys = prompt_keys(batch.prompts, batch.meta)
    full: Any = deepcopy(fn)
    for _ in range(ROUNDS):
        full.update(made_up(examined), ro.leaf, ro.tree, prompts=keys)
    return full


def _look_at_words(examined: ExaminedRun, section: ReportSection) -> None:
    """Every image must have been shown to the rewards with the prompt that it was sampled with."""
    batch, ro = examined.found.batch, examined.rollout
    group = ro.tree.group[ro.leaf].tolist()
    wrong = [i for i, g in enumerate(group) if batch.prompts[i] != examined.texts[g]]
    if wrong or batch.group.tolist() != group:
        section.find("credit/groups", f"{len(wrong)} images are scored with another's prompt")


def _middling(examined: ExaminedRun, reward: Tensor) -> list[int]:
    """Pick finished leaves in the middle of their prompt, one for each prompt -> places."""
    ro = examined.rollout
    finished, group = leaf_kinds(ro.tree, ro.leaf).cpu() == 0, ro.tree.group[ro.leaf].cpu()
    picked = []
    for number in group.unique().tolist():
        mine = ((group == number) & finished).nonzero().flatten()
        picked += mine[torch.argsort(reward[mine])][len(mine) // 2 : len(mine) // 2 + 1].tolist()
    return picked


def _gain(examined: ExaminedRun, reward: Tensor, base: Tensor, place: int) -> float:
    """Return how the advantages above a leaf move when it becomes the best of its prompt."""
    ro = examined.rollout
    better = reward.clone()
    better[place] = 1.0
    node, path = int(ro.leaf[place]), []
    while node >= 0:
        path.append(node)
        node = int(ro.tree.parent[node])
    likelihood = examined.trainer.method.likelihood
    mine = set(trained_nodes(ro, likelihood.trains).tolist()) & set(path)
    rows = torch.tensor(sorted(mine), dtype=torch.int64)
    return float((advantages_of(examined, better) - base)[rows].sum())


def cosine(one: Tensor, two: Tensor) -> float:
    norms = float(one.double().norm() * two.double().norm())
    if norms == 0:
        return 1.0 if float(one.norm()) == float(two.norm()) else 0.0
    return float((one.double() @ two.double()) / norms)
