"""Read what a client sends to be scored: JSON with PNG images or frames, checked before anything
large is unpacked."""

from __future__ import annotations

import base64
import io
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl.core.errors import DataError, FlowRLError
from flowrl.core.files import parse_json
from flowrl.core.pixels import png_bytes
from flowrl.core.types import Source

from .request_queue import ScoreRequest

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MOST_VALUES = 2**20  # of a request's JSON, beside what is in its texts: 0.1 GB
MOST_SOURCES = 16  # of one image, on average
PIXEL, START_PIXEL = 3, 12  # bytes of a decoded pixel: of an image, of a source, which is floats
KEYS = ("images", "prompts", "frames", "group", "meta", "sigma", "rewards", "sources", "source")


class RequestRefused(FlowRLError):
    """A request that is not served: the HTTP status, what kind of mistake it is, and the
    message."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class RequestLimits(NamedTuple):
    """How much one request may hold."""

    bytes: int = 256 * 2**20  # of the body
    images: int = 256  # frames of videos count each
    pixels: int = 2**24  # of one image: 4096 x 4096
    all_pixels: int = 2**26  # of all together: 64 images of 1024 x 1024, 0.8 GB as floats
    held: int = 3 * 2**30  # bytes of decoded pixels, of all requests in hand together


Take = Callable[[int], None]
"""Takes so many bytes before pixels are decoded into them. Raises RequestRefused."""


class Decoded:
    """The bytes of decoded pixels that all requests in hand hold together. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self._lock = threading.Lock()

    @contextmanager
    def share(self) -> Iterator[Take]:
        """Give a request what it takes memory with; all of it comes back at the end, after which
        a thread that still reads the request gets none."""
        mine, over = 0, False

        def take(size: int) -> None:
            nonlocal mine
            with self._lock:
                self._check(mine + size, size, over)
                self.held += size
                mine += size

        try:
            yield take
        finally:
            with self._lock:
                over = True
                self.held -= mine

    def _check(self, whole: int, more: int, over: bool) -> None:
        """Raise RequestRefused where there is no room for `more` bytes of a request that has
        `whole` of them then."""
        if whole > self.most:
            raise RequestRefused(
                413,
                "size",
                f"expected a request whose images take at most {_mib(self.most)} when they are "
                f"decoded, got {_mib(whole)}; send fewer at a time, or raise --max-held-mb",
            )
        if over or self.held + more > self.most:
            raise RequestRefused(
                503,
                "busy",
                f"the decoded images of all requests in hand have {_mib(self.most)} "
                f"(--max-held-mb), of which {_mib(self.held)} are taken, and these need "
                f"{_mib(more)}; try again soon",
            )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def no_limit(size: int) -> None:
    """Take memory of which nobody keeps count."""


def parse(
    body: bytes | bytearray,
    known: Sequence[str],
    limits: RequestLimits,
    videos: Collection[str] = (),
    take: Take = no_limit,
) -> ScoreRequest:
    """Turn the body of a request into images, or videos, and words; `take` is called before pixels
    are decoded. Raises RequestRefused.

    Keys: `images` (base64 of 8-bit RGB PNG files of one size) and `prompts`; optionally `frames`
    (of each video: so many of `images`, one after the other, are a video, and all other lists have
    an entry per video), `group` (whole numbers, by default every image its own), `meta` (objects,
    the prompts' records), `sigma` (numbers, by default 0), `rewards` (names, by default all `known`
    ones that judge such), and what edits start from: `sources` (PNG files as in `images`, of any
    sizes) and `source` (for each image, a list of places in `sources`).

    videos: the names in `known` that judge videos; the others judge images.
    """
    # one object with known keys
    data = _json(body)
    if not isinstance(data, dict) or not {"images", "prompts"} <= data.keys() <= set(KEYS):
        got = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise RequestRefused(
            400,
            "request",
            f"expected an object with images, prompts and optionally {KEYS[2:]}, got {got}",
        )
    # images, not too many
    images = _list(data["images"], "images", "texts", str)
    frames = _frames(data, len(images))
    count = len(images) // (frames or 1)
    if not 1 <= len(images) <= limits.images:
        status, kind = (413, "size") if images else (400, "request")
        raise RequestRefused(status, kind, _too_many(len(images), frames, limits))
    names = _names(data, known, videos, frames)
    # what goes with each image
    group = _list(data.get("group", list(range(count))), "group", "whole numbers", int, count)
    if any(abs(number) >= 2**63 for number in group):
        raise RequestRefused(400, "request", "group: expected whole numbers of at most 63 bits")
    sigma = _list(data.get("sigma", [0.0] * count), "sigma", "numbers", (int, float), count)
    prompts = _list(data["prompts"], "prompts", "texts", str, count)
    meta = _list(data.get("meta", [{}] * count), "meta", "objects", dict, count)
    pixels = _images(images, limits, partial(_taken, take, PIXEL))
    return ScoreRequest(
        pixels=pixels.unflatten(0, (count, frames)) if frames else pixels,
        prompts=prompts,
        group=torch.tensor(group, dtype=torch.int64),
        meta=meta,
        sigma=_finite(sigma),
        names=tuple(names),
        source=_sources(data, count, limits, _area(pixels), partial(_taken, take, START_PIXEL)),
    )


def _names(
    data: dict[str, Any], known: Sequence[str], videos: Collection[str], frames: int
) -> list[str]:
    """Return the rewards that are asked: hosted ones, for what is sent."""
    fitting = [name for name in known if (name in videos) == bool(frames)]
    names = _list(data.get("rewards", fitting or list(known)), "rewards", "names", str)
    if not names or not set(names) <= set(known) or len(set(names)) < len(names):
        raise RequestRefused(
            400, "request", f"rewards: expected some of {', '.join(known)}, each once, got {names}"
        )
    for name in names:
        if name not in fitting:
            raise RequestRefused(400, "request", _wrong_kind(name, frames))
    return names


def _frames(data: dict[str, Any], images: int) -> int:
    """Return the frames of each video; 0: the request holds images."""
    frames = data.get("frames", 0)
    if "frames" not in data:
        return 0
    if type(frames) is not int or frames < 1 or images % frames:
        raise RequestRefused(
            400,
            "request",
            "frames: expected a whole number, the frames of each video, that divides the "
            f"{images} images, got {str(frames)[:40]}",
        )
    return frames


def _too_many(images: int, frames: int, limits: RequestLimits) -> str:
    what = f" ({images // frames} videos of {frames} frames)" if frames else ""
    most = f"1 to {limits.images} images" + (" or frames" if frames else "")
    return f"images: expected {most} in one request, got {images}{what}; --max-images raises it"


def _wrong_kind(name: str, frames: int) -> str:
    if frames:
        return (
            f"rewards: {name} judges images, got videos of {frames} frames; give it `frames` in "
            "the server's config, or judge frame by frame: `frames` at the client, no `videos`"
        )
    return f"rewards: {name} judges videos, got images; say how many `frames` each video has"


def parse_records(
    body: bytes | bytearray, known: Sequence[str]
) -> tuple[str, list[dict[str, Any]], list[str]]:
    """Read a request to check records: `reward`, `records` and their `places`, for messages. Raises
    RequestRefused."""
    data = _json(body)
    if not isinstance(data, dict) or data.keys() != {"reward", "records", "places"}:
        raise RequestRefused(400, "request", "expected an object with reward, records and places")
    if data["reward"] not in known:
        raise RequestRefused(400, "request", f"reward: expected one of {', '.join(known)}")
    records = _list(data["records"], "records", "objects", dict)
    return data["reward"], records, _list(data["places"], "places", "texts", str, len(records))


def _area(pixels: Tensor) -> int:
    return pixels.numel() // 3


def _taken(take: Take, each: int, pixels: int) -> None:
    take(each * pixels)


def _sources(
    data: dict[str, Any], count: int, limits: RequestLimits, taken: int, take: Take
) -> list[Source]:
    """Decode what images start from -> [count], or [] where there is nothing. With the `taken`
    pixels of the images the files have one limit; as often as they are named they have it again,
    since a reward may want each image's own."""
    # sources are sent once each; every image names those that it starts from
    if "source" not in data and "sources" not in data:
        return []
    texts = _list(data.get("sources"), "sources", "texts", str)
    places = _list(data.get("source"), "source", "lists of places in sources", list, count)
    known = range(len(texts))
    named = 0
    for row in places:
        named += len(row)
        if not all(type(place) is int and place in known for place in row):
            raise RequestRefused(
                400, "request", f"source: expected places in sources, 0 to {len(texts) - 1}"
            )
    most = limits.images
    if len(texts) > most or named > most * MOST_SOURCES:
        raise RequestRefused(
            413,
            "size",
            f"source: expected at most {most} files, named {most * MOST_SOURCES} times in all, got "
            f"{len(texts)}, named {named} times",
        )
    # one at a time, since they may differ in size; together they have one limit
    files, left = [], limits.all_pixels - taken
    for text in texts:
        one = _images([text], limits._replace(all_pixels=left), take)
        left -= _area(one)
        files.append(one)
    # as often as they are named: each time it is a picture in somebody's memory
    uses = sum(_area(files[place]) for row in places for place in row)
    if uses > limits.all_pixels:
        raise RequestRefused(
            413,
            "size",
            f"source: expected sources of at most {limits.all_pixels} pixels, counted as often as "
            f"they are named, got {uses}; send fewer images at a time",
        )
    floats = [file[0].float() / 255 for file in files]
    # images that start from the same sources share one tuple, and its memory
    starts: dict[tuple[int, ...], Source] = {}
    for row in places:
        starts.setdefault(tuple(row), tuple(floats[place] for place in row))
    return [starts[tuple(row)] for row in places]


def _json(body: bytes | bytearray) -> Any:
    # an empty list of three bytes takes 64 of memory; in images there is none of these letters
    values = sum(map(body.count, b",[{"))
    if values > MOST_VALUES:
        raise RequestRefused(
            413,
            "size",
            f"the body: expected at most {MOST_VALUES} commas and brackets, got {values}; send "
            "fewer images or records at a time",
        )
    try:
        return parse_json(body, "the body", error=DataError, values=False)
    except DataError as error:
        raise RequestRefused(400, "request", f"the body is not valid JSON: {error}") from error


def _list(
    value: Any, key: str, what: str, kind: type | tuple[type, ...], count: int | None = None
) -> list[Any]:
    wrong = not isinstance(value, list) or (count is not None and len(value) != count)
    if wrong or not all(isinstance(item, kind) and not isinstance(item, bool) for item in value):
        each = f"{what}" if count is None else f"{count} {what}, one per image"
        raise RequestRefused(400, "request", f"{key}: expected a list of {each}")
    return list(value)


def _finite(values: list[int | float]) -> Tensor:
    try:
        sigma = torch.tensor([float(value) for value in values], dtype=torch.float32)
    except (OverflowError, RuntimeError):  # beyond what a double, or what float32 holds
        sigma = torch.tensor([torch.inf])
    if not bool(sigma.isfinite().all()):
        raise RequestRefused(400, "request", "sigma: a number is too large")
    return sigma


def _images(texts: list[str], limits: RequestLimits, take: Take) -> Tensor:
    """Decode base64 PNG files of one size -> [L, 3, H, W] uint8, after a look at the sizes that
    they claim; `take` is asked for all their pixels."""
    # out of base64
    files: list[bytes] = []
    for place, text in enumerate(texts):
        try:
            files.append(base64.b64decode(text, validate=True))
        except ValueError as error:
            raise RequestRefused(400, "request", f"images[{place}]: not base64: {error}") from error
    # one size, not too large
    sizes = [_claimed(file, f"images[{place}]") for place, file in enumerate(files)]
    if len(set(sizes)) > 1:
        raise RequestRefused(
            400,
            "request",
            f"images: expected images of one size in a request, got {sorted(set(sizes))}",
        )
    one = sizes[0][0] * sizes[0][1]
    if one > limits.pixels or one * len(files) > limits.all_pixels:
        raise RequestRefused(
            413,
            "size",
            f"images: expected at most {limits.pixels} pixels in an image and {limits.all_pixels} "
            f"in a request, got {len(files)} of {sizes[0][0]} x {sizes[0][1]}; send fewer at a "
            "time",
        )
    # decoded only now
    take(one * len(files))
    arrays = [_decode(file, sizes[0], f"images[{place}]") for place, file in enumerate(files)]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()


def _claimed(file: bytes, where: str) -> tuple[int, int]:
    """Return (width, height) as a PNG's header has it, without unpacking anything."""
    if len(file) < 33 or file[:8] != SIGNATURE or file[12:16] != b"IHDR":
        raise RequestRefused(400, "request", f"{where}: expected a PNG file")
    width, height, depth, color, interlaced = struct.unpack(">IIBB2xB", file[16:29])
    if (depth, color, interlaced) != (8, 2, 0) or not width or not height:
        raise RequestRefused(
            400,
            "request",
            f"{where}: expected 8-bit RGB (bit depth 8, colour type 2, not interlaced), got bit "
            f"depth {depth}, colour type {color}, interlace {interlaced}, {width} x {height}; "
            "convert it before it is sent",
        )
    return width, height


def _decode(file: bytes, size: tuple[int, int], where: str) -> np.ndarray:
    try:
        _check_rows(file, *size)
        with Image.open(io.BytesIO(file), formats=["PNG"]) as image:
            if image.size != size or image.mode != "RGB":  # a second header further on
                raise ValueError(
                    f"the file is {image.mode} of {image.size}, its header says RGB of {size}"
                )
            return np.asarray(image)
    except Exception as error:  # a decoder may raise anything on bytes that were made to break it
        raise RequestRefused(400, "request", f"{where}: a broken PNG file: {error}") from error


def _check_rows(file: bytes, width: int, height: int) -> None:
    """Raise ValueError unless the file holds every row: Pillow paints those that are missing
    black."""
    need = height * (1 + 3 * width)
    got = png_bytes(file, need)
    if got != need:
        raise ValueError(f"expected {need} bytes of pixels, got {'more' if got > need else got}")
