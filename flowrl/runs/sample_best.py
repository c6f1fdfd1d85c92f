"""Images of prompts, each the best of several by a reward of the config: best-of-n where no list is
judged."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.config.load import Config
from flowrl.core.abilities import asks_people, sees_latents
from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.prompts import PromptSet, check_records, prompts_if_there
from flowrl.core.types import FlowModel, Reward, Source
from flowrl.evaluation.held_out import best_rows, chooser, sampled_images, score_all
from flowrl.evaluation.reward_call import frames_of, rewards_of
from flowrl.runs.evaluate import sample_all, sampling
from flowrl.runs.target import Target
from flowrl.training.weights import Weights


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
    if asks_people(reward) or sees_latents(reward):
        what = "asks people" if asks_people(reward) else "judges latents, not images"
        raise ConfigError(
            f"eval.best_by: reward {name!r} {what}; take another, one of "
            f"{', '.join(other for other in c.rewards if other != name) or 'none that is here'}"
        )
    # what the reward reads of each prompt
    known = _listed(c)
    more = {"source": [*files]} if files else {}
    records = [{**known.get(text, {"prompt": text}), **more} for text in texts]
    places = [f"prompt {text!r}" for text in texts]
    check_records(PromptSet([*texts], records, "", "the prompts", places), {name: reward})
    return BestBy(name, reward, records)


def sample_or_choose(
    found: Target, texts: list[str], images: int, files: Sequence[str], starts: Sequence[Source]
) -> tuple[Tensor, str]:
    """Sample `images` images of each prompt with a target's `eval` settings, each the best of
    several where ``eval.best_of`` says so -> ([P * images, 3, H, W], the reward that chose, or "").

    files, starts: what all prompts edit, and the same read for each of them, as `given_sources`
    does. Raises what `best_by` and `sample_best` do.
    """
    model, c = found.model, found.config
    more: dict[str, Any] = {"seed": c.eval.seed, "images": images, "sources": starts}
    if c.eval.best_of == 1:
        return sample_all(model, c, texts, base=found.base, **more), ""
    by = best_by(model, c, texts, files)
    return sample_best(model, c, texts, by, base=found.base, **more), by.name


def sample_best(
    model: FlowModel,
    c: Config,
    texts: list[str],
    by: BestBy,
    *,
    seed: int,
    images: int = 1,
    base: Weights | None = None,
    sources: Sequence[Source] = (),
) -> Tensor:
    """Sample `images` images of each prompt, each the best of ``eval.best_of`` by a reward
    -> [P * images, 3, H, W] on the CPU.

    As in evaluations: of every `best_of` neighbours the one that was scored highest, the first of
    equals; NaN is chosen only where nothing else is there, which is a RewardError.
    """
    n = c.eval.best_of
    options = {**sampling(c, base), "images": images * n, "seed": seed}
    starts = partial(_at, sources)
    kept = []
    # whole prompts at a time, so that no more than a batch is held
    for index, pixels in sampled_images(model, texts, **options, sources=starts):
        records = [by.records[i] for i in index]
        given = [sources[i] for i in index] if sources else []
        scored = score_all({by.name: by.reward}, pixels, records, group=index, sources=given)
        chosen = best_rows(scored[by.name], images, n)
        lost = scored[by.name][chosen].isnan().nonzero()
        if len(lost):
            text = texts[index[int(chosen[lost[0]])]]
            raise RewardError(
                f"eval.best_by: reward {by.name!r} scored none of {n} images of {text!r}; let "
                "another reward choose"
            )
        kept.append(pixels[chosen.to(pixels.device)].cpu())
    return torch.cat(kept)


def _listed(c: Config) -> dict[str, dict[str, Any]]:
    """Return the records of the config's prompt lists that are here, by their text."""
    lists = [prompts_if_there(path) for path in (c.prompts.train, c.prompts.test)]
    rows = (found for found in lists if found is not None)
    return {text: row for one in rows for text, row in zip(one.texts, one.records, strict=True)}


def _at(sources: Sequence[Source], places: list[int]) -> list[Source]:
    return [sources[place] for place in places] if sources else []
