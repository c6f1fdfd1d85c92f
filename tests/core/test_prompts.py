"""Prompt lists: what is read, what is refused, which prompts an iteration gets, what two lists
share, and the lists that are made by code."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights
from toykit import toy

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, DataError
from flowrl.core.prompt_lists import CLASSES, COCO_NAMES, COLORS, MADE, RELATIONS, all_texts
from flowrl.core.prompts import (
    OPPOSITE,
    Overlap,
    PromptSet,
    check_records,
    load_prompts,
    overlap,
    stream,
)
from flowrl.doctor.before_loading import look_at_prompts
from flowrl.runs.suite import run_suite
from flowrl.training.run import OverlapWarning, warn_of_overlap
from flowrl.training.trainer import Trainer
from rewards.ocr import ocr
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
        ('{"words": "a"}', ["line 1", 'expected the key "prompt"', "'words'"]),
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
    return stream(numbered(size), seed=seed, first=iteration * count, count=count)


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**63 - 1), st.integers(1, 4))
def test_every_prompt_once_per_epoch(size: int, count: int, seed: int, epochs: int) -> None:
    dealt: list[int] = []
    for n in range(-(-epochs * size // count)):
        dealt += deal(size, count, seed, n)
    for epoch in range(epochs):
        assert sorted(dealt[epoch * size : (epoch + 1) * size]) == list(range(size))


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
    dealt = [n for turn in range(6) for n in stream(prompts, first=6 * turn, **options)]
    assert ["aaaaaabbc"[n] for n in dealt] == list("abc") * 12
    times = Counter(dealt)
    assert [times[n] for n in range(9)] == [2] * 6 + [6, 6] + [12]
    # one value: as without balance
    same = PromptSet(texts, [{**record, "tag": "x"} for record in records], "n", "n.txt")
    assert stream(same, first=18, **options) == stream(same, seed=0, count=6, first=18)
    records[4] = {"prompt": "4"}
    with pytest.raises(DataError, match="prompt 5: train.balance is 'tag', so each record"):
        stream(prompts, first=0, **options)


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


def test_an_empty_list_deals_nothing() -> None:
    with pytest.raises(DataError, match="no prompts"):
        stream(numbered(0), seed=0, first=0, count=1)


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


ONE = ("train.prompts=1",)


def prompts(*texts: str) -> PromptSet:
    return PromptSet([*texts], [{"prompt": text} for text in texts], "some", "some.txt")


# held out, trained, and in which list the pair is
CASES = [
    ("a red square", "a red square", "same"),
    ("A red  square.", "a red square", "same"),
    ("a photo of a red square", "a red square", "paraphrased"),
    ("there is one red square", "a red square", "paraphrased"),
    ("a circle to the left of a square", "a circle left of a square", "paraphrased"),
    ("a circle left of a square", "a square right of a circle", "mirrored"),
    ("a photo of a cross above a square", "a square below a cross", "mirrored"),
    ("a circle left of a square", "a square left of a circle", None),
    ("a circle left of a square", "a circle right of a square", None),
    ("a red square", "a blue square", None),
    ("two squares", "a square", None),
]


@pytest.mark.parametrize(("held", "trained", "kind"), CASES)
def test_pairs_of_texts(held: str, trained: str, kind: str | None) -> None:
    found = overlap(prompts(held, "a dog"), prompts("a cat", trained))
    wanted = Overlap([], [], [])
    if kind is not None:
        getattr(wanted, kind).append((held, trained))
    assert found == wanted


def test_the_shipped_lists_by_a_second_count() -> None:
    """Pairs compared one by one, from the records' own fields."""
    test, train = (load_prompts(f"assets/shapes/{name}.jsonl") for name in ("test", "train"))

    def mirror(record: dict[str, Any]) -> list[Any]:
        first, second = record["include"]
        relation = OPPOSITE[second["position"][0]]
        turned = {**first, "position": [relation, 0]}
        return [{k: v for k, v in second.items() if k != "position"}, turned]

    def same_things(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> bool:
        return (
            one in ([*p] for p in itertools.permutations(two))
            if "position" not in str(one)
            else one == two
        )

    mirrored, paraphrased = 0, 0
    for held in test.records:
        if any(same_things(held["include"], other["include"]) for other in train.records):
            paraphrased += 1
        elif held["tag"] == "position":
            mirrored += mirror(held) in [other["include"] for other in train.records]
    found = overlap(test, train)
    assert not found.same
    assert (len(found.mirrored), len(found.paraphrased)) == (mirrored, paraphrased)
    page = Path(__file__).resolve().parents[2] / "docs" / "shapes.md"
    said = f"{paraphrased} of its {len(test)} prompts ask for what a training prompt asks for"
    assert said in " ".join(page.read_text(encoding="utf-8").split())
    assert f"{mirrored} mirror" in " ".join(page.read_text(encoding="utf-8").split())


def test_a_run_says_so(tmp_path: Path) -> None:
    """One file for both lists: every prompt is known, and a warning says it once."""
    config = toy(tmp_path)
    same = toy(tmp_path, f"prompts.test={config.prompts.train}")
    count = len(load_prompts(config.prompts.train))
    with pytest.warns(UserWarning, match=f"{count} of {count} are training prompts too"):
        Trainer(same)


def written(file: Path, *rows: dict[str, Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


TRAINED = {"prompt": "a circle left of a square"}
KINDS = [
    (
        {"prompt": "a circle to the left of a square"},
        "1 of 1 ask for what a training prompt asks for in other words",
    ),
    ({"prompt": "a square right of a circle"}, "1 of 1 mirror a training prompt's relation"),
    ({"prompt": "A circle left of a square."}, "1 of 1 are training prompts too"),
    ({**TRAINED, "held_out": False}, "1 of 1 are training prompts too"),
]


@pytest.mark.parametrize(("held", "said"), KINDS)
def test_a_run_names_each_kind_by_itself(tmp_path: Path, held: dict[str, Any], said: str) -> None:
    """Also where no text is in both lists."""
    train = written(tmp_path / "known.jsonl", TRAINED)
    test = written(tmp_path / "held.jsonl", held)
    with pytest.warns(OverlapWarning, match=f"of the held-out prompts, {said}: "):
        Trainer(toy(tmp_path, f"prompts.train={train}", f"prompts.test={test}", *ONE))


@pytest.mark.parametrize("text", ["a circle to the left of a square", "a square right of a circle"])
def test_a_list_may_say_that_training_knows_what_it_asks_for(tmp_path: Path, text: str) -> None:
    """As the shapes lists do: of their four single shapes all wordings are known."""
    train = written(tmp_path / "known.jsonl", TRAINED)
    test = written(tmp_path / "held.jsonl", {"prompt": text, "held_out": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error", OverlapWarning)
        Trainer(toy(tmp_path, f"prompts.train={train}", f"prompts.test={test}", *ONE))
        config = load_config("shapes/flow_grpo")
        warn_of_overlap(load_prompts(config.prompts.train), load_prompts(config.prompts.test))


def test_prompts_that_start_from_other_things_are_others() -> None:
    """One of two equal texts has the same start in both lists, and one reworded text."""
    trained = prompts("make it red", "make it blue", "make the one blue")
    held = prompts("make it red", "make it blue", "make the one a blue")
    found = overlap(held, trained, (["a", "b", "c"], ["a", "c", "c"]))
    assert found.same == [("make it red", "make it red")]
    assert found.paraphrased == [("make the one a blue", "make the one blue")]


def test_a_column_of_a_csv_file_may_be_named_include(tmp_path: Path) -> None:
    """It is a text: prompts are compared by their words, in a run, the doctor and a suite."""
    (tmp_path / "known.csv").write_text("prompt,include,exclude\na red dot,circle,\na cat,x,y\n")
    (tmp_path / "held.csv").write_text("prompt,include\na photo of a red dot,square\na dog,x\n")
    lists = [f"prompts.train={tmp_path}/known.csv", f"prompts.test={tmp_path}/held.csv"]
    found = overlap(load_prompts(tmp_path / "held.csv"), load_prompts(tmp_path / "known.csv"))
    assert found == Overlap([], [], [("a photo of a red dot", "a red dot")])
    config = toy(tmp_path, *lists)
    said = "1 of 2 ask for what a training prompt asks for in other words"
    assert any(said in line for line in look_at_prompts(config).lines)
    with pytest.warns(OverlapWarning, match=said):
        Trainer(config).step()
    report = run_suite(config.call("model")(), config, "toy", tmp_path / "suite", target="toy")
    assert report["tasks"]["all"]["images"] == 4


SIZES = {"single_object": 80, "two_object": 99, "counting": 80}
SIZES |= {"colors": 94, "position": 100, "color_attr": 100}
"""Of evaluation_metadata.jsonl in djghosh13/geneval, counted."""


def test_the_classes_are_cocos_in_cocos_order() -> None:
    """torchvision's list has COCO's 91 places; some hold no class."""
    known = MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    wanted = [name for name in known if name not in ("__background__", "N/A")]
    assert [COCO_NAMES.get(name, name) for name in CLASSES] == wanted


def test_the_test_list_has_genevals_numbers() -> None:
    found = load_prompts("geneval/test")
    assert len(found) == 553 == len(set(found.texts)) and found.name == "geneval-test"
    assert Counter(record["tag"] for record in found.records) == SIZES
    assert found.places[2] == "geneval/test, prompt 3"


@pytest.mark.parametrize("name", ["geneval/test", "geneval/train"])
def test_each_record_says_what_its_prompt_says(name: str) -> None:
    """Read back: classes, colours, relation and number stand in the prompt, in this order."""
    numbers = {"two": 2, "three": 3, "four": 4}
    for record in load_prompts(name).records:
        include, text = record["include"], record["prompt"].removeprefix("a photo of ")
        assert all(entry["class"] in CLASSES and entry["count"] > 0 for entry in include)
        if record["tag"] == "counting":
            (entry,), (excluded,) = include, record["exclude"]
            assert numbers[text.split()[0]] == entry["count"] == excluded["count"] - 1
            assert excluded["class"] == entry["class"]
            continue
        assert "exclude" not in record
        # the first entry of a relation is what the other is left of
        said = include[::-1] if record["tag"] == "position" else include
        names = [f"{entry.get('color', '')} {entry['class']}".strip() for entry in said]
        link = include[1]["position"][0] if record["tag"] == "position" else "and"
        article = r"(?:an?|a pair of) "
        assert re.fullmatch(f" {link} ".join(article + re.escape(n) for n in names), text), text
        assert all(entry.get("color", "red") in COLORS for entry in include)
        assert link in (*RELATIONS, "and")


def parts(record: dict[str, Any]) -> set[Any]:
    """What a record combines, written down for the second time: by its tag."""
    include, tag = record["include"], record["tag"]
    if tag in ("colors", "color_attr"):
        return {(entry["class"], entry["color"]) for entry in include}
    if tag == "counting":
        return {(include[0]["class"], include[0]["count"])}
    return {frozenset(entry["class"] for entry in include)} if len(include) == 2 else set()


def test_training_shares_no_combination_with_the_test() -> None:
    test, train = load_prompts("geneval/test"), load_prompts("geneval/train")
    known = set().union(*(parts(record) for record in test.records))
    assert not [record for record in train.records if known & parts(record)]
    # 80 pairs of 240 are counting's, 294 coloured classes at most, 199 pairs of classes
    assert len(known) > 500
    assert overlap(test, train) == ([], [], [])


def test_training_has_the_tasks_in_its_shares() -> None:
    """7, 5, 3, 1 and 1 of 17; a counting prompt ten times, the others once."""
    train = load_prompts("geneval/train")
    shares = {"position": 7, "counting": 5, "color_attr": 3, "colors": 1, "two_object": 1}
    counted = Counter(record["tag"] for record in train.records)
    assert counted == {tag: 320 * share for tag, share in shares.items()}
    often = Counter(zip(train.texts, (r["tag"] for r in train.records), strict=True))
    wanted = {(tag, 10 if tag == "counting" else 1) for tag in shares}
    assert {(tag, times) for (_, tag), times in often.items()} == wanted
    # mixed: any hundred have all tasks
    assert len({record["tag"] for record in train.records[:100]}) == 5


def test_ocr_lists_share_no_text() -> None:
    """By the target that the reward reads off the prompt."""
    test, train = load_prompts("ocr/test"), load_prompts("ocr/train")
    reward, held = ocr(), {record["target"].lower() for record in test.records}
    for listed in (test, train):
        assert len(set(listed.texts)) == len(listed)
        for record, where in zip(listed.records, listed.places, strict=True):
            reward.check_record(record, where)
            assert record["prompt"].count('"') == 2 and f'"{record["target"]}"' in record["prompt"]
    assert len(held) == 1000 == len(test) and len(train) > 5000
    assert held.isdisjoint(record["target"].lower() for record in train.records)
    assert overlap(test, train) == ([], [], [])
    assert len({text.lower().replace(" ", "") for text in all_texts()}) == len(all_texts())


def test_motion_lists_share_no_pair() -> None:
    """Of who and what; 212 pairs in all, 100 of them to test, the others in six places each."""
    test, train = load_prompts("motion/test"), load_prompts("motion/train")
    held, seen = (set(map(itemgetter("who", "what"), one.records)) for one in (test, train))
    assert (len(test), len(held), len(train), len(seen)) == (100, 100, 6 * 108, 108)
    assert held.isdisjoint(seen) and len(set(train.texts)) == len(train)
    assert overlap(test, train) == ([], [], [])


def test_a_list_is_the_callers_own_and_always_the_same() -> None:
    first = load_prompts("ocr/test")
    first.records[0]["prompt"] = "changed"
    assert load_prompts("ocr/test").records[0]["prompt"] == first.texts[0]
    # recorded when the list was made: a run's prompts must not change with a library's version
    assert load_prompts("geneval/test").texts[80] == "a photo of a backpack and a pair of scissors"


def test_leaks_are_found() -> None:
    """One prompt of the test list in the training list, its mirror image, and a text in another
    place."""
    test = load_prompts("geneval/test")
    place = next(i for i, r in enumerate(test.records) if r["tag"] == "position")
    first, second = test.records[place]["include"]
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    turned = {**first, "position": [opposite[second["position"][0]], 0]}
    bare = {"class": second["class"], "count": 1}
    mirrored = {"prompt": "mirrored", "include": [bare, turned]}
    rows = [test.records[0], mirrored]
    leaky = PromptSet([row["prompt"] for row in rows], rows, "leaky", "leaky")
    found = overlap(test, leaky)
    assert found.same == [(test.texts[0], test.texts[0])]
    assert found.mirrored == [(test.texts[place], "mirrored")] and not found.paraphrased
    # a text to be written
    rows = [{"prompt": 'a cup that says "ONE  way"'}, {"prompt": 'a door with "One Way" on it'}]
    sides = [PromptSet([row["prompt"]], [row], "side", "side") for row in rows]
    assert overlap(sides[0], sides[1]).paraphrased == [(rows[0]["prompt"], rows[1]["prompt"])]


@pytest.mark.parametrize(
    ("name", "nearest"), [("geneval/tset", "geneval/test"), ("ocr", "ocr/"), ("gneval/train", "")]
)
def test_an_unknown_list_names_those_that_are_there(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_prompts(name)
    assert all(made in str(caught.value) for made in MADE) and nearest in str(caught.value)


@pytest.mark.parametrize(
    "position", [["left of", 1], ["left of", 0, 1], "left of", [0, 0], ["left of", -1], None]
)
def test_a_relation_to_nothing_names_file_and_line(tmp_path: Path, position: Any) -> None:
    """An entry can stand in relation to an earlier one only: GenEval's code fails with an
    IndexError at any other."""
    good = {"class": "cat", "count": 1}
    row: dict[str, Any] = {"prompt": "a cat", "include": [good, {**good, "position": position}]}
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps({"prompt": "a dog"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(
        DataError, match=r"bad.jsonl, line 2, include, entry 2: expected .*position"
    ):
        load_prompts(file)
    row["include"][1]["position"] = ["left of", 0]
    file.write_text(json.dumps(row) + "\n")
    assert load_prompts(file).records == [row]
