"""Images of all kinds, how they are damaged, and a plain reader to compare with."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import torch
from fuzzkit import damage_bytes
from PIL import Image
from torch import Tensor

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by a PNG's colour type


def _pixels(channels: int, seed: int = 0, side: int = 9) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (side, side + 2, channels), dtype=np.uint8)


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def one_png(seed: int) -> bytes:
    """Return an 8-bit RGB PNG file of noise."""
    return _saved(Image.fromarray(_pixels(3, seed)), "PNG")


def chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG with its checksum."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def deep_png() -> bytes:
    """Return a PNG of 16 bits a channel, which Pillow does not write."""
    rows = b"".join(b"\x00" + bytes(range(5 * 6)) for _ in range(4))
    head = struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0)
    return (
        SIGNATURE + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )


def bomb(width: int, height: int, rows: bytes = b"") -> bytes:
    """Return a PNG that claims a size, with other pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        SIGNATURE + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )


_RGB, _RGBA = Image.fromarray(_pixels(3)), Image.fromarray(_pixels(4))
_GREY = Image.fromarray(_pixels(1)[:, :, 0])
_FRAMES = [Image.fromarray(_pixels(3, seed)) for seed in range(3)]
_TURNED = Image.Exif()
_TURNED[0x0112] = 6

PNGS = {
    "rgb": one_png(0),
    "rgba": _saved(_RGBA, "PNG"),
    "grey": _saved(_GREY, "PNG"),
    "palette": _saved(_RGB.quantize(16), "PNG"),
    "bits": _saved(_GREY.convert("1"), "PNG"),
    "16-bit grey": _saved(Image.fromarray(_pixels(1)[:, :, 0].astype(np.uint16) * 257), "PNG"),
    "16-bit rgb": deep_png(),
    "animated": _saved(_FRAMES[0], "PNG", save_all=True, append_images=_FRAMES[1:]),
    "turned": _saved(_RGB, "PNG", exif=_TURNED),
    "empty rows": bomb(40, 30),
    "bomb": bomb(60_000, 60_000),
    "real bomb": bomb(3000, 3000, bytes(9001 * 3000)),
}
OTHERS = {
    "jpeg": _saved(_RGB, "JPEG"),
    "jpeg grey": _saved(_GREY, "JPEG"),
    "jpeg cmyk": _saved(_RGB.convert("CMYK"), "JPEG"),
    "jpeg progressive": _saved(_RGB, "JPEG", progressive=True, exif=_TURNED),
    "webp": _saved(_RGB, "WEBP"),
    "webp lossless": _saved(_RGBA, "WEBP", lossless=True),
    "webp animated": _saved(_FRAMES[0], "WEBP", save_all=True, append_images=_FRAMES[1:]),
    "gif": _saved(_RGB, "GIF"),
    "tiff": _saved(_RGB, "TIFF"),
}


def chunks_of(file: bytes) -> list[tuple[bytes, bytes]]:
    """Return (name, data) of a PNG's chunks, as far as they go."""
    found, place = [], len(SIGNATURE)
    while place + 8 <= len(file):
        length, name = struct.unpack(">I4s", file[place : place + 8])
        found.append((name, file[place + 8 : place + 8 + length]))
        place += 12 + length
    return found


def damage_image(file: bytes, rng: random.Random) -> bytes:
    """Damage a file as bytes; or a PNG's chunks, with checksums that fit."""
    if not file.startswith(SIGNATURE) or rng.random() < 0.4:
        return damage_bytes(file, rng)
    parts = chunks_of(file)
    at = rng.randrange(len(parts))
    name, data = parts[at]
    how = rng.randrange(6)
    if how == 0:
        del parts[at]
    elif how == 1:
        parts.insert(rng.randrange(len(parts) + 1), parts[at])
    elif how == 2 and name == b"IHDR":
        fields = list(struct.unpack(">IIBBBBB", data))
        place = rng.randrange(7)
        fields[place] = rng.choice((0, 1, 2, 3, 4, 6, 16, 5, 255) + (2**31, 60_000) * (place < 2))
        parts[at] = (name, struct.pack(">IIBBBBB", *fields))
    elif how == 3 and name == b"IDAT":  # rows are missing, all else fits
        try:
            rows = zlib.decompress(data)
        except zlib.error:
            rows = data
        parts[at] = (name, zlib.compress(rows[: rng.randrange(len(rows) + 1)]))
    elif data:
        parts[at] = (name, damage_bytes(data, rng))
    return SIGNATURE + b"".join(chunk(*part) for part in parts)


def _unpacked(data: bytes) -> int:
    """Count the bytes that zlib unpacks before the end or a fault."""
    unpack, got = zlib.decompressobj(), 0
    try:
        for place in range(0, len(data), 16):
            got += len(unpack.decompress(data[place : place + 16]))
    except zlib.error:
        pass
    return got


def plain_pixels(file: bytes) -> Tensor | str:
    """Return pixels [3, H, W] uint8 as Pillow converts them, or what is wrong with the file: zlib
    tells whether a PNG that is not interlaced holds all its rows."""
    if file.startswith(SIGNATURE):
        parts = chunks_of(file)
        head = next(data for name, data in parts if name == b"IHDR")
        width, height, depth, color, _, _, interlaced = struct.unpack(">IIBBBBB", head[:13])
        got = _unpacked(b"".join(data for name, data in parts if name == b"IDAT"))
        need = height * (1 + (width * depth * CHANNELS[color] + 7) // 8)
        if not interlaced and got < need:
            return f"{got} of {need} bytes of pixels"
    with Image.open(io.BytesIO(file)) as image:
        if image.mode.startswith("I"):  # 16-bit grey
            levels = np.asarray(image).astype(np.float64) / 257
            grey = Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
            rgb = np.array(grey.convert("RGB"))
        else:
            rgb = np.array(image.convert("RGB"))
    return torch.from_numpy(rgb).permute(2, 0, 1).contiguous()
