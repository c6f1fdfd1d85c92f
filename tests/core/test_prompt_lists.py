"""The lists that are made by code: GenEval's structure, held to its published numbers and to COCO's
names in torchvision; and nothing is in both of two lists."""

from __future__ import annotations

import json
import re
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.prompt_lists import MADE
from flowrl.core.prompt_lists.geneval import CLASSES, COCO_NAMES, COLORS, RELATIONS
from flowrl.core.prompt_lists.ocr import all_texts
from flowrl.core.prompts import PromptSet, load_prompts, overlap
from rewards.ocr import ocr

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
    for given in (test, train):
        assert len(set(given.texts)) == len(given)
        for record, where in zip(given.records, given.places, strict=True):
            reward.check_record(record, where)
            assert record["prompt"].count('"') == 2 and f'"{record["target"]}"' in record["prompt"]
    assert len(held) == 1000 == len(test) and len(train) > 5000
    assert held.isdisjoint(record["target"].lower() for record in train.records)
    assert overlap(test, train) == ([], [], [])
    assert len({text.lower().replace(" ", "") for text in all_texts()}) == len(all_texts())


def test_motion_lists_share_no_pair() -> None:
    """Of who and what; 212 pairs in all, 100 of them to test, the others in six places each."""
    test, train = load_prompts("motion/test"), load_prompts("motion/train")
    held, seen = (set(map(itemgetter("who", "what"), given.records)) for given in (test, train))
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
