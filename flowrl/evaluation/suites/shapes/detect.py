"""Read coloured shapes off a 64x64 image from its pixels alone: background, blobs, shape by
template, colour by mean.

What the reader cannot name is reported as an object of unknown shape or colour (-1), never dropped,
so that nothing unreadable passes for a clean image.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from scipy import ndimage
from torch import Tensor

from flowrl.evaluation.suites.shapes import flaws
from flowrl.evaluation.suites.shapes.chunks import in_chunks
from flowrl.evaluation.suites.shapes.pixels import quantised
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
    bad = flaws.mixed(pixels, labels, len(blobs.image)) | (cornered & (readings.shape == 0))
    flawed = flaws.traced(pixels, background, contrast > STRONG)
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
            cornered[rows] = flaws.cornered(mask)
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
