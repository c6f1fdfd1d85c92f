"""Prompt lists that are made by code: a config or ``--suite`` names one, no file is needed.

All that is asked for is put in order by a digest of itself, so a list never changes, on no machine
and in no version of a library.

**GenEval** (2310.11513): its six tasks, 553 prompts to test and others to train on. The benchmark
draws its prompts at random; this takes the same classes, colours, counts and relations, with as
many prompts for each task, in an order of its own. **Differs:** other draws than the published
file, which `load_prompts` reads too; plurals and pairs are English ("two knives", "a pair of
scissors") where GenEval adds an s; a counting prompt draws each class and number once. What the
lists do not share are combinations: a coloured class, a class with a number, and, in prompts
without colours, a pair of classes. No prompt to train on holds one of a test prompt, in whatever
task, order or relation. So single objects are for testing only. **Differs:** Flow-GRPO (2505.05470)
leaves out of its training prompts only the test prompts, in either order.

**OCR**: prompts that ask for a text in the image, in straight double quotes: 1,000 to test, and
others to train on. Flow-GRPO has 1,018 test and about 20,000 training prompts of this kind, written
by a language model; they are not shipped here. These are made of places where a text can stand and
of texts of two or three words or a word and a number. No text of a test prompt is one of a training
prompt.

**Motion**: prompts of videos: somebody or something moves, somewhere, seen by a camera that may
move too. Published lists of video prompts are not shipped here. These are made of who moves, what
they do, places and cameras. No pair of who and what of a test prompt is one of a training prompt.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def digest(*parts: object) -> bytes:
    """Return 16 bytes that depend on what the parts look like as texts, and on nothing else."""
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()


def shuffled(things: Iterable[T], purpose: str) -> list[T]:
    """Sort things by their digest: one order for each purpose, the same everywhere."""
    return sorted(things, key=lambda thing: digest(purpose, thing))


def pick(choices: list[T], *parts: object) -> T:
    """Choose one of a list by the digest of the parts."""
    return choices[int.from_bytes(digest(*parts), "big") % len(choices)]


# GenEval
Record = dict[str, Any]

CLASSES: tuple[str, ...] = (
    *("person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat"),
    *("traffic light", "fire hydrant", "stop sign", "parking meter", "bench"),
    *("bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe"),
    *("backpack", "umbrella", "handbag", "tie", "suitcase"),
    *("frisbee", "skis", "snowboard", "sports ball", "kite", "baseball bat", "baseball glove"),
    *("skateboard", "surfboard", "tennis racket"),
    *("bottle", "wine glass", "cup", "fork", "knife", "spoon", "bowl"),
    *("banana", "apple", "sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza"),
    *("donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet"),
    *("tv", "laptop", "computer mouse", "tv remote", "computer keyboard", "cell phone"),
    *("microwave", "oven", "toaster", "sink", "refrigerator", "book", "clock", "vase"),
    *("scissors", "teddy bear", "hair drier", "toothbrush"),
)
"""GenEval's names, in COCO's order."""

COCO_NAMES = {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}
"""GenEval's name -> COCO's, where they differ; detectors answer with COCO's."""

COLORS: tuple[str, ...] = (
    *("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"),
)
RELATIONS: tuple[str, ...] = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}

_PLURALS = {
    "person": "people",
    "bus": "buses",
    "bench": "benches",
    "sheep": "sheep",
    "skis": "pairs of skis",
    "wine glass": "wine glasses",
    "knife": "knives",
    "sandwich": "sandwiches",
    "broccoli": "heads of broccoli",
    "couch": "couches",
    "computer mouse": "computer mice",
    "scissors": "pairs of scissors",
    "toothbrush": "toothbrushes",
}
_PAIRS = ("skis", "scissors")

TEST_SIZES = {
    "single_object": 80,
    "two_object": 99,
    "counting": 80,
    "colors": 94,
    "position": 100,
    "color_attr": 100,
}
"""Prompts of each task, as GenEval has them."""

TRAIN_SHARES = {"position": 7, "counting": 5, "color_attr": 3, "colors": 1, "two_object": 1}
"""What of the training list is of a task, in 17ths: the tasks that base models are worst at most
often; ours."""
TRAIN_UNIT = 320
"""Training prompts for each 17th."""

_COLORED = CLASSES[1:]  # no coloured people


def _geneval_test() -> list[Record]:
    """Return 553 records: tag, include, exclude, prompt, task by task."""
    out: list[Record] = []
    for tag, size in TEST_SIZES.items():
        out += [_geneval_record(tag, chosen) for chosen in _test_choices(tag)[:size]]
    return out


def _geneval_train() -> list[Record]:
    """Return 5,440 records of five tasks, mixed; each of the 160 counting prompts stands there ten
    times, which keeps the tasks' shares."""
    known: set[tuple[Any, ...]] = set()
    for record in _geneval_test():
        known |= _combined_in(record)
    out: list[Record] = []
    for tag, share in TRAIN_SHARES.items():
        records = _free(tag, known, share * TRAIN_UNIT)
        out += list(itertools.islice(itertools.cycle(records), share * TRAIN_UNIT))
    places = shuffled(range(len(out)), "train")
    return [out[place] for place in places]


def _combined_in(record: Record) -> set[tuple[Any, ...]]:
    """Return what is combined in a record: coloured classes, a class with a number, and pairs of
    classes of the tasks without colours."""
    found: set[tuple[Any, ...]] = set()
    include = record["include"]
    for entry in include:
        if "color" in entry:
            found.add((entry["class"], entry["color"]))
        if entry["count"] > 1:
            found.add((entry["class"], entry["count"]))
    if len(include) > 1 and not found:
        found.add(tuple(sorted(entry["class"] for entry in include)))
    return found


def _free(tag: str, known: set[tuple[Any, ...]], most: int) -> list[Record]:
    """Return up to `most` records of a task that hold no combination of `known`."""
    out: list[Record] = []
    for chosen in _train_choices(tag, known):
        record = _geneval_record(tag, chosen)
        if known.isdisjoint(_combined_in(record)):
            out.append(record)
        if len(out) == most:
            break
    return out


def _test_choices(tag: str) -> list[tuple[Any, ...]]:
    """Return all that a task can ask for, shuffled."""
    pairs: Iterable[tuple[Any, ...]]
    if tag == "color_attr":
        # of each two coloured classes one pair of colours: more than enough to draw from
        pairs = itertools.combinations(_COLORED, 2)
        return [_tinted(a, b, COLORS) for a, b in shuffled(pairs, tag)]
    if tag == "position":
        pairs = itertools.combinations(CLASSES, 2)
        return [(*_turned(a, b, tag), pick([*RELATIONS], a, b)) for a, b in shuffled(pairs, tag)]
    if tag == "two_object":
        pairs = itertools.combinations(CLASSES, 2)
        return [_turned(a, b, tag) for a, b in shuffled(pairs, tag)]
    every: dict[str, Iterable[tuple[Any, ...]]] = {
        "single_object": ((name,) for name in CLASSES),
        "counting": itertools.product(CLASSES, NUMBERS),
        "colors": itertools.product(_COLORED, COLORS),
    }
    return shuffled(every[tag], tag)


def _train_choices(tag: str, known: set[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return all that a task can ask for, in an order that differs from the test list's."""
    if tag == "position":
        pairs = shuffled(itertools.permutations(CLASSES, 2), "train position")
        return [(a, b, pick([*RELATIONS], "train", a, b)) for a, b in pairs]
    if tag != "color_attr":
        return _test_choices(tag)[::-1]
    # colours that are free for each class
    out = []
    for a, b in shuffled(itertools.combinations(_COLORED, 2), "train color_attr"):
        free = [color for color in COLORS if (a, color) not in known]
        first = pick(free, "first", a, b)
        free = [color for color in COLORS if (b, color) not in known and color != first]
        second = pick(free, "second", a, b)
        out.append((a, first, b, second))
    return out


def _turned(a: str, b: str, purpose: str) -> tuple[str, str]:
    """Name two classes in one order or the other."""
    return (a, b) if digest("order", purpose, a, b)[0] % 2 else (b, a)


def _tinted(a: str, b: str, colors: tuple[str, ...]) -> tuple[str, str, str, str]:
    """Give two classes two different colours."""
    first, second = _turned(a, b, "color_attr")
    one_color = pick([*colors], "first", a, b)
    other = pick([color for color in colors if color != one_color], "second", a, b)
    return first, one_color, second, other


def _geneval_record(tag: str, chosen: tuple[Any, ...]) -> Record:
    """Make the record of a task from what was chosen for it."""
    exclude: list[Record] = []
    if tag == "counting":
        name, count = chosen
        include = [{"class": name, "count": count}]
        exclude = [{"class": name, "count": count + 1}]
        text = several(name, count)
    elif tag == "colors":
        name, color = chosen
        include = [{"class": name, "count": 1, "color": color}]
        text = one(f"{color} {name}")
    elif tag == "color_attr":
        a, first, b, second = chosen
        include = [
            {"class": a, "count": 1, "color": first},
            {"class": b, "count": 1, "color": second},
        ]
        text = f"{one(f'{first} {a}')} and {one(f'{second} {b}')}"
    elif tag == "position":
        a, b, relation = chosen
        include = [{"class": b, "count": 1}, {"class": a, "count": 1, "position": [relation, 0]}]
        text = f"{one(a)} {relation} {one(b)}"
    else:
        include = [{"class": name, "count": 1} for name in chosen]
        text = " and ".join(one(name) for name in chosen)
    # the keys in GenEval's order
    record: Record = {"tag": tag, "include": include}
    if exclude:
        record["exclude"] = exclude
    return {**record, "prompt": f"a photo of {text}"}


def one(name: str) -> str:
    """Say one thing: "an apple", "a red car", "a pair of skis"."""
    if name.endswith(_PAIRS):
        return f"a pair of {name}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def several(name: str, count: int) -> str:
    """Say 2 to 4 things of a class: "three wine glasses"."""
    return f"{NUMBERS[count]} {_PLURALS.get(name, f'{name}s')}"


# OCR
OCR_TESTS = 1000
OCR_EACH = 5
"""Prompts of each training text, each in another place."""

_OCR_PLACES = [
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
_OCR_KINDS = ["", "a close-up of ", "a watercolour painting of ", "a black and white photo of "]

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
    pairs = map(" ".join, itertools.product(_FIRST, _SECOND))
    advice = map(" the ".join, itertools.product(_VERB, _OBJECT))
    numbered = [f"{a} {n}" for a, n in itertools.product(_NUMBERED, range(2, 100))]
    return shuffled([*pairs, *advice, *numbered], "ocr texts")


def _ocr_test() -> list[dict[str, Any]]:
    """Return 1,000 records: prompt, and the text as "target"."""
    return [_ocr_record(text) for text in all_texts()[:OCR_TESTS]]


def _ocr_train() -> list[dict[str, Any]]:
    """Return five records for each text that no test prompt has, mixed."""
    several = itertools.product(all_texts()[OCR_TESTS:], range(OCR_EACH))
    return [_ocr_record(text, turn) for text, turn in shuffled(several, "ocr train")]


def _ocr_record(text: str, turn: int = 0) -> dict[str, Any]:
    """Ask for a text; `turn` moves on to the next place."""
    first = _OCR_PLACES.index(pick(_OCR_PLACES, "place", text))
    place = _OCR_PLACES[(first + turn) % len(_OCR_PLACES)].format(f'"{text}"')
    kind = pick(_OCR_KINDS, "kind", text, turn)
    return {"prompt": f"{kind}{place}", "target": text, "tag": "ocr"}


# motion
MOTION_TESTS = 100
MOTION_EACH = 6
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
_MOTION_PLACES = [
    *("on a beach at sunset", "in a snowy forest", "on a quiet street in the rain"),
    *("in a field of tall grass", "beside a mountain lake", "in a busy market square"),
    *("on a wooden bridge in fog", "in a desert at noon", "in a park in autumn"),
    *("under street lamps at night", "on a cliff above the sea", "in a meadow in the morning"),
]
_CAMERAS = [
    "",
    "",
    "The camera is still.",
    "The camera follows slowly.",
    "The camera moves closer.",
]


def _all_pairs() -> list[tuple[str, str]]:
    """Return every pair of who and what, shuffled."""
    found: list[tuple[str, str]] = []
    for who, what in [(_ANIMALS, _BY_ANIMALS), (_PEOPLE, _BY_PEOPLE), (_THINGS, _BY_THINGS)]:
        found += itertools.product(who, what)
    return shuffled(found, "motion pairs")


def _motion_test() -> list[dict[str, Any]]:
    """Return 100 records."""
    return [_motion_record(*pair) for pair in _all_pairs()[:MOTION_TESTS]]


def _motion_train() -> list[dict[str, Any]]:
    """Return six records for each pair that no test prompt has, mixed."""
    several = itertools.product(_all_pairs()[MOTION_TESTS:], range(MOTION_EACH))
    return [_motion_record(*pair, turn) for pair, turn in shuffled(several, "motion train")]


def _motion_record(who: str, what: str, turn: int = 0) -> dict[str, Any]:
    """Describe a scene; `turn` moves on to the next place."""
    first = _MOTION_PLACES.index(pick(_MOTION_PLACES, "place", who, what))
    place = _MOTION_PLACES[(first + turn) % len(_MOTION_PLACES)]
    camera = pick(_CAMERAS, "camera", who, what, turn)
    prompt = f"{who[0].upper()}{who[1:]} {what} {place}. {camera}".strip()
    return {"prompt": prompt, "who": who, "what": what, "tag": "motion"}


MADE: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "geneval/test": _geneval_test,
    "geneval/train": _geneval_train,
    "motion/test": _motion_test,
    "motion/train": _motion_train,
    "ocr/test": _ocr_test,
    "ocr/train": _ocr_train,
}
"""Name of a list -> what makes its records."""


@cache
def _records(name: str) -> list[dict[str, Any]]:
    return MADE[name]()


def made_records(name: str) -> list[dict[str, Any]]:
    """Return the records of a list of `MADE`, each with its prompt; they are the caller's own."""
    return [{**record} for record in _records(name)]
