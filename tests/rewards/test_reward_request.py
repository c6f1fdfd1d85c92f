"""What a reward server reads of a request, and what it refuses before it unpacks anything."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from typing import Any

import pytest
import torch
from PIL import Image
from serving import data_of, png, random_images

from rewards.remote.read_request import RequestLimits, RequestRefused, parse
from rewards.remote.request_queue import ScoreRequest


def crafted(width: int, height: int, *, depth: int = 8, color: int = 2, pixels: bytes = b"") -> str:
    """Write a PNG with any header by the format's own rules: chunks of length, name, data, CRC."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()


def read(data: dict[str, Any], limits: RequestLimits | None = None) -> ScoreRequest:
    """Read a request to a server that hosts the rewards a and b."""
    return parse(json.dumps(data).encode(), ["a", "b"], limits or RequestLimits())


def test_a_request_is_read_as_it_was_sent() -> None:
    images = random_images(3)
    meta = [{"a": 1}, {}, {"b": [None, 0.1]}]
    extra = {"group": [5, 5, -1], "meta": meta, "sigma": [0, 0.5, 1.0], "rewards": ["b"]}
    got = read(data_of(images, **extra))
    assert torch.equal(got.pixels.float() / 255, images) and got.pixels.dtype == torch.uint8
    assert (got.group.tolist(), got.meta, got.sigma.tolist()) == ([5, 5, -1], meta, [0, 0.5, 1])
    assert got.names == ("b",) and got.prompts == ["p"] * 3
    bare = read(data_of(images))
    assert (bare.group.tolist(), bare.meta, bare.sigma.tolist()) == ([0, 1, 2], [{}] * 3, [0] * 3)
    assert bare.names == ("a", "b")
    right = crafted(1, 1, pixels=b"\0\x01\x02\x03")  # filter 0, then one pixel
    assert read({"images": [right], "prompts": ["p"]}).pixels.flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"images": [', "not valid JSON"),
        (b'{"images": [], "prompts": [], "sigma": [NaN]}', "NaN is no number"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "got list"),
        (b'{"images": []}', r"got \['images'\]"),
        (b'{"images": [], "prompts": [], "exec": 1}', "exec"),
        (b'{"images": [], "prompts": []}', "1 to 256 images in one request, got 0"),
        (b'{"images": "abc", "prompts": ["p"]}', "images: expected a list of texts"),
        (b'{"images": ["*"], "prompts": ["p"]}', r"images\[0\]: not base64"),
        (b'{"images": ["aGVsbG8="], "prompts": ["p"]}', r"images\[0\]: expected a PNG"),
    ],
)
def test_a_body_that_is_no_request_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(RequestRefused, match=message) as error:
        parse(body, ["a"], RequestLimits())
    assert error.value.status == 400 and error.value.kind == "request"


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": ["p"]},
        {"prompts": ["p", 1]},
        {"group": [1]},
        {"group": [1, True]},
        {"group": [1, 2.0]},
        {"group": [1, 2**63]},
        {"meta": [{}, []]},
        {"meta": {}},
        {"sigma": [0, None]},
        {"sigma": [0, 10**400]},
        {"sigma": [0, 1e39]},
        {"rewards": []},
        {"rewards": ["c"]},
        {"rewards": ["a", "a"]},
        {"images": [png(random_images(1)[0]), png(random_images(1, size=5)[0])]},
    ],
    ids=lambda changes: str(changes)[:25],
)
def test_a_list_that_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    (key,) = changes
    with pytest.raises(RequestRefused, match=key) as error:
        read(data_of(random_images(2), **changes))
    assert error.value.status == 400


def test_numbers_beyond_json_are_refused() -> None:
    """Python reads 1e999 as infinity."""
    text = json.dumps(data_of(random_images(1), sigma=[0.5])).replace("0.5", "1e999")
    with pytest.raises(RequestRefused, match="sigma"):
        parse(text.encode(), ["a"], RequestLimits())


def test_images_are_measured_before_they_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bombs claim 2 gigapixels, or many small images; Pillow must not even see them."""

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("unpacked")

    monkeypatch.setattr("rewards.remote.read_request.Image.open", opened)
    bomb = crafted(50_000, 50_000, pixels=bytes(1000))
    small = RequestLimits(images=4, pixels=100, all_pixels=150)
    for images, limits, message in (
        ([bomb], RequestLimits(), "16777216 pixels in an image.*50000 x 50000"),
        ([crafted(2**31 - 1, 2**31 - 1)], RequestLimits(), "pixels"),
        ([crafted(10, 11)], small, "100 pixels"),
        ([crafted(10, 8)] * 2, small, "150 in a request, got 2 of 10 x 8"),
        ([crafted(1, 1)] * 5, small, "1 to 4 images"),
    ):
        with pytest.raises(RequestRefused, match=message) as error:
            read({"images": images, "prompts": ["p"] * len(images)}, limits)
        assert (error.value.status, error.value.kind) == (413, "size")


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_a_file_that_is_no_8_bit_rgb_png_is_refused() -> None:
    cut = base64.b64decode(png(random_images(1, size=64)[0]))[:900]
    photo = io.BytesIO()
    Image.new("RGB", (8, 8)).save(photo, "JPEG")
    for image, message in (
        (crafted(2, 2, color=6), "colour type 6"),
        (crafted(2, 2, depth=16), "bit depth 16"),
        (crafted(2, 2, color=3), "colour type 3"),
        (crafted(0, 2), "0 x 2"),
        # two rows of 1 + 2 * 3 bytes
        (crafted(2, 2, pixels=b"\0" * 7), "broken PNG.*expected 14 bytes of pixels, got 7"),
        (crafted(2, 2, pixels=b"\0" * 15), "broken PNG.*got more"),
        (crafted(2, 2, pixels=b"\x09" * 14), "broken PNG"),  # there is no filter 9
        (encoded(cut), "broken PNG"),
        (encoded(b"\x89PNG\r\n\x1a\n" + b"\0" * 50), "expected a PNG"),
        (encoded(photo.getvalue()), "expected a PNG"),
    ):
        with pytest.raises(RequestRefused, match=message):
            read({"images": [image], "prompts": ["p"]})
