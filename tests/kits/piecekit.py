"""A stand-in for the package sentencepiece, which is not installed here: it splits into the letters
of a vocabulary file, and lets diffusers have the classes that ask for the package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import diffusers
from diffusers.utils import import_utils

NAME = "sentencepiece"
# the classes that ask for it, and where they are
CLASSES = {
    "KolorsPipeline": "kolors.pipeline_kolors",
    "KolorsImg2ImgPipeline": "kolors.pipeline_kolors_img2img",
    "KolorsPAGPipeline": "pag.pipeline_pag_kolors",
}
SPACE = "▁"


class Processor:
    """What reads a vocabulary of single characters."""

    def __init__(self, model_file: str) -> None:
        self.pieces = [*_pieces(Path(model_file).read_bytes())]

    def vocab_size(self) -> int:
        return len(self.pieces)

    get_piece_size = vocab_size

    def bos_id(self) -> int:
        return self.PieceToId("<s>")

    def eos_id(self) -> int:
        return self.PieceToId("</s>")

    def unk_id(self) -> int:
        return self.PieceToId("<unk>")

    def EncodeAsPieces(self, text: str) -> list[str]:
        words = f" {text}" if text else ""  # as the real one begins
        return [*words.replace(" ", SPACE)]

    def encode(self, text: str) -> list[int]:
        return [self.PieceToId(one) for one in self.EncodeAsPieces(text)]

    def PieceToId(self, piece: str) -> int:
        return self.pieces.index(piece) if piece in self.pieces else 0

    def IdToPiece(self, place: int) -> str:
        return self.pieces[place]

    def DecodePieces(self, pieces: list[str]) -> str:
        return "".join(pieces).replace(SPACE, " ").strip()

    def decode(self, ids: list[int]) -> str:
        return self.DecodePieces([self.pieces[one] for one in ids])


def _pieces(data: bytes) -> Iterator[str]:
    """Read the texts of a ModelProto's pieces."""
    for field, content in _fields(data):
        if field == 1 and isinstance(content, bytes):
            yield next(part.decode() for one, part in _fields(content) if one == 1)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        if key & 7 == 0:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        size = 4
        if key & 7 == 2:
            size, place = _varint(data, place)
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


@contextmanager
def with_pieces() -> Iterator[None]:
    """Have the package for a while, or the real one where it is installed."""
    if import_utils.is_sentencepiece_available() or NAME in sys.modules:
        yield
        return
    made = ModuleType(NAME)
    made.__spec__ = ModuleSpec(NAME, None)
    vars(made)["SentencePieceProcessor"] = Processor
    with ExitStack() as stack:
        sys.modules[NAME] = made
        stack.callback(sys.modules.pop, NAME)
        stack.enter_context(patch.object(import_utils, "_sentencepiece_available", True))
        for name, place in CLASSES.items():
            module = importlib.import_module(f"diffusers.pipelines.{place}")
            stack.enter_context(patch.object(diffusers, name, getattr(module, name)))
        yield
