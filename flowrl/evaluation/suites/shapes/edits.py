"""Edits of shapes: a scene, what is to be changed about one object, the scene that should come of
it, and a judge of edited images that sees nothing but pixels.

The judge reads the source as images are read (`detect`), so its own objects say what has to stay.
Strict: the asked change is there; every other object is where it was, of its shape and colour;
nothing was added or lost; the background has its grey; nothing is unreadable, and there is no flaw,
such as corners on a circle, paint on a shape or specks.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowrl.core.errors import DataError
from flowrl.evaluation.suites.shapes.checker import spotless
from flowrl.evaluation.suites.shapes.detect import Detections, detect
from flowrl.evaluation.suites.shapes.scene import CLASSES, COLORS, SIZE, Scenes, layout

KINDS = ("recolor", "move", "add", "remove")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
SHIFT = (11.0, 24.0)  # pixels that an object is moved by in the true scenes
_GAP, _MARGIN, _JITTER = 4.0, 2.0, 2.0
_TRIES = 12  # places that are tried for a move

Record = dict[str, Any]

STAY = 3.0  # pixels that an object may drift and still be where it was
LOST = 12.0  # ... from which it is elsewhere
SIZE_STAYS = 0.3  # share of its area that an object may gain or lose
MOVED = 8.0  # pixels from which an object has moved
GREY = 0.06  # by how much the background's channels may differ from the source's

_COLORS = [*COLORS]


class Edits(NamedTuple):
    """N edits: the scene before, one that is right after it, and the words."""

    before: Scenes
    after: Scenes
    records: list[Record]  # [N]  prompt, tag, edit: {kind, class, color, to}


def draw_edits(rng: np.random.Generator, kinds: np.ndarray) -> Edits:
    """Draw an edit for each of `kinds` [N], indices into KINDS, of scenes of two or three objects
    that differ in shape or colour. The last object is the one that changes."""
    parts: list[tuple[int, Scenes, Scenes, Record]] = []
    todo = np.arange(len(kinds))
    while len(todo):
        found = _draw(rng, kinds[todo])
        parts += [(int(todo[row]), *rest) for row, *rest in found]  # type: ignore[misc]
        done = {int(todo[row]) for row, *_ in found}
        todo = np.array([row for row in todo if int(row) not in done], np.int64)
    parts.sort(key=itemgetter(0))
    _, before, after, records = zip(*parts, strict=True)
    return Edits(_stacked(before), _stacked(after), [*records])


def _stacked(scenes: Sequence[Scenes]) -> Scenes:
    return Scenes(*map(np.concatenate, zip(*scenes, strict=True)))


def _draw(rng: np.random.Generator, kinds: np.ndarray) -> list[tuple[int, Scenes, Scenes, Record]]:
    """Draw scenes for `kinds` [N]; those in which an object has no room to move are left out."""
    n = len(kinds)
    count = rng.integers(2, 4, n)
    center, radius = layout(rng, count)
    # pairs of shape and colour, none twice in a scene
    pair = rng.permuted(np.tile(np.arange(len(CLASSES) * len(COLORS)), (n, 1)), axis=1)[:, :4]
    shape, color = np.divmod(pair, len(COLORS))
    grey = rng.uniform(0.88, 1.0, n).astype(np.float32)
    whole = Scenes(count, shape, color, center, radius, grey)
    out = []
    for row in range(n):
        one = Scenes(*(field[row : row + 1].copy() for field in whole))
        made = _edit(rng, one, KINDS[int(kinds[row])])
        if made is not None:
            out.append((row, *made))
    return out


def _edit(
    rng: np.random.Generator, scene: Scenes, kind: str
) -> tuple[Scenes, Scenes, Record] | None:
    """Edit the last object of one scene -> before, after, record; None where it has no room."""
    last = int(scene.number[0]) - 1
    shape, color = CLASSES[scene.shape[0, last]], [*COLORS][scene.color[0, last]]
    edit = {"kind": kind, "class": shape, "color": color}
    # arrays [1, objects] of a scene; to leave out the last object, `number` is lowered
    other = Scenes(*(field.copy() for field in scene))
    fewer = other._replace(number=scene.number - 1)
    if kind == "add":
        return fewer, scene, _record(edit)
    if kind == "remove":
        return scene, fewer, _record(edit)
    if kind == "recolor":
        # no two objects may become alike, or the edit could not be judged
        taken = set(scene.color[0][scene.shape[0] == scene.shape[0, last]].tolist())
        free = [c for c in range(len(COLORS)) if c not in taken]
        other.color[0, last] = rng.choice(free)
        return scene, other, _record(edit | {"to": [*COLORS][other.color[0, last]]})
    # move: a free place in one of four directions, if there is one
    where = _room(rng, scene, last)
    if where is None:
        return None
    other.center[0, last] = where[1]
    return scene, other, _record(edit | {"to": where[0]})


def _room(rng: np.random.Generator, scene: Scenes, last: int) -> tuple[str, np.ndarray] | None:
    """Find a place for the last object of one scene that lies in some direction."""
    center, radius = scene.center[0], scene.radius[0]
    for name in rng.choice([*DIRECTIONS], _TRIES):
        along = np.array(DIRECTIONS[name], np.float32)
        across = np.abs(along[::-1]) * rng.uniform(-_JITTER, _JITTER)
        place = (center[last] + along * rng.uniform(*SHIFT) + across).astype(np.float32)
        edge = radius[last] + _MARGIN
        inside = bool(((place >= edge) & (place <= SIZE - edge)).all())
        gaps = np.linalg.norm(center[:last] - place, axis=-1) - radius[:last] - radius[last]
        if inside and bool((gaps >= _GAP).all()):
            return str(name), place
    return None


def _record(edit: Record) -> Record:
    return {"prompt": prompt_of(edit), "tag": edit["kind"], "edit": edit}


def prompt_of(edit: Record) -> str:
    """Say an edit in words."""
    thing = f"{edit['color']} {edit['class']}"
    if edit["kind"] == "recolor":
        return f"make the {thing} {edit['to']}"
    if edit["kind"] == "move":
        return f"move the {thing} {edit['to']}"
    if edit["kind"] == "add":
        return f"add a {thing}"
    return f"remove the {thing}"


def edit_words() -> list[str]:
    """List the words of all prompts."""
    found = {"make", "move", "add", "remove", "the", "a", *CLASSES, *COLORS, *DIRECTIONS}
    return sorted(found)


class EditVerdict(NamedTuple):
    """What became of N edits."""

    strict: Tensor  # [N] bool
    graded: Tensor  # [N] float32 in [0, 1]; 1 exactly where strict, 0 for a copy of the source
    done: Tensor  # [N] float32 in [0, 1], how well the asked change is there
    kept: Tensor  # [N] float32 in [0, 1], how well all else is as it was


def check_edits(images: Tensor, sources: Tensor, records: Sequence[Record]) -> EditVerdict:
    """Judge edits [N, 3, 64, 64] of sources [N, 3, 64, 64] by their records. Raises DataError for a
    source in which the object of the edit is not there exactly once."""
    after, before = detect(images, find_flaws=True), detect(sources)
    clean = spotless(after)
    rows = [_judge(after, before, i, record["edit"]) for i, record in enumerate(records)]
    done, kept, right = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    same = np.abs(after.background - before.background).max(1) <= GREY
    strict = (right > 0) & clean & same
    unread = (after.area * (1 - after.match.max(-1) * after.purity)).sum(1) + after.clutter
    soft = done * kept * after.plain * np.where(same, 1.0, 0.5) / (1 + unread / 256)
    graded = np.where(strict, 1.0, 0.95 * soft).astype(np.float32)
    return EditVerdict(
        torch.from_numpy(strict),
        torch.from_numpy(graded),
        torch.from_numpy(done.astype(np.float32)),
        torch.from_numpy(kept.astype(np.float32)),
    )


class _Thing(NamedTuple):
    shape: int
    color: int
    center: np.ndarray  # [2] pixels
    area: float


def _judge(
    after: Detections, before: Detections, row: int, edit: Record
) -> tuple[float, float, bool]:
    """Judge one edit -> how well it is done, how well the rest was kept, whether both are right."""
    things = _things(before, row)
    shape, color = CLASSES.index(edit["class"]), _COLORS.index(edit["color"])
    mine = [thing for thing in things if (thing.shape, thing.color) == (shape, color)]
    wanted = 0 if edit["kind"] == "add" else 1
    if len(mine) != wanted:
        raise DataError(
            f"rewards.shapes_edit: {edit!r} needs a source with {wanted} of the object, which is "
            f"read {len(mine)} times in it"
        )
    others = [thing for thing in things if thing not in mine]
    expected = len(others) + (0 if edit["kind"] == "remove" else 1)
    # what has to stay
    kept = []
    for other in others:
        near = _nearness(after, row, other)
        kept.append(_found(after, row, other.shape, other.color, near))
    extra = max(0, int(after.number[row]) - expected)
    rest = float(np.exp(-extra / 2))
    if kept:
        rest *= float(np.mean(kept))
    # what has to change
    thing = mine[0] if mine else None
    asked = (shape, color)
    done = _done(after, row, edit, thing, asked)
    # what a copy has of it, as purple has of blue, is nothing
    copy = _done(before, row, edit, thing, asked)
    done = max(0.0, (done - copy) / (1 - copy)) if copy < 1 else 0.0
    right = done >= 1 and extra == 0 and all(value >= 1 for value in kept)
    return done, rest, right and int(after.number[row]) == expected


def _things(found: Detections, row: int) -> list[_Thing]:
    things = []
    for k in range(int(found.number[row])):
        shape, color = int(found.shape[row, k]), int(found.color[row, k])
        if shape >= 0 and color >= 0:
            things.append(_Thing(shape, color, found.center[row, k], float(found.area[row, k])))
    return things


def _nearness(found: Detections, row: int, thing: _Thing) -> np.ndarray:
    """Say of each object [K] how much it stands where a thing stood and has its size: 1 within
    `STAY` pixels, 0 from `LOST` on."""
    k = int(found.number[row])
    away = np.linalg.norm(found.center[row, :k] - thing.center, axis=-1)
    place = np.clip((LOST - away) / (LOST - STAY), 0, 1)
    grown = np.abs(found.area[row, :k] / thing.area - 1)
    return place * np.clip(2 - grown / SIZE_STAYS, 0, 1)


def _found(found: Detections, row: int, shape: int, color: int, factor: np.ndarray) -> float:
    """Return how much the best object is of a shape and colour, times a factor [K]."""
    k = int(found.number[row])
    member = found.match[row, :k, shape] * found.tint[row, :k, color] * factor
    return float(member.max(initial=0.0))


def _done(
    after: Detections, row: int, edit: Record, thing: _Thing | None, asked: tuple[int, int]
) -> float:
    """Return how well the asked change is there: 1 exactly where it is."""
    k, (shape, color) = int(after.number[row]), asked
    if thing is None:  # add: anywhere
        return _found(after, row, shape, color, np.ones(k))
    if edit["kind"] == "recolor":
        return _found(after, row, shape, _COLORS.index(edit["to"]), _nearness(after, row, thing))
    if edit["kind"] == "remove":
        away = np.linalg.norm(after.center[row, :k] - thing.center, axis=-1)
        left = np.clip((LOST - away) / (LOST - STAY), 0, 1).max(initial=0.0)
        # nor anywhere else
        there = (after.shape[row, :k] == shape) & (after.color[row, :k] == color)
        return 0.0 if there.any() else 1 - float(left)
    shift = after.center[row, :k] - thing.center
    axis = np.array(DIRECTIONS[edit["to"]], np.float64)
    along = shift @ axis
    across = np.abs(shift @ np.abs(axis[::-1]))
    size = np.clip(2 - np.abs(after.area[row, :k] / thing.area - 1) / SIZE_STAYS, 0, 1)
    way = np.clip(along / MOVED, 0, 1) * np.clip(2 - across / np.maximum(along, 1e-6), 0, 1)
    return _found(after, row, shape, color, way * size)


def validate_edit(record: Any, where: str) -> None:
    """Refuse a record that cannot be judged (DataError)."""
    edit = record.get("edit") if isinstance(record, dict) else None
    if not isinstance(edit, dict) or edit.get("kind") not in KINDS:
        raise DataError(
            f"{where}: expected an object `edit` with a `kind` of {', '.join(KINDS)}; got "
            f"{edit!r:.200}"
        )
    to = {"recolor": _COLORS, "move": [*DIRECTIONS]}.get(edit["kind"], [None])
    for key, known in (("class", [*CLASSES]), ("color", _COLORS), ("to", to)):
        if edit.get(key) not in known:
            offered = ", ".join(map(str, known)) if known != [None] else "nothing"
            raise DataError(f"{where}: edit.{key}: expected {offered}, got {edit.get(key)!r}")
