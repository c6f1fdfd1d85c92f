"""Reading images of any kind, and giving each its prompt record."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError
from flowrl.evaluation import image_files as images
from flowrl.evaluation.image_files import find_images, match_prompts, read_image

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)  # 7 wide, 5 high
PLAIN = torch.from_numpy(PIXELS).permute(2, 0, 1)
ON_WHITE, FIRST_FRAME = ["transparency laid on white"], ["only the first frame"]


def read(path: Path) -> tuple[Tensor, list[str]]:
    return read_image(find_images([path])[0])


def tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def save(path: Path, image: Image.Image | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or Image.fromarray(PIXELS)).save(path, **options)
    return path


GREY, OPAQUE = Image.fromarray(PIXELS).convert("L"), Image.fromarray(PIXELS).convert("RGBA")
PALETTE = Image.new("P", (7, 5), 1)
PALETTE.putpalette([0, 0, 0, 200, 0, 0])
LEVELS = np.linspace(0, 65535, 35).reshape(5, 7).astype(np.uint16)
MOVING = {"save_all": True, "append_images": [Image.fromarray(255 - PIXELS)], "lossless": True}
KINDS: list[tuple[str, Image.Image | None, dict[str, Any], Tensor, list[str]]] = [
    ("a.png", None, {}, PLAIN, []),
    ("a.webp", None, {"lossless": True}, PLAIN, []),
    ("grey.png", GREY, {}, tensor(GREY), []),
    ("opaque.png", OPAQUE, {}, PLAIN, []),  # not worth a note
    ("palette.png", PALETTE, {"transparency": 1}, torch.full((3, 5, 7), 255), ON_WHITE),
    # 65535 is white: level / 257; Pillow's own convert("RGB") turns all above 255 white
    (
        "16 bits.png",
        Image.fromarray(LEVELS),
        {},
        torch.from_numpy(np.round(LEVELS / 257)).expand(3, 5, 7),
        [],
    ),
    ("moving.webp", None, MOVING, PLAIN, FIRST_FRAME),
]


@pytest.mark.parametrize(("name", "image", "options", "expected", "said"), KINDS)
def test_every_kind_of_file_keeps_its_pixels(
    tmp_path: Path,
    name: str,
    image: Image.Image | None,
    options: dict[str, Any],
    expected: Tensor,
    said: list[str],
) -> None:
    found, notes = read(save(tmp_path / name, image, **options))
    assert found.dtype == torch.uint8 and found.is_contiguous()
    assert torch.equal(found, expected.byte()) and notes == said


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_jpeg_is_read_as_pillow_reads_it(tmp_path: Path, mode: str) -> None:
    file = save(tmp_path / "a.JPG", Image.fromarray(PIXELS).convert(mode), format="JPEG")
    assert torch.equal(read(file)[0], tensor(Image.open(file)))


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_exif_orientation(tmp_path: Path, name: str) -> None:
    """Pillow's own exif_transpose, in all eight; 0 and 9 do not exist and turn nothing."""
    for turn in range(10):
        exif = Image.Exif()
        exif[0x0112] = turn
        (found,) = find_images([save(tmp_path / name, exif=exif)])
        expected = tensor(ImageOps.exif_transpose(Image.open(tmp_path / name)))
        image, notes = read_image(found)
        assert torch.equal(image, expected) and found.size == tuple(expected.shape[1:])
        assert notes == (["turned as EXIF says"] if 2 <= turn <= 8 else [])


def test_exif_after_the_pixels_of_a_png(tmp_path: Path) -> None:
    """The PNG standard allows the eXIf chunk after IDAT; moved there by hand."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = save(tmp_path / "a.png", exif=exif).read_bytes()
    start = data.index(b"eXIf") - 4
    end = start + 12 + struct.unpack(">I", data[start : start + 4])[0]
    moved = tmp_path / "moved.png"
    moved.write_bytes(data[:start] + data[end:-12] + data[start:end] + data[-12:])
    assert b"IDAT" in moved.read_bytes().split(b"eXIf")[0]
    assert torch.equal(read(moved)[0], read(tmp_path / "a.png")[0])
    assert find_images([moved])[0].size == (7, 5)


def test_transparency_is_laid_on_white_and_said(tmp_path: Path) -> None:
    """c a + 255 (1 - a), to one of 255 levels."""
    alpha = np.random.default_rng(1).integers(0, 256, (5, 7), np.uint8)
    image, notes = read(save(tmp_path / "a.png", Image.fromarray(np.dstack([PIXELS, alpha]))))
    share = alpha[..., None].astype(float) / 255
    expected = torch.from_numpy(PIXELS * share + 255 * (1 - share)).permute(2, 0, 1)
    assert (image.double() - expected).abs().max() <= 1 and notes == ON_WHITE


# ---------------------------------------------------------------------------------- what is refused


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("side", [10_000, 60_000])
def test_a_decompression_bomb_is_refused_by_its_header(tmp_path: Path, side: int) -> None:
    """A valid PNG of a few bytes that claims 10^8 and 3.6 * 10^9 pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + body)
    with pytest.raises(DataError, match=r"bomb\.png: .*67,108,864 pixels"):
        find_images([tmp_path / "bomb.png"])


def test_the_limit_itself_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a.png")
    monkeypatch.setattr(images, "MAX_PIXELS", 35)
    assert find_images([tmp_path / "a.png"])[0].size == (5, 7)
    monkeypatch.setattr(images, "MAX_PIXELS", 34)
    with pytest.raises(DataError, match="at most 34 pixels, got 7 x 5"):
        find_images([tmp_path / "a.png"])


def test_what_is_broken_or_no_image_is_named(tmp_path: Path) -> None:
    large = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    for name in ("a.png", "a.jpg", "a.webp"):
        whole = save(tmp_path / name, large).read_bytes()
        for left in (0.0, 0.5, 0.9):
            (tmp_path / name).write_bytes(whole[: int(left * len(whole))])
            with pytest.raises(DataError, match=name):
                read(tmp_path / name)
    (tmp_path / "text.png").write_text("hello")
    save(tmp_path / "gif.png", format="GIF")
    for name in ("text.png", "gif.png", "gone.png"):
        with pytest.raises(DataError, match=name):
            find_images([tmp_path / name])
    with pytest.raises(DataError, match="expected a folder with images"):
        find_images([save(tmp_path / "empty" / "a.bmp").parent])


def test_folders_are_searched_and_sorted(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPEG", "sub/c.webp", ".hidden.png", ".cache/d.png"):
        save(tmp_path / name)
    (tmp_path / "notes.txt").touch()
    assert [found.name for found in find_images([tmp_path])] == ["a.JPEG", "b.png", "sub/c.webp"]
    both = find_images([tmp_path / "sub", tmp_path / "b.png"])
    assert [found.name for found in both] == [f"{tmp_path}/sub/c.webp", f"{tmp_path}/b.png"]
    with pytest.raises(DataError, match=r"b\.png: given twice"):
        find_images([tmp_path, tmp_path / "sub" / ".." / "b.png"])


# ----------------------------------------------------------------------------------------- prompts


@pytest.fixture
def three(tmp_path: Path) -> Path:
    for name in ("1.png", "2.png", "sub/1.png"):
        save(tmp_path / "p" / name)
    return tmp_path / "p"


def write(folder: Path, *records: dict[str, Any]) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


A, B, C = {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}


def test_one_prompt_for_all_and_none(three: Path) -> None:
    found = find_images([three])
    words = match_prompts(found, "a cat", None)
    assert words.has_prompts and words.prompts.records == [{"prompt": "a cat"}] * 3
    assert not match_prompts(found, None, None).has_prompts
    assert match_prompts(found, "", None).has_prompts
    with pytest.raises(ConfigError, match="not both"):
        match_prompts(found, "a cat", "cats.txt")


@pytest.mark.parametrize("key", ["file", "image"])
def test_records_are_matched_by_name(three: Path, key: str) -> None:
    """By the path in the folder, as such, seen from the prompt file, or a name that is unique."""
    records = [
        {"prompt": "sub one", key: "p/sub/1.png"},  # seen from the prompt file
        {"prompt": "one", key: "1.png"},
        {"prompt": "two", key: str(three / "2.png")},
        {"prompt": "nobody", key: "gone.png"},
    ]
    file = write(three.parent, *records)
    words = match_prompts(find_images([three]), None, file)
    assert words.prompts.texts == ["one", "two", "sub one"] and words.unused == 1
    assert [place.rpartition(" ")[2] for place in words.prompts.places] == ["2", "3", "1"]
    alone = match_prompts(find_images([three / "sub"]), None, file)
    assert alone.prompts.texts == ["sub one"]  # not the other 1.png
    beside = write(three, {"prompt": "2", key: "2.png"})
    assert match_prompts(find_images([three / "2.png"]), None, beside).unused == 0


ONE = A | {"file": "1.png"}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([ONE, B | {"file": "2.png"}], "'sub/1.png' as 'file', got none"),
        ([ONE, B | {"file": "1.png"}], "line 2: .*'1.png' has one already"),
        ([ONE, B | {"file": "sub/../1.png"}], "line 2: .*has one already"),
        ([ONE, B], "line 2: expected the image's file as 'file'"),
        ([A | {"file": 3}], "line 1: expected the image's file"),
        ([A, B], "got 2 records for 3 images"),
    ],
)
def test_an_image_without_its_own_record(
    three: Path, records: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        match_prompts(find_images([three]), None, write(three.parent, *records))


def test_records_go_in_order_where_the_order_is_clear(tmp_path: Path, three: Path) -> None:
    """10.png comes before 2.png by name: prompts by number would go to other images."""
    words = match_prompts(find_images([three]), None, write(tmp_path, A | {"tag": "t"}, B, C))
    assert words.prompts.texts == ["a", "b", "c"] and words.prompts.records[0]["tag"] == "t"
    numbered = [save(tmp_path / "n" / f"{number}.png") for number in (1, 2, 10)]
    lettered = [save(tmp_path / "q" / f"{name}.png") for name in ("a", "a1", "b07")]
    file = write(tmp_path, A, B, C)
    with pytest.raises(DataError, match=r"10\.png comes here.*2\.png"):
        match_prompts(find_images([tmp_path / "n"]), None, file)
    for clear in (numbered, [lettered[0].parent]):  # listed by a person; sorted as by number
        assert match_prompts(find_images(clear), None, file).prompts.texts == ["a", "b", "c"]
