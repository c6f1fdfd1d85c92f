"""The first half of an iteration: sample, decode, score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.algorithms.rollout.join import merge, without_leaves
from flowrl.algorithms.rollout.own_windows import sample
from flowrl.core.abilities import judges_singly
from flowrl.core.seeds import generator
from flowrl.core.types import RewardBatch, Rollout, concatenated
from flowrl.evaluation.sources import encode_rows
from flowrl.training.decode import ImageBuffer, distinct_leaves, first_of
from flowrl.training.empty_prompts import without_some_prompts
from flowrl.training.guidance import encoding_guidance, sampling_guidance
from flowrl.training.reward_batch import reward_batch, sigma_grid, with_latents
from flowrl.training.scout import scouted
from flowrl.training.setup import Setup
from flowrl.training.stored_images import stored_rollout

Step = Callable[[int, int], None]
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


def collect(
    run: Setup, rows: list[int], places: Sequence[int] | None = None, *, attempt: int = 0
) -> Collected:
    """Sample and score the training prompts `rows`.

    Only those at ascending `places` in the iteration, if they are given; what is drawn for a prompt
    follows from its place, and from `attempt` where the place is drawn again. With ``train.parts``
    above 1 the prompts are sampled in so many turns, and with ``train.overlap`` each turn's images
    are scored in a thread while the next are sampled. Turns and their order are the same either
    way.
    """
    t = run.config.train
    places = range(len(rows)) if places is None else places
    size = -(-len(places) // t.parts)
    turns = [places[first : first + size] for first in range(0, len(places), size)]
    # a thread starts with torch's default number of threads
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
    rollouts: list[Rollout] = []
    answers, images = [], ImageBuffer(len(places))
    try:
        for number, turn in enumerate(turns):
            step = partial(_of_turns, run, number, len(turns))
            ro, levels = _sample_turn(run, rows, turn, attempt, step)
            with run.phase("decode"):
                at = len(rollouts) * size
                if levels is None:
                    place = images.decode(run, ro, rows, first=at)
                else:
                    place = images.keep(ro, levels, first=at)
            batch = with_latents(run, ro, reward_batch(run, ro, images.of(place), rows))
            rollouts.append(ro if run.method.reads_leaves else without_leaves(ro))
            same = distinct_leaves(ro)[1]
            there = pool if t.overlap and len(turns) > 1 else None
            answers.append(_score(run, batch, same, there, step))
            del ro, levels, batch
        with run.phase("reward"):
            values = []
            for answer in answers:
                values.append(answer.result())
                run.progress(len(values), len(answers))
    finally:  # after Ctrl-C nobody waits for a reward that hangs
        pool.shutdown(wait=False, cancel_futures=True)
    found = _merged(run, rollouts, images, values, rows)
    return found._replace(rollout=without_some_prompts(run, found.rollout, rows, attempt))


def _of_turns(run: Setup, number: int, turns: int, done: int, total: int) -> None:
    """Say how much of a phase is done that each of several turns has a part of."""
    run.progress(number * total + done, turns * total)


def sample_forest(
    run: Setup,
    rows: list[int],
    *,
    places: Sequence[int] | None = None,
    attempt: int = 0,
    progress: Step | None = None,
) -> Rollout:
    """Sample the forest of the training prompts `rows`, which stand at `places` in the iteration,
    or from its start on, with the weights that sample: the current ones, or a copy that follows
    them. `progress` gets (denoising steps that are done, all)."""
    c = run.config
    plan = run.method.plan(run.iteration)
    # images that are on disk already: nothing is sampled
    if plan.stored is not None:
        return _stored(run, rows, 0)[0]
    # noise follows from seed, iteration, place and attempt alone, so a resume draws the same
    places = range(len(rows)) if places is None else places
    again = (attempt,) if attempt else ()
    stream = "scouted" if c.scout.images else "rollout"
    # some methods sample with the copy `old` of the weights, which follows them slowly
    policy = run.weights.using("old") if "old" in run.method.copies else nullcontext()
    with encoding_guidance(c, run.model):
        cond = encode_rows(run.model, run.train_set, rows, run.size)
    with policy, sampling_guidance(c, run.model):
        return sample(
            run.model,
            cond,
            plan,
            run.method.transition,
            sigmas=sigma_grid(run, plan),
            shape=run.model.latent_shape(c.image.height, c.image.width),
            group_size=run.cost.roots,
            generators=[generator(c.seed, stream, run.iteration, p, *again) for p in places],
            group_ids=torch.tensor(places),
            same_noise=c.train.same_noise,
            micro_batch=c.train.rollout_batch,
            keep_mean="old_mean" in run.method.needs & run.method.likelihood.keeps,
            noise=scouted(run, rows, places, attempt) if c.scout.images else None,
            progress=progress,
        )


def _sample_turn(
    run: Setup, rows: list[int], turn: Sequence[int], attempt: int, progress: Step
) -> tuple[Rollout, Tensor | None]:
    """Sample a turn -> its rollout, and the images [l, 3, H, W] where these are there already."""
    mine = [rows[place] for place in turn]
    with run.phase("rollout"):
        if run.method.plan(run.iteration).stored is not None:
            return _stored(run, mine, turn[0])
        return sample_forest(run, mine, places=turn, attempt=attempt, progress=progress), None


def _stored(run: Setup, rows: list[int], first: int) -> tuple[Rollout, Tensor]:
    """Read the stored images of training prompts `rows`."""
    c = run.config
    with encoding_guidance(c, run.model):
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
    run: Setup, batch: RewardBatch, same: Tensor, pool: ThreadPoolExecutor | None, progress: Step
) -> Future[Values]:
    """Ask the rewards about a turn, in the thread of `pool` or at once. Each sees its images as
    floats of its own; equal ones, of one number in `same` [L], are shown once if all judge singly.
    `progress` hears only what this thread does.
    """
    once = scored_once(run)

    def ask(*told: Step) -> Values:
        seen = first_of(batch, same) if once else batch
        values = run.reward_set.score(seen, f"iteration {run.iteration}", *told)
        return {name: row[same] for name, row in values.items()} if once else values

    if pool is not None:
        return pool.submit(ask)
    done: Future[Values] = Future()
    with run.phase("reward"):
        done.set_result(ask(progress))
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
    scores = {name: row[order.cpu()] for name, row in concatenated(values).items()}
    return Collected(ro, batch, scores)
