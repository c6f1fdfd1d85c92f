"""Prompts of videos: somebody or something moves, somewhere, seen by a camera that may move too.

Published lists of video prompts are not shipped here. These are made of who moves, what they do,
places and cameras. No pair of who and what of a test prompt is one of a training prompt.
"""

from __future__ import annotations

import itertools
from typing import Any

from flowrl.core.prompt_lists.order import pick, shuffled

TEST_SIZE = 100
TRAIN_EACH = 6
"""Prompts of each training pair of who and what, each in another place."""

_ANIMALS = (
    *("a golden retriever", "a black cat", "a red fox", "a brown horse", "a white goat"),
    *("a grey wolf", "a young deer", "an elephant", "a lion", "a panda"),
)
_PEOPLE = (
    *("a woman in a red coat", "an old man with a hat", "a girl with a backpack"),
    *("a boy in a yellow raincoat", "a dancer in a blue dress", "a chef in a white apron"),
    *("an astronaut", "a robot", "a farmer", "a street musician"),
)
_THINGS = (
    *("a red sports car", "a yellow taxi", "a steam train", "a wooden sailing boat"),
    *("a blue bicycle without a rider", "a large rubber ball", "a paper kite", "a hot air balloon"),
)
_BY_ANIMALS = (
    *("walks from left to right", "runs towards the camera", "jumps over a fallen log"),
    *("turns its head and looks back", "lies down slowly", "shakes off water"),
    *("drinks and then looks up", "walks away from the camera"),
)
_BY_PEOPLE = (
    *("walks from right to left", "waves at the camera", "turns around slowly"),
    *("picks up an umbrella and opens it", "sits down on a bench", "climbs a few stairs"),
    *("throws a ball up and catches it", "runs away from the camera"),
)
_BY_THINGS = (
    *("moves from left to right", "comes towards the camera", "slows down and stops"),
    *("disappears behind a hill", "turns in a wide curve", "rises a little and sinks again"),
)
PLACES = [
    *("on a beach at sunset", "in a snowy forest", "on a quiet street in the rain"),
    *("in a field of tall grass", "beside a mountain lake", "in a busy market square"),
    *("on a wooden bridge in fog", "in a desert at noon", "in a park in autumn"),
    *("under street lamps at night", "on a cliff above the sea", "in a meadow in the morning"),
]
CAMERAS = ["", "", "The camera is still.", "The camera follows slowly.", "The camera moves closer."]


def _all_pairs() -> list[tuple[str, str]]:
    """Return every pair of who and what, shuffled."""
    found: list[tuple[str, str]] = []
    for who, what in [(_ANIMALS, _BY_ANIMALS), (_PEOPLE, _BY_PEOPLE), (_THINGS, _BY_THINGS)]:
        found += itertools.product(who, what)
    return shuffled(found, "motion pairs")


def test_records() -> list[dict[str, Any]]:
    """Return 100 records."""
    return [_record(*pair) for pair in _all_pairs()[:TEST_SIZE]]


def train_records() -> list[dict[str, Any]]:
    """Return six records for each pair that no test prompt has, mixed."""
    several = itertools.product(_all_pairs()[TEST_SIZE:], range(TRAIN_EACH))
    return [_record(*pair, turn) for pair, turn in shuffled(several, "motion train")]


def _record(who: str, what: str, turn: int = 0) -> dict[str, Any]:
    """Describe a scene; `turn` moves on to the next place."""
    first = PLACES.index(pick(PLACES, "place", who, what))
    place = PLACES[(first + turn) % len(PLACES)]
    camera = pick(CAMERAS, "camera", who, what, turn)
    prompt = f"{who[0].upper()}{who[1:]} {what} {place}. {camera}".strip()
    return {"prompt": prompt, "who": who, "what": what, "tag": "motion"}
