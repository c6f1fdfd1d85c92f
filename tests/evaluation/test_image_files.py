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


def read(path: Path) -> Tensor:
    return read_image(find_images([path])[0])[0]


def tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def save(path: Path, image: Image.Image | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or Image.fromarray(PIXELS)).save(path, **options)
    return path


@pytest.mark.parametrize(("name", "options"), [("a.png", {}), ("a.webp", {"lossless": True})])
def test_lossless_files_keep_every_pixel(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    found = read(save(tmp_path / name, **options))
    assert found.dtype == torch.uint8 and found.is_contiguous()
    assert torch.equal(found, torch.from_numpy(PIXELS).permute(2, 0, 1))


def test_jpeg_is_read_as_pillow_reads_it(tmp_path: Path) -> None:
    assert torch.equal(
        read(save(tmp_path / "a.JPG", format="JPEG")), tensor(Image.open(tmp_path / "a.JPG"))
    )


@pytest.mark.parametrize("turn", range(0, 10))
@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_exif_orientation(tmp_path: Path, name: str, turn: int) -> None:
    """The same as Pillow's own exif_transpose, in all eight orientations; 0 and 9 do not exist and
    turn nothing."""
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
    assert torch.equal(read(moved), read(tmp_path / "a.png")) and find_images([moved])[0].size == (
        7,
        5,
    )


def test_transparency_is_laid_on_white_and_said(tmp_path: Path) -> None:
    """c a + 255 (1 - a), to one of 255 levels; an opaque alpha channel changes nothing and is not
    worth a note."""
    alpha = np.random.default_rng(1).integers(0, 256, (5, 7), np.uint8)
    rgba = np.dstack([PIXELS, alpha])
    (found,) = find_images([save(tmp_path / "a.png", Image.fromarray(rgba))])
    image, notes = read_image(found)
    share = alpha[..., None].astype(float) / 255
    expected = torch.from_numpy(PIXELS * share + 255 * (1 - share)).permute(2, 0, 1)
    assert (image.double() - expected).abs().max() <= 1 and notes == ["transparency laid on white"]
    (found,) = find_images([save(tmp_path / "b.png", Image.fromarray(PIXELS).convert("RGBA"))])
    image, notes = read_image(found)
    assert torch.equal(image, torch.from_numpy(PIXELS).permute(2, 0, 1)) and notes == []


def test_a_transparent_palette(tmp_path: Path) -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 200, 0, 0])
    (found,) = find_images([save(tmp_path / "a.png", image, transparency=1)])
    pixels, notes = read_image(found)
    assert pixels.unique().tolist() == [255] and notes == ["transparency laid on white"]


def test_grey_of_16_bits_is_not_cut_off(tmp_path: Path) -> None:
    """65535 is white: level / 257. Pillow's own convert("RGB") turns everything above 255 white."""
    levels = np.linspace(0, 65535, 35).reshape(5, 7).astype(np.uint16)
    found = read(save(tmp_path / "a.png", Image.fromarray(levels)))
    expected = torch.from_numpy(np.round(levels / 257)).byte()
    assert torch.equal(found, expected.expand(3, 5, 7))


def test_other_modes_become_rgb(tmp_path: Path) -> None:
    image = Image.fromarray(PIXELS)
    assert torch.equal(
        read(save(tmp_path / "l.png", image.convert("L"))), tensor(image.convert("L"))
    )
    cmyk = save(tmp_path / "c.jpg", image.convert("CMYK"))
    assert torch.equal(read(cmyk), tensor(Image.open(cmyk))) and read(cmyk).shape == (3, 5, 7)


def test_of_an_animation_the_first_frame_and_a_note(tmp_path: Path) -> None:
    other = Image.fromarray(255 - PIXELS)
    (found,) = find_images(
        [save(tmp_path / "a.webp", save_all=True, append_images=[other], lossless=True)]
    )
    image, notes = read_image(found)
    assert torch.equal(image, torch.from_numpy(PIXELS).permute(2, 0, 1)) and notes == [
        "only the first frame"
    ]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("side", [10_000, 60_000])
def test_a_decompression_bomb_is_refused_by_its_header(tmp_path: Path, side: int) -> None:
    """A valid PNG of a few bytes that claims 10^8 and 3.6 * 10^9 pixels."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    chunks = header + _chunk(b"IDAT", zlib.compress(b"")) + _chunk(b"IEND", b"")
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    with pytest.raises(DataError, match=r"bomb\.png: .*67,108,864 pixels"):
        find_images([tmp_path / "bomb.png"])


def test_the_limit_itself_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a.png")
    monkeypatch.setattr(images, "MAX_PIXELS", 35)
    assert find_images([tmp_path / "a.png"])[0].size == (5, 7)
    monkeypatch.setattr(images, "MAX_PIXELS", 34)
    with pytest.raises(DataError, match="at most 34 pixels, got 7 x 5"):
        find_images([tmp_path / "a.png"])


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp"])
@pytest.mark.parametrize("left", [0.0, 0.5, 0.9])
def test_a_broken_file_is_named(tmp_path: Path, name: str, left: float) -> None:
    rough = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    file = save(tmp_path / name, rough)
    file.write_bytes(file.read_bytes()[: int(left * file.stat().st_size)])
    with pytest.raises(DataError, match=name):
        read(file)


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("hello")
    save(tmp_path / "b.png", format="GIF")
    for name in ("a.png", "b.png", "gone.png"):
        with pytest.raises(DataError, match=name):
            find_images([tmp_path / name])
    with pytest.raises(DataError, match="expected a folder with images"):
        find_images([save(tmp_path / "empty" / "a.bmp").parent])


def test_folders_are_searched_and_sorted(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPEG", "sub/c.webp", ".hidden.png", ".cache/d.png", "notes.txt"):
        if name.endswith("txt"):
            (tmp_path / name).touch()
        else:
            save(tmp_path / name)
    assert [found.name for found in find_images([tmp_path])] == ["a.JPEG", "b.png", "sub/c.webp"]
    both = find_images([tmp_path / "sub", tmp_path / "b.png"])
    assert [found.name for found in both] == [f"{tmp_path}/sub/c.webp", f"{tmp_path}/b.png"]
    with pytest.raises(DataError, match=r"b\.png: given twice"):
        find_images([tmp_path, tmp_path / "sub" / ".." / "b.png"])


# ------------------------------------------------------------------------------------------ prompts


@pytest.fixture
def three(tmp_path: Path) -> Path:
    for name in ("1.png", "2.png", "sub/1.png"):
        save(tmp_path / "p" / name)
    return tmp_path / "p"


def write(folder: Path, *records: dict[str, Any] | str) -> str:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def test_one_prompt_for_all_and_none(three: Path) -> None:
    found = find_images([three])
    words = match_prompts(found, "a cat", None)
    assert words.has_prompts and words.prompts.records == [{"prompt": "a cat"}] * 3
    assert (
        not match_prompts(found, None, None).has_prompts
        and match_prompts(found, "", None).has_prompts
    )
    with pytest.raises(ConfigError, match="not both"):
        match_prompts(found, "a cat", "cats.txt")


@pytest.mark.parametrize("key", ["file", "image"])
def test_records_are_matched_by_name(three: Path, key: str) -> None:
    """By the path in the folder, the path as such, the path seen from the prompt file, or a name
    that occurs once."""
    found = find_images([three])
    file = write(
        three.parent,
        {"prompt": "sub one", key: "p/sub/1.png"},  # seen from the prompt file
        {"prompt": "one", key: "1.png"},
        {"prompt": "two", key: str(three / "2.png")},
        {"prompt": "nobody", key: "gone.png"},
    )
    words = match_prompts(found, None, file)
    assert words.prompts.texts == ["one", "two", "sub one"] and words.unused == 1
    assert [place.rpartition(" ")[2] for place in words.prompts.places] == ["2", "3", "1"]
    assert match_prompts(find_images([three / "sub"]), None, file).prompts.texts == [
        "sub one"
    ]  # not the other 1.png
    assert (
        match_prompts(
            find_images([three / "2.png"]), None, write(three, {"prompt": "2", key: "2.png"})
        ).unused
        == 0
    )


def test_an_image_without_its_own_record(three: Path) -> None:
    found = find_images([three])
    for records, message in (
        (
            [{"prompt": "a", "file": "1.png"}, {"prompt": "b", "file": "2.png"}],
            "'sub/1.png' as 'file', got none",
        ),
        (
            [{"prompt": "a", "file": "1.png"}, {"prompt": "b", "file": "1.png"}],
            "line 2: .*'1.png' has one already",
        ),
        (
            [{"prompt": "a", "file": "1.png"}, {"prompt": "b"}],
            "line 2: expected the image's file as 'file'",
        ),
        ([{"prompt": "a", "file": 3}], "line 1: expected the image's file"),
        (
            [{"prompt": "a", "file": "1.png"}, {"prompt": "b", "file": "sub/../1.png"}],
            "line 2: .*has one already",
        ),
    ):
        with pytest.raises(DataError, match=message):
            match_prompts(found, None, write(three.parent, *records))


def test_records_in_order(three: Path) -> None:
    found = find_images([three])
    words = match_prompts(
        found,
        None,
        write(three.parent, {"prompt": "a", "tag": "t"}, {"prompt": "b"}, {"prompt": "c"}),
    )
    assert words.prompts.texts == ["a", "b", "c"] and words.prompts.records[0]["tag"] == "t"
    with pytest.raises(DataError, match="got 2 records for 3 images"):
        match_prompts(found, None, write(three.parent, {"prompt": "a"}, {"prompt": "b"}))


def test_an_order_that_is_not_clear_is_refused(tmp_path: Path) -> None:
    """10.png comes before 2.png by name: a list of prompts written by number would silently go to
    other images."""
    for number in (1, 2, 10):
        save(tmp_path / "p" / f"{number}.png")
    file = write(tmp_path, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    with pytest.raises(DataError, match=r"10\.png comes here.*2\.png"):
        match_prompts(find_images([tmp_path / "p"]), None, file)
    named = [
        tmp_path / "p" / f"{number}.png" for number in (1, 2, 10)
    ]  # as a person would list them
    assert match_prompts(find_images(named), None, file).prompts.texts == ["a", "b", "c"]
    (
        save(tmp_path / "q" / "a.png"),
        save(tmp_path / "q" / "a1.png"),
        save(tmp_path / "q" / "b07.png"),
    )
    assert match_prompts(find_images([tmp_path / "q"]), None, file).prompts.texts == ["a", "b", "c"]
