"""What the judge says of edits: the source and the edited image, and a question of the reward
`edit_verifier` in flowrl's own words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from flowrl.core.errors import DataError
from flowrl.evaluation.suites.shapes.checker import cleanliness, spotless
from flowrl.evaluation.suites.shapes.detect import detect
from flowrl.evaluation.suites.shapes.edits import DIRECTIONS, KINDS, check_edits, prompt_of
from flowrl.evaluation.suites.shapes.scene import CLASSES, COLORS, SIZE
from rewards.edit_verifier import USUAL

ASKED = re.compile(r"by this instruction: (.+)")
CHECK = re.compile(r"Check one thing alone: (.+)")
DIGIT = re.compile(r"single digit from 0")
HIGHEST = 5
Record = dict[str, Any]


def _known() -> dict[str, Record]:
    """Return every instruction that can be read, with the edit that it asks for."""
    found = {}
    for kind, shape, color in product(KINDS, CLASSES, COLORS):
        for to in {"recolor": [*COLORS], "move": [*DIRECTIONS]}.get(kind, [None]):
            edit = {"kind": kind, "class": shape, "color": color} | ({"to": to} if to else {})
            found[prompt_of(edit)] = edit
    return found


INSTRUCTIONS = _known()


def said(images: Sequence[Tensor], text: str) -> dict[str, float]:
    """Answer about a source and its edit [3, H, W] in [0, 1] -> share of each first token: digits
    0 to 5 where one was asked for, else Yes and No. Raises ValueError for what cannot be read."""
    asked = ASKED.search(text)
    edit = INSTRUCTIONS.get(asked[1].strip()) if asked else None
    if edit is None:
        raise ValueError(f"expected an instruction of assets/shapes-edits, got {text[:120]!r}")
    source, edited = (_sized(image) for image in images)
    try:
        verdict = check_edits(edited, source, [{"edit": edit}])
    except DataError as error:
        raise ValueError(str(error)) from error
    if DIGIT.search(text):
        return digits(float(verdict.graded[0]))
    # one thing alone: what was kept, what was done, how it looks
    check = CHECK.search(text)
    kind = next((k for k, words in USUAL.items() if check and check[1].strip() == words), None)
    if kind is None:
        raise ValueError(f"expected one of the usual principles, got {text[:160]!r}")
    shares = {"keep": float(verdict.kept[0]), "follow": float(verdict.done[0])}
    yes = shares[kind] if kind in shares else quality(edited)
    return {"Yes": yes, "No": 1 - yes}


def digits(score: float) -> dict[str, float]:
    """Spread a score in [0, 1] over the two digits next to its fifth, so that their mean is it."""
    place = float(np.clip(score, 0, 1)) * HIGHEST
    low = min(int(place), HIGHEST - 1)
    shares = dict.fromkeys(map(str, range(HIGHEST + 1)), 0.0)
    shares[str(low + 1)] = place - low
    shares[str(low)] = 1 - (place - low)
    return shares


def quality(image: Tensor) -> float:
    """Say how an image [1, 3, H, W] looks: 1 without a flaw, a half where all can be read."""
    found = detect(image, find_flaws=True)
    return (float(spotless(found)[0]) + float(cleanliness(found)[0])) / 2


def _sized(image: Tensor) -> Tensor:
    """Scale an image to what is read -> [1, 3, SIZE, SIZE]."""
    if image.shape[1:] == (SIZE, SIZE):
        return image[None]
    wide = interpolate(image[None], (SIZE, SIZE), mode="bilinear", antialias=True)
    return torch.clamp(wide, 0, 1)
