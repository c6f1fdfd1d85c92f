"""Prompts that ask for a text in the image, in straight double quotes: 1,000 to test, and others to
train on.

Flow-GRPO (2505.05470) has 1,018 test and about 20,000 training prompts of this kind, written by a
language model; they are not shipped here. These are made of places where a text can stand and of
texts of two or three words or a word and a number. No text of a test prompt is one of a training
prompt.
"""

from __future__ import annotations

import itertools
from typing import Any

from flowrl.core.prompt_lists.order import pick, shuffled

TEST_SIZE = 1000
TRAIN_EACH = 5
"""Prompts of each training text, each in another place."""

PLACES = [
    "a wooden shop sign above a door that reads {}",
    "a neon sign in a dark window that says {}",
    "a chalkboard in front of a small restaurant with the words {}",
    "a billboard beside a highway that shows {}",
    "the cover of a hardback book with the title {}",
    "a white coffee mug on a desk with {} printed on it",
    "a street poster on a brick wall that announces {}",
    "a birthday cake with {} written in icing",
    "a metal plaque on a stone wall engraved with {}",
    "a t-shirt on a hanger with the slogan {}",
    "the screen of a smartphone that shows {}",
    "a cardboard box on a doorstep labelled {}",
    "a banner across a town square with {} on it",
    "a railway platform with a departure board that reads {}",
    "a glass jar on a kitchen shelf with the label {}",
    "a hand-painted sign at a farm gate that says {}",
    "a delivery van with {} on its side",
    "a museum ticket on a table with {} printed on it",
    "a flag on a ship's mast with the words {}",
    "a sticky note on a laptop that says {}",
    "graffiti on a concrete wall that spells {}",
    "the front page of a newspaper with the headline {}",
    "a park bench with a brass plate that reads {}",
    "a theatre marquee at night that shows {}",
    "an old stone milestone carved with {}",
]
KINDS = ["", "a close-up of ", "a watercolour painting of ", "a black and white photo of "]

_FIRST = (
    *("Fresh", "Open", "Golden", "Silent", "Happy", "Lost", "Hidden", "Brave", "Warm", "Lucky"),
    *("Simple", "Bright", "Little", "Grand", "Northern", "Secret", "Gentle", "Modern", "Velvet"),
    *("Broken", "Early", "Second", "Wild", "Quiet", "Royal"),
)
_SECOND = (
    *("Garden", "Bakery", "Harbor", "Market", "Library", "Morning", "Journey", "Kitchen"),
    *("Bridge", "Island", "Station", "Window", "Forest", "Lantern", "Studio", "Castle", "River"),
    *("Mountain", "Candle", "Orchard", "Museum", "Compass", "Village", "Meadow", "Theater"),
)
_VERB = (
    *("Mind", "Save", "Watch", "Follow", "Cross", "Visit", "Paint", "Enjoy", "Find", "Keep"),
    *("Share", "Close", "Build", "Clean", "Guard", "Trust", "Leave", "Hold", "Meet", "Change"),
)
_OBJECT = (
    *("Gap", "Date", "Planet", "Birds", "Light", "Road", "Ocean", "Music", "World", "Door"),
    *("Story", "Water", "Bees", "Signs", "Future", "Line", "Moment", "Truth", "Stairs", "Town"),
)
_NUMBERED = (
    *("Platform", "Room", "Exit", "Gate", "Route", "Chapter", "Level", "Table", "Pier", "Track"),
    *("Studio", "Lot", "Unit", "Flight", "Section", "Bay", "Lane", "Volume", "Locker", "Floor"),
)


def all_texts() -> list[str]:
    """Return every text, shuffled: no two differ by case or spaces alone."""
    pairs = [f"{a} {b}" for a, b in itertools.product(_FIRST, _SECOND)]
    advice = [f"{a} the {b}" for a, b in itertools.product(_VERB, _OBJECT)]
    numbered = [f"{a} {n}" for a, n in itertools.product(_NUMBERED, range(2, 100))]
    return shuffled([*pairs, *advice, *numbered], "ocr texts")


def test_records() -> list[dict[str, Any]]:
    """Return 1,000 records: prompt, and the text as "target"."""
    return [_record(text) for text in all_texts()[:TEST_SIZE]]


def train_records() -> list[dict[str, Any]]:
    """Return five records for each text that no test prompt has, mixed."""
    several = itertools.product(all_texts()[TEST_SIZE:], range(TRAIN_EACH))
    return [_record(text, turn) for text, turn in shuffled(several, "ocr train")]


def _record(text: str, turn: int = 0) -> dict[str, Any]:
    """Ask for a text; `turn` moves on to the next place."""
    first = PLACES.index(pick(PLACES, "place", text))
    place = PLACES[(first + turn) % len(PLACES)].format(f'"{text}"')
    kind = pick(KINDS, "kind", text, turn)
    return {"prompt": f"{kind}{place}", "target": text, "tag": "ocr"}
