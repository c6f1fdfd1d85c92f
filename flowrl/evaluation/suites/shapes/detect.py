"""Read coloured shapes off a 64x64 image from its pixels alone: background, blobs, shape by
template, colour by mean.

What the reader cannot name is reported as an object of unknown shape or colour (-1), never dropped,
so that nothing unreadable passes for a clean image. Flaws that templates and mean colours do not
see are looked for apart: corners on a circle, paint on a shape, traces on the background. Each
limit of theirs lies between what 600 true scenes show, drawn and through the VAE of the latent
base model in `assets/`, and what the probes in `tests/evaluation/test_checker.py` do: each may be
a tenth higher before the first probe passes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from flowrl.core.errors import DataError
from flowrl.evaluation.suites.geneval.objects import DetectedObject, Objects
from flowrl.evaluation.suites.shapes.scene import CLASSES, COLORS, SIZE, coverage

SLOTS = 16
"""Objects kept per image, the largest first; the area of further ones counts as clutter."""

# contrast (largest channel difference from the background) from which a pixel is not background
WEAK = 0.12
# about half of every palette colour's contrast (0.7 to 0.88): the outline of an anti-aliased shape
STRONG = 0.45
MIN_AREA = 12  # pixels from which a blob is an object
MIN_READABLE = 60  # pixels below which shapes look alike; rendered shapes have 118 to 531
MIN_IOU = 0.88  # overlap with the ideal shape from which a blob counts as that shape ...
# ... if it also leads the next shape by this much (a perfect square leads the circle by 0.16)
MIN_MARGIN = 0.08
# RGB distance to a palette colour up to which a mean counts as it; the closest two are 0.48 apart
MAX_COLOR = 0.20
# RGB distance from its blob's mean from which an inner pixel is of another colour
STRAY_COLOR = 0.26
MAX_STRAY = 0.05  # share of such pixels up to which a blob has one colour

_PALETTE = np.array(list(COLORS.values()), np.float32) / 255.0
# Of each class, in units of the radius: area, how far the centroid lies below the centre, reach of
# the box.
_AREA = (np.pi, 1.76**2, 1.85, 0.68 * (4 - 0.68))
_DROP = (0.0, 0.0, 0.85 - 1.85 / 3, 0.0)
_REACH = np.array(
    [(1, 1, 1, 1), (0.88, 0.88, 0.88, 0.88), (1, 1, 1, 0.85), (1, 1, 1, 1)], np.float32
)

# largest angular harmonic of an outline, of the 3rd to the 8th: circles have up to 0.074, regular
# hexagons 0.22 to 0.27, pentagons 0.33 to 0.34, at radii of 9 to 13 pixels
MAX_HARMONIC = 0.14
HARMONICS = range(3, 9)
# of the pixels inside a shape: root mean square RGB distance from their mean (true: up to 0.071),
MAX_SPREAD = 0.11
# and how many of them are further away than STRAY (true: up to 2)
STRAY, MAX_STRAYS = 0.2, 4
# of the background, 3 pixels off all shapes: root mean square of the largest channel's difference
# (true: up to 0.0134) and the largest mean of 5 x 5 pixels in a channel (true: up to 0.0433)
MAX_ROUGHNESS = 0.03
MAX_TRACE = 0.07
# pixels off the background in specks too small to be objects (true: none)
MAX_SPECKS = 3

CHUNK = 128
"""Images at a time: few enough for the processor's cache."""

_COLORS = tuple(COLORS)


class Detections(NamedTuple):
    """What is on N images, sorted by confidence; slots past ``number`` are unused. Lengths in
    pixels, y down."""

    number: np.ndarray  # [N] int64, 0..16
    shape: np.ndarray  # [N, 16] int64, index into CLASSES; -1 = unreadable or unused
    color: np.ndarray  # [N, 16] int64, index into COLORS; -1 = unreadable or unused
    # [N, 16, 4] float32, (left, top, right, bottom), of the fitted shape where it is readable
    box: np.ndarray
    center: np.ndarray  # [N, 16, 2] float32, (x, y) of the box
    area: np.ndarray  # [N, 16] float32
    confidence: np.ndarray  # [N, 16] float32 in [0, 1], best shape match
    match: np.ndarray  # [N, 16, 4] float32, soft membership in each class: 1 where `shape` is it
    tint: np.ndarray  # [N, 16, 6] float32, soft membership in each colour: 1 where `color` is it
    purity: np.ndarray  # [N, 16] float32, 1 = of one colour, whichever, 0 = of several
    background: np.ndarray  # [N, 3] float32
    plain: np.ndarray  # [N] float32, 1 = background light grey as rendered, 0 = dark or coloured
    clutter: np.ndarray  # [N] float32, pixels that are neither background nor part of an object
    # [N] bool, corners on a circle, paint on a shape or traces on the background; None = not looked
    flawed: np.ndarray | None


def quantised(images: Tensor) -> np.ndarray:
    """Check images [N, 3, 64, 64] in [0, 1] and round them to 8 bits -> float32. Raises
    DataError."""
    # a batch of floats of the right size
    wanted = (3, SIZE, SIZE)
    if not isinstance(images, Tensor) or images.ndim != 4 or tuple(images.shape[1:]) != wanted:
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise DataError(
            f"the shapes checker reads a tensor of images [N, 3, {SIZE}, {SIZE}]; got {got}. "
            f"Sample at {SIZE}x{SIZE} pixels."
        )
    if not images.is_floating_point():
        raise DataError(
            f"the shapes checker reads float images in [0, 1]; got {images.dtype}. Divide bytes by "
            "255."
        )
    # finite
    values = images.detach().to("cpu", torch.float32)
    finite = torch.isfinite(values).flatten(1).all(1)
    if not bool(finite.all()):
        bad = (~finite).nonzero().flatten().tolist()
        raise DataError(
            f"images must be finite; got NaN or infinity in image(s) {bad[:8]}. Check the decoder."
        )
    # in [0, 1], but for rounding errors of up to 1e-3
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if low < -1e-3 or high > 1 + 1e-3:
        raise DataError(
            f"images must lie in [0, 1]; got [{low:.4g}, {high:.4g}]. Map [-1, 1] by (x + 1) / 2."
        )
    return (torch.round(values.clamp(0, 1) * 255) / 255).numpy()


def in_chunks(look: Callable[[np.ndarray], tuple[Any, ...]], pixels: np.ndarray) -> list[Any]:
    """Call `look` on a few of the images [N, ...] at a time, in torch's number of threads -> its
    columns, each joined along its first axis; None where they are None.

    Right only for what says of one image nothing that depends on the others.
    """
    parts = [pixels[i : i + CHUNK] for i in range(0, max(len(pixels), 1), CHUNK)]
    threads = min(torch.get_num_threads(), len(parts))
    if threads == 1:
        found = [look(part) for part in parts]
    else:
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(look, parts))
    columns = zip(*found, strict=True)
    return [None if rows[0] is None else np.concatenate(rows) for rows in columns]


class _Blobs(NamedTuple):
    image: np.ndarray  # [M] int64
    faint: np.ndarray  # [M] bool, never reaches the outline contrast
    area: np.ndarray  # [M] float32
    box: np.ndarray  # [M, 4] float32, pixel bounds
    edge: np.ndarray  # [M] float32, pixels on the image's edge


class _Readings(NamedTuple):
    match: np.ndarray  # [M, 4] float32
    tint: np.ndarray  # [M, 6] float32
    purity: np.ndarray  # [M] float32
    shape: np.ndarray  # [M] int64
    color: np.ndarray  # [M] int64
    box: np.ndarray  # [M, 4] float32
    confidence: np.ndarray  # [M] float32


def detect(images: Tensor, *, find_flaws: bool = False) -> Detections:
    """Find the objects of each image: [N, 3, 64, 64] in [0, 1] -> Detections; DataError for
    anything else.

    Images are rounded to 8 bits first, so that a tensor and its PNG are read alike. `find_flaws`
    also looks for what neither templates nor mean colours see, which costs a quarter more.
    """
    return Detections(*in_chunks(partial(_detect, find_flaws=find_flaws), quantised(images)))


def _detect(pixels: np.ndarray, *, find_flaws: bool) -> Detections:
    """Find the objects of a few images [N, 3, 64, 64]."""
    ring = np.ones((SIZE, SIZE), bool)
    ring[2:-2, 2:-2] = False  # rendered shapes keep two pixels from the edge
    background = np.median(pixels[:, :, ring], axis=-1)
    contrast = np.abs(pixels - background[:, :, None, None]).max(1)
    labels, clutter, blobs = _find_blobs(contrast)
    iou, fitted, cornered = _match_shapes(contrast, labels, blobs, find_flaws)
    readings = _read(blobs, iou, fitted, *_match_colors(pixels, labels))
    if not find_flaws:
        return _pack(blobs, readings, background, clutter, None)
    bad = mixed(pixels, labels, len(blobs.image)) | (cornered & (readings.shape == 0))
    flawed = traced(pixels, background, contrast > STRONG)
    flawed[blobs.image[bad & (readings.shape >= 0)]] = True
    return _pack(blobs, readings, background, clutter, flawed)


def _find_blobs(contrast: np.ndarray) -> tuple[np.ndarray, np.ndarray, _Blobs]:
    """Label strong blobs, and faint ones away from them: -> labels [N,64,64] (1..M, 0 none),
    clutter [N], blobs."""
    # strong blobs, then faint ones; the soft edge of a shape is no object of its own
    strong = _label(contrast > STRONG, np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]]))
    blur = ndimage.maximum_filter(strong, (1, 5, 5)) > 0
    rest = (contrast > WEAK) & ~blur
    faint = _label(rest, np.ones((3, 3), int))
    number = int(strong.max(initial=0))
    labels = np.where(faint > 0, faint + number, strong)
    # the largest ones of each image keep a number, in the order of image and area
    found = ndimage.find_objects(labels) if labels.size else []
    image = np.array([planes.start for planes, _, _ in found], np.int64)
    area = np.bincount(labels[labels > 0], minlength=len(found) + 1)[1:].astype(np.float32)
    order = np.lexsort((-area, image))
    chosen = order[_slot(image[order]) < SLOTS]
    table = np.zeros(len(found) + 1, labels.dtype)
    table[chosen + 1] = np.arange(1, len(chosen) + 1)
    labels = table[labels]
    # pixels on the image's edge, and bounds
    rim = labels.copy()
    rim[:, 1:-1, 1:-1] = 0
    edge = np.bincount(rim[rim > 0], minlength=len(chosen) + 1)[1:].astype(np.float32)
    spans = [found[i][1:] for i in chosen]
    bounds = [(across.start, down.start, across.stop, down.stop) for down, across in spans]
    box = np.array(bounds, np.float32).reshape(-1, 4)
    # all other pixels off the background are clutter
    specks = (rest | (contrast > STRONG)) & (labels == 0)
    blobs = _Blobs(image[chosen], chosen >= number, area[chosen], box, edge)
    return labels, specks.sum((1, 2)).astype(np.float32), blobs


def _label(mask: np.ndarray, link: np.ndarray) -> np.ndarray:
    """Label the connected blobs of at least MIN_AREA pixels in a stack of images; images never
    connect."""
    structure = np.zeros((3, 3, 3), int)
    structure[1] = link
    labels, number = ndimage.label(mask, structure)
    big = np.bincount(labels.ravel(), minlength=number + 1) >= MIN_AREA
    big[0] = False
    return (np.cumsum(big) * big).astype(np.int32)[labels]


def _slot(image: np.ndarray) -> np.ndarray:
    """Number the members of each run of equal values in a sorted array from 0."""
    return np.arange(len(image)) - np.searchsorted(image, image)


def _match_shapes(
    contrast: np.ndarray, labels: np.ndarray, blobs: _Blobs, find_flaws: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compare each blob with the ideal shapes of its area and centroid: -> IoU [M, 4], fitted boxes
    [M, 4, 4], and whether it has corners where a circle has none [M], if `find_flaws`."""
    # each blob with its soft edge
    iou = np.zeros((len(blobs.image), 4), np.float32)
    fitted = np.zeros((len(blobs.image), 4, 4), np.float32)
    cornered = np.zeros(len(blobs.image), bool)
    owner = np.where(labels > 0, labels, ndimage.maximum_filter(labels, (1, 3, 3)))
    extent = (blobs.box[:, 2:] - blobs.box[:, :2]).max(1)
    for window, fits in ((32, extent <= 28), (SIZE, extent > 28)):
        rows = np.flatnonzero(fits & ~blobs.faint)
        if not len(rows):
            continue
        # a window around each blob
        middle = (blobs.box[rows, :2] + blobs.box[rows, 2:]) / 2
        origin = np.clip(middle - window / 2, 0, SIZE - window).astype(np.int64)
        span = np.arange(window)
        line, column = origin[:, 1, None, None] + span[:, None], origin[:, :1, None] + span
        where = blobs.image[rows, None, None], line, column
        # its own contrast in there
        own = owner[where] == rows[:, None, None] + 1
        mask = _coverage(np.where(own, contrast[where], 0.0))
        iou[rows], boxes = _fit(mask)
        fitted[rows] = boxes + np.tile(origin, 2)[:, None]
        if find_flaws:
            cornered[rows] = has_corners(mask)
    return iou, fitted, cornered


def _coverage(value: np.ndarray) -> np.ndarray:
    """Say how far blobs of contrasts [M, W, W] cover each pixel -> [M, W, W] in [0, 1]."""
    # anti-aliasing mixes linearly: contrast over the contrast of the blob's inside is coverage,
    # whatever the colour
    body = np.where(value > STRONG, value, 0.0)
    full = (body**2).sum((1, 2)) / body.sum((1, 2))
    return _sharpened(value / full[:, None, None])


def _fit(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit the four classes to masks [M, W, W]: -> IoU [M, 4], boxes [M, 4, 4]."""
    area, grid = mask.sum((1, 2)), np.arange(mask.shape[-1]) + 0.5
    moments = [(mask.sum(1) * grid).sum(-1), (mask.sum(2) * grid).sum(-1)]
    center = np.stack(moments, -1) / area[:, None]
    # the ideal shape of each class at that place
    iou, boxes = np.zeros((len(mask), 4), np.float32), np.zeros((len(mask), 4, 4), np.float32)
    for kind in range(len(CLASSES)):
        radius = np.sqrt(area / _AREA[kind])
        at = center - np.stack([np.zeros_like(radius), _DROP[kind] * radius], -1)
        ideal = _sharpened(coverage(np.full(len(mask), kind), at, radius, len(grid)))
        overlap = np.minimum(mask, ideal).sum((1, 2))
        iou[:, kind] = overlap / (area + ideal.sum((1, 2)) - overlap)
        boxes[:, kind] = np.tile(at, 2) + _REACH[kind] * radius[:, None] * np.array([-1, -1, 1, 1])
    return iou, boxes


def _sharpened(mask: np.ndarray) -> np.ndarray:
    """Halve the width of a soft edge, so that neither blur nor noise off the outline counts as
    another shape."""
    return np.clip(2 * mask - 0.5, 0.0, 1.0).astype(np.float32)


def _match_colors(pixels: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Average the inside of each blob: -> RGB distance to each palette colour [M, 6], share of
    stray pixels [M]."""
    inside = labels * (ndimage.minimum_filter(labels, (1, 3, 3)) == labels)
    number = int(labels.max(initial=0)) + 1
    # too thin to have an inside: take all of it
    hollow = np.bincount(inside.ravel(), minlength=number) == 0
    image, row, column = np.nonzero(np.where(hollow[labels], labels, inside))
    ids, values = labels[image, row, column], pixels[image, :, row, column]
    size = np.maximum(np.bincount(ids, minlength=number), 1)
    mean = np.stack([np.bincount(ids, values[:, c], number) / size for c in range(3)], -1)
    odd = np.linalg.norm(values - mean[ids], axis=-1) > STRAY_COLOR
    stray = np.bincount(ids, odd, number) / size
    distance = np.linalg.norm(mean[:, None] - _PALETTE, axis=-1)
    return distance[1:].astype(np.float32), stray[1:].astype(np.float32)


def _read(
    blobs: _Blobs, iou: np.ndarray, fitted: np.ndarray, distance: np.ndarray, stray: np.ndarray
) -> _Readings:
    """Turn measurements into soft memberships, 1 exactly where a blob is readable, and names."""
    lead = iou - np.where(np.eye(4, dtype=bool), -1.0, iou[:, None, :]).max(-1)
    match = np.clip((iou - 0.6) / (MIN_IOU - 0.6), 0, 1)
    match = match * np.clip(1 + (lead - MIN_MARGIN) / 0.2, 0, 1)
    # a shape on the edge is cut off
    whole = 1 / (1 + blobs.edge / 3) * np.clip(blobs.area / MIN_READABLE, 0, 1)
    match = match * whole[:, None]
    purity = np.clip(1 + (MAX_STRAY - stray) / 0.5, 0, 1)
    tint = np.clip((0.6 - distance) / (0.6 - MAX_COLOR), 0, 1) * purity[:, None]
    rows, best, nearest = np.arange(len(iou)), iou.argmax(1), distance.argmin(1)
    shape = np.where(match[rows, best] >= 1, best, -1)
    color = np.where(tint[rows, nearest] >= 1, nearest, -1)
    box = np.where((shape >= 0)[:, None], fitted[rows, best], blobs.box)
    return _Readings(match, tint, purity, shape, color, box, match.max(1) * iou.max(1))


def _pack(
    blobs: _Blobs,
    readings: _Readings,
    background: np.ndarray,
    clutter: np.ndarray,
    flawed: np.ndarray | None,
) -> Detections:
    order = np.lexsort((-blobs.area, -readings.confidence, blobs.image))
    where = blobs.image[order], _slot(blobs.image[order])

    def place(values: np.ndarray, fill: int = 0) -> np.ndarray:
        out = np.full((len(background), SLOTS, *values.shape[1:]), fill, values.dtype)
        out[where] = values[order]
        return out

    # 1 from 0.8; rendered ones have 0.88 to 1
    light = np.clip((background.min(1) - 0.5) / 0.3, 0, 1)
    grey = np.clip((0.35 - np.ptp(background, axis=1)) / 0.25, 0, 1)
    return Detections(
        number=np.bincount(blobs.image, minlength=len(background)),
        shape=place(readings.shape, -1),
        color=place(readings.color, -1),
        box=place(readings.box),
        center=place((readings.box[:, :2] + readings.box[:, 2:]) / 2),
        area=place(blobs.area),
        confidence=place(readings.confidence),
        match=place(readings.match),
        tint=place(readings.tint),
        purity=place(readings.purity),
        background=background,
        plain=light * grey,
        clutter=clutter,
        flawed=flawed,
    )


def mixed(pixels: np.ndarray, labels: np.ndarray, count: int) -> np.ndarray:
    """Say which of `count` blobs are of more than one colour inside: images [N, 3, H, W], labels
    [N, H, W] (1..count) -> [count] bool."""
    inside = labels * (ndimage.minimum_filter(labels, (1, 3, 3)) == labels)
    image, row, column = np.nonzero(inside)
    ids, values = inside[image, row, column], pixels[image, :, row, column]
    size = np.maximum(np.bincount(ids, minlength=count + 1), 1)
    mean = [np.bincount(ids, values[:, c], count + 1) / size for c in range(3)]
    away = np.linalg.norm(values - np.stack(mean, -1)[ids], axis=-1)
    spread = np.sqrt(np.bincount(ids, away**2, count + 1) / size)
    strays = np.bincount(ids, away > STRAY, count + 1)
    return ((spread > MAX_SPREAD) | (strays > MAX_STRAYS))[1:]


def has_corners(mask: np.ndarray) -> np.ndarray:
    """Say which soft masks [M, W, W] have corners where a circle has none -> [M] bool.

    The n-th harmonic is ``(n + 2) / 2 |sum mask z^n| / area`` with z the place from the centroid in
    units of the circle's radius: 0 for a disk, and ``(n + 2) eps / 2`` for an outline ``1 + eps
    cos(n angle)``.
    """
    grid = np.arange(mask.shape[-1]) + 0.5
    area = mask.sum((1, 2))
    x = (mask.sum(1) @ grid) / area
    y = (mask.sum(2) @ grid) / area
    radius = np.sqrt(area / np.pi)[:, None, None]
    z = (grid[None, None, :] - x[:, None, None]) + 1j * (grid[None, :, None] - y[:, None, None])
    z = z / radius
    found = [(n + 2) / 2 * np.abs((mask * z**n).sum((1, 2))) / area for n in HARMONICS]
    return np.max(found, axis=0) > MAX_HARMONIC


def traced(pixels: np.ndarray, background: np.ndarray, strong: np.ndarray) -> np.ndarray:
    """Say which images [N, 3, H, W] have traces on the background: faint shapes, stripes, texture
    -> [N] bool.

    background [N, 3]; strong [N, H, W] bool: pixels of shapes.
    """
    free = ~(ndimage.maximum_filter(strong.astype(np.uint8), (1, 7, 7)) > 0)
    away = (pixels - background[:, :, None, None]) * free[:, None]
    many = np.maximum(free.sum((1, 2)), 1)
    rough = np.sqrt((np.abs(away).max(1) ** 2).sum((1, 2)) / many)
    # means over what is free of 5 x 5 pixels, where that is most of them
    share = ndimage.uniform_filter(free.astype(np.float32), (0, 5, 5))[:, None]
    means = ndimage.uniform_filter(away, (0, 0, 5, 5)) / np.maximum(share, 0.5)
    trace = (np.abs(means) * (share > 0.5)).max((1, 2, 3))
    return (rough > MAX_ROUGHNESS) | (trace > MAX_TRACE)


def shapes_objects(images: Tensor) -> list[Objects]:
    """Find the readable shapes of images [N, 3, 64, 64] in [0, 1], each with its colour."""
    return objects_of(detect(images))


def objects_of(found: Detections) -> list[Objects]:
    """Return the detections of N images; what has no readable shape is left out."""
    out: list[Objects] = []
    for i, number in enumerate(found.number.tolist()):
        mine: Objects = {}
        for k in range(number):
            shape, color = int(found.shape[i, k]), int(found.color[i, k])
            if shape < 0:
                continue
            left, top, right, bottom = found.box[i, k].tolist()
            named = _COLORS[color] if color >= 0 else ""
            one = DetectedObject(
                (left, top, right, bottom), float(found.confidence[i, k]), None, named
            )
            mine.setdefault(CLASSES[shape], []).append(one)
        out.append(mine)
    return out
