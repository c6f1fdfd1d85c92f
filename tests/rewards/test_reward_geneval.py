"""GenEval as a reward: real detector classes with random weights, held to transformers' own
post-processing and pipelines; colours held to open_clip's zero-shot classifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from clipkit import clip_tokenizer, pil, random_images
from detectorkit import tiny_grounding_dino, tiny_mask2former, tiny_owl
from PIL import Image
from torch.nn.functional import interpolate, normalize
from transformers import Mask2FormerImageProcessor, pipeline
from weightkit import Weights

from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.prompt_lists import CLASSES, COLORS
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.geneval.objects import DetectedObject
from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from rewards._backbones.clip import OpenClip
from rewards._common.pixels import shortest
from rewards._detectors.networks import Mask2Former, ZeroShot, instances, top_classes
from rewards.geneval import geneval
from rewards.geneval.colors import ClipColors, crop

CPU = torch.device("cpu")
SEE: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "who": "test"}


def pils(count: int, height: int = 80, width: int = 100) -> list[Image.Image]:
    return [pil(image) for image in random_images(count, height, width)]


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


def batch(images: torch.Tensor, records: list[dict[str, Any]]) -> RewardBatch:
    n = len(images)
    return RewardBatch(images, [""] * n, torch.arange(n), records, torch.zeros(n))


def test_verdict_and_lines_with_a_random_detector(weights: Weights) -> None:
    """What the lines say was found is what the verdict counts, and only that."""
    reward = geneval(**weights.geneval, threshold=0.2)
    names = ["book", "vase", "cat"]
    records = [
        {"prompt": name, "tag": "single_object", "include": [{"class": name, "count": 1}]}
        for name in names
    ]
    scores, rows = reward.explain(batch(random_images(3, 80, 100), records))
    for score, row, name in zip(scores.tolist(), rows, names, strict=True):
        found = json.loads(row["details"])
        assert score == row["score"] == float(row["correct"]) == float(name in found)
        assert all(box[4] > 0.2 for boxes in found.values() for box in boxes)
    assert 0 < scores.sum() < 3 or any(row["reason"] for row in rows)
    strict = {**records[0], "tag": "counting"}
    _, (row,) = reward.explain(batch(random_images(1, 80, 100), [strict]))
    assert all(box[4] > 0.9 for boxes in json.loads(row["details"]).values() for box in boxes)


@pytest.mark.parametrize("mode", ["strict", "graded", "exact"])
def test_with_the_shapes_detector_it_is_the_pixel_checker(mode: Any) -> None:
    """Scenes under their own records and under others'; the checker also wants a clean image,
    which rendered ones are."""
    records = [record for task in all_records().values() for record in task[::37]]
    images = render(scenes_for(records, np.random.default_rng(0)))
    asked = records[:10] + records[10:][::-1]
    reward = geneval(detector="shapes", mode=mode)
    scores = reward(batch(images, asked))
    strict = check(images, asked).strict.float()
    if mode == "strict":
        assert torch.equal(scores, strict) and 0.2 < strict.mean() < 0.9
    # a right image earns all there is; `exact` also wants no object too many
    assert (scores[strict.bool()] == 1).all() or mode == "exact"
    assert ((scores == 1) <= (strict == 1)).all() or mode != "strict"


@pytest.mark.parametrize("mode", ["graded", "exact"])
def test_what_only_excludes_is_no_reward(mode: Any) -> None:
    record = {"prompt": "no circle", "include": [], "exclude": [{"class": "circle", "count": 1}]}
    geneval(detector="shapes", mode="strict").check_record(record, "here: line 1")
    with pytest.raises(DataError, match=f"here: line 1: mode '{mode}'.*`exclude` alone"):
        geneval(detector="shapes", mode=mode).check_record(record, "here: line 1")


def test_a_colour_that_shapes_cannot_have_is_refused(weights: Weights) -> None:
    """White is one of GenEval's ten colours, and none of the six of shapes; red is of both."""
    record = {"prompt": "a circle", "include": [{"class": "circle", "count": 1, "color": "white"}]}
    reward = geneval(detector="shapes")
    expected = "here, include.0.: `color`: expected one of .*'purple', 'black'.*, got 'white'"
    with pytest.raises(DataError, match=expected):
        reward.check_record(record, "here")
    record["include"] = [{"class": "circle", "count": 1, "color": "red"}]
    reward.check_record(record, "here")
    record["include"] = [{"class": "cat", "count": 1, "color": "white"}]
    geneval(**weights.geneval).check_record(record, "here")


def test_what_cannot_be_asked_of_a_detector(weights: Weights) -> None:
    reward = geneval(**weights.geneval)
    record = {"prompt": "a unicorn", "include": [{"class": "unicorn", "count": 1}]}
    with pytest.raises(DataError, match="here: line 4, include.*no class 'unicorn'.*owl"):
        reward.check_record(record, "here: line 4")
    with pytest.raises(DataError, match="image 0, include"):
        reward(batch(random_images(1), [record]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "loose"}, "mode: expected one of strict"),
        ({"detector": "yolo"}, "detector: expected one of mask2former"),
        ({"threshold": 1.0}, "threshold"),
        ({"max_objects": 0}, "max_objects"),
        ({"max_overlap": 0.0}, "max_overlap"),
    ],
)
def test_arguments_that_make_no_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        geneval(**{"detector": "shapes", **given})


def test_weights_that_are_not_there(tmp_path: Path, weights: Weights) -> None:
    with pytest.raises(ModelError, match="nobody/nothing.*Mask2Former"):
        geneval(path="nobody/nothing")
    with pytest.raises(ModelError, match="nobody/clip.*CLIPModel"):
        geneval(path=weights.geneval["path"], clip="nobody/clip")
    with pytest.raises(ModelError, match="Mask2Former"):
        geneval(path=str(weights.clip.folder), clip=str(weights.clip.folder))
