"""Sample held-out prompts without noise in the transitions, and score them with intervals.

Of every n images of a prompt an evaluation may keep the one that a reward puts first (best-of-n).
Images without a score are counted, never averaged over, and an error where they are too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.config.load import REPORT_KEYS
from flowrl.core.abilities import conditioning
from flowrl.core.errors import ConfigError, RewardError, RunError
from flowrl.core.pixels import round_8bit
from flowrl.core.processes import World, sharded
from flowrl.core.prompts import PromptSet, Record, prompts_hash, task_of
from flowrl.core.seeds import generator
from flowrl.core.types import FlowModel, Reward, RewardBatch, Source, concatenated, sources_at
from flowrl.evaluation.reward_call import ask
from flowrl.evaluation.sources import sources_of
from flowrl.evaluation.statistics import (
    by_prompt,
    known_mean,
    prompt_means,
    summarize_apart,
    summarize_scores,
)

# prompt index of each image, whether it is not finite, scores batch by batch
Share = tuple[list[int], list[bool], list[dict[str, Tensor]]]


@torch.no_grad()
def sampled_images(
    model: FlowModel,
    texts: list[str],
    *,
    height: int,
    width: int,
    steps: int,
    images: int = 1,
    batch: int = 256,
    seed: int = 0,
    tuned: float = 1.0,
    late: Callable[[], AbstractContextManager[None]] | None = None,
    progress: Callable[[int, int], None] | None = None,
    places: Sequence[int] | None = None,
    broken: bool = False,
    sources: Callable[[list[int]], Sequence[Source]] = lambda places: [],
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield ([prompt index of each image], images [n, 3, H, W]) by plain Euler steps on the
    model's own grid.

    Each prompt's noise depends on (seed, its place in `texts`) alone, not on `batch`. `progress`
    gets (prompts done, all). With `tuned` below 1 the last steps are taken inside ``late()``, by
    the weights from before training; see `sample_ode`. `places` picks some of the texts. An image
    that is not finite is a RunError, or is yielded as it is with `broken`. `sources` gives what the
    texts at some places start from.
    """
    if steps < 1 or images < 1 or batch < 1:
        raise ConfigError(
            f"sample: steps, images and batch must be at least 1, got {steps}, {images} and {batch}"
        )
    # whole prompts to a batch
    share = _at_once(images, batch)
    sigmas, shape = model.sigmas(steps, height, width), model.latent_shape(height, width)
    if places is None:
        places = range(len(texts))
    for first in range(0, len(places), share):
        # noise of each prompt's own, then Euler steps
        rows = list(places[first : first + share])
        x0 = sample_ode(
            model,
            conditioning(model, [texts[i] for i in rows], sources(rows)),
            sigmas=sigmas,
            shape=shape,
            group_size=images,
            generators=[generator(seed, "sample", i) for i in rows],
            micro_batch=batch,
            tuned=tuned,
            late=late,
        )
        # images of 8 bits, as a PNG of them would have
        index = np.repeat(rows, images).tolist()
        pixels = round_8bit(model.decode(x0))
        if not broken:
            _refuse_broken(pixels, texts, index)
        yield index, pixels
        if progress is not None:
            progress(first + len(rows), len(places))


def _at_once(images: int, batch: int) -> int:
    """Return how many prompts are sampled at once."""
    return max(1, batch // images)


def finite_images(images: Tensor) -> Tensor:
    """Say of each image [n, 3, H, W] whether it holds no NaN and no infinity -> [n] bool."""
    return images.isfinite().flatten(1).all(1)


def _refuse_broken(images: Tensor, texts: list[str], rows: list[int]) -> None:
    """Raise RunError, naming the prompt, if an image [n, 3, H, W] of prompts `rows` [n] holds NaN
    or infinity."""
    wrong = (~finite_images(images)).nonzero()
    if len(wrong):
        prompt = texts[rows[int(wrong[0])]]
        raise RunError(f"sampling: the model made an image of {prompt!r} that is not finite")


@torch.no_grad()
def score_all(
    rewards: Mapping[str, Reward],
    images: Tensor,
    records: list[dict[str, Any]],
    *,
    group: list[int] | None = None,
    sources: Sequence[Source] = (),
) -> dict[str, Tensor]:
    """Score finished images [n, 3, H, W], one prompt record each, with every reward -> {name:
    [n]} on the CPU.

    group: a number per prompt for rewards that compare images of one prompt; by default all are
    of one. sources: what each image started from, [n] or nothing. An image that is not finite is
    shown to no reward and not scored: NaN. Raises RewardError that names the reward which failed.
    """
    if group is None:
        group = [0] * len(records)
    groups = torch.tensor(group, dtype=torch.int64)
    # the images that can be shown
    shown = finite_images(images)
    rows = shown.nonzero()[:, 0].tolist()
    records = [records[row] for row in rows]
    prompts = [record["prompt"] for record in records]
    if len(rows) < len(images):
        images = images[shown]
    starts = sources_at(sources, rows)
    batch = RewardBatch(images, prompts, groups[rows], records, torch.zeros(len(rows)), starts)
    # their scores
    scores = {name: torch.full(shown.shape, torch.nan) for name in rewards}
    for name, reward in rewards.items():
        if rows:
            scores[name][rows] = ask(name, reward, batch, "evaluation")
    return scores


def evaluate_prompts(
    model: FlowModel,
    prompts: PromptSet,
    rewards: Mapping[str, Reward],
    *,
    headline: str,
    height: int,
    width: int,
    steps: int,
    images: int,
    batch: int = 256,
    seed: int = 0,
    tuned: float = 1.0,
    late: Callable[[], AbstractContextManager[None]] | None = None,
    progress: Callable[[int, int], None] | None = None,
    world: World | None = None,
    outcomes: bool = False,
    max_unscored: float = 0.0,
    best_of: int = 1,
    best_by: str = "",
) -> dict[str, Any]:
    """Sample `images` images of every prompt, as `sampled_images` does, and score them.

    With `best_of` n, n are drawn for each, and the report is of those that the reward `best_by`, or
    else the headline, puts first.

    In a `world` of several processes each takes its share of the prompts, and all return the same
    report. After each batch all have to be done with theirs, and `progress` gets (prompts of this
    process that are done, all of them), equally often in each.

    Returns {"score": headline, headline: overall, "interval": [low, high], "tasks": {tag: {...}},
    ...}. Overall is the mean over tasks, as in GenEval, not over images. Intervals hold 95 % over
    prompts: what other prompts of these tasks would give. "by_prompt" has the headline's mean for
    each prompt of a task, {tag: [...]}, null where no image was scored, as in "rewards". Where
    tasks have prompts with and without a `held_out` mark, "held_out" and "seen" are summaries over
    these tasks. With `outcomes` also the headline's score of every image, a list per prompt.

    An image that is not finite, or that a reward gave NaN, is not scored. Means leave it out, and
    the report counts such images by reward under "unscored". If they are more than the share
    `max_unscored` of all (with `outcomes`: any), raises RunError for images that are not finite,
    RewardError for a reward's NaN; RunError also if they are all images of a task; ConfigError for
    a headline reward that is named like a key of the report.
    """
    _check_headline(headline)
    # the options, which become part of the report
    options: dict[str, Any] = {"height": height, "width": width, "steps": steps}
    options |= {"images": images * best_of, "batch": batch, "seed": seed, "tuned": tuned}
    by, most = chooser(best_by, headline, rewards), None if outcomes else max_unscored
    # every process samples and scores its share
    world = world or World()
    mine = partial(_scored, model, prompts, rewards, world, late=late, progress=progress, **options)
    rows, broken, scores = _joined(world.gather(world.together(mine)))
    if best_of > 1:
        rows, broken, scores = keep_best(rows, broken, scores, by, images, best_of)
        options |= {"images": images, "best_of": best_of, "best_by": by}
    report = _whole_report(headline, scores, rows, broken, prompts, most)
    about = {"prompts": prompts.name, "count": len(prompts), "prompts_hash": prompts_hash(prompts)}
    report["setting"] = {**options, **about, "guidance": getattr(model, "guidance", None)}
    return report


def _check_headline(name: str) -> None:
    """Refuse a headline that the report has a key of. Raises ConfigError."""
    if name in REPORT_KEYS:
        raise ConfigError(
            f"a reward named {name!r} cannot be the headline: the report has a key of that name"
        )


def _joined(shares: list[Share]) -> tuple[list[int], Tensor, dict[str, Tensor]]:
    """Put the processes' shares together -> prompt index of each image, which are not finite [n],
    scores {name: [n]}."""
    rows, broken, parts = list[int](), list[bool](), list[dict[str, Tensor]]()
    for index, found, scored in shares:
        rows += index
        broken += found
        parts += scored
    return rows, torch.tensor(broken), concatenated(parts)


def _whole_report(
    headline: str,
    scores: Mapping[str, Tensor],
    rows: list[int],
    broken: Tensor,
    prompts: PromptSet,
    most: float | None,
) -> dict[str, Any]:
    """Summarize scores {name: [n]} of images of the prompts `rows`: the headline by task and by
    prompt, and for seen and held-out prompts apart; every reward's mean. most: the share that may
    go unscored; None: no image may, and every image's score is in the report."""
    unscored = count_unscored(scores, prompts.texts_of(rows), broken, most)
    known = scores[headline].isfinite()
    places, records = list[int](), list[Record]()
    for place, scored in zip(rows, known.tolist(), strict=True):
        if scored:
            places.append(place)
            records.append(prompts.records[place])
    check_tasks(prompts.records, records, headline)
    # the headline's
    values = scores[headline][known]
    tags = [*map(task_of, records)]
    held = torch.tensor([bool(record.get("held_out", False)) for record in records])
    whole = summarize_scores(values, tags, places)
    report = {"score": headline, headline: whole.pop("mean"), **whole}
    report |= summarize_apart(values, tags, held, places)
    # every reward's
    report["rewards"] = {name: known_mean(values) for name, values in scores.items()}
    each = by_prompt(scores[headline], rows, len(prompts.texts))
    report["by_prompt"] = prompt_means(each, prompts.records)
    if most is None:
        report["outcomes"] = each
    if unscored:
        report["unscored"] = unscored
    return report


def _scored(
    model: FlowModel,
    prompts: PromptSet,
    rewards: Mapping[str, Reward],
    world: World,
    *,
    images: int,
    batch: int,
    progress: Callable[[int, int], None] | None,
    **options: Any,
) -> Share:
    """Sample and score this process' share of the prompts, a batch at a time, all processes
    together."""
    # FSDP calls the network in step: who has less draws the first prompt again
    share = world.share(len(prompts))
    most = -(-len(prompts) // world.size)
    places = [*share, *[0] * (most - len(share))] if sharded() else share
    # what was drawn again is not scored
    rows: list[int] = []
    broken: list[bool] = []
    parts: list[dict[str, Tensor]] = []
    starts = partial(sources_of, prompts, size=(options["height"], options["width"]))
    options |= {"places": places, "broken": True, "sources": starts}
    drawn = sampled_images(model, prompts.texts, images=images, batch=batch, **options)

    def one() -> None:
        index, pixels = next(drawn, ([], None))
        index = index[: len(share) * images - len(rows)]
        rows.extend(index)
        if index and pixels is not None:
            records = [prompts.records[i] for i in index]
            shown = pixels[: len(index)]
            broken.extend((~finite_images(shown)).tolist())
            parts.append(score_all(rewards, shown, records, group=index, sources=starts(index)))

    # as many rounds as the largest share takes
    for _ in range(-(-most // _at_once(images, batch))):
        world.together(one)
        if progress is not None:
            progress(len(rows) // images, len(share))
    return rows, broken, parts


def chooser(best_by: str, headline: str, rewards: Mapping[str, object]) -> str:
    """Return the reward that chooses. Raises ConfigError if there is none of that name."""
    name = best_by or headline
    if name not in rewards:
        raise ConfigError(
            f"eval.best_by: expected the name of a reward, one of {', '.join(rewards)}, got "
            f"{name!r}"
        )
    return name


def best_places(scores: np.ndarray, n: int) -> np.ndarray:
    """Return the places [P, S] of the best of every n neighbours in scores [P, S n].

    The first of equals is taken. NaN = not scored is never chosen where another was scored.
    """
    ranked = np.where(np.isnan(scores), -np.inf, scores).reshape(len(scores), -1, n)
    return ranked.argmax(-1) + np.arange(ranked.shape[1]) * n


def best_rows(scores: Tensor, images: int, n: int) -> Tensor:
    """Return the places of the best of every n scores [prompts * images * n], prompt by prompt."""
    table = scores.reshape(-1, images * n).numpy()
    first = np.arange(len(table))[:, None] * images * n
    return torch.from_numpy(best_places(table, n) + first).flatten()


def keep_best(
    rows: list[int], broken: Tensor, scores: Mapping[str, Tensor], by: str, images: int, n: int
) -> tuple[list[int], Tensor, dict[str, Tensor]]:
    """Keep the best of every n images by the reward `by`: their prompts, whether they are broken,
    and their scores."""
    chosen = best_rows(scores[by], images, n)
    kept = {name: values[chosen] for name, values in scores.items()}
    return [rows[place] for place in chosen.tolist()], broken[chosen], kept


def count_unscored(
    scores: Mapping[str, Tensor], texts: list[str], broken: Tensor, most: float | None
) -> dict[str, int]:
    """Count the images without a score by reward, where there are any; `broken` [n] are not finite.

    Raises an error if they are more than the share `most` of all, or any where `most` is None: a
    RunError if the broken images alone are so many, or else a RewardError.
    """
    counts: dict[str, int] = {}
    limit = most or 0.0
    for name, values in scores.items():
        missing = values.isnan().nonzero()[:, 0].tolist()
        if len(missing) / len(values) > limit:
            own = broken.double().mean().item() <= limit
            said = (
                f"evaluation: reward {name!r} gave no score for an image of {texts[missing[0]]!r} "
                f"({len(missing)} of {len(values)} images have none: {int(broken.sum())} are not "
                f"finite, to the others the reward gave NaN). {_rule(most, own)}"
            )
            if own:
                raise RewardError(said)
            raise RunError(said)
        if missing:
            counts[name] = len(missing)
    return counts


def _rule(most: float | None, own: bool) -> str:
    """Say how many images may be without a score, and what helps; `own`: the reward is at fault."""
    if most is not None:
        return f"train.max_unscored={most} is the share that may be left out so; raise it to go on"
    mend = "mend the reward to go on" if own else "`flowrl doctor` looks for the cause"
    return f"A comparison needs every image scored, whatever train.max_unscored allows; {mend}"


def check_tasks(every: list[Record], scored: list[Record], headline: str) -> None:
    """Raise RunError if a task has no scored image: the mean over tasks would be another one."""
    tags = {*map(task_of, scored)}
    for record in every:
        tag = task_of(record)
        if tag not in tags:
            raise RunError(
                f"evaluation: reward {headline!r} scored no image of the task {tag!r}, so there is "
                "no mean over tasks. Mend the reward, or take the task's prompts out of the list "
                "(prompts.test)"
            )
