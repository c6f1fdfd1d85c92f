"""Evaluate and sample a model as a config's `eval` and `samples` sections say, also the best of
several images by a reward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.config.load import Config, check_eval_count, check_eval_size
from flowrl.core.abilities import asks_people, sees_latents
from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.prompts import (
    PromptSet,
    check_records,
    load_prompts,
    prompts_if_there,
    task_of,
)
from flowrl.core.types import FlowModel, Reward, RewardBatch, Source, sources_at
from flowrl.evaluation.contents import own_judge
from flowrl.evaluation.held_out import (
    best_rows,
    chooser,
    evaluate_prompts,
    finite_images,
    sampled_images,
    score_all,
)
from flowrl.evaluation.reward_call import ask, check_arguments, frames_of, rewards_of
from flowrl.evaluation.sources import check_sources, check_starts, sources_of
from flowrl.evaluation.velocity_drift import PROMPTS, Given, Probe, take
from flowrl.training.trainer import Trainer
from flowrl.training.weights import Weights


def evaluate(
    model: FlowModel,
    c: Config,
    *,
    trainer: Trainer | None = None,
    base: Weights | None = None,
    progress: Any = None,
    outcomes: bool = False,
) -> dict[str, Any]:
    """Evaluate a model on the held-out prompts as a config's `eval` section says; with `outcomes`
    the report has the score of every image. A reward that asks people is left out unless it is the
    headline.

    With ``eval.tuned`` below 1 the last steps are taken with the weights from before training: the
    snapshot "ref" of the trainer, or of `base`, which `load_run` gives. Raises ConfigError if it is
    needed and not there.
    """
    # a trainer has prompts and rewards loaded already
    if trainer is None:
        prompts, world = load_prompts(c.prompts.test), None
        check_sources(prompts, c.eval_size)
        check_eval_count(c, len(prompts))
        check_eval_size(model, c)
        check_starts(model, prompts)
        rewards = rewards_of(c.rewards, frames_of(c, model))
    else:
        prompts, world, base = trainer.test_set, trainer.world, trainer.weights
        rewards = trainer.rewards
    judges = {}
    for name, reward in rewards.items():
        if not sees_latents(reward) and (name == c.headline or not asks_people(reward)):
            judges[name] = reward
    check_records(prompts, judges)
    check_arguments(judges, prompts.records)
    report = evaluate_prompts(
        model,
        prompts,
        judges,
        headline=c.headline,
        **sampling(c, base),
        progress=progress,
        world=world,
        outcomes=outcomes,
        max_unscored=c.train.max_unscored,
        best_of=c.eval.best_of,
        best_by=c.eval.best_by,
    )
    report["setting"] |= {**guidance_of(model, c), **own_judge(c)}
    return report


def guidance_of(model: FlowModel, c: Config) -> dict[str, Any]:
    """Return "guidance", and "true_cfg_scale" where a model has both: as the config has them, or
    the model's own where the config leaves it to the model."""
    known = {"guidance": getattr(model, "guidance", None)}
    for key in ("guidance", "true_cfg_scale"):
        if c.model.kwargs.get(key) is not None:
            known[key] = c.model.kwargs[key]
    return known


def eval_weights(trainer: Trainer) -> AbstractContextManager[None]:
    """Put the weights that a config evaluates into the model for a while."""
    if trainer.config.eval.weights == "ema":
        return trainer.weights.using("ema")
    return nullcontext()


def sample_all(
    model: FlowModel,
    c: Config,
    texts: list[str],
    *,
    seed: int,
    images: int = 1,
    base: Weights | None = None,
    broken: bool = False,
    sources: Sequence[Source] = (),
    by: BestBy | None = None,
) -> Tensor:
    """Sample `images` images of each prompt with a config's `eval` steps -> [len(texts) * images,
    3, H, W], CPU.

    `base` as in `evaluate`, `broken` as in `sampled_images`; `sources` [len(texts)] of a model that
    starts from images. `by`: each image is the best of ``eval.best_of`` by this reward, as in
    evaluations: of so many neighbours the one that was scored highest, the first of equals. Raises
    RewardError where none of them has a score.
    """
    n = 1
    if by is not None:
        n = c.eval.best_of
    options = {**sampling(c, base), "images": images * n, "seed": seed, "broken": broken}
    kept = []
    # whole prompts at a time, so that no more than a batch is held
    options["sources"] = partial(sources_at, sources)
    for index, pixels in sampled_images(model, texts, **options):
        if by is not None:
            records, given = [by.records[i] for i in index], sources_at(sources, index)
            scored = score_all({by.name: by.reward}, pixels, records, group=index, sources=given)
            chosen = best_rows(scored[by.name], images, n)
            lost = scored[by.name][chosen].isnan().nonzero()
            if len(lost):
                raise RewardError(
                    f"eval.best_by: reward {by.name!r} scored none of {n} images of "
                    f"{texts[index[int(chosen[lost[0]])]]!r}; let another reward choose"
                )
            pixels = pixels[chosen.to(pixels.device)]
        kept.append(pixels.cpu())
    return torch.cat(kept)


def given_sources(model: FlowModel, c: Config, texts: list[str], files: list[str]) -> list[Source]:
    """Read what a user wants edited, the same `files` for each of `texts` -> [len(texts)], or [].

    Raises DataError, or ConfigError, for a file that is no such image, for too many or too few."""
    more = _starts_from(files)
    records = [{"prompt": text, **more} for text in texts]
    places = [f"prompt {text!r} (--source)" for text in texts]
    prompts, size = PromptSet(texts, records, "", "", places), c.eval_size
    check_sources(prompts, size)
    check_starts(model, prompts)
    return sources_of(prompts, range(len(texts)), size)


def _starts_from(files: Sequence[str]) -> dict[str, Any]:
    """Return the files that are edited as a prompt's record has them."""
    if not files:
        return {}
    return {"source": [*files]}


def sample_grid_prompts(trainer: Trainer) -> tuple[list[str], Tensor]:
    """Sample the fixed prompts of a run from their fixed noise -> (texts, images [P, 3, H, W]).

    An image that is not finite is there as it is; `grey` makes something of it that can be drawn.
    """
    c, held_out = trainer.config, trainer.test_set
    places = grid_prompts(held_out.records, c.samples.prompts)
    texts = held_out.texts_of(places)
    options: dict[str, Any] = {"seed": c.samples.seed, "base": trainer.weights, "broken": True}
    with eval_weights(trainer):
        sources = sources_of(held_out, places, c.eval_size)
        images = sample_all(trainer.model, c, texts, sources=sources, **options)
    return texts, images


def grid_sources(trainer: Trainer) -> Tensor | None:
    """Return what the images of `sample_grid_prompts` start from, the K sources of a prompt side by
    side [P, 3, H, K W]; None where they start from noise alone."""
    held_out = trainer.test_set
    places = grid_prompts(held_out.records, trainer.config.samples.prompts)
    found = sources_of(held_out, places, trainer.config.eval_size)
    if not found or not all(found):
        return None
    # all of the size of the samples: sources_of scales them, whatever their files are
    return torch.stack([torch.cat(source, dim=2) for source in found])


def verdicts(trainer: Trainer, images: Tensor) -> list[bool | None]:
    """Say which images of `sample_grid_prompts` are right, where the score of the evaluations is a
    yes or a no (its reward has ``says_right``); else []. None where it gave no score. Raises
    RewardError."""
    c, held_out = trainer.config, trainer.test_set
    reward = trainer.rewards[c.headline]
    if not getattr(reward, "says_right", False):
        return []
    places = grid_prompts(held_out.records, c.samples.prompts)
    batch = RewardBatch(
        images=images,
        prompts=held_out.texts_of(places),
        group=torch.arange(len(places)),
        meta=[held_out.records[i] for i in places],
        sigma=torch.zeros(len(places)),
        source=sources_of(held_out, places, (images.shape[-2], images.shape[-1])),
    )
    # a verdict of each image, none where it has no score
    right: list[bool | None] = []
    for value in ask(c.headline, reward, batch, "image grid").tolist():
        if math.isnan(value):
            right.append(None)
        else:
            right.append(value == 1)
    return right


def probe_of(trainer: Trainer) -> Probe:
    """Take the probe of a trainer's model as it is now, on prompts of the grid."""
    c, held_out = trainer.config, trainer.test_set
    places = grid_prompts(held_out.records, PROMPTS)
    sources = sources_of(held_out, places, trainer.size)
    given = Given(held_out.texts_of(places), sources)
    size = {"height": c.image.height, "width": c.image.width}
    return take(trainer.model, given, **size, steps=c.eval.steps, seed=c.eval.seed)


def grey(images: Tensor) -> Tensor:
    """Paint images [n, 3, H, W], or videos [n, T, 3, H, W], grey that are not finite."""
    kept = finite_images(images).reshape(-1, *[1] * (images.ndim - 1))
    return torch.where(kept, images, torch.full_like(images, 0.5))


def grid_prompts(records: Sequence[dict[str, Any]], count: int) -> list[int]:
    """Pick `count` prompts, the tasks in turn, evenly spread over each task's list."""
    by_task: dict[str, list[int]] = {}
    for i, record in enumerate(records):
        by_task.setdefault(task_of(record), []).append(i)
    # in turn: the first of every task, the second of every task that has one ...
    turns = []
    for turn in range(count):
        turns += [(turn, task) for task, rows in by_task.items() if turn < len(rows)]
    turns = turns[:count]
    # a task with n places takes every (rows / n)-th of its rows
    share = Counter(task for _, task in turns)
    return [by_task[task][turn * len(by_task[task]) // share[task]] for turn, task in turns]


def sampling(c: Config, base: Weights | None) -> dict[str, Any]:
    """Return a config's `image` and `eval` sections as `sampled_images` takes them, and what puts
    the weights from before training into the model for the last steps."""
    late = None
    if base is not None and c.eval.tuned < 1:
        late = partial(base.using, "ref")
    return {
        "height": c.eval_size[0],
        "width": c.eval_size[1],
        "steps": c.eval.steps,
        "images": c.eval.images,
        "batch": c.eval.batch,
        "seed": c.eval.seed,
        "tuned": c.eval.tuned,
        "late": late,
    }


class BestBy(NamedTuple):
    """The reward that chooses among the images of each prompt."""

    name: str
    reward: Reward
    records: list[dict[str, Any]]  # [P]  what it reads of each prompt


def best_by(model: FlowModel, c: Config, texts: Sequence[str], files: Sequence[str] = ()) -> BestBy:
    """Make the reward that `eval.best_by` names, or else the headline, and what it reads of prompts
    `texts` [P], which all edit the images `files`.

    A prompt has the record that the config's own lists have for its text, if they know it. Raises
    ConfigError for a reward that evaluations leave out, and DataError, as `check_records`, for a
    prompt that the reward cannot judge.
    """
    # the reward, which sees finished images and nothing else
    name = chooser(c.eval.best_by, c.headline, c.rewards)
    (reward,) = rewards_of({name: c.rewards[name]}, frames_of(c, model)).values()
    why = ""
    if asks_people(reward):
        why = "asks people"
    elif sees_latents(reward):
        why = "judges latents, not images"
    if why:
        others = ", ".join(other for other in c.rewards if other != name)
        raise ConfigError(
            f"eval.best_by: reward {name!r} {why}; take another, one of "
            f"{others or 'none that is here'}"
        )
    # what the reward reads of each prompt
    known, more = _listed(c), _starts_from(files)
    records = [{**known.get(text, {"prompt": text}), **more} for text in texts]
    places = [f"prompt {text!r}" for text in texts]
    check_records(PromptSet([*texts], records, "", "the prompts", places), {name: reward})
    return BestBy(name, reward, records)


def _listed(c: Config) -> dict[str, dict[str, Any]]:
    """Return the records of the config's prompt lists that are here, by their text."""
    rows: dict[str, dict[str, Any]] = {}
    for path in (c.prompts.train, c.prompts.test):
        found = prompts_if_there(path)
        if found is not None:
            rows.update(zip(found.texts, found.records, strict=True))
    return rows
