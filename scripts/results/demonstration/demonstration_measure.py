"""Measure one setting of one model: sample, judge, count; and keep it, so that it is done once."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from variety import OPEN_NOISE, leaves_open, mean_spread, spread

from flowrl.core.files import write_json
from flowrl.core.prompts import load_prompts, scenes_of
from flowrl.core.types import FlowModel
from flowrl.evaluation.crossed_errors import crossed
from flowrl.evaluation.held_out import sampled_images
from flowrl.evaluation.suites.shapes.checker import ORDER_TASKS, Verdict, check, word_order
from flowrl.evaluation.suites.shapes.prompts import Record
from flowrl.runs.open_run import open_target

BEST_OF = 8


class Setting(NamedTuple):
    """What is measured."""

    target: str  # model folder or run
    prompts: str  # prompt file
    guidance: float
    steps: int
    per_task: int  # images, at least
    seed: int  # of the initial noise
    best_of: int = 1  # images that the reward chooses one of
    reward: str = "graded"  # which choice of the reward
    open_prompts: str = ""  # a file: of its prompts that leave colour and place open, variety
    open_images: int = 0  # of each of these


class Bench:
    """Where measurements are kept, and how models are opened."""

    def __init__(self, work: Path, config: str, overrides: Sequence[str]) -> None:
        self.work, self.config, self.overrides = work, config, list(overrides)
        self._open: tuple[Any, FlowModel] | None = None

    def measure(self, name: str, setting: Setting) -> dict[str, Any]:
        """Return what was measured under `name`; measure it if it is not there, or of another
        setting."""
        file = self.work / f"{name}.json"
        stated = {**setting._asdict(), "weights": _stamp(Path(setting.target))}
        if file.exists():
            found = json.loads(file.read_text(encoding="utf-8"))
            if found["setting"] == stated:
                return dict(found)
        print(f"{name}: {setting}", flush=True)
        found = {"setting": stated, **_measured(self.model(setting), setting)}
        self.work.mkdir(parents=True, exist_ok=True)
        write_json(file, found)
        return found

    def model(self, setting: Setting) -> FlowModel:
        """Open a target with its guidance; the last one stays open."""
        key = (setting.target, setting.guidance)
        if self._open is None or self._open[0] != key:
            self._open = None
            gc.collect()
            overrides = [f"model.guidance={setting.guidance:g}", *self.overrides]
            target = open_target(setting.target, settings=self.config, overrides=overrides)
            self._open = (key, target.model)
        return self._open[1]


def _stamp(target: Path) -> list[Any]:
    """Say which weights a folder has, so that others are measured anew: names, sizes, times."""
    files = sorted(target.rglob("*.safetensors"))
    return [[str(f.relative_to(target)), f.stat().st_size, int(f.stat().st_mtime)] for f in files]


def images_of(
    model: FlowModel, records: Sequence[Record], setting: Setting, count: int, offset: int = 0
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield (index of the record, images), `count` images of each record, from their own noise."""
    options: dict[str, Any] = {"height": 64, "width": 64, "steps": setting.steps, "batch": 128}
    texts = [record["prompt"] for record in records]
    for rows, pixels in sampled_images(
        model, texts, images=count, seed=setting.seed + offset, **options
    ):
        yield rows, pixels.cpu()


def by_task(records: Sequence[Record]) -> dict[str, list[int]]:
    """Return the places of each task's records, tasks in the order of the list."""
    out: dict[str, list[int]] = {}
    for i, record in enumerate(records):
        out.setdefault(str(record["tag"]), []).append(i)
    return out


def _measured(model: FlowModel, setting: Setting) -> dict[str, Any]:
    records = load_prompts(setting.prompts).records
    # each task has about as many images, whatever the number of its prompts
    hits: list[list[float]] = [[] for _ in records]
    order: dict[str, list[int]] = {}
    seconds, made = 0.0, 0
    for number, (task, rows) in enumerate(by_task(records).items()):
        mine, each = [records[i] for i in rows], math.ceil(setting.per_task / len(rows))
        began, parts, index = time.process_time(), [], list[int]()
        for some, pixels in images_of(model, mine, setting, each * setting.best_of, number):
            chosen = _best(pixels, [mine[i] for i in some], setting)
            parts.append(pixels[chosen])
            index += [some[i] for i in chosen]
        seconds += time.process_time() - began
        # what is on them
        images, asked = torch.cat(parts), [mine[i] for i in index]
        verdict = check(images, asked)
        for i, right in zip(index, verdict.strict.tolist(), strict=True):
            hits[rows[i]].append(float(right))
        made += len(images)
        if task in ORDER_TASKS:
            order[task] = list(word_order(images, asked, task))
    calls = setting.steps * setting.best_of * (1 if setting.guidance == 1 else 2)
    return {
        "outcomes": hits,
        "images": made,
        "network_calls": calls,
        "processor_seconds": seconds / made,
        "word_order": order,
        "diversity": _variety(model, setting),
    }


def _variety(model: FlowModel, setting: Setting) -> dict[str, float]:
    """Measure how much images of the open prompts differ, from noise of their own; {} where none is
    asked for."""
    if not setting.open_prompts:
        return {}
    mine = [one for one in load_prompts(setting.open_prompts).records if leaves_open(one)]
    count = setting.open_images * setting.best_of
    parts: list[list[Tensor]] = [[] for _ in mine]
    for some, pixels in images_of(model, mine, setting, count, OPEN_NOISE):
        for place in _best(pixels, [mine[i] for i in some], setting):
            parts[some[place]].append(pixels[place])
    return mean_spread([spread(torch.stack(images)) for images in parts])


def _best(images: Tensor, records: Sequence[Record], setting: Setting) -> list[int]:
    """Choose one of every `best_of` images, the one of the highest reward -> their places."""
    if setting.best_of == 1:
        return list(range(len(images)))
    verdict: Verdict = check(images, records)
    reward = getattr(verdict, setting.reward).unflatten(0, (-1, setting.best_of))
    first = torch.arange(len(reward)) * setting.best_of
    return (first + reward.argmax(1)).tolist()


class Rates(NamedTuple):
    """Shares of right images, and which scenes they are of."""

    values: np.ndarray  # [seeds, scenes]
    tags: list[str]  # [scenes]
    held_out: list[bool]  # [scenes]: its combination was left out of training


def rates(found: Sequence[Mapping[str, Any]]) -> Rates:
    """Return the share of right images per seed and scene of measurements: the wordings and rows of
    a scene are right together too often to count as independent."""
    prompts = load_prompts(found[0]["setting"]["prompts"])
    tags = [str(record["tag"]) for record in prompts.records]
    rows: dict[Any, list[int]] = {}
    for i, key in enumerate(zip(tags, scenes_of(prompts), strict=True)):
        rows.setdefault(key, []).append(i)
    shares = np.array([list(map(np.mean, one["outcomes"])) for one in found])
    values = np.stack([shares[:, some].mean(1) for some in rows.values()], 1)
    held_out = [bool(prompts.records[some[0]].get("held_out")) for some in rows.values()]
    return Rates(values, [tag for tag, _ in rows], held_out)


def gain(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return by how much measurements of one setting are above those of another, as `crossed`."""
    return crossed(rates(one).values - rates(other).values, rates(one).tags)


def crossed_shares(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return mean, interval and tasks of measurements of one setting, one per training seed, as
    `crossed` does; what an interval has below 0 or above 1 is cut off."""
    whole = crossed(*rates(found)[:2])
    for one in (whole, *whole["tasks"].values()):
        one["interval"] = [b if b is None else min(1.0, max(0.0, b)) for b in one["interval"]]
    return whole


def entry(found: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """Put the measurements of one setting, one per training seed, together."""
    first = found[0]
    # how often two objects stood as asked, the opposite way, or neither, over the seeds
    named = {}
    for task in first["word_order"]:
        orders = np.sum([one["word_order"][task] for one in found], 0)
        named[task] = dict(zip(ORDERS, map(int, orders), strict=True))
    return {
        # outcomes are crossed, seeds x scenes, so the interval has both kinds of chance
        **crossed_shares(found),
        "seeds": len(found),
        "images": sum(one["images"] for one in found),
        "guidance": first["setting"]["guidance"],
        "steps": first["setting"]["steps"],
        "prompts": first["setting"]["prompts"],
        "cost_per_image": {
            "network_calls": first["network_calls"],
            "processor_seconds": sum(one["processor_seconds"] for one in found) / len(found),
        },
        "word_order": named,
        "diversity": mean_spread([one["diversity"] for one in found]),
        **more,
    }


ORDERS = ("asked", "opposite", "neither")
