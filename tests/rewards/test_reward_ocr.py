"""The OCR reward: public fixtures, edit distances of others, a scripted engine, and the real one on
rendered text."""

from __future__ import annotations

import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError, RewardError, RunError
from flowrl.core.prompts import check_records, load_prompts
from flowrl.core.types import Reward, RewardBatch
from rewards.ocr import edit_distance, fold, ocr, similarity, target_of

SIGN = 'a shop sign that says "New York City" at night'
WORDS = st.text(alphabet="abc", max_size=7)


def _batch(
    images: Tensor, prompts: list[str], meta: list[dict[str, Any]] | None = None
) -> RewardBatch:
    n = len(images)
    return RewardBatch(
        images, prompts, torch.arange(n), meta or [{"prompt": p} for p in prompts], torch.zeros(n)
    )


def _greys(*levels: int) -> Tensor:
    """Return one grey image per level, so that a scripted engine can tell them apart."""
    return torch.tensor(levels).float().div(255)[:, None, None, None].expand(-1, 3, 8, 8)


def _scripted(found: dict[int, str | Exception], **arguments: Any) -> ocr:
    """Return a scorer whose engine reads what `found` says of the image's grey level."""

    def read(image: Image.Image) -> str:
        answer = found[np.asarray(image)[0, 0, 0]]
        if isinstance(answer, Exception):
            raise answer
        return answer

    scorer = ocr(**arguments)
    scorer._read = read
    return scorer


@pytest.mark.parametrize(
    ("found", "expected"),
    # 11 letters. The reference's fixtures: "salenewyorkciti" is 4 deletions and 1 substitution away
    [
        ("New York City", 1.0),
        ("Sale NewYork Citi", 6 / 11),
        ("ABBA", 0.0),  # no letter in common
        ("other text", 2 / 11),  # 9 edits by rapidfuzz 3.14
        ("", 0.0),
        ("NEW YORK CITY", 1.0),
        ("xx newyork\tcity yy", 1.0),  # anywhere
        ("New York Cit", 10 / 11),
        ("x" * 500, 0.0),  # capped: a long text costs no more than none
    ],
)
def test_scores_of_known_readings(found: str, expected: float) -> None:
    assert similarity(found, "New York City") == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [  # textbook examples: Wagner and Fischer's successors, Jurafsky and Martin
        ("kitten", "sitting", 3),
        ("saturday", "sunday", 3),
        ("intention", "execution", 5),
        ("", "abc", 3),
        ("abc", "", 3),
        ("", "", 0),
    ],
)
def test_edit_distances_of_the_textbooks(a: str, b: str, expected: int) -> None:
    assert edit_distance(a, b) == expected


@given(WORDS, WORDS)
def test_the_edit_distance_is_its_recursive_definition(a: str, b: str) -> None:
    @cache
    def lev(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        return min(lev(i - 1, j) + 1, lev(i, j - 1) + 1, lev(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

    assert edit_distance(a, b) == lev(len(a), len(b))


@given(st.text(max_size=30), st.text(max_size=30))
def test_the_edit_distance_is_rapidfuzzs(a: str, b: str) -> None:
    rapidfuzz = pytest.importorskip("rapidfuzz.distance")
    assert edit_distance(a, b) == rapidfuzz.Levenshtein.distance(a, b)


def test_images_are_compared_with_their_own_prompts() -> None:
    scorer = _scripted({0: "New York City", 100: "Sale NewYork Citi", 200: "bread"})
    images, prompts = _greys(0, 100, 200, 200), [SIGN, SIGN, SIGN, 'a note with "bread" and "milk"']
    scores = scorer(_batch(images, prompts))
    assert isinstance(scorer, Reward) and scores.dtype == torch.float32
    expected = torch.tensor(
        [1, 6 / 11, 1 / 11, 1]
    )  # "bread" is 10 edits from "newyorkcity" by rapidfuzz 3.14
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)
    order = [3, 1, 0, 2]
    assert torch.equal(scorer(_batch(images[order], [prompts[i] for i in order])), scores[order])
    assert scorer(_batch(images[:0], [])).shape == (0,)


def test_the_first_quotes_count_or_the_records_key() -> None:
    assert target_of('says "A" and "B"', {}, "", "here") == "A"
    assert (
        target_of('a 12" pizza box with "FOOD"', {}, "", "here") == " pizza box with "
    )  # as in the public code
    assert target_of('a 12" pizza box with "FOOD"', {"text": "FOOD"}, "text", "here") == "FOOD"
    assert fold(" New\u3000York\nCity ") == "newyorkcity"
    scorer = _scripted({0: "food"}, key="text")
    assert (
        scorer(
            _batch(_greys(0), ["a pizza box"], [{"prompt": "a pizza box", "text": "FOOD"}])
        ).item()
        == 1
    )


@pytest.mark.parametrize(
    ("record", "key", "message"),
    [
        ({"prompt": "a sign"}, "", "double quotes"),
        ({"prompt": 'a 12" pizza'}, "", "double quotes"),
        ({"prompt": "a sign that says \u201cOPEN\u201d"}, "", "straight double quotes"),
        ({"prompt": 'a sign that says ""'}, "", "not empty"),
        ({"prompt": 'a sign that says " \t "'}, "", "not empty"),
        ({"prompt": 'says "x"'}, "text", "'text', got None"),
        ({"prompt": 'says "x"', "text": 7}, "text", "'text', got 7"),
        ({"prompt": 'says "x"', "text": ""}, "text", "not empty"),
    ],
)
def test_prompts_without_a_text_are_refused_before_sampling(
    record: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(DataError, match=f"^file, line 3: .*{message}"):
        ocr(key=key).check_record(record, "file, line 3")
    with pytest.raises(DataError, match=message):  # and if they come all the same
        _scripted({0: ""}, key=key)(_batch(_greys(0), [record["prompt"]], [record]))


def test_the_loop_finds_the_check(tmp_path: Any) -> None:
    file = tmp_path / "signs.txt"
    file.write_text(f"{SIGN}\na tree\n", encoding="utf-8")
    with pytest.raises(DataError, match="signs.txt, line 2.*double quotes"):
        check_records(load_prompts(file), {"ocr": ocr()})


def test_a_failed_reading_is_no_score() -> None:
    scorer = _scripted({0: "New York City", 9: ValueError("bad\ntrace"), 10: MemoryError()})
    with pytest.warns(
        RuntimeWarning, match=r"not scored \(NaN\): image 1 \('New York City'\): bad$"
    ):
        scores = scorer(_batch(_greys(0, 9), [SIGN] * 2))
    assert scores[0] == 1 and scores[1].isnan()
    with pytest.raises(RewardError, match="failed on all 2 images; image 0 .*: MemoryError"):
        scorer(_batch(_greys(10, 9), [SIGN] * 2))
    assert scorer(_batch(_greys(0), [SIGN])).item() == 1  # and it goes on afterwards


def test_the_probe_asks_for_a_reading() -> None:
    scorer = ocr()
    scorer._read = lambda image: "flow"
    scorer.probe()
    scorer._read = lambda image: " "
    with pytest.raises(RunError, match="read nothing"):
        scorer.probe()
    scorer = _scripted({255: ValueError("no session")})
    with pytest.raises(RunError, match="failed on a test image: no session"):
        scorer.probe()


@pytest.mark.parametrize("missing", ["rapidocr", "onnxruntime"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # an import of it now raises ImportError
    for call in (ocr().probe, lambda: ocr()(_batch(_greys(0), [SIGN]))):
        with pytest.raises(
            RunError, match=r"rapidocr and onnxruntime .*pip install 'flowrl\[ocr\]'"
        ):
            call()


class _Engine:
    """Stands in for rapidocr.RapidOCR: gives the answers of the list `answers`, one after the
    other."""

    answers: list[Any] = []
    params: dict[str, Any] = {}

    def __init__(self, params: dict[str, Any]) -> None:
        _Engine.params = params

    def __call__(self, image: Image.Image) -> Any:
        assert image.mode == "RGB"  # an array would be taken for BGR
        return _Engine.answers.pop(0)


def test_lines_are_joined_if_the_engine_trusts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr", SimpleNamespace(RapidOCR=_Engine))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace())  # type: ignore[arg-type]
    lines = SimpleNamespace(txts=("New ", "zz", "York", "City"), scores=(0.01, 0.0, 0.3, 0.9))
    nothing, odd = (
        SimpleNamespace(txts=None, scores=None),
        SimpleNamespace(boxes=[1]),
    )  # no text; no list of texts
    _Engine.answers = [lines, nothing, odd]
    with pytest.warns(RuntimeWarning, match="image 2"):
        scores = ocr(threads=3)(_batch(_greys(0, 0, 0), [SIGN] * 3))
    assert scores[:2].tolist() == [1, 0] and scores[2].isnan()
    assert _Engine.params["Global.text_score"] == 0  # else lines below 0.5 never come
    assert _Engine.params["Global.use_cls"] is False
    assert _Engine.params["EngineConfig.onnxruntime.intra_op_num_threads"] == 3
    _Engine.answers = [lines]
    assert ocr(confidence=0.3)(_batch(_greys(0), [SIGN])).item() == pytest.approx(
        4 / 11
    )  # "City" alone
    assert (
        _Engine.params["EngineConfig.onnxruntime.intra_op_num_threads"] == -1
    )  # RapidOCR's word for its own choice


@pytest.mark.parametrize("arguments", [{"confidence": -0.1}, {"confidence": 1.0}, {"threads": -1}])
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        ocr(**arguments)


def _rendered(*lines: str, paper: str = "white", ink: str = "black") -> Tensor:
    """Draw lines of text with Pillow's own font."""
    image = Image.new("RGB", (320, 256), paper)
    for place, line in enumerate(lines):
        ImageDraw.Draw(image).text(
            (20, 30 + 80 * place), line, fill=ink, font=ImageFont.load_default(40)
        )
    return torch.tensor(np.asarray(image)).permute(2, 0, 1) / 255


def test_the_real_engine_reads_rendered_text() -> None:
    pytest.importorskip("rapidocr")
    pytest.importorskip("onnxruntime")
    scorer = ocr(threads=1)
    scorer.probe()
    images = torch.stack(
        [
            _rendered("New York City"),
            _rendered(
                "New York", "City", paper="navy", ink="yellow"
            ),  # two lines, read from the top
            _rendered("New York"),
            _rendered("BREAD"),
            _rendered(),  # no text at all: a score of 0, not a failure
        ]
    )
    scores = scorer(_batch(images, [SIGN] * 5)).tolist()
    # 11 letters: "newyork" lacks 4, "bread" is 10 edits away (rapidfuzz 3.14)
    assert scores == pytest.approx([1, 1, 7 / 11, 1 / 11, 0], abs=1e-6)
    assert (
        ocr(threads=1, confidence=0.999999)(_batch(images[:1], [SIGN])).item() == 0
    )  # nothing is trusted so much
