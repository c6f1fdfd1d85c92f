"""Judge images of shapes against GenEval records, from pixels alone: a strict verdict and a
graded reward.

The strict verdict follows GenEval's evaluation (Ghosh et al. 2023): every `include` entry must be
there with its count, colour and relation, and no `exclude` entry may be reached.

**Differs:** GenEval ignores whatever its detector does not name. Here a sizable blob of unreadable
shape or colour, a shape cut by the edge, clutter, or a background that is not plain light grey
fails the strict verdict: a policy trained on the verdict would otherwise hide mistakes in what the
checker cannot read. So do flaws that neither templates nor mean colours see: corners on a circle,
paint on a shape, specks, and traces on the background (`flowrl.evaluation.suites.shapes.detect`).
And where two entries name one class, each means the objects of its own colour; in GenEval both look
at the most confident ones, and cannot both be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowrl.core.errors import DataError
from flowrl.evaluation.suites.shapes.detect import MAX_SPECKS, Detections, detect
from flowrl.evaluation.suites.shapes.prompts import Record
from flowrl.evaluation.suites.shapes.scene import CLASSES, COLORS, RELATIONS

POSITION_THRESHOLD = 0.1
MAX_CLUTTER = 40.0
"""Pixels off the background, in specks too small to be objects, that a readable image may have."""

_COLOR_NAMES = tuple(COLORS)
_AXIS = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)], np.float64)


class Verdict(NamedTuple):
    """What became of N images. A check that a record does not ask for is True."""

    strict: Tensor  # [N] bool
    graded: Tensor  # [N] float32 in [0, 1]; 1 exactly where strict
    count_ok: Tensor  # [N] bool, every include entry has at least its count
    color_ok: Tensor  # [N] bool, ... with the right colour
    position_ok: Tensor  # [N] bool, ... in the right relation
    exclude_ok: Tensor  # [N] bool, no exclude entry is reached
    clean: Tensor  # [N] bool, nothing unreadable, plain background, no flaw
    # [N] float32, as graded, but a relation is paid by its angle: 0 from perpendicular to opposite
    graded_angle: Tensor


ORDER_TASKS = ("position", "color_attr")
"""Tasks whose prompts mean something else with two words exchanged."""

_AXES = ((-1.0, 0.0), (1.0, 0.0), (0.0, -1.0), (0.0, 1.0))


class Order(NamedTuple):
    """Images with the two right shapes: as asked, opposite relation or swapped colours, else."""

    asked: int
    opposite: int
    neither: int


def check(images: Tensor, records: Sequence[dict[str, Any]]) -> Verdict:
    """Judge images [N, 3, 64, 64] in [0, 1] by N records -> Verdict; DataError for bad input."""
    if len(images) != len(records):
        raise DataError(
            f"one record per image is needed; got {len(images)} images and {len(records)} records."
        )
    for index, record in enumerate(records):
        validate(record, f"record {index}")
    return judge_detections(detect(images, find_flaws=True), records)


def judge_detections(found: Detections, records: Sequence[dict[str, Any]]) -> Verdict:
    """Judge detections by valid records: N of each -> Verdict; DataError if flaws were not looked
    for."""
    # each image by its own record
    clean = spotless(found)
    flags, soft = np.ones((len(records), 4), bool), np.zeros((2, len(records)), np.float32)
    for i, record in enumerate(records):
        k = int(found.number[i])
        shape, color, box = found.shape[i, :k], found.color[i, :k], found.box[i, :k]
        flags[i] = rules(record, shape, color, box)
        soft[:, i] = _credit(record, found.match[i, :k], found.tint[i, :k], box)
    # what cannot be read costs
    unread = (found.area * (1 - found.match.max(-1) * found.purity)).sum(1) + found.clutter
    soft = soft * found.plain / (1 + unread / 256)
    # graded is 1 only where strict
    strict = clean & flags.all(1)
    graded, graded_angle = np.where(strict, 1.0, 0.95 * soft).astype(np.float32)
    count_ok, color_ok, position_ok, exclude_ok = torch.from_numpy(flags.copy()).unbind(1)
    return Verdict(
        strict=torch.from_numpy(strict),
        graded=torch.from_numpy(graded),
        graded_angle=torch.from_numpy(graded_angle),
        count_ok=count_ok,
        color_ok=color_ok,
        position_ok=position_ok,
        exclude_ok=exclude_ok,
        clean=torch.from_numpy(clean),
    )


def spotless(found: Detections) -> np.ndarray:
    """Say which images are clean, without a flaw -> [N] bool; DataError if none was looked for."""
    if found.flawed is None:
        raise DataError("the strict verdict needs detect(images, find_flaws=True).")
    return cleanliness(found) & ~found.flawed & (found.clutter <= MAX_SPECKS)


def cleanliness(found: Detections) -> np.ndarray:
    """Say which images hold nothing but readable objects on a plain background: -> [N] bool."""
    used = np.arange(found.shape.shape[1]) < found.number[:, None]
    unread = (used & ((found.shape < 0) | (found.color < 0))).any(1)
    return ~unread & (found.plain >= 1) & (found.clutter <= MAX_CLUTTER)


def rules(
    record: dict[str, Any], shape: np.ndarray, color: np.ndarray, box: np.ndarray
) -> tuple[bool, bool, bool, bool]:
    """Apply GenEval's rules to K objects sorted by confidence: -> (count, colour, position,
    exclude) all right.

    As in GenEval an entry looks at its `count` most confident objects of the class, the position is
    only looked at once count and colour are right, and a reference entry that failed makes it
    wrong.
    """
    count_ok = color_ok = position_ok = True
    groups: list[np.ndarray | None] = []
    shared = shared_classes(record)
    for entry in record["include"]:
        # the most confident objects of the class
        mine = np.flatnonzero(shape == CLASSES.index(entry["class"]))[: entry["count"]]
        # a class that comes twice: enough of it, and of it those of the colour
        if entry["class"] in shared:
            whole = np.flatnonzero(shape == CLASSES.index(entry["class"]))
            count_ok &= len(whole) >= shared[entry["class"]]
            mine = whole[color[whole] == _COLOR_NAMES.index(entry["color"])][: entry["count"]]
        matched = len(mine) >= entry["count"]
        count_ok &= matched or entry["class"] in shared
        # then their colour
        if "color" in entry:
            named = _COLOR_NAMES.index(entry["color"])
            if not (matched and (color[mine] == named).all()):
                color_ok = matched = False
        # then where they stand
        if "position" in entry:
            relation, reference = entry["position"]
            target = groups[reference]
            if not matched or target is None or not _stands(box[mine], box[target], relation):
                position_ok = matched = False
        groups.append(mine if matched else None)
    # nothing that is forbidden
    exclude_ok = True
    for entry in record.get("exclude", []):
        exclude_ok &= bool((shape == CLASSES.index(entry["class"])).sum() < entry["count"])
    return count_ok, color_ok, position_ok, exclude_ok


def shared_classes(record: dict[str, Any]) -> dict[str, int]:
    """Return the classes that several include entries name, each with all of its objects."""
    named = [entry["class"] for entry in record["include"]]
    total = dict.fromkeys([name for name in named if named.count(name) > 1], 0)
    for entry in record["include"]:
        if entry["class"] in total:
            total[entry["class"]] += entry["count"]
    return total


def _stands(box: np.ndarray, reference: np.ndarray, relation: str) -> bool:
    """Say whether all boxes [A, 4] stand in a relation to all reference boxes [B, 4]."""
    axis = _AXIS[RELATIONS.index(relation)]
    return bool((offsets(box, reference) @ axis > 0.5).all())


def offsets(box: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Measure where boxes [A, 4] stand to reference boxes [B, 4] as GenEval does: -> [A, B, 2],
    right and down > 0.

    The offset of the centres, shrunk towards 0 by a tenth of the two extents, over the length of
    the unshrunk offset.
    """
    box, reference = box[:, None], reference[None]
    extent = (box[..., 2:] - box[..., :2]) + (reference[..., 2:] - reference[..., :2])
    offset = (box[..., :2] + box[..., 2:] - reference[..., :2] - reference[..., 2:]) / 2
    shrunk = np.maximum(np.abs(offset) - POSITION_THRESHOLD * extent, 0) * np.sign(offset)
    shrunk = np.where((np.abs(shrunk) < 1e-3).all(-1, keepdims=True), 0, shrunk)
    return shrunk / np.maximum(np.linalg.norm(offset, axis=-1, keepdims=True), 1e-9)


def _credit(
    record: dict[str, Any], match: np.ndarray, tint: np.ndarray, box: np.ndarray
) -> tuple[float, float]:
    """Average the soft credits of the include entries, lowered by what the exclude entries forbid:
    -> [0, 1] for both ways to pay a relation.

    GenEval's partial credit as Flow-GRPO trains on it (1 - |n - found| / n, then colour, then
    position), with soft membership in place of yes and no.

    **Differs:** Flow-GRPO's count credit may go below 0, and its reward ignores `exclude`; here
    each credit stays in [0, 1] and forbidden objects cost.
    """
    credits: list[float] = []
    places: list[tuple[float, float]] = []
    counts: list[float] = []
    shared = shared_classes(record)
    for entry in record["include"]:
        # as many as asked for
        member = match[:, CLASSES.index(entry["class"])].astype(np.float64)
        asked = shared.get(entry["class"], entry["count"])
        total = float(member.sum())
        counts.append(max(0.0, 1 - abs(asked - total) / asked))
        credits.append(counts[-1])
        # of the right colour
        if "color" in entry:
            right = float(member @ tint[:, _COLOR_NAMES.index(entry["color"])])
            if entry["class"] in shared:
                share = max(0.0, 1 - abs(entry["count"] - right) / entry["count"])
            else:
                share = right / max(total, 1e-6)
            credits.append(counts[-1] * share)
        # in relation: 0.5 and more along the axis, -1 is opposite
        if "position" in entry:
            relation, reference = entry["position"]
            pair = _members(entry, shared, match, tint)[:, None]
            pair = pair * _members(record["include"][reference], shared, match, tint)
            pair = pair * (1 - np.eye(len(pair)))
            along = offsets(box, box) @ _AXIS[RELATIONS.index(relation)]
            both = counts[-1] * counts[reference] / max(float(pair.sum()), 1e-6)
            paid = (np.clip((along + 1) / 1.5, 0, 1), np.clip(along / 0.5, 0, 1))
            places.append(
                (both * float((pair * paid[0]).sum()), both * float((pair * paid[1]).sum()))
            )
    # forbidden objects cost
    found = match.sum(0)
    extra = 0.0
    for entry in record.get("exclude", []):
        extra += max(0.0, float(found[CLASSES.index(entry["class"])]) - entry["count"] + 1)
    kept = float(np.exp(-extra / 2))
    lenient = [*credits, *(place[0] for place in places)]
    angle = [*credits, *(place[1] for place in places)]
    return float(np.mean(lenient)) * kept, float(np.mean(angle)) * kept


def _members(
    entry: dict[str, Any], shared: dict[str, int], match: np.ndarray, tint: np.ndarray
) -> np.ndarray:
    """Say how much each object is one of an entry's: -> [K]; by colour too where entries share
    the class."""
    member = match[:, CLASSES.index(entry["class"])].astype(np.float64)
    if entry["class"] in shared:
        member = member * tint[:, _COLOR_NAMES.index(entry["color"])]
    return member


def validate(record: Any, where: str) -> None:
    """Refuse a record that the shapes checker cannot judge (DataError)."""
    # two lists
    include = record.get("include") if isinstance(record, dict) else None
    if not isinstance(include, list) or not include:
        raise DataError(
            f"{where}: expected a GenEval record with a non-empty list `include`; got "
            f"{record!r:.200}."
        )
    if not isinstance(record.get("exclude", []), list):
        raise DataError(
            f"{where}: `exclude` must be a list of entries; got {record['exclude']!r:.200}."
        )
    # of entries
    known = {"class", "count", "color", "position"}
    for index, entry in enumerate(include):
        _validate_entry(entry, f"{where}, include[{index}]", known, index)
    for index, entry in enumerate(record.get("exclude", [])):
        _validate_entry(entry, f"{where}, exclude[{index}]", {"class", "count"}, 0)
    # a class that comes twice is told apart by colours
    for name in shared_classes(record):
        colors = [entry.get("color") for entry in include if entry["class"] == name]
        if None in colors or len(set(colors)) < len(colors):
            raise DataError(
                f"{where}: include entries of one class need a colour each, all different; got "
                f"{colors} for {name!r}."
            )


def _validate_entry(entry: Any, where: str, known: set[str], index: int) -> None:
    # keys, and the class and count that every entry has
    if not isinstance(entry, dict) or set(entry) - known:
        raise DataError(
            f"{where}: expected an object with keys {sorted(known)}; got {entry!r:.200}."
        )
    if entry.get("class") not in CLASSES:
        raise DataError(
            f"{where}: `class` must be one of {list(CLASSES)}; got {entry.get('class')!r}."
        )
    count = entry.get("count")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise DataError(f"{where}: `count` must be a whole number from 1; got {count!r}.")
    # colour and relation, where they are asked for
    if "color" in entry and entry["color"] not in _COLOR_NAMES:
        raise DataError(f"{where}: `color` must be one of {list(COLORS)}; got {entry['color']!r}.")
    position = entry.get("position", (RELATIONS[0], index - 1))
    if not isinstance(position, list | tuple) or len(position) != 2 or position[0] not in RELATIONS:
        raise DataError(
            f"{where}: `position` must be [one of {list(RELATIONS)}, entry index]; got "
            f"{position!r}."
        )
    if "position" in entry and (not isinstance(position[1], int) or not 0 <= position[1] < index):
        raise DataError(
            f"{where}: `position` must refer to an earlier include entry; got index "
            f"{position[1]!r}."
        )


def word_order(images: Tensor, records: Sequence[Record], task: str) -> Order:
    """Count a task's images [N, 3, 64, 64] with exactly the two right shapes by their order."""
    # objects of the task's images
    rows = [i for i, record in enumerate(records) if record["tag"] == task]
    found, counts = detect(images[rows]), [0, 0, 0]
    for i, row in enumerate(rows):
        # the two right shapes
        entries = records[row]["include"]
        wanted = [CLASSES.index(entry["class"]) for entry in entries]
        shapes = found.shape[i, :2].tolist()
        if found.number[i] != 2 or sorted(shapes) != sorted(wanted):
            continue
        # their order
        slots = [shapes.index(shape) for shape in wanted]
        read = _order_of_places if task == "position" else _order_of_colors
        counts[read(found, i, slots, entries)] += 1
    return Order(*counts)


def _order_of_places(found: Detections, i: int, slots: list[int], entries: list[Record]) -> int:
    """Say of image i whether its objects stand as asked (0), the other way (1) or neither (2)."""
    first, second = slots
    right, down = _AXES[RELATIONS.index(entries[1]["position"][0])]
    offset = offsets(found.box[i, [second]], found.box[i, [first]])[0, 0]
    along = float(offset[0] * right + offset[1] * down)
    if along > 0.5:
        return 0
    return 1 if along < -0.5 else 2


def _order_of_colors(found: Detections, i: int, slots: list[int], entries: list[Record]) -> int:
    """Say of image i whether its colours are as asked (0), swapped (1) or neither (2)."""
    seen = found.color[i, slots].tolist()
    asked = [list(COLORS).index(entry["color"]) for entry in entries]
    if seen == asked:
        return 0
    return 1 if seen == asked[::-1] else 2
