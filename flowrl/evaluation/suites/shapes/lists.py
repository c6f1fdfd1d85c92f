"""Disjoint lists of prompts: to train on, to choose by (validation), and to report (test).

What is split are scenes, not texts. "A square right of a circle" and "a circle left of a square"
are one scene, so are "a circle and a square" and "a square and a circle", and every wording of a
scene stands in the list of the scene. Only `single_object` is split by wording: it has four scenes,
and every other task shows them too.

The test list has every scene with a held-out combination, up to a limit. Choose hyper-parameters,
guidance and steps on the validation list. The test list is for final figures.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from flowrl.evaluation.suites.shapes.harder import (
    combinations,
    crossings,
    hard_records,
    rephrased,
)
from flowrl.evaluation.suites.shapes.prompts import TASKS, Record, all_records

MOST_HELD, MOST_SEEN, MOST_TRAIN = 12, 12, 60
"""Scenes of a task, at most: held-out ones of the test list; the others of the test list and of
the validation list, each; those of the training list."""

OOD_EACH = 24
"""Prompts of each kind of the out-of-distribution list."""

_FLIPPED = {"right of": "left of", "below": "above"}


class Lists(NamedTuple):
    """Prompts with no scene in two lists."""

    train: list[Record]
    validation: list[Record]
    test: list[Record]


def scene_key(record: Record) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what a record asks for, however it is said: equal for all wordings of a scene."""
    things = []
    for wish in record["include"]:
        things.append((wish["class"], wish["count"], wish.get("color", "")))
    stands = []
    for i, wish in enumerate(record["include"]):
        if "position" in wish:
            relation, other = wish["position"]
            one, two = things[i], things[other]
            if relation in _FLIPPED:
                relation, one, two = _FLIPPED[relation], two, one
            stands.append((one, relation, two))
    return tuple(sorted(things)), tuple(sorted(stands))


def _wording(record: Record) -> str:
    """Return a prompt with its class left open."""
    return str(record["prompt"]).replace(record["include"][0]["class"], "*")


def benchmark_lists(seed: int = 0) -> Lists:
    """Split the prompts of the benchmark's six tasks."""
    rng = random.Random(seed)
    whole = Lists([], [], [])
    for task, records in all_records().items():
        key = _wording if task == "single_object" else scene_key
        _add(whole, _split(records, key, rng))
    return whole


def hard_lists(seed: int = 0) -> Lists:
    """Split the harder prompts, at most 60 scenes of each task."""
    rng = random.Random(seed)
    whole = Lists([], [], [])
    for records in hard_records().values():
        scenes = sorted({scene_key(record) for record in records}, key=repr)
        kept = set(rng.sample(scenes, min(len(scenes), MOST_TRAIN)))
        some = [record for record in records if scene_key(record) in kept]
        _add(whole, _split(some, scene_key, rng))
    return whole


def ood_list(seed: int = 0) -> list[Record]:
    """Draw the out-of-distribution prompts; it is for testing only.

    Scenes in other words are test scenes of the benchmark without held-out combinations, and the
    other kinds are scenes that no other list has. So no scene of it is trained on.
    """
    rng = random.Random(seed)
    # test scenes in other words, each scene once
    said: dict[tuple[str, Hashable], Record] = {}
    for record in benchmark_lists(seed).test:
        if not record["held_out"]:
            said.setdefault((record["tag"], scene_key(record)), rephrased(record))
    known = list(said)
    chosen = []
    for task in TASKS:
        mine = [key for key in known if key[0] == task]
        chosen += rng.sample(mine, min(len(mine), OOD_EACH // len(TASKS)))
    out = [said[key] for key in chosen]
    # what nobody asks for elsewhere
    for records in (combinations(), crossings()):
        out += rng.sample(records, OOD_EACH)
    return out


def _add(whole: Lists, part: Lists) -> None:
    for mine, more in zip(whole, part, strict=True):
        mine += more


def _split(
    records: Sequence[Record], key: Callable[[Record], Hashable], rng: random.Random
) -> Lists:
    """Split one task by scene: a fifth of the seen scenes for validation, a fifth for the test."""
    # scenes, those with a held-out wording apart
    every = dict.fromkeys(key(record) for record in records)
    held = {key(record) for record in records if record["held_out"]}
    seen = [scene for scene in every if scene not in held]
    rng.shuffle(seen)
    share = min(MOST_SEEN, max(1, round(len(seen) / 5)))
    # which list has which of them
    hidden = [scene for scene in every if scene in held]
    test = {*rng.sample(hidden, min(len(hidden), MOST_HELD)), *seen[:share]}
    validation = set(seen[share : 2 * share])
    train = set(seen[2 * share : 2 * share + MOST_TRAIN])
    lists = []
    for scenes in (train, validation, test):
        lists.append([record for record in records if key(record) in scenes])
    return Lists(*lists)
