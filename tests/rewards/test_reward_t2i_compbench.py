"""T2I-CompBench: its rule of places on published fixtures, its prompts' words, BLIP held to
transformers' own generation, and a suite with random networks of the real classes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from clipkit import pil, random_images
from runkit import rows
from toykit import toy
from transformers import BlipForQuestionAnswering
from weightkit import Weights

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.prompts import load_prompts
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.catalogue import overrides_of
from flowrl.evaluation.suites.geneval.objects import DetectedObject
from flowrl.runs.suite import run_suite
from rewards._common.pixels import normalise, squash
from rewards.t2i_compbench import t2i_compbench
from rewards.t2i_compbench.blip_vqa import BlipVqa
from rewards.t2i_compbench.places import holds, place_score, twin_score
from rewards.t2i_compbench.words import Plain, Spacy, asked_phrases, relation_of

CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "who": "test"}
BOX = (0.0, 0.0, 100.0, 100.0)


def at(x: float, y: float) -> tuple[float, float, float, float]:
    """Move BOX."""
    return (x, y, x + 100, y + 100)


@pytest.mark.parametrize(
    ("kind", "other", "expected"),
    [
        ("left", at(200, 50), 1.0),
        ("left", at(50, 0), 0.3),  # IoU 1/3
        ("left", at(-200, 0), 0.0),
        ("left", at(200, 200), 0.0),  # exactly diagonal
        ("right", at(-200, 0), 1.0),
        ("top", at(0, 200), 1.0),
        ("top", at(0, -200), 0.0),
        ("bottom", at(0, -200), 1.0),
        ("beside", at(400, 300), 0.375),
        ("beside", at(400, 149), 1.0),
        ("", at(0, 200), 0.0),
    ],
)
def test_places_are_scored_as_published(kind: str, other: Any, expected: float) -> None:
    """The reference's fixtures of the published function."""
    assert holds(kind, BOX, other) == pytest.approx(expected)


def test_half_of_a_score_is_the_place() -> None:
    """By hand: a quarter of each confidence and half of the rule, in pixels of the published 479;
    below a half nothing."""
    first, second = [DetectedObject((0, 0, 20, 20), 0.8)], [DetectedObject((60, 0, 80, 20), 0.6)]
    assert place_score("left", first, second, (100, 100)) == pytest.approx(0.2 + 0.15 + 0.5)
    assert place_score("right", first, second, (100, 100)) == 0.0
    assert place_score("left", first, [], (100, 100)) == 0.0
    # 60 of 100 pixels are 287 of 479, and 40 of 640 x 480 are 30 of 480
    beside = place_score("beside", first, [DetectedObject((60, 60, 80, 80), 0.6)], (100, 100))
    assert beside == pytest.approx(0.35 + 0.5 * 150 / (60 * 4.79))
    assert place_score("beside", first, [DetectedObject((40, 40, 60, 60), 0.6)], (640, 480)) > 0.84


def test_two_of_one_class_are_two_objects() -> None:
    """By hand, as above: the best ordered pair of different ones; one alone is a quarter, below a
    half, so nothing. Published code compares the most confident one with itself."""
    left, right = DetectedObject((0, 0, 20, 20), 0.8), DetectedObject((60, 0, 80, 20), 0.6)
    score, pair = twin_score("left", [left, right], (100, 100))
    assert score == pytest.approx(0.2 + 0.15 + 0.5) and pair == [[left], [right]]
    assert twin_score("right", [left, right], (100, 100))[1] == [[right], [left]]
    assert twin_score("left", [left], (100, 100)) == (0.0, [[left], []])
    assert place_score("beside", [left], [left], (100, 100)) > 0.85  # what it would be


def test_noun_phrases() -> None:
    """Read by hand, in the forms of the benchmark's templates."""
    plain = Plain()
    for prompt, expected in {
        "a red car and a green boat": ["a red car", "a green boat"],
        "rubber boots and fluffy rugs": ["rubber boots", "fluffy rugs"],
        "A tall, narrow black and white clock.": ["A tall, narrow black and white clock"],
        "The oval mug was on top of the oak table.": ["The oval mug", "top", "the oak table"],
        "The wool coat and metallic hook hold the wooden bag by the glass window.": [
            "The wool coat",
            "metallic hook",
            "the wooden bag",
            "the glass window",
        ],
        "the spotted dog slowly walked across a square carpet": [
            "the spotted dog",
            "a square carpet",
        ],
        "the brave knight sat": ["the brave knight"],
    }.items():
        assert plain.phrases(prompt) == expected
    assert asked_phrases(plain, "The oval mug was on top of the oak table.") == [
        "The oval mug",
        "the oak table",
    ]
    assert len(asked_phrases(plain, "a cup, " * 12)) == 8


def test_relations_and_the_slips_of_published_code() -> None:
    """ "on top of" is in its list but never holds; the first of its list wins, even inside of a
    word; a prompt without any of them is worth 0."""
    plain: dict[str, Any] = {"listed": False, "top_fails": False}
    slips: dict[str, Any] = {"listed": True, "top_fails": True}

    def read(prompt: str, how: dict[str, Any]) -> Any:
        found = relation_of(Plain(), prompt, **how)
        return tuple(found) if found else None

    assert read("a cow on the left of a desk", plain) == ("left", "cow", "desk")
    assert read("a cow on the left of a desk", slips) == ("left", "cow", "desk")
    assert read("The red mug is on top of the oak table.", plain) == ("top", "mug", "table")
    assert read("The red mug is on top of the oak table.", slips) == ("", "mug", "table")
    two = "a cow on the top of a desk near a lamp"
    assert read(two, plain) == ("top", "cow", "desk")
    assert read(two, slips) == ("beside", "desk", "lamp")
    assert read("a nearby cow", plain) is None and read("a cow above a desk", slips) is None


def test_spacy_reads_as_its_pipeline_does(tmp_path: Path) -> None:
    """A pipeline that was taught one sentence, with its library; none at all is an error."""
    with pytest.raises(ConfigError, match="parser: spacy.*spacy download nothing-here.*plain"):
        Spacy("nothing-here", "test")
    spacy = pytest.importorskip("spacy")
    from spacy.training import Example

    nlp = spacy.blank("en")
    nlp.add_pipe("morphologizer")
    nlp.add_pipe("parser", config={"min_action_freq": 1})
    text = "a red cow near the desk"
    told = {
        "pos": ["DET", "ADJ", "NOUN", "ADP", "DET", "NOUN"],
        "heads": [2, 2, 2, 2, 5, 3],
        "deps": ["det", "amod", "ROOT", "prep", "det", "pobj"],
    }
    example = Example.from_dict(nlp.make_doc(text), told)
    learn = nlp.initialize(lambda: [example])
    for _ in range(30):
        nlp.update([example], sgd=learn)
    nlp.to_disk(tmp_path / "own")
    own = Spacy(str(tmp_path / "own"), "test")
    assert own.phrases(text) == ["a red cow", "the desk"]
    assert (
        own.things(text, "near") == ("cow", "desk") and own.plainly(text) == "a cow near the desk"
    )


def test_answers_are_those_of_transformers_generation(weights: Weights) -> None:
    """The first token that the library's own `generate` would choose: the softmax of its logits for
    yes and no; alone and in company of longer questions."""
    path = weights.t2i_compbench["vqa"]
    mine = BlipVqa(path, size=48, **CPU)
    theirs = BlipForQuestionAnswering.from_pretrained(path).eval()
    images = [pil(image) for image in random_images(2, 60, 80)]
    asked = [["A red car?", 'the "big", green boat (of wood)?'], ["a cat?"]]
    answers = mine(images, asked)
    clean = [["a red car?", "the big, green boat of wood?"], ["a cat?"]]
    assert [len(row) for row in answers] == [2, 1] and len({*answers[0], *answers[1]}) == 3
    for image, texts, found in zip(images, clean, answers, strict=True):
        for text, value in zip(texts, found, strict=True):
            ids = mine.tokens(text, return_tensors="pt")["input_ids"]
            ids[:, 0] = mine.begin + 1  # [ENC]
            said = theirs.generate(
                input_ids=ids,
                pixel_values=normalise(squash(image, 48)[None]),
                interpolate_pos_encoding=True,
                max_new_tokens=1,
                min_length=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
            yes, no = said.logits[0][0, mine.answers].tolist()
            assert value == pytest.approx(1 / (1 + math.exp(no - yes)), abs=1e-5)


def batch(records: list[dict[str, Any]]) -> RewardBatch:
    count = len(records)
    prompts = [record["prompt"] for record in records]
    images = random_images(count, 80, 100)
    return RewardBatch(images, prompts, torch.arange(count), records, torch.zeros(count))


def test_parts_are_averaged_and_told(weights: Weights) -> None:
    reward = t2i_compbench(**weights.t2i_compbench)
    prompt = "The red cat is next to the blue dog."
    records = [{"prompt": prompt, "parts": ["attribute", "spatial", "action"]}]
    records.append({"prompt": "a red cat above a dog", "parts": ["attribute", "spatial"]})
    scores, told = reward.explain(batch(records))
    assert told[0]["asked"] == ["The red cat", "the blue dog"]
    assert told[0]["attribute"] == pytest.approx(math.prod(told[0]["answers"]))
    assert told[0]["relation"] == ["beside", "cat", "dog"]
    every = [told[0][part] for part in ("attribute", "spatial", "action")]
    assert scores[0].item() == pytest.approx(sum(every) / 3, abs=1e-6)
    # no phrase that can be read: the other part alone, or with the slip a 0
    assert told[1]["spatial"] is None and scores[1].item() == pytest.approx(told[1]["attribute"])
    slip = t2i_compbench(**weights.t2i_compbench, unread_relation_is_zero=True)
    assert slip(batch(records))[1].item() == pytest.approx(told[1]["attribute"] / 2)


def write(folder: Path) -> Path:
    """Write prompts of our own in the benchmark's layout."""
    folder.mkdir()
    mixed = ["The red mug is on the left of the oak table.", "A tall man reads a thin book."]
    mixed.append("The shy cat watches the loud dog near the round bowl.")
    for name, lines in {
        "color_val": ["a red car and a green boat"],
        "spatial_val": ["a cow near a desk"],
        "non_spatial_val": ["A man is reading."],
        "complex_val": mixed,
        "complex_val_spatial": mixed[:1],
        "complex_val_action": [mixed[1].upper()],
        "numeracy_val": ["four cats"],
    }.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_a_suite_of_random_networks(weights: Weights, tmp_path: Path) -> None:
    """From the benchmark's layout to a score by category, and a line that says what was found."""
    folder = write(tmp_path / "dataset")
    prompts = load_prompts(f"t2i-compbench:{folder}")
    parts = [(record["tag"], record["parts"]) for record in prompts.records]
    assert parts[:3] == [
        ("color", ["attribute"]),
        ("spatial", ["spatial"]),
        ("non_spatial", ["action"]),
    ]
    assert [mine for _, mine in parts[3:]] == [
        ["attribute", "spatial"],
        ["attribute", "action"],
        ["attribute", "spatial", "action"],
    ]
    given = overrides_of("t2i-compbench", str(folder))
    given += [
        f"rewards.t2i_compbench.{key}={value}" for key, value in weights.t2i_compbench.items()
    ]
    config = toy(tmp_path / "toy", *given, "eval.images=1")
    report = run_suite(
        config.call("model")(), config, "t2i-compbench", tmp_path / "out", target="toy"
    )
    assert set(report["tasks"]) == {"color", "spatial", "non_spatial", "complex"}
    lines = rows(tmp_path / "out" / "t2i_compbench.jsonl")
    assert len(lines) == 6 and lines[0]["asked"] == ["a red car", "a green boat"]
    assert report["setting"]["rewards"]["t2i_compbench"]["parser"] == "plain"


def test_what_cannot_be_judged_is_said_first(weights: Weights, tmp_path: Path) -> None:
    folder = write(tmp_path / "dataset")
    (folder / "complex_val_action.txt").unlink()
    for path, told in {
        str(folder): r"complex_val.txt: expected complex_val_action.txt beside it",
        str(folder / "numeracy_val.txt"): "numeracy.*not judged here",
        str(tmp_path): "color_val.txt",
        "hub:a/b/complex_val": "another category than complex",
    }.items():
        with pytest.raises(DataError, match=told):
            load_prompts(f"t2i-compbench:{path}")
    boxes = t2i_compbench(detector="mask2former", path=weights.geneval["path"])
    odd: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "a cow"}, 'expected "parts"'),
        ({"prompt": "a cow", "parts": ["taste"]}, 'expected "parts"'),
        ({"prompt": "a cow above a desk", "parts": ["spatial"]}, "no relation of two things"),
        (
            {"prompt": "a frog near a dog", "parts": ["spatial"]},
            "the detector knows no class 'frog'.*owl",
        ),
        ({"prompt": "of and or", "parts": ["attribute"]}, "no noun phrase"),
        ({"prompt": "x", "parts": ["spatial"], "objects": ["cow"]}, "expected two texts"),
    ]
    for record, told in odd:
        with pytest.raises(DataError, match=f"file, line 3: {told}"):
            boxes.check_record(record, "file, line 3")
    with pytest.raises(ModelError, match="BlipForQuestionAnswering"):
        reward = t2i_compbench(vqa=str(tmp_path))
        reward.check_record({"prompt": "a cow", "parts": ["attribute"]}, "here")
        reward.probe()
    wrong: dict[str, Any]
    for wrong in ({"detector": "eyes"}, {"parser": "nltk"}, {"threshold": 1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            t2i_compbench(**wrong)
    with pytest.raises(ConfigError, match="multiple of 16"):
        BlipVqa(weights.t2i_compbench["vqa"], size=50, **CPU)
    config = load_config("shapes/awm", overrides_of("t2i-compbench", "t2i-compbench/color"))
    assert config.prompts.test == "t2i-compbench/color" and config.eval.images == 10
    assert json.dumps(config.rewards["t2i_compbench"].to_dict())
