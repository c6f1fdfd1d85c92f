"""Words of prompts and captions, and the tokenizer in which each word is one token."""

from __future__ import annotations

import json
from pathlib import Path

from common import TOKENS
from transformers import CLIPTokenizer

from flowrl.evaluation.suites.shapes.prompts import all_records

PLACES = ["top", "bottom", "left", "right", "middle", "big", "small"]
"""Words of dense captions, beside those of the prompts."""

ROUNDS = 20
"""Orders of the words that are tried for the merges."""


def vocabulary() -> list[str]:
    """List all words of prompts and captions, long ones first: "are" must not split "square"."""
    found = set(PLACES)
    for records in all_records().values():
        for record in records:
            found |= set(record["prompt"].split())
    return sorted(found, key=lambda word: (-len(word), word))


def build_tokenizer(folder: Path, words: list[str] | None = None) -> CLIPTokenizer:
    """Write a byte-pair vocabulary in which every word is one token: those of prompts and captions,
    or others, long ones first.

    Merges that are learnt early can split later words; those words go to the front, and all
    merges are learnt again. SystemExit, should that never end.
    """
    words = vocabulary() if words is None else words
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(ROUNDS):
        # a tokenizer from the words in this order
        _write_vocabulary(folder, words)
        files = str(folder / "vocab.json"), str(folder / "merges.txt")
        tokenizer = CLIPTokenizer(*files, model_max_length=TOKENS)
        # words that it splits go to the front
        split = [word for word in words if len(tokenizer(word).input_ids) != 3]
        if not split:
            tokenizer.save_pretrained(folder)
            return CLIPTokenizer.from_pretrained(folder)
        words = split + [word for word in words if word not in split]
    raise SystemExit(f"expected one token for each word, but these are split: {split}")


def _write_vocabulary(folder: Path, words: list[str]) -> None:
    merges = _merges(words)
    letters = sorted(set("".join(words)))
    ends = [letter + "</w>" for letter in letters]
    joined = ["".join(merge) for merge in merges]
    marks = ["<|startoftext|>", "<|endoftext|>"]
    symbols = list(dict.fromkeys([*letters, *ends, *joined, *marks]))
    vocab = {symbol: index for index, symbol in enumerate(symbols)}
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False))
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")


def _merges(words: list[str]) -> list[tuple[str, str]]:
    """Join each word's letters from the left -> pairs of symbols, in the order of learning."""
    merges: list[tuple[str, str]] = []
    for word in words:
        parts = [*word[:-1], word[-1] + "</w>"]
        while len(parts) > 1:
            if (parts[0], parts[1]) not in merges:
                merges.append((parts[0], parts[1]))
            parts = [parts[0] + parts[1], *parts[2:]]
    return merges
