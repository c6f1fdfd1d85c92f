"""Prompt files as people have them: each layout is one that a public list, a trainer or a
spreadsheet writes, with texts of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.core.errors import DataError
from flowrl.core.prompt_files import COLUMNS, prompt_name
from flowrl.core.prompts import given_prompts, load_prompts

TWO = ["a small house, in the rain", 'a "large" house']
PLAIN = "\n".join(TWO) + "\n"
PARTI = (
    "Prompt\tCategory\tChallenge\tNote\n"
    "a quiet harbour\tOutdoor Scenes\tBasic\t\n"
    '"H E L L O" in chalk on a board\tIllustrations\tWriting & Symbols\t\n'
)
CUT_TABS = PARTI.replace("\t\n", "\n")
META = {"a/1.png": {"caption": "a house", "tags": "x, y"}, "a/2.jpg": {"tags": "1girl, solo"}}
QUOTED = '"a small house, in the rain"\n"a ""large"" house"\n'

TABLES: dict[str, tuple[str, str, list[str]]] = {
    "Google's TSV": ("p.tsv", PARTI, ["a quiet harbour", '"H E L L O" in chalk on a board']),
    "TSV whose empty cells an editor cut": (
        "p.tsv",
        CUT_TABS.replace('"H E L L O" in', "HELLO in"),
        ["a quiet harbour", "HELLO in chalk on a board"],
    ),
    "TSV of a spreadsheet": ("p.tsv", 'prompt\tn\n"a ""big"", red cat"\t1\n', ['a "big", red cat']),
    "CSV with tabs": ("p.csv", "id\tprompt\n1\ta cat, a dog\n", ["a cat, a dog"]),
    "DrawBench": ("p.csv", 'Prompts,Category\nA.,Colors\n"A, b.",Counting\n', ["A.", "A, b."]),
    "semicolons": ("p.csv", 'id;Prompt\n1;a cat, a dog\n2;"a; b"\n', ["a cat, a dog", "a; b"]),
    "bars": ("p.csv", "prompt|style\na cat, a dog|oil\n", ["a cat, a dog"]),
    "Excel says what separates": ("p.csv", "sep=;\r\nprompt;n\r\na, b;1\r\n", ["a, b"]),
    "empty columns": ("p.csv", "prompt,tag,,\na cat,x,,\n", ["a cat"]),
    "no header": ("p.csv", PLAIN, TWO),
    "no header, one column": ("p.csv", "a cat\na dog\n", ["a cat", "a dog"]),
    "quoted lines": ("p.csv", QUOTED, TWO),
    "quoted lines with commas behind": ("p.csv", QUOTED.replace('"\n', '",\n'), TWO),
    "quoted lines of a text": ("p.txt", QUOTED, TWO),
    "one column, commas as in prose": ("p.csv", f"Prompt\n{PLAIN}", TWO),
    "a column of a text": ("p.txt", "Prompts\na cat\na dog\n", ["a cat", "a dog"]),
    "a text with old line ends": ("p.txt", "a cat\ra dog\r", ["a cat", "a dog"]),
    "JSONL named a text": ("p.txt", '{"text": "a cat"}\n{"text": "a dog"}\n', ["a cat", "a dog"]),
    "a table named a text": ("p.txt", 'id,Prompt\n1,a cat\n2,"a, b"\n', ["a cat", "a, b"]),
    "braces of a text": ("p.txt", "{a|b} cat\ntext, old\n", ["{a|b} cat", "text, old"]),
    "a quoted word is no quoted line": ("p.txt", '"HELLO"\na cat\n', ['"HELLO"', "a cat"]),
    "UniGenBench by itself": ("p.csv", 'index,prompt_zh,sub_dims_zh\n0,一只猫,"{}"\n', ["一只猫"]),
    "Chinese without a header": ("p.csv", "一只猫，一只狗\n两只狗\n", ["一只猫，一只狗", "两只狗"]),
}  # fmt: skip

RECORDS: dict[str, tuple[str, Any, list[str]]] = {
    "text": ("p.jsonl", [{"file_name": "1.png", "text": "a cat"}], ["a cat"]),
    "caption": ("p.jsonl", [{"caption": "a cat"}, {"prompt": "b", "text": "c"}], ["a cat", "b"]),
    "bare texts": ("p.jsonl", ["a cat", "a dog"], ["a cat", "a dog"]),
    "Prompt": ("p.json", [{"Prompt": "a cat"}, "a dog"], ["a cat", "a dog"]),
    "a list below prompts": ("p.json", {"prompts": ["a cat", "a dog"]}, ["a cat", "a dog"]),
    "records below data": ("p.json", {"version": "1", "data": [{"text": "a"}]}, ["a"]),
    "COCO": ("p.json", {"images": [{"id": 1}], "annotations": [{"caption": "a cat"}]}, ["a cat"]),
    "GenAI-Bench": ("p.json", {"1": {"prompt": "a", "tags": []}, "2": {"prompt": "b"}}, ["a", "b"]),
    "texts by id": ("p.json", {"0": "a cat", "1": "a dog"}, ["a cat", "a dog"]),
    "kohya": ("meta_cap.json", META, ["a house", "1girl, solo"]),
    "lists by task": ("p.json", {"colors": ["a red"], "counting": ["two"]}, ["a red", "two"]),
    "columns": ("p.json", {"prompt": ["a", "b"], "id": [1, 2]}, ["a", "b"]),
    "pandas": ("p.json", {"text": {"0": "a", "1": "b"}, "n": {"0": 1, "1": 2}}, ["a", "b"]),
}  # fmt: skip


def written(folder: Path, name: str, content: Any) -> Path:
    """Write a text as it is, records as JSON, or one a line."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    if name.endswith(".jsonl") and not isinstance(content, str):
        text = "".join(json.dumps(record) + "\n" for record in content)
    (folder / name).write_bytes(text.encode())
    return folder / name


@pytest.mark.parametrize("kind", [*TABLES, *RECORDS])
def test_layouts(tmp_path: Path, kind: str) -> None:
    """The texts stand in the files above as they are read here."""
    name, content, texts = {**TABLES, **RECORDS}[kind]
    found = load_prompts(written(tmp_path, name, content))
    assert found.texts == texts == [record["prompt"] for record in found.records]


def test_what_stands_beside_a_prompt_is_kept(tmp_path: Path) -> None:
    [one, two] = load_prompts(written(tmp_path, "p.tsv", PARTI)).records
    assert one["Category"] == "Outdoor Scenes" and two["Note"] == ""
    [one, two] = load_prompts(written(tmp_path, "m.json", META)).records
    assert (one["file"], one["tags"], two["file"]) == ("a/1.png", "x, y", "a/2.jpg")
    [one, two] = load_prompts(written(tmp_path, "t.json", RECORDS["lists by task"][1])).records
    assert (one["tag"], two["tag"]) == ("colors", "counting")
    [one, two] = load_prompts(written(tmp_path, "c.json", RECORDS["columns"][1])).records
    assert (one["id"], two["id"]) == (1, 2)
    [one] = load_prompts(written(tmp_path, "i.json", {"000": {"text": "a"}})).records
    assert one == {"id": "000", "text": "a", "prompt": "a"}


def test_an_object_a_line_is_read_under_either_ending(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    assert load_prompts(written(tmp_path, "p.json", lines)).texts == ["a", "b"]
    for text in (json.dumps(rows), json.dumps(rows, indent=1)):
        assert load_prompts(written(tmp_path, "p.jsonl", text)).texts == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.csv", "1,a cat\n2,a dog\n", "1: expected a column named prompt.*got '1', 'a cat'"),
        ("p.csv", "words\na cat\n", "got 'words'. Name the column"),
        ("p.csv", "a cat;Animals\na dog;Animals\n", "got 'a cat', 'Animals'"),
        ("p.csv", "id,words\n1,a\n2,b,c\n", "got 'id', 'words'"),
        ("p.csv", "Prompt,PROMPT\na,b\n", "got 'Prompt', 'PROMPT'"),
        ("p.csv", "negative_prompt,id\nugly,1\n", "got 'negative_prompt', 'id'"),
        ("p.tsv", "a cat\tAnimals\n", "got 'a cat', 'Animals'"),
        ("p.tsv", 'id\tprompt\n1\t"a cat\n2\n', "line 2: .*broken row"),
        ("p.json", {"prompt": "a"}, "expected a list .*got an object"),
        ("p.json", {"version": "1", "x": {"prompt": "a"}}, "expected a list .*got an object"),
        ("p.json", {"train": ["a"], "test": ["b"], "n": 3}, "expected a list .*got an object"),
        ("p.jsonl", '{"prompt": "a", "prompt": "b"}\n', "line 1: .*'prompt' stands twice"),
        ("p.jsonl", [{"words": "a"}], 'line 1: expected the key "prompt" .*caption'),
        ("p.jsonl", [{"tags": ["a"]}], "not empty"),
        ("p.jsonl", '{"prompt": "a", "n": 1e999}\n', "line 1: .*no finite number"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_one_message(
    tmp_path: Path, name: str, content: Any, says: str
) -> None:
    path = written(tmp_path, name, content)
    with pytest.raises(DataError, match=says) as caught:
        load_prompts(path)
    assert str(path) in str(caught.value)


UNREAD: dict[str, tuple[str, str, str]] = {
    "tilde": ("p.csv", "id~prompt\n1~a cat\n2~a dog\n", "'~' between.*line sep=~ above"),
    "caret": ("p.txt", "prompt^tag\na cat, wet^x\na dog^y\n", r"'\^' between.*line sep=\^ above"),
    "two letters": ("p.csv", "id::Prompt Text\n1::a cat\n", "'::' between.*Save the table again"),
    "three letters": ("p.txt", "id<|>prompt\n1<|>a cat\n", "'<.>' between.*Save the table again"),
    "Hive": ("p.csv", "id\x01prompt\n1\x01a cat\n", r"'.x01' between"),
    "a unit separator": ("p.tsv", "id\x1fprompt\n1\x1fa cat\n", r"'.x1f' between"),
    "a wide comma": ("p.csv", "编号，提示词\n1，一只猫\n", "'，' between"),
    "a colon": ("p.txt", "id:prompt\n1:a cat\n", "':' between"),
    "no header": ("p.csv", "1~a cat\n2~a dog\n", "'~' between.*into a .txt"),
    "fixed width": ("p.txt", "id   prompt\n1    a cat\n22   dog\n", "columns of fixed width.*CSV"),
    "fixed width, CSV": ("p.csv", "  id  text\n0  1   a cat\n", "columns of fixed width"),
    "Markdown": ("p.txt", "| id | prompt |\n|---|:---|\n| 1 | a cat |\n", "drawn for people"),
    "Markdown, CSV": ("p.csv", "| id | prompt |\n|---|---|\n| 1 | a cat |\n", "drawn for people"),
    "a database": ("p.txt", "+--+--+\n|id|text|\n+--+--+\n|1|a cat|\n", "drawn for people"),
    "tabs in a text": ("p.txt", "1\ta cat\n2\ta dog\n", "tabs between them and no header.*.tsv"),
    "tabs below commas": ("p.csv", "id,prompt\n1\ta cat, wet\n", "tabs below a header .*','"),
    "tabs below spaces": ("p.tsv", "id prompt\n1\ta cat\n", "expected a column named prompt"),
    "a line without its tab": ("p.tsv", "id\tprompt\n1\ta cat\n2  a dog\n", "line 3: expected 2"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNREAD)
def test_a_layout_that_is_not_read_is_no_list_of_prompts(tmp_path: Path, kind: str) -> None:
    """Each message says what separates columns that are read, and how to mend the file."""
    name, content, says = UNREAD[kind]
    path = written(tmp_path, name, content)
    with pytest.raises(DataError, match=says) as caught:
        load_prompts(path)
    assert f"{path}, line " in str(caught.value)


PROSE: dict[str, list[str]] = {
    "symbols": ["a ~ b", "c^d", "a cat #1", "text: hello", "50% off, $3"],
    "a colon in each": ["text: hello", "text: world"],
    "one line": ["id~prompt"],
    "words alone": ["text", "caption", "bird"],
    "columns elsewhere": ["prompt~tag", "a cat"],
    "two spaces": ["a  cat", "a  dog"],
    "a rule below a sentence": ["a cat", "-----", "a dog"],
    "a tab somewhere": ["a cat\tand a dog", "a cow"],
    "long lines of symbols": ["-" * 10**6 + "x", "".join(map(chr, range(0x2010, 0x2FFF))), "a"],
}


@pytest.mark.parametrize("kind", PROSE)
def test_symbols_of_prose_are_kept(tmp_path: Path, kind: str) -> None:
    lines = PROSE[kind]
    assert load_prompts(written(tmp_path, "p.txt", "\n".join(lines))).texts == lines


def test_a_separator_that_is_named_is_read(tmp_path: Path) -> None:
    """As the message about it says."""
    text = "sep=~\nid~prompt\n1~a cat, wet\n2~a dog\n"
    assert load_prompts(written(tmp_path, "p.csv", text)).texts == ["a cat, wet", "a dog"]


def test_names_of_columns() -> None:
    """The table's order decides; spelling does not."""
    for name in COLUMNS:
        spelt = [name, name.upper(), f" {name}", name.replace("_", " "), f"{name}s"]
        assert [prompt_name(["id", one]) for one in spelt] == spelt
    assert prompt_name(["tags", "Text", "Caption"]) == "Caption"
    assert prompt_name(["tag", "prompt_id", "negative_prompt", "prompt embeds"]) is None


def test_records_of_a_program_are_called_as_in_files() -> None:
    rows = [{"Prompts": "a cat"}, {"Text Prompt": "a dog", "n": 1}, "a cow"]
    assert given_prompts(rows, "mine").texts == ["a cat", "a dog", "a cow"]


def test_dpg_is_known_by_its_columns(tmp_path: Path) -> None:
    """Its rows are questions: two of them are one prompt."""
    head = "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,"
    rows = '0,"a red, wet sky",k,1,0,b,c,t,A sky?\n0,"a red, wet sky",k,2,1,b,c,t,Red?\n'
    file = written(tmp_path, "d.csv", f"{head}question_natural_language\n{rows}")
    [record] = load_prompts(file).records
    assert [question["parents"] for question in record["questions"]] == [[], [1]]
    assert load_prompts(f"dpg:{file}").records == [record]


def test_a_folder_with_a_prompt_a_file_is_one_list(tmp_path: Path) -> None:
    """As DPG-Bench has its prompts: 1,065 files would be as many tasks."""
    for name in ("partiprompts1", "COCO2"):
        written(tmp_path, f"{name}.txt", f"a picture of {name}\n")
    records = load_prompts(tmp_path).records
    assert [record["id"] for record in records] == ["COCO2", "partiprompts1"]
    assert not any("tag" in record for record in records)
    written(tmp_path, "more.txt", "one\ntwo\n")
    assert {record["tag"] for record in load_prompts(tmp_path).records} == {
        *("COCO2", "partiprompts1", "more")
    }


@pytest.mark.parametrize(
    "keys", [("Testpoints", "Testpoint Description"), ("考点", "考点对应描述")]
)
def test_unigenbench_in_both_languages(tmp_path: Path, keys: tuple[str, str]) -> None:
    cell = json.dumps(dict(zip(keys, (["风格"], ["水墨画"]), strict=True)), ensure_ascii=False)
    quoted = cell.replace('"', '""')
    ending = "en" if keys[0].isascii() else "zh"
    text = f'index,prompt_{ending},sub_dims_{ending}\n7,一只狐狸,"{quoted}"\n'
    [record] = load_prompts(f"unigenbench:{written(tmp_path, 'u.csv', text)}").records
    assert record["prompt"] == "一只狐狸" and record["index"] == "7"
    assert (record["testpoints"], record["descriptions"]) == (["风格"], ["水墨画"])
