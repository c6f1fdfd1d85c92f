"""The vocabulary of single letters as a sentencepiece file, written byte by byte."""

from __future__ import annotations

import string
import struct
from pathlib import Path

SPACE = "▁"
# what a piece is, by the numbers of the format: a letter, what is unknown, a mark
LETTER, UNKNOWN, MARK = 1, 2, 3
CHARACTERS = 4  # the kind of model that splits into single characters
PIECES = [
    ("<unk>", UNKNOWN),
    ("<s>", MARK),
    ("</s>", MARK),
    *((one, LETTER) for one in (SPACE, *string.ascii_letters, *string.digits, *string.punctuation)),
]


def piece_file(folder: Path) -> Path:
    """Write ``tokenizer.model`` into a folder -> the file.

    Source: sentencepiece_model.proto: a ModelProto has pieces (1: text 1, score 2, type 3), and
    the settings of its trainer (2: model_type 3, vocab_size 4) and normaliser (3: name 1).
    """
    made = b""
    for place, (text, kind) in enumerate(PIECES):
        score = b"\x15" + struct.pack("<f", -float(place))
        made += _held(1, _held(1, text.encode()) + score + _number(3, kind))
    made += _held(2, _number(3, CHARACTERS) + _number(4, len(PIECES)))
    made += _held(3, _held(1, b"identity"))
    file = folder / "tokenizer.model"
    file.write_bytes(made)
    return file


def _held(field: int, content: bytes) -> bytes:
    """Return a field that holds bytes."""
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """Return a whole number, seven bits a byte, the lowest first."""
    made = []
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])
