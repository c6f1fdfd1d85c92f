"""The first half of an iteration: sample, decode, score."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.algorithms.nodes import leaf_kinds
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.rollout.join import merge
from flowrl.algorithms.rollout.sigma_grid import read_sigma_grid
from flowrl.core.needs import needs_of
from flowrl.core.pixels import round_8bit
from flowrl.core.seeds import generator
from flowrl.core.types import Plan, RewardBatch, Rollout
from flowrl.evaluation.reward_metrics import finished_distances
from flowrl.training.checks import check_images
from flowrl.training.setup import Setup
from flowrl.training.shared_forest import SharedForest, join_images

Values = dict[str, Tensor]
"""What each reward said of the leaves: {name: [L]}."""


class Collected(NamedTuple):
    """The sampled and scored prompts of one process."""

    rollout: Rollout
    batch: RewardBatch
    values: Values


def collect(run: Setup, rows: list[int], places: range | None = None) -> Collected:
    """Sample and score the training prompts `rows`.

    Only those at `places` in the iteration, if they are given; what is drawn for a prompt follows
    from its place. With ``train.parts`` above 1 the prompts are sampled in so many turns, and with
    ``train.overlap`` each turn's images are scored in a thread while the next are sampled. Turns
    and their order are the same either way.
    """
    t = run.config.train
    places = range(len(rows)) if places is None else places
    size = -(-len(places) // t.parts)
    turns = [places[first : first + size] for first in range(0, len(places), size)]
    # a thread starts with torch's default number of threads
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
    rollouts, batches, answers = [], [], []
    try:
        for turn in turns:
            ro, batch = _sample_and_decode(run, rows, turn)
            rollouts.append(ro)
            batches.append(batch)
            answers.append(_score(run, batch, pool if t.overlap and len(turns) > 1 else None))
        with run.phase("reward"):
            values = [answer.result() for answer in answers]
    finally:  # after Ctrl-C nobody waits for a reward that hangs
        pool.shutdown(wait=False, cancel_futures=True)
    return _merged(run, rollouts, batches, values, rows)


def sample(run: Setup, rows: list[int], *, first: int = 0) -> Rollout:
    """Sample the forest of the training prompts `rows`, which stand from place `first` on in the
    iteration, with the weights that sample: the current ones, or a copy that follows them."""
    c = run.config
    plan = run.method.plan(run.iteration)
    places = range(first, first + len(rows))
    policy = run.weights.using("old") if "old" in run.method.copies else nullcontext()
    with policy:
        return rollout(
            run.model,
            run.model.encode([run.train_set.texts[i] for i in rows]),
            plan,
            run.method.transition,
            sigmas=sigma_grid(run, plan),
            shape=run.model.latent_shape(c.image.height, c.image.width),
            group_size=run.cost.roots,
            generators=[generator(c.seed, "rollout", run.iteration, place) for place in places],
            group_ids=torch.tensor(places),
            same_noise=c.train.same_noise,
            micro_batch=c.train.rollout_batch,
            keep_mean="old_mean" in run.method.needs & run.method.likelihood.keeps,
        )


def sigma_grid(run: Setup, plan: Plan) -> Tensor:
    """Return the sigmas [S+1] that a plan is run on: the model's own, or what the plan reads off
    them."""
    size = (run.config.image.height, run.config.image.width)
    if plan.sigma_grid is None:
        return run.model.sigmas(len(plan.noise), *size)
    return read_sigma_grid(run.model.sigmas(plan.sigma_grid.steps, *size), plan.sigma_grid)


def reward_batch(run: Setup, ro: Rollout, images: Tensor, rows: list[int]) -> RewardBatch:
    """Put images [L, 3, H, W] together with their prompts."""
    group = ro.tree.group[ro.leaf]
    records = [run.train_set.records[rows[g]] for g in group.tolist()]
    prompts = [record["prompt"] for record in records]
    return RewardBatch(images, prompts, group, records, torch.zeros(len(records)))


def give_credit(
    run: Setup, forest: SharedForest, found: Collected, rows: list[int]
) -> tuple[Tensor, dict[str, float]]:
    """Give every node of the whole forest its advantage, the same in all processes -> (advantage
    [V], metrics).

    Rewards that are trained along, and the aggregator, then take their step.
    """
    whole, batch, values, apart = forest.whole, found.batch, found.values, None
    if forest.leaf is not None:
        kind = leaf_kinds(found.rollout.tree, found.rollout.leaf)
        own = finished_distances(batch.images, batch.group, kind)
        apart = torch.cat(run.world.gather(own))
        values = _gathered(run, values, forest.leaf)
        batch = reward_batch(run, whole, _all_images(run, batch, forest.leaf), rows)
    where = f"iteration {run.iteration}"
    run.reward_set.check_unscored(values, batch.prompts, where)
    credit = run.method.credit
    if "log_prob" in needs_of(credit):
        credit = partial(credit, log_prob=whole.log_prob)
    advantage, metrics = run.reward_set.advantages(
        values, batch, whole.leaf, whole.tree, credit, distance=apart
    )
    run.intact = run.intact and not run.reward_set.has_state()
    learned = run.reward_set.update(values, batch, whole.leaf, whole.tree)
    return advantage, metrics | learned


def _sample_and_decode(run: Setup, rows: list[int], turn: range) -> tuple[Rollout, RewardBatch]:
    with run.phase("rollout"):
        ro = sample(run, [rows[place] for place in turn], first=turn.start)
    with run.phase("decode"), torch.no_grad():
        images = round_8bit(run.model.decode(ro.x[ro.leaf].float()))
    check_images(ro, images, [run.train_set.texts[row] for row in rows], run.iteration)
    return ro, reward_batch(run, ro, images, rows)


def _score(run: Setup, batch: RewardBatch, pool: ThreadPoolExecutor | None) -> Future[Values]:
    """Ask the rewards, in the thread of `pool` or at once."""
    where = f"iteration {run.iteration}"
    if pool is not None:
        return pool.submit(run.reward_set.score, batch, where)
    done: Future[Values] = Future()
    with run.phase("reward"):
        done.set_result(run.reward_set.score(batch, where))
    return done


def _merged(
    run: Setup,
    rollouts: list[Rollout],
    batches: list[RewardBatch],
    values: list[Values],
    rows: list[int],
) -> Collected:
    """Join the turns as if all prompts had been sampled in one."""
    if len(rollouts) == 1:
        return Collected(rollouts[0], batches[0], values[0])
    ro, _, order = merge(rollouts)
    images = torch.cat([batch.images for batch in batches])
    batch = reward_batch(run, ro, images[order.to(images.device)], rows)
    joined = {name: torch.cat([row[name] for row in values]) for name in values[0]}
    return Collected(ro, batch, {name: row[order.cpu()] for name, row in joined.items()})


def _gathered(run: Setup, values: Values, leaf: Tensor) -> Values:
    """Join the values of all processes, in the order of the whole forest's leaves [L]."""
    answers = run.world.gather(values)
    joined = {name: torch.cat([answer[name] for answer in answers]) for name in values}
    return {name: row[leaf] for name, row in joined.items()}


def _all_images(run: Setup, batch: RewardBatch, leaf: Tensor) -> Tensor:
    """Return the images of all processes [L, 3, H, W] where a reward is trained along: every
    process trains it on all of them, so that it stays the same. Else nothing, [L, 0]."""
    if not run.reward_set.learned_rewards():
        return torch.zeros(len(leaf), 0)
    images = join_images(run.world, batch)
    return images[leaf.to(images.device)]
