"""Sample held-out prompts without noise in the transitions, and score them with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.dist import World, sharded
from flowrl.errors import ConfigError, RunError
from flowrl.panel import ask
from flowrl.prompts import PromptSet
from flowrl.samplers.rollout import sample_ode
from flowrl.seeds import generator
from flowrl.types import FlowModel, Reward, RewardBatch

Z95 = 1.959963984540054  # the normal quantile of a two-sided 95 % interval


def as_uint8(images: Tensor) -> Tensor:
    """Round pictures in [0, 1] to the 256 levels that a PNG keeps, so that a saved picture scores the same."""
    return (images.float().clamp(0, 1) * 255).round() / 255


@torch.no_grad()
def sample(
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
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield ([prompt index of each picture], pictures [n, 3, H, W]) by plain Euler steps on the model's own grid.

    Each prompt's noise depends on (seed, its place in `texts`) alone, not on `batch`. `progress` gets (done, all). With
    `tuned` below 1 the last steps are taken inside ``late()``, by the weights from before training; see `sample_ode`.
    `places` picks some of the texts. Raises RunError if a picture is not finite.
    """
    if steps < 1 or images < 1 or batch < 1:
        raise ConfigError(f"sample: steps, images and batch must be at least 1, got {steps}, {images} and {batch}")
    share = max(1, batch // images)
    sigmas, shape = model.sigmas(steps, height, width), model.latent_shape(height, width)
    chosen = range(len(texts)) if places is None else places
    for first in range(0, len(chosen), share):
        rows = list(chosen[first : first + share])
        x0 = sample_ode(
            model,
            model.encode([texts[i] for i in rows]),
            sigmas=sigmas,
            shape=shape,
            group_size=images,
            generators=[generator(seed, "sample", i) for i in rows],
            micro_batch=batch,
            tuned=tuned,
            late=late,
        )
        index, pictures = [i for i in rows for _ in range(images)], as_uint8(model.decode(x0))
        broken = (~pictures.isfinite().flatten(1).all(1)).nonzero()
        if len(broken):
            raise RunError(f"sampling: the model made a picture of {texts[index[int(broken[0])]]!r} that is not finite")
        yield index, pictures
        if progress is not None:
            progress(first + len(rows), len(chosen))


@torch.no_grad()
def score(
    rewards: Mapping[str, Reward], pictures: Tensor, records: list[dict[str, Any]], *, group: list[int] | None = None
) -> dict[str, Tensor]:
    """Score finished pictures [n, 3, H, W], one prompt record each, with every reward -> {name: [n]} on the CPU.

    group: a number per prompt for rewards that compare pictures of one prompt; by default all are of one. Raises
    RewardError that names the reward which failed.
    """
    groups = torch.tensor(group if group is not None else [0] * len(records), dtype=torch.int64)
    batch = RewardBatch(pictures, [r["prompt"] for r in records], groups, records, torch.zeros(len(records)))
    return {name: ask(name, reward, batch, "evaluation") for name, reward in rewards.items()}


def evaluate(
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
) -> dict[str, Any]:
    """Sample `images` pictures of every prompt, as `sample` does, and score them.

    In a `world` of several processes each takes its share of the prompts, and all return the same report.

    Returns {"score": headline, headline: overall, "interval": [low, high], "tasks": {tag: {...}}, ...}. Overall is the
    mean over tasks, as in GenEval, not over pictures. Intervals hold 95 % of the sampling noise for *these* prompts:
    Wilson's for a task of 0/1 verdicts, the normal one else; overall, the tasks' intervals combined.

    Raises RunError if a picture could not be scored: an evaluation with holes is no evaluation; ConfigError for a
    headline reward that is named like a key of the report.
    """
    taken = {"score", "interval", "images", "tasks", "seen", "held_out", "rewards", "setting"}
    if headline in taken:
        raise ConfigError(f"a reward named {headline!r} cannot be the headline: the report has a key of that name")
    options: dict[str, Any] = {"height": height, "width": width, "steps": steps, "images": images, "batch": batch}
    options |= {"seed": seed, "tuned": tuned}
    world = world or World()
    mine = partial(_scored, model, prompts, rewards, world, late=late, progress=progress, **options)
    found = world.gather(world.together(mine))
    rows, parts = [i for index, _ in found for i in index], [part for _, scored in found for part in scored]
    scores = {name: torch.cat([part[name] for part in parts]) for name in rewards}
    for name, values in scores.items():
        if not bool(values.isfinite().all()):
            bad = prompts.texts[rows[int((~values.isfinite()).nonzero()[0])]]
            raise RunError(f"evaluation: reward {name!r} gave no score for a picture of {bad!r}")
    records = [prompts.records[i] for i in rows]
    tags = [str(record.get("tag", "all")) for record in records]
    report = summarize(scores[headline], tags)
    out = {"score": headline, headline: report["mean"], **{k: v for k, v in report.items() if k != "mean"}}
    held = torch.tensor([bool(record.get("held_out", False)) for record in records])
    if bool(held.any()) and not bool(held.all()):
        out["seen"] = summarize(scores[headline][~held], [t for t, h in zip(tags, held.tolist(), strict=True) if not h])
        out["held_out"] = summarize(scores[headline][held], [t for t, h in zip(tags, held.tolist(), strict=True) if h])
    out["rewards"] = {name: values.mean().item() for name, values in scores.items()}
    out["setting"] = {**options, "prompts": prompts.name, "guidance": getattr(model, "guidance", None)}
    return out


def _scored(
    model: FlowModel, prompts: PromptSet, rewards: Mapping[str, Reward], world: World, *, images: int, **options: Any
) -> tuple[list[int], list[dict[str, Tensor]]]:
    """Sample and score this process' share of the prompts -> prompt index of each picture, scores batch by batch."""
    share = world.share(len(prompts))
    most = -(-len(prompts) // world.size)  # FSDP calls the network in step: who has less draws the first prompt again
    places = [*share, *[0] * (most - len(share))] if sharded() else share
    rows: list[int] = []
    parts: list[dict[str, Tensor]] = []
    for index, pictures in sample(model, prompts.texts, images=images, places=places, **options):
        index = index[: len(share) * images - len(rows)]
        rows += index
        if index:
            records = [prompts.records[i] for i in index]
            parts.append(score(rewards, pictures[: len(index)], records, group=index))
    return rows, parts


def summarize(values: Tensor, tags: list[str]) -> dict[str, Any]:
    """Average scores [n] per tag, then over tags -> {"mean", "interval", "images", "tasks": {tag: {...}}}.

    The overall interval adds the squares of the tasks' distances from mean to lower end, and to upper end, each apart
    (Newcombe 1998; Zou and Donner 2008): tasks where all or no pictures hit still have a width.
    """
    tasks: dict[str, Any] = {}
    for tag in dict.fromkeys(tags):
        mine = values[torch.tensor([t == tag for t in tags])].double()
        mean, n = mine.mean().item(), len(mine)
        binary = bool(((mine == 0) | (mine == 1)).all())
        half = Z95 * math.sqrt(mine.var(correction=0).item() / n)
        interval = list(wilson(round(mean * n), n)) if binary else [mean - half, mean + half]
        tasks[tag] = {"mean": mean, "interval": interval, "images": n}
    overall = sum(task["mean"] for task in tasks.values()) / len(tasks)
    below, above = (
        math.sqrt(sum((task["mean"] - task["interval"][end]) ** 2 for task in tasks.values())) / len(tasks)
        for end in (0, 1)
    )
    return {"mean": overall, "interval": [overall - below, overall + above], "images": len(tags), "tasks": tasks}


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % score interval of `hits` successes in `n` trials (Wilson 1927)."""
    if not 0 <= hits <= n or n < 1:
        raise ConfigError(f"wilson: needs 0 <= hits <= n and n >= 1, got hits={hits}, n={n}")
    p, z2 = hits / n, Z95 * Z95
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def evaluation_table(result: Mapping[str, Any]) -> str:
    """Say an evaluation as aligned text: each task, the mean over tasks, seen and held-out prompts apart."""
    name = result["score"]
    rows = [(task, row["mean"], row["interval"], row["images"]) for task, row in result["tasks"].items()]
    rows.append(("mean over tasks", result[name], result["interval"], result["images"]))
    parts = [(name, result[name]) for name in ("seen", "held_out") if name in result]
    rows += [(part, row["mean"], row["interval"], row["images"]) for part, row in parts]
    width = max(len(row[0]) for row in rows)
    lines = [f"{'':<{width}}  {name:>7}  {'95 % interval':>15}  pictures"]
    lines += [f"{k:<{width}}  {mean:7.3f}  {low:6.3f} to {high:5.3f}  {n:8d}" for k, mean, (low, high), n in rows]
    return "\n".join(lines)
