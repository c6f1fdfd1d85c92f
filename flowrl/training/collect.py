"""The first half of an iteration: sample, decode, score."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.algorithms.nodes import leaf_kinds, trained_nodes
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.rollout.join import merge, without_leaves
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs_of
from flowrl.core.pixels import from_bytes
from flowrl.core.promises import judges_singly
from flowrl.core.seeds import generator
from flowrl.core.types import RewardBatch, Rollout, Tree
from flowrl.evaluation.looks import LOOKS, looks_of
from flowrl.evaluation.preference_pairs import labels_of
from flowrl.evaluation.reward_metrics import (
    finished_distances,
    histogram,
    prompt_entropy,
    weighted_sum,
)
from flowrl.evaluation.sources import encode
from flowrl.training.decode import ImageBuffer, distinct_leaves, first_of
from flowrl.training.reward_batch import reward_batch, sigma_grid
from flowrl.training.scout import scouted
from flowrl.training.setup import Setup
from flowrl.training.shared_forest import SharedForest
from flowrl.training.stored import stored_rollout

Values = dict[str, Tensor]
"""What each reward said of the leaves: {name: [L]}."""


class Collected(NamedTuple):
    """The sampled and scored prompts of one process.

    Images are uint8 on the host, 256 levels a channel; rewards see them as floats. The rollout has
    no latents of leaves where nothing trains on them.
    """

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
    rollouts, answers, images = [], [], ImageBuffer(len(places))
    try:
        for turn in turns:
            ro, levels = _sample_turn(run, rows, turn)
            with run.phase("decode"):
                at = turn.start - places.start
                if levels is None:
                    place = images.decode(run, ro, rows, first=at)
                else:
                    place = images.keep(ro, levels, first=at)
            batch = reward_batch(run, ro, images.of(place), rows)
            rollouts.append(ro if run.method.reads_leaves else without_leaves(ro))
            same = distinct_leaves(ro)[1]
            there = pool if t.overlap and len(turns) > 1 else None
            answers.append(_score(run, batch, same, there))
            del ro, levels, batch
        with run.phase("reward"):
            values = [answer.result() for answer in answers]
    finally:  # after Ctrl-C nobody waits for a reward that hangs
        pool.shutdown(wait=False, cancel_futures=True)
    return _merged(run, rollouts, images, values, rows)


def sample(run: Setup, rows: list[int], *, first: int = 0) -> Rollout:
    """Sample the forest of the training prompts `rows`, which stand from place `first` on in the
    iteration, with the weights that sample: the current ones, or a copy that follows them."""
    c = run.config
    plan = run.method.plan(run.iteration)
    if plan.stored is not None:
        return _stored(run, rows, first)[0]
    places = range(first, first + len(rows))
    stream = "scouted" if c.scout.images else "rollout"
    policy = run.weights.using("old") if "old" in run.method.copies else nullcontext()
    with policy:
        return rollout(
            run.model,
            encode(run.model, run.train_set, rows, run.size),
            plan,
            run.method.transition,
            sigmas=sigma_grid(run, plan),
            shape=run.model.latent_shape(c.image.height, c.image.width),
            group_size=run.cost.roots,
            generators=[generator(c.seed, stream, run.iteration, place) for place in places],
            group_ids=torch.tensor(places),
            same_noise=c.train.same_noise,
            micro_batch=c.train.rollout_batch,
            keep_mean="old_mean" in run.method.needs & run.method.likelihood.keeps,
            noise=scouted(run, rows, first) if c.scout.images else None,
        )


def give_credit(
    run: Setup, forest: SharedForest, found: Collected, rows: list[int]
) -> tuple[Tensor, dict[str, float]]:
    """Give every node of the whole forest its advantage, the same in all processes -> (advantage
    [V], metrics).

    Rewards that are trained along, and the aggregator, then take their step.
    """
    whole, batch, values, apart = forest.whole, found.batch, found.values, None
    kind = leaf_kinds(found.rollout.tree, found.rollout.leaf)
    looks = torch.cat(run.world.gather(looks_of(batch.images, batch.group, kind)))
    if forest.leaf is not None:
        own = finished_distances(batch.images, batch.group, kind)
        apart = torch.cat(run.world.gather(own))
        values = _gathered(run, values, forest.leaf)
        batch = reward_batch(run, whole, _all_images(run, batch, forest.leaf), rows)
    elif run.reward_set.learned_rewards():
        batch = batch._replace(images=from_bytes(batch.images))
    where = f"iteration {run.iteration}"
    run.reward_set.check_unscored(values, batch.prompts, where)
    credit = run.method.credit
    if "log_prob" in needs_of(credit):
        credit = partial(credit, log_prob=whole.log_prob)
    if "prompts" in needs_of(credit):
        credit = partial(credit, prompts=batch.prompts)
    told = {}
    if "state" in needs_of(run.method.credit):
        told["state"] = state_of(run, rows)[batch.group]
        credit = partial(credit, **told)
    if run.method.plan(run.iteration).stored == "labels":
        credit = _by_label(credit, labels_of(batch.meta, batch.group))
    advantage, metrics = run.reward_set.advantages(
        values, batch, whole.leaf, whole.tree, credit, distance=apart
    )
    finished = leaf_kinds(whole.tree, whole.leaf).cpu() == 0
    total = weighted_sum(values, run.config.reward_weights)[finished]
    nodes = trained_nodes(whole, run.method.likelihood.trains)
    run.histograms = {"reward": histogram(total), "advantage": histogram(advantage[nodes])}
    metrics |= dict(zip(LOOKS, looks.mean(0).tolist(), strict=True))
    metrics["prompt_entropy"] = prompt_entropy(advantage, whole.tree.group)
    run.intact = run.intact and not run.reward_set.has_state()
    learned = run.reward_set.update(values, batch, whole.leaf, whole.tree, told)
    return advantage, metrics | learned


def state_of(run: Setup, rows: list[int]) -> Tensor:
    """Return what the likelihood says of the noise of training prompts `rows` -> [R, D] on the
    CPU. Raises ConfigError for a likelihood that has nothing to say."""
    describe = getattr(run.method.likelihood, "describe", None)
    if describe is None:
        raise ConfigError(
            f"credit {run.config.credit.fn} judges the initial noise, and likelihood "
            f"{run.config.likelihood.fn} has none that is learned; take likelihood prior"
        )
    policy = run.weights.using("old") if "old" in run.method.copies else nullcontext()
    with policy, torch.no_grad():
        found: Tensor = describe(run.model.encode([run.train_set.texts[row] for row in rows]))
    return found.cpu()


def _by_label(credit: Callable[..., Tensor], labels: Tensor) -> Callable[..., Tensor]:
    """Let a credit see labels [L] in place of the rewards."""

    def judged(reward: Tensor, leaf: Tensor, tree: Tree) -> Tensor:
        return credit(labels.to(reward), leaf, tree)

    return judged


def _sample_turn(run: Setup, rows: list[int], turn: range) -> tuple[Rollout, Tensor | None]:
    """Sample a turn -> its rollout, and the images [l, 3, H, W] where these are there already."""
    mine = [rows[place] for place in turn]
    with run.phase("rollout"):
        if run.method.plan(run.iteration).stored is not None:
            return _stored(run, mine, turn.start)
        return sample(run, mine, first=turn.start), None


def _stored(run: Setup, rows: list[int], first: int) -> tuple[Rollout, Tensor]:
    """Read the stored images of training prompts `rows`."""
    c = run.config
    return stored_rollout(
        run.model,
        run.train_set,
        rows,
        sigmas=sigma_grid(run, run.method.plan(run.iteration)),
        size=(c.image.height, c.image.width),
        first=first,
        micro_batch=c.train.rollout_batch,
    )


def _score(
    run: Setup, batch: RewardBatch, same: Tensor, pool: ThreadPoolExecutor | None
) -> Future[Values]:
    """Ask the rewards about a turn, in the thread of `pool` or at once. Each sees its images as
    floats of its own; equal ones, of one number in `same` [L], are shown once if all judge singly.
    """
    once = scored_once(run)

    def ask() -> Values:
        seen = first_of(batch, same) if once else batch
        values = run.reward_set.score(seen, f"iteration {run.iteration}")
        return {name: row[same] for name, row in values.items()} if once else values

    if pool is not None:
        return pool.submit(ask)
    done: Future[Values] = Future()
    with run.phase("reward"):
        done.set_result(ask())
    return done


def scored_once(run: Setup) -> bool:
    """Say whether equal images are shown to the rewards once."""
    return all(judges_singly(reward) for reward in run.rewards.values())


def images_worked_on(run: Setup, ro: Rollout) -> tuple[int, int]:
    """Count the images of a rollout that were decoded, and those that were scored."""
    distinct = len(distinct_leaves(ro)[0])
    return distinct, distinct if scored_once(run) else len(ro.leaf)


def _merged(
    run: Setup,
    rollouts: list[Rollout],
    images: ImageBuffer,
    values: list[Values],
    rows: list[int],
) -> Collected:
    """Join the turns as if all prompts had been sampled in one."""
    ro, _, order = merge(rollouts)
    batch = reward_batch(run, ro, images.of(order), rows)
    if len(values) == 1:
        return Collected(ro, batch, values[0])
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
    return from_bytes(torch.cat(run.world.gather(batch.images))[leaf])
