"""The words of GenEval: 80 COCO classes, ten colours, four relations, and their English."""

from __future__ import annotations

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


def one(name: str) -> str:
    """Say one thing: "an apple", "a red car", "a pair of skis"."""
    if name.endswith(_PAIRS):
        return f"a pair of {name}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def several(name: str, count: int) -> str:
    """Say 2 to 4 things of a class: "three wine glasses"."""
    return f"{NUMBERS[count]} {_PLURALS.get(name, f'{name}s')}"
