"""From the rewards of an iteration to the advantage of each node, and who learns from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from flowrl.algorithms.nodes import leaf_kinds, trained_nodes
from flowrl.core.abilities import Visit
from flowrl.core.errors import ConfigError
from flowrl.core.host_copies import on_host
from flowrl.core.needs import needs_of
from flowrl.core.pixels import from_bytes
from flowrl.core.types import Batch, RewardBatch, Rollout, Tree, concatenated
from flowrl.evaluation.preference_pairs import labels_of
from flowrl.evaluation.reward_metrics import (
    LOOKS,
    finished_distances,
    histogram,
    looks_of,
    prompt_entropy,
    total_reward,
)
from flowrl.evaluation.sources import encode_rows, prompt_keys
from flowrl.training.collect import Collected, Values
from flowrl.training.earlier_draws import EarlierDraws, draws_of
from flowrl.training.prompt_visits import join_places, show_sampler
from flowrl.training.reward_batch import reward_batch
from flowrl.training.setup import Setup
from flowrl.training.shared_forest import SharedForest


def give_credit(
    run: Setup,
    forest: SharedForest,
    found: Collected,
    rows: list[int],
    dropped: Sequence[Visit] = (),
) -> tuple[Tensor, dict[str, float]]:
    """Give every node of the whole forest its advantage, the same in all processes -> (advantage
    [V], metrics).

    Rewards that are trained along, the aggregator and the sampler then take their step; dropped:
    prompts of this iteration that are not in the forest any more.
    """
    # images are measured in the process that has them; every process gets the figures
    whole, batch, values, apart = forest.whole, found.batch, found.values, None
    kind = leaf_kinds(found.rollout.tree, found.rollout.leaf)
    looks = torch.cat(run.world.gather(looks_of(batch.images, batch.group, kind)))
    # credit compares images of the whole forest, so every process gets all rewards
    if forest.leaf is not None:
        own = finished_distances(batch.images, batch.group, kind)
        apart = torch.cat(run.world.gather(own))
        values = _gathered(run, values, forest.leaf)
        batch = reward_batch(run, whole, _all_images(run, batch, forest.leaf), rows)
    elif run.reward_set.learned_rewards():
        batch = batch._replace(images=from_bytes(batch.images))
    where = f"iteration {run.iteration}"
    run.reward_set.check_unscored(values, batch.prompts, where)
    # the credit names in its signature what it wants to know besides the rewards
    credit = run.method.credit
    if "log_prob" in needs_of(credit):
        credit = partial(credit, log_prob=whole.log_prob)
    if "prompts" in needs_of(credit):
        credit = partial(credit, prompts=prompt_keys(batch.prompts, batch.meta))
    extra = {}
    if "state" in needs_of(run.method.credit):
        extra["state"] = state_of(run, rows)[on_host(batch.group)]
        credit = partial(credit, **extra)
    if run.method.plan(run.iteration).stored == "labels":
        credit = _by_label(credit, labels_of(batch.meta, batch.group))
    # rewards [L] become advantages per node [V], by aggregate and credit
    tree = join_places(run, whole.tree, rows)
    advantage, metrics = run.reward_set.advantages(
        values, batch, whole.leaf, tree, credit, distance=apart
    )
    # figures of finished images alone; previews of an early step would distort them
    finished = leaf_kinds(whole.tree, whole.leaf).cpu() == 0
    total = total_reward(values, run.config.reward_weights)[finished]
    nodes = trained_nodes(whole, run.method.likelihood.trains)
    run.histograms = {"reward": histogram(total), "advantage": histogram(advantage[nodes])}
    metrics |= dict(zip(LOOKS, looks.mean(0).tolist(), strict=True))
    metrics["prompt_entropy"] = prompt_entropy(advantage, tree.group)
    # rewards and sampler learn now: after an error the iteration would be half done
    run.intact = run.intact and not run.reward_set.has_state() and run.sampler is None
    if run.earlier is not None:
        extra["moved"] = moved_since(run, run.earlier, found.rollout, whole, rows)
        metrics["moved"] = float(extra["moved"].nanmean().nan_to_num())
    learned = run.reward_set.update(values, batch, whole.leaf, tree, extra)
    show_sampler(run, values, batch, whole.leaf, tree, rows, [*dropped])
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
        found: Tensor = describe(encode_rows(run.model, run.train_set, rows, run.size))
    return found.cpu()


def moved_since(
    run: Setup, earlier: EarlierDraws, ro: Rollout, whole: Rollout, rows: list[int]
) -> Tensor:
    """Return how far the policy has moved since the last visit of each leaf's prompt [L] float64 on
    the CPU, NaN at a first one; then keep the draws of this visit in their place."""
    likelihood, transition = run.method.likelihood, run.method.transition

    def score(batch: Batch) -> Tensor:
        return likelihood.evaluate(run.model, batch, transition).log_prob

    # each process asks about its own prompts, and all keep what any of them has drawn
    policy = run.weights.using("old") if "old" in run.method.copies else nullcontext()
    with policy, torch.no_grad():
        mine = earlier.moved(ro, rows, score, run.config.train.micro_batch)
    known: dict[int, float] = {}
    for found, drawn in run.world.gather((mine, draws_of(ro, rows))):
        known |= found
        earlier.kept |= drawn
    places = whole.tree.group[whole.leaf].tolist()
    return torch.tensor([known.get(place, torch.nan) for place in places], dtype=torch.float64)


def _by_label(credit: Callable[..., Tensor], labels: Tensor) -> Callable[..., Tensor]:
    """Let a credit see labels [L] in place of the rewards."""

    def judged(reward: Tensor, leaf: Tensor, tree: Tree) -> Tensor:
        return credit(labels.to(reward), leaf, tree)

    return judged


def _gathered(run: Setup, values: Values, leaf: Tensor) -> Values:
    """Join the values of all processes, in the order of the whole forest's leaves [L]."""
    answers = concatenated(run.world.gather(values))
    return {name: answers[name][leaf] for name in values}


def _all_images(run: Setup, batch: RewardBatch, leaf: Tensor) -> Tensor:
    """Return the images of all processes [L, 3, H, W] where a reward is trained along: every
    process trains it on all of them, so that it stays the same. Else nothing, [L, 0]."""
    if not run.reward_set.learned_rewards():
        return torch.zeros(len(leaf), 0)
    return from_bytes(torch.cat(run.world.gather(batch.images))[leaf])
