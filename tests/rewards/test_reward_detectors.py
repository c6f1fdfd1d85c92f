"""Rewards that look for things: GenEval and T2I-CompBench on real detector classes with random
weights, held to transformers' and open_clip's own results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from clipkit import clip_tokenizer, pil, random_images
from PIL import Image
from runkit import rows
from tinyscorers import tiny_grounding_dino, tiny_mask2former, tiny_owl
from torch import Tensor
from torch.nn.functional import interpolate, normalize
from toykit import toy
from transformers import BlipForQuestionAnswering, Mask2FormerImageProcessor, pipeline
from weightkit import Weights

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.prompt_lists import CLASSES, COLORS
from flowrl.core.prompts import load_prompts
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.catalogue import overrides_of
from flowrl.evaluation.suites.geneval.objects import DetectedObject
from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from flowrl.runs.suite import run_suite
from rewards._backbones.clip import OpenClip
from rewards._common.pixels import normalise, shortest, squash
from rewards._detectors.networks import Mask2Former, ZeroShot, instances, top_classes
from rewards.geneval import geneval
from rewards.geneval.reward import ClipColors, crop
from rewards.t2i_compbench import t2i_compbench
from rewards.t2i_compbench.blip_vqa import BlipVqa
from rewards.t2i_compbench.reward import holds, place_score, twin_score
from rewards.t2i_compbench.words import Plain, Spacy, asked_phrases, relation_of

CPU = torch.device("cpu")
SEE: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "who": "test"}


def pils(count: int, height: int = 80, width: int = 100) -> list[Image.Image]:
    return [pil(image) for image in random_images(count, height, width)]


def asked(records: list[dict[str, Any]], images: Tensor | None = None) -> RewardBatch:
    count = len(records)
    prompts = [record["prompt"] for record in records]
    shown = random_images(count, 80, 100) if images is None else images
    return RewardBatch(shown, prompts, torch.arange(count), records, torch.zeros(count))


def test_instances_are_those_of_transformers() -> None:
    """Its post-processing works at 384 x 384, so masks of that size go through both."""
    g = torch.Generator().manual_seed(0)
    classes = 3 * torch.randn(2, 30, 81, generator=g)
    rough = torch.randn(2, 30, 12, 12, generator=g)
    masks = interpolate(4 * rough - 2, (384, 384), mode="bilinear")
    said = type("Said", (), {"class_queries_logits": classes, "masks_queries_logits": masks})
    theirs = Mask2FormerImageProcessor().post_process_instance_segmentation(
        said, threshold=0.02, return_binary_maps=True
    )
    names = [str(number) for number in range(80)]
    for row, expected in enumerate(theirs):
        chosen, share, query = top_classes(classes[row], 0.02)
        found = instances(masks[row][query], share, chosen, names, 0.02)
        segments = expected["segments_info"]
        # transformers looks at as many candidates as there are queries, this at 100
        assert len(segments) > 10 and sum(map(len, found.values())) >= len(segments)
        for place, segment in enumerate(segments):
            mask = expected["segmentation"][place].numpy() > 0
            alike = [
                one
                for one in found[names[segment["label_id"]]]
                if abs(one.score - segment["score"]) < 1e-5 and bool((one.mask == mask).all())
            ]
            assert len(alike) == 1
            one = alike[0]
            rows, columns = np.nonzero(mask)
            edges = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            assert one.box == edges


def test_mask2former_finds_things_on_images(tmp_path: Path) -> None:
    """The same alone and together; only what is above the floor; its labels are GenEval's names."""
    detector = Mask2Former(str(tiny_mask2former(tmp_path)), **SEE)
    images = pils(3)
    assert detector.classes == frozenset(CLASSES) and detector.names == [*CLASSES]
    together = detector(images, [[]] * 3, 0.1)
    for image, found in zip(images, together, strict=True):
        (alone,) = detector([image], [[]], 0.1)
        assert alone.keys() == found.keys()
        for name, some in found.items():
            assert len(alone[name]) == len(some), name
        for one in [one for some in found.values() for one in some]:
            assert one.score > 0.1 and one.mask is not None and one.mask.shape == (80, 100)
    assert sum(map(len, together)) > 3
    assert all(not found for found in detector(images, [[]] * 3, 0.999))


def test_padding_is_no_part_of_an_image(tmp_path: Path) -> None:
    """With a mask that covers the left half of what is valid, the box is the image's left half."""
    detector = Mask2Former(str(tiny_mask2former(tmp_path)), **SEE)
    detector.images = Mask2FormerImageProcessor(size={"shortest_edge": 64, "longest_edge": 128})

    class Halves(torch.nn.Module):
        def forward(self, pixel_values: Any, pixel_mask: Any) -> Any:
            masks = torch.full((len(pixel_values), 1, *pixel_values.shape[-2:]), -9.0)
            for row, valid in enumerate(pixel_mask):
                height, width = int(valid.any(1).sum()), int(valid.any(0).sum())
                masks[row, :, :height, : width // 2] = 9.0
            classes = torch.full((len(pixel_values), 1, 81), -9.0)
            classes[..., 0] = 9.0
            said = {"class_queries_logits": classes, "masks_queries_logits": masks}
            return type("Said", (), said)

    detector.network = Halves()
    images = [Image.new("RGB", (100, 50)), Image.new("RGB", (50, 100))]
    for image, found in zip(images, detector(images, [[]] * 2, 0.3), strict=True):
        (one,) = found["person"]
        assert one.box == pytest.approx((0, 0, image.width / 2, image.height), abs=1)


@pytest.mark.parametrize(("kind", "template"), [("owl", "a photo of a {}"), ("dino", "{}.")])
def test_open_vocabulary_boxes_are_those_of_the_pipeline(
    tmp_path: Path, kind: str, template: str
) -> None:
    """transformers' pipeline, asked for one class of one image at a time; it rounds boxes down."""
    if kind == "owl":
        folder = tiny_owl(tmp_path / "owl", clip_tokenizer())
    else:
        folder = tiny_grounding_dino(tmp_path / "dino")
    detector = ZeroShot(str(folder), template=template, **SEE)
    images = pils(2, 64, 64)
    wanted = [["cat", "tennis racket"], ["cow"]]
    found = detector(images, wanted, 0.1)
    theirs = pipeline("zero-shot-object-detection", str(folder), device="cpu")
    for image, names, objects in zip(images, wanted, found, strict=True):
        assert set(objects) <= set(names)
        for name in names:
            expected = theirs(image, candidate_labels=[template.format(name)], threshold=0.1)
            scores = sorted((row["score"] for row in expected), reverse=True)
            mine = objects.get(name, [])
            assert [one.score for one in mine] == pytest.approx(scores, abs=1e-4)
            boxes = [[*row["box"].values()] for row in expected]
            order = sorted(range(len(boxes)), key=lambda i: -expected[i]["score"])
            for one, place in zip(mine, order, strict=True):
                assert one.box == pytest.approx(np.clip(boxes[place], 0, 64), abs=1.01)
    assert sum(map(len, found)) > 0 and detector(images, [[], []], 0.1) == [{}, {}]


def test_colours_are_those_of_open_clips_classifier(weights: Weights) -> None:
    """open_clip's own zero-shot classifier, on crops that were cut by hand."""
    tiny = weights.clip
    towers = OpenClip(str(tiny.file), tiny.architecture, prepare=shortest, **SEE)
    reader = ClipColors(towers, batch=4)
    templates = [
        lambda c: f"a photo of a {c} hot dog",
        lambda c: f"a photo of a {c}-colored hot dog",
        lambda c: f"a photo of a {c} object",
    ]
    tokens = open_clip.get_tokenizer(tiny.architecture)
    theirs = open_clip.build_zero_shot_classifier(
        tiny.model, tokens, COLORS, templates, num_classes_per_batch=None
    )
    torch.testing.assert_close(reader.directions("hot dog"), theirs.T, atol=1e-5, rtol=0)
    # a mask in the middle of the box
    image, mask = pils(1, 60, 60)[0], np.zeros((60, 60), bool)
    mask[10:30, 10:30] = True
    found = [
        DetectedObject((5, 5, 35, 40), 0.9, mask),
        DetectedObject((20, 0, 60, 60), 0.8),
        DetectedObject((0, 0, 1, 1), 0.7),
    ]
    pixels = np.asarray(image).copy()
    pixels[~mask] = 0x99
    by_hand = [Image.fromarray(pixels).crop((5, 5, 35, 40)), image.crop((20, 0, 60, 60))]
    by_hand.append(image.crop((0, 0, 1, 1)))
    for one, cut in zip(found, by_hand, strict=True):
        assert np.array_equal(np.asarray(crop(image, one)), np.asarray(cut))
    with torch.no_grad():
        seen = normalize(towers.see(by_hand), dim=-1)
    expected = [COLORS[i] for i in (seen @ theirs).argmax(-1).tolist()]
    assert reader(image, "hot dog", found) == expected


def test_a_box_at_the_edge_still_has_a_pixel() -> None:
    image = Image.new("RGB", (20, 10))
    assert crop(image, DetectedObject((20, 10, 20, 10), 0.5)).size == (1, 1)


def test_verdict_and_lines_with_a_random_detector(weights: Weights) -> None:
    """What the lines say was found is what the verdict counts, and only that."""
    reward = geneval(**weights.geneval, threshold=0.2)
    names = ["book", "vase", "cat"]
    records = [
        {"prompt": name, "tag": "single_object", "include": [{"class": name, "count": 1}]}
        for name in names
    ]
    scores, rows = reward.explain(asked(records))
    for score, row, name in zip(scores.tolist(), rows, names, strict=True):
        found = json.loads(row["details"])
        assert score == row["score"] == float(row["correct"]) == float(name in found)
        assert all(box[4] > 0.2 for boxes in found.values() for box in boxes)
    assert 0 < scores.sum() < 3 or any(row["reason"] for row in rows)
    strict = {**records[0], "tag": "counting"}
    _, (row,) = reward.explain(asked([strict]))
    assert all(box[4] > 0.9 for boxes in json.loads(row["details"]).values() for box in boxes)


@pytest.mark.parametrize("mode", ["strict", "graded", "exact"])
def test_with_the_shapes_detector_it_is_the_pixel_checker(mode: Any) -> None:
    """Scenes under their own records and under others'; the checker also wants a clean image,
    which rendered ones are."""
    records = [record for task in all_records().values() for record in task[::37]]
    images = render(scenes_for(records, np.random.default_rng(0)))
    mixed = records[:10] + records[10:][::-1]
    reward = geneval(detector="shapes", mode=mode)
    scores = reward(asked(mixed, images))
    strict = check(images, mixed).strict.float()
    if mode == "strict":
        assert torch.equal(scores, strict) and 0.2 < strict.mean() < 0.9
    # a right image earns all there is; `exact` also wants no object too many
    assert (scores[strict.bool()] == 1).all() or mode == "exact"
    assert ((scores == 1) <= (strict == 1)).all() or mode != "strict"


def test_what_cannot_be_asked_of_a_detector(weights: Weights) -> None:
    """White is one of GenEval's ten colours, and none of the six of shapes; red is of both. What
    only excludes is no reward but in the strict mode."""
    near = geneval(detector="shapes")
    record = {"prompt": "a circle", "include": [{"class": "circle", "count": 1, "color": "white"}]}
    said = "here, include.0.: `color`: expected one of .*'purple', 'black'.*, got 'white'"
    with pytest.raises(DataError, match=said):
        near.check_record(record, "here")
    near.check_record(
        {**record, "include": [{"class": "circle", "count": 1, "color": "red"}]}, "here"
    )
    far = geneval(**weights.geneval)
    far.check_record(
        {**record, "include": [{"class": "cat", "count": 1, "color": "white"}]}, "here"
    )
    record = {"prompt": "a unicorn", "include": [{"class": "unicorn", "count": 1}]}
    with pytest.raises(DataError, match="here: line 4, include.*no class 'unicorn'.*owl"):
        far.check_record(record, "here: line 4")
    with pytest.raises(DataError, match="image 0, include"):
        far(asked([record]))
    record = {"prompt": "no circle", "include": [], "exclude": [{"class": "circle", "count": 1}]}
    geneval(detector="shapes", mode="strict").check_record(record, "here: line 1")
    mode: Any
    for mode in ("graded", "exact"):
        with pytest.raises(DataError, match=f"here: line 1: mode '{mode}'.*`exclude` alone"):
            geneval(detector="shapes", mode=mode).check_record(record, "here: line 1")


def test_weights_that_are_not_there(tmp_path: Path, weights: Weights) -> None:
    with pytest.raises(ModelError, match="nobody/nothing.*Mask2Former"):
        geneval(path="nobody/nothing")
    with pytest.raises(ModelError, match="nobody/clip.*CLIPModel"):
        geneval(path=weights.geneval["path"], clip="nobody/clip")
    with pytest.raises(ModelError, match="Mask2Former"):
        geneval(path=str(weights.clip.folder), clip=str(weights.clip.folder))


# ------------------------------------------------------------------------------------ T2I-CompBench


def test_places_are_scored_as_published() -> None:
    """The reference's fixtures of the published function, on boxes of 100 pixels."""
    for kind, x, y, expected in (
        ("left", 200, 50, 1.0),
        ("left", 50, 0, 0.3),  # IoU 1/3
        ("left", -200, 0, 0.0),
        ("left", 200, 200, 0.0),  # exactly diagonal
        ("right", -200, 0, 1.0),
        ("top", 0, 200, 1.0),
        ("top", 0, -200, 0.0),
        ("bottom", 0, -200, 1.0),
        ("beside", 400, 300, 0.375),
        ("beside", 400, 149, 1.0),
        ("", 0, 200, 0.0),
    ):
        found = holds(kind, (0.0, 0.0, 100.0, 100.0), (x, y, x + 100, y + 100))
        assert found == pytest.approx(expected), (kind, x, y)


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
    hook = "The wool coat and metallic hook hold the wooden bag by the glass window."
    for prompt, expected in {
        hook: ["The wool coat", "metallic hook", "the wooden bag", "the glass window"],
        "a red car and a green boat": ["a red car", "a green boat"],
        "rubber boots and fluffy rugs": ["rubber boots", "fluffy rugs"],
        "A tall, narrow black and white clock.": ["A tall, narrow black and white clock"],
        "The oval mug was on top of the oak table.": ["The oval mug", "top", "the oak table"],
        "the spotted dog slowly walked across a square carpet": [
            "the spotted dog",
            "a square carpet",
        ],
        "the brave knight sat": ["the brave knight"],
    }.items():
        assert plain.phrases(prompt) == expected
    seen = asked_phrases(plain, "The oval mug was on top of the oak table.")
    assert seen == ["The oval mug", "the oak table"]
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
    mine = BlipVqa(path, size=48, **SEE)
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


def test_parts_are_averaged_and_told(weights: Weights) -> None:
    reward = t2i_compbench(**weights.t2i_compbench)
    prompt = "The red cat is next to the blue dog."
    records = [{"prompt": prompt, "parts": ["attribute", "spatial", "action"]}]
    records.append({"prompt": "a red cat above a dog", "parts": ["attribute", "spatial"]})
    scores, told = reward.explain(asked(records))
    assert told[0]["asked"] == ["The red cat", "the blue dog"]
    assert told[0]["attribute"] == pytest.approx(math.prod(told[0]["answers"]))
    assert told[0]["relation"] == ["beside", "cat", "dog"]
    every = [told[0][part] for part in ("attribute", "spatial", "action")]
    assert scores[0].item() == pytest.approx(sum(every) / 3, abs=1e-6)
    # no phrase that can be read: the other part alone, or with the slip a 0
    assert told[1]["spatial"] is None and scores[1].item() == pytest.approx(told[1]["attribute"])
    slip = t2i_compbench(**weights.t2i_compbench, unread_relation_is_zero=True)
    assert slip(asked(records))[1].item() == pytest.approx(told[1]["attribute"] / 2)


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
    single = ["attribute"], ["spatial"], ["action"]
    assert parts[:3] == [*zip(("color", "spatial", "non_spatial"), single, strict=True)]
    mixed = [["attribute", "spatial"], ["attribute", "action"], ["attribute", "spatial", "action"]]
    assert [mine for _, mine in parts[3:]] == mixed
    given = overrides_of("t2i-compbench", str(folder))
    for key, value in weights.t2i_compbench.items():
        given.append(f"rewards.t2i_compbench.{key}={value}")
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
    with pytest.raises(ConfigError, match="multiple of 16"):
        BlipVqa(weights.t2i_compbench["vqa"], size=50, **SEE)
    config = load_config("shapes/awm", overrides_of("t2i-compbench", "t2i-compbench/color"))
    assert config.prompts.test == "t2i-compbench/color" and config.eval.images == 10
    assert json.dumps(config.rewards["t2i_compbench"].to_dict())
