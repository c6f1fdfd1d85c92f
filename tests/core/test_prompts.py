"""Prompt files: what is read, what is refused, and which prompts an iteration gets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.prompts import PromptSet, batch_for, check_records, load_prompts
from rewards.shapes import shapes

GENEVAL = (
    '{"tag": "counting", "include": [{"class": "circle", "count": 2, "color": "red"}], '
    '"exclude": [], "prompt": "two red circles"}\n'
)


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.txt", 'a cat\n\n  \na dög, "big"\n'),
        ("p.txt", '\ufeff\ufeffa cat\r\n\r\n\ufeffa dög, "big"'),
        ("p.jsonl", '{"prompt": "a cat"}\n\n{"prompt": "a d\\u00f6g, \\"big\\""}\n'),
        ("p.jsonl", '\ufeff{"prompt": "a cat"}\r\n{"prompt": "a dög, \\"big\\""}'),
        ("p.json", '["a cat", {"prompt": "a dög, \\"big\\""}]'),
        ("p.csv", 'id,prompt\n1,a cat\n,\n2,"a dög, ""big"""\n'),
        ("p.CSV", '\ufeff\nCaption\na cat\n\n"a dög, ""big"""\n'),
        ("p.tsv", 'text\tid\r\na cat\t1\r\n"a dög, ""big"""\t2\r\n'),
    ],
)
def test_formats(tmp_path: Path, name: str, content: str) -> None:
    path, texts = write(tmp_path, name, content), ["a cat", 'a dög, "big"']
    found = load_prompts(path)
    assert found.texts == texts == [record["prompt"] for record in found.records]
    assert (found.name, found.path, len(found)) == ("p", str(path), 2)


def test_records_keep_everything(tmp_path: Path) -> None:
    [record] = load_prompts(write(tmp_path, "g.jsonl", GENEVAL)).records
    assert record["include"] == [{"class": "circle", "count": 2, "color": "red"}]
    assert record["tag"] == "counting"
    [record] = load_prompts(write(tmp_path, "g.csv", "caption,tag\nx,y\n")).records
    assert record == {"caption": "x", "tag": "y", "prompt": "x"}


def test_line_separator_inside_a_text_is_no_new_line(tmp_path: Path) -> None:
    text = "one\u2028two\u0085three"
    assert load_prompts(write(tmp_path, "u.jsonl", f'{{"prompt": "{text}"}}')).texts == [text]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("e.txt", "", ["at least one prompt", "empty or blank"]),
        ("e.json", " \n", ["at least one prompt"]),
        ("e.jsonl", "\ufeff\n \n", ["at least one prompt"]),
        ("e.csv", "prompt\n", ["at least one prompt"]),
        ("e.json", "[]", ["at least one prompt"]),
        ("x.parquet", "x", [".jsonl, .json, .txt, .csv, .tsv", "'.parquet'"]),
        ("x", "x", ["'no ending'"]),
        ("u.txt", b"ok\nbad \xff\n", ["u.txt, line 2", "UTF-8", "0xff"]),
        ("u.txt", "a cat".encode("utf-16"), ["line 1", "UTF-16"]),
        ("l.json", '{"prompt": "a"}', ["expected a list", "an object"]),
        ("l.json", '["a", 3]', ["entry 2", "a number"]),
        ("l.json", '["a",\n"b"', ["line 2", "expected JSON"]),
        ("c.csv", "id,words\n1,a\n", ["line 1", "prompt or caption or text", "'words'"]),
        ("c.csv", "prompt,prompt\na,b\n", ["line 1", "differ"]),
        ("c.csv", "id,prompt\n1,a\n2\n", ["line 3", "expected 2 columns", "got 1"]),
        ("c.csv", 'id,prompt\n1,a\n2,"b\n3,c\n', ["line 3", "broken row"]),
        ("c.csv", "id,prompt\n1,\n", ["line 2", "not empty"]),
        ("c.csv", 'id,prompt\n1,"two\nlines"\n2,\n', ["line 4", "not empty"]),
    ],
)
def test_errors_name_file_and_line(
    tmp_path: Path, name: str, content: str | bytes, parts: list[str]
) -> None:
    refused(write(tmp_path, name, content), parts)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('{"prompt": "a"}\n\n{"prompt": }', ["line 3, column 12", "expected JSON"]),
        ('{"prompt": "a"}\n"b"', ["line 2", "expected an object", "got a text"]),
        ('{"text": "a"}', ["line 1", 'expected the key "prompt"', "'text'"]),
        ("{}", ["line 1", "an empty object"]),
        ('{"prompt": " "}', ["line 1", "not empty"]),
        ('{"prompt": 3}', ["line 1", "got 3"]),
        ('{"prompt": "\\ud800"}', ["surrogate"]),
        ("[" * 100_000, ["nested too deeply"]),
        ('{"prompt": "a", "tag": 1}', ['"tag"', "got 1"]),
        ('{"prompt": "a", "include": {}}', ["1, include", "expected a list", "an object"]),
        ('{"prompt": "a", "include": [{"count": 1}]}', ["include, entry 1", '"class"']),
        ('{"prompt": "a", "exclude": [{"class": "x", "count": 0}]}', ["exclude, entry 1", ">= 1"]),
        ('{"prompt": "a", "include": [{"class": "x", "count": true}]}', ["whole number", "True"]),
    ],
)
def test_errors_name_the_line_of_a_record(tmp_path: Path, line: str, parts: list[str]) -> None:
    refused(write(tmp_path, "j.jsonl", line + "\n"), parts)


def refused(path: Path, parts: list[str]) -> None:
    """Expect an error that names the file and says all parts."""
    with pytest.raises(DataError) as caught:
        load_prompts(path)
    message = str(caught.value)
    assert [part for part in (str(path), *parts) if part not in message] == [], message


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="looked for"):
        load_prompts(tmp_path / "none.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(DataError, match="got none"):
        load_prompts(tmp_path / "folder.txt")


def numbered(size: int) -> PromptSet:
    texts = [str(n) for n in range(size)]
    return PromptSet(texts, [{"prompt": text} for text in texts], "n", "n.txt")


def deal(size: int, count: int, seed: int, iteration: int) -> list[int]:
    return batch_for(numbered(size), seed=seed, iteration=iteration, count=count)


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**63 - 1), st.integers(1, 4))
def test_every_prompt_once_per_epoch(size: int, count: int, seed: int, epochs: int) -> None:
    stream: list[int] = []
    for n in range(-(-epochs * size // count)):
        stream += deal(size, count, seed, n)
    for epoch in range(epochs):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 1000), st.integers(0, 500))
def test_batch_is_a_function_of_its_arguments(
    size: int, count: int, seed: int, iteration: int
) -> None:
    once = deal(size, count, seed, iteration)
    deal(size + 1, count, seed + 1, iteration + 7)
    assert deal(size, count, seed, iteration) == once
    counts = Counter(once).values()
    assert len(once) == count and (size * 2 < count or max(counts) <= 2 + count // size)


def test_balance_gives_every_value_its_turn() -> None:
    """9 prompts, 6 of them a, 2 b, 1 c: by hand, of 12 places each value has every third, and each
    of its prompts comes equally often."""
    texts = [str(n) for n in range(9)]
    records = [{"prompt": text, "tag": "aaaaaabbc"[n]} for n, text in enumerate(texts)]
    prompts = PromptSet(texts, records, "n", "n.txt")
    options: dict[str, Any] = {"seed": 0, "count": 6, "balance": "tag"}
    dealt = [n for turn in range(6) for n in batch_for(prompts, iteration=turn, **options)]
    assert ["aaaaaabbc"[n] for n in dealt] == list("abc") * 12
    times = Counter(dealt)
    assert [times[n] for n in range(9)] == [2] * 6 + [6, 6] + [12]
    # one value: as without balance
    same = PromptSet(texts, [{**record, "tag": "x"} for record in records], "n", "n.txt")
    assert batch_for(same, iteration=3, **options) == batch_for(same, seed=0, count=6, iteration=3)
    records[4] = {"prompt": "4"}
    with pytest.raises(DataError, match="prompt 5: train.balance is 'tag', so each record"):
        batch_for(prompts, iteration=0, **options)


def test_order_differs_between_epochs_and_seeds_and_is_pinned() -> None:
    epochs = [deal(8, 8, 0, n) for n in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] and deal(8, 8, 1, 0) != epochs[0]
    # Recorded from the first version: a later one must deal the same prompts, or runs could not be
    # resumed.
    assert epochs[0] == [7, 0, 1, 5, 3, 4, 2, 6]


def test_first_place_is_uniform() -> None:
    """2000 draws from 5: each count is Binomial(2000, 1/5), mean 400, standard deviation 17.9; 5
    deviations are allowed."""
    firsts = Counter(deal(5, 1, seed, 0)[0] for seed in range(2000))
    assert all(abs(firsts[n] - 400) < 90 for n in range(5))


def test_impossible_batches() -> None:
    for iteration, count in ((0, 0), (-1, 1)):
        with pytest.raises(DataError, match="expected count >= 1 and iteration >= 0"):
            batch_for(numbered(3), seed=0, iteration=iteration, count=count)
    with pytest.raises(DataError, match="no prompts"):
        batch_for(numbered(0), seed=0, iteration=0, count=1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "p.jsonl",
            '{"prompt": "a circle", "include": [{"class": "circle", "count": 1}]}\n\n'
            '{"prompt": "a cow", "include": [{"class": "cow", "count": 1}]}\n',
            r"p\.jsonl, line 3, include\[0\].*'cow'",
        ),
        ("p.txt", "a circle\n", r"p\.txt, line 1: expected a GenEval record"),
    ],
)
def test_records_are_shown_to_the_rewards_before_anything_is_sampled(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    prompts = load_prompts(tmp_path / name)
    # not every reward reads records
    check_records(prompts, {"other": lambda batch: batch.images.mean()})
    with pytest.raises(DataError, match=message):
        check_records(prompts, {"shapes": shapes()})
