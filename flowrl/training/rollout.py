"""The first half of an iteration: sample the prompts, decode a few images at a time, score them.

Images are kept as bytes on the host: on the model's device there are never more than one call's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.algorithms.forest import cond_of, leaf_places, leaf_sigmas, merge, without_leaves
from flowrl.algorithms.rollout.engine import sample
from flowrl.core.errors import RunError
from flowrl.core.pixels import to_bytes
from flowrl.core.processes import waiting
from flowrl.core.types import Latents, RewardBatch, Rollout, concatenated, sources_at
from flowrl.evaluation.sources import sources_of
from flowrl.training.run import Run

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
    run: Run, rows: list[int], places: Sequence[int] | None = None, *, attempt: int = 0
) -> Collected:
    """Sample and score the training prompts `rows`.

    Only those at ascending `places` in the iteration, if they are given; what is drawn for a prompt
    follows from its place, and from `attempt` where the place is drawn again. With ``train.parts``
    above 1 the prompts are sampled in so many turns, and with ``train.overlap`` each turn's images
    are scored in a thread while the next are sampled. Turns and their order are the same either
    way.
    """
    t = run.config.train
    if places is None:
        places = range(len(rows))
    size = -(-len(places) // t.parts)
    turns = -(-len(places) // size)
    # a thread starts with torch's default number of threads
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
    rollouts: list[Rollout] = []
    answers: list[Future[Values]] = []
    images = ImageBuffer(len(places))
    try:
        for number in range(turns):
            step = partial(_of_turns, run, number, turns)
            at = number * size
            ro, levels = _sample_turn(run, rows, places[at : at + size], attempt, step)
            with run.phase("decode"):
                if levels is None:
                    place = images.decode(run, ro, rows, first=at)
                else:
                    place = images.keep(ro, levels, first=at)
            batch = reward_batch(run, ro, images.of(place), rows)
            if run.reward_set.sees_latents:
                batch = with_latents(ro, batch)
            rollouts.append(ro if run.method.reads_leaves else without_leaves(ro))
            same = distinct_leaves(ro)[1]
            # beside the sampling of the next turn, or at once: the thread hears no progress
            if t.overlap and turns > 1:
                answers.append(pool.submit(_score, run, batch, same))
            else:
                answers.append(Future())
                with run.phase("reward"):
                    answers[-1].set_result(_score(run, batch, same, step))
            del ro, levels, batch
        with run.phase("reward"):
            values = []
            for answer in answers:
                with waiting():
                    values.append(answer.result())
                run.progress(len(values), len(answers))
    finally:  # after Ctrl-C nobody waits for a reward that hangs
        pool.shutdown(wait=False, cancel_futures=True)
    found = _merged(run, rollouts, images, values, rows)
    ro = found.rollout
    for part in run.parts.at("sampled"):
        ro = part.sampled(run, ro, rows, attempt)
    return found._replace(rollout=ro)


def _of_turns(run: Run, number: int, turns: int, done: int, total: int) -> None:
    """Say how much of a phase is done that each of several turns has a part of."""
    run.progress(number * total + done, turns * total)


def sample_forest(
    run: Run,
    rows: list[int],
    *,
    places: Sequence[int] | None = None,
    attempt: int = 0,
    progress: Step | None = None,
) -> Rollout:
    """Sample the forest of the training prompts `rows`, which stand at `places` in the iteration,
    or from its start on, with the weights that sample. `progress` gets (denoising
    steps that are done, all)."""
    c, plan = run.config, run.method.plan(run.iteration)
    if places is None:
        places = range(len(rows))
    # a part may know of images that need not be sampled
    given = run.parts.first("rollout", run, rows, places[0] if places else 0)
    if given is not None:
        made: Rollout = given[0]
        return made
    with run.parts.inside("encoding", run):
        cond = run.encode(rows)
    with run.parts.inside("sampling", run):
        noise = run.parts.first("noise", run, rows, places, attempt)
        # noise follows from seed, iteration, place and attempt alone, so a resume draws the same
        stream = "rollout" if noise is None else "scouted"
        generators = [run.stream(stream, place, attempt) for place in places]
        return sample(
            run.model,
            cond,
            plan,
            run.method.transition,
            sigmas=run.sigmas(plan),
            shape=run.latent_shape,
            group_size=run.cost.roots,
            generators=generators,
            group_ids=torch.tensor(places),
            same_noise=c.train.same_noise,
            micro_batch=c.train.rollout_batch,
            keep_mean="old_mean" in run.method.needs & run.method.likelihood.keeps,
            noise=noise,
            progress=progress,
        )


def _sample_turn(
    run: Run, rows: list[int], turn: Sequence[int], attempt: int, progress: Step
) -> tuple[Rollout, Tensor | None]:
    """Sample a turn -> its rollout, and the images [l, 3, H, W] where these are there already."""
    mine = []
    for place in turn:
        mine.append(rows[place])
    with run.phase("rollout"):
        given: tuple[Rollout, Tensor] | None = run.parts.first("rollout", run, mine, turn[0])
        if given is not None:
            return given
        return sample_forest(run, mine, places=turn, attempt=attempt, progress=progress), None


def _score(run: Run, batch: RewardBatch, same: Tensor, *progress: Step) -> Values:
    """Ask the rewards about a turn. Each sees its images as floats of its own; equal ones, of one
    number in `same` [L], are shown once if all judge singly."""
    where = f"iteration {run.iteration}"
    if not run.reward_set.judges_singly:
        return run.reward_set.score(batch, where, *progress)
    values = run.reward_set.score(first_of(batch, same), where, *progress)
    for name, row in values.items():
        values[name] = row[same]
    return values


def images_worked_on(run: Run, ro: Rollout) -> tuple[int, int]:
    """Count the images of a rollout that were decoded, and those that were scored."""
    distinct = len(distinct_leaves(ro)[0])
    return distinct, distinct if run.reward_set.judges_singly else len(ro.leaf)


def _merged(
    run: Run,
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


# ------------------------------------------------------------------------ what is not finite


def broken_rows(rows: Tensor) -> list[int]:
    """List the rows [B, *] that hold a number that is not finite."""
    # where the sum is finite, so is every term of it
    if bool(rows.sum().isfinite()):
        return []
    found: list[int] = (~rows.isfinite().flatten(1).all(1)).nonzero().flatten().tolist()
    return found


def check_latents(ro: Rollout, texts: list[str], iteration: int) -> None:
    """Raise RunError if the model made a latent that is not finite; texts: the prompts of the
    iteration, by group id."""
    broken = broken_rows(ro.x)
    if broken:
        node = broken[0]  # nodes are stored step by step, so this is an earliest one
        done, text = int(ro.tree.step[node]) - 1, prompt_of(ro, node, texts)
        mend = (
            "nothing was trained yet: use a wider model.dtype, less noise in plan, or mend the "
            "weights in model.path"
        )
        if iteration:
            mend = (
                "go on from an earlier checkpoint with a lower optimizer.lr, or use a wider "
                "model.dtype"
            )
        raise RunError(
            f"iteration {iteration}: the model made a latent that is not finite by denoising step "
            f"{done} (of {len(ro.sigmas) - 1}, counted from 0) of prompt {text}; {mend}"
        )


def check_images(
    ro: Rollout, nodes: Tensor, images: Tensor, texts: list[str], iteration: int
) -> None:
    """Raise RunError if one of the images [B, 3, H, W] of leaves [B] is not finite."""
    broken = broken_rows(images)
    if broken:
        node = int(nodes[broken[0]])
        raise RunError(
            f"iteration {iteration}: the model made an image of {prompt_of(ro, node, texts)} that "
            "is not finite, although its latent is"
        )


def prompt_of(ro: Rollout, node: int, texts: list[str]) -> str:
    """Quote the prompt of a node."""
    return repr(texts[int(ro.tree.group[node])])


# ------------------------------------------------------------------------- images as bytes


@dataclass
class ImageBuffer:
    """The images of this process' prompts, uint8 [L, 3, H, W], or videos [L, T, 3, H, W], on the
    host, in the order of the merged rollout's leaves.

    On the model's device there are never more than one call's images.
    """

    prompts: int
    levels: Tensor | None = None

    @torch.no_grad()
    def decode(self, run: Run, ro: Rollout, rows: list[int], *, first: int) -> Tensor:
        """Decode the leaves of a part whose prompts begin at the `first` of this process -> their
        places [l].

        Leaves with one latent are decoded once. Raises RunError for what is not finite.
        """
        texts = run.train_set.texts_of(rows)
        check_latents(ro, texts, run.iteration)
        place = leaf_places(ro, first=first, prompts=self.prompts)
        node, same = distinct_leaves(ro)
        size = int(run.config.model.kwargs.get("decode_batch", run.config.train.rollout_batch))
        for start in range(0, len(node), size):
            some = node[start : start + size]
            mine = (same >= start) & (same < start + size)
            # nothing of a call stays on the device
            made = run.model.decode(ro.x[some].float())
            check_images(ro, some, made, texts, run.iteration)
            levels = to_bytes(made).cpu()
            del made
            room = self._room(levels, len(place) // len(ro.group_ids))
            room[place[mine]] = levels[same[mine] - start]
            del levels
            run.progress(min(start + size, len(node)), len(node))
        return place

    def keep(self, ro: Rollout, levels: Tensor, *, first: int) -> Tensor:
        """Keep images [l, 3, H, W] that are there already, in the order of a part's leaves -> their
        places [l]."""
        place = leaf_places(ro, first=first, prompts=self.prompts)
        room = self._room(levels, len(place) // len(ro.group_ids))
        room[place] = levels
        return place

    def of(self, place: Tensor) -> Tensor:
        """Return the images [l, 3, H, W] at places [l]. Raises IndexError before any was
        decoded."""
        if self.levels is None:
            raise IndexError("no image was decoded yet")
        whole = len(place) == len(self.levels)
        return self.levels if whole else self.levels[place]

    def _room(self, like: Tensor, per_prompt: int) -> Tensor:
        if self.levels is None:
            count = per_prompt * self.prompts
            self.levels = torch.empty(count, *like.shape[1:], dtype=torch.uint8)
        return self.levels


def distinct_leaves(ro: Rollout) -> tuple[Tensor, Tensor]:
    """List one leaf per latent -> nodes [d], and for each leaf which of them is its own [l] on the
    host."""
    if ro.twin is None:
        return ro.leaf, torch.arange(len(ro.leaf))
    leaf, first = ro.leaf.cpu(), ro.twin[ro.leaf].cpu()
    node = leaf[first == leaf]
    number = torch.full((len(ro.tree.parent),), -1)
    number[node] = torch.arange(len(node))
    return node.to(ro.leaf.device), number[first]


def first_of(batch: RewardBatch, same: Tensor) -> RewardBatch:
    """Keep the first image of each number in `same` [L]."""
    # nothing to leave out where all differ
    count = int(same.max()) + 1
    if count == len(same):
        return batch
    # the first row of each number, in the order of the numbers
    place = torch.arange(len(same))
    rows = torch.full((count,), len(same)).scatter_reduce(0, same, place, "amin")
    prompts = [batch.prompts[i] for i in rows.tolist()]
    meta = [batch.meta[i] for i in rows.tolist()]
    sources = sources_at(batch.source, rows.tolist())
    group = batch.group[rows.to(batch.group.device)]
    seen = RewardBatch(batch.images[rows], prompts, group, meta, batch.sigma[rows], sources)
    if batch.latents is None:
        return seen
    # latents may lie on another device than the images
    x0, cond, states = batch.latents
    there = rows.to(x0.device)
    mine = {name: value[there] for name, value in cond.items()}
    if states is not None:
        states = states[there]
    return seen._replace(latents=Latents(x0[there], mine, states))


# ------------------------------------------------------------------- what rewards see


def reward_batch(run: Run, ro: Rollout, images: Tensor, rows: list[int]) -> RewardBatch:
    """Put images [L, 3, H, W] of a rollout's leaves together with their prompts."""
    group = ro.tree.group[ro.leaf]
    index = []
    for g in group.tolist():
        index.append(rows[g])
    sigma = leaf_sigmas(ro, run.method.plan(run.iteration).tail).cpu()
    return prompted(run, images, group, index)._replace(sigma=sigma)


def with_latents(ro: Rollout, batch: RewardBatch) -> RewardBatch:
    """Show the latents of a rollout's leaves, the states that estimates among them are of, and what
    they are conditioned on."""
    # an estimate belongs to the node above it, a finished image to itself
    estimate, states = batch.sigma > 0, None
    if bool(estimate.any()):
        above = ro.tree.parent[ro.leaf]
        states = ro.x[torch.where(estimate.to(above.device), above, ro.leaf)]
    return batch._replace(latents=Latents(ro.x[ro.leaf], cond_of(ro, ro.leaf), states))


def prompted(run: Run, images: Tensor, group: Tensor, index: list[int]) -> RewardBatch:
    """Put images [L, 3, H, W] together with the training prompts `index` [L]."""
    records = []
    for row in index:
        records.append(run.train_set.records[row])
    prompts = run.train_set.texts_of(index)
    sources = sources_of(run.train_set, index, run.size) if run.edits else []
    return RewardBatch(images, prompts, group, records, torch.zeros(len(records)), sources)
