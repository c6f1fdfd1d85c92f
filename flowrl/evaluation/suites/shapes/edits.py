"""Edits of the shapes world: a scene, what is to be changed about one object of it, and the scene
that should come of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flowrl.evaluation.suites.shapes.scene import CLASSES, COLORS, SIZE, Scenes, layout

KINDS = ("recolor", "move", "add", "remove")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
SHIFT = (11.0, 24.0)  # pixels that an object is moved by in the true scenes
_GAP, _MARGIN, _JITTER = 4.0, 2.0, 2.0
_TRIES = 12  # places that are tried for a move

Record = dict[str, Any]


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
    parts.sort(key=lambda part: part[0])
    before = _stacked([part[1] for part in parts])
    after = _stacked([part[2] for part in parts])
    return Edits(before, after, [part[3] for part in parts])


def _stacked(scenes: list[Scenes]) -> Scenes:
    return Scenes(*(np.concatenate(field) for field in zip(*scenes, strict=True)))


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
        taken = {
            int(c)
            for s, c in zip(scene.shape[0], scene.color[0], strict=True)
            if s == scene.shape[0, last]
        }
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
    return f"add a {thing}" if edit["kind"] == "add" else f"remove the {thing}"


def edit_words() -> list[str]:
    """List the words of all prompts."""
    found = {"make", "move", "add", "remove", "the", "a", *CLASSES, *COLORS, *DIRECTIONS}
    return sorted(found)
