"""The OCR reward: public fixtures, edit distances of others, and two engines."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from clipkit import batch_of
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl.core.errors import DataError, RewardError, RunError
from flowrl.core.prompts import check_records, load_prompts
from rewards.ocr import edit_distance, fold, ocr, similarity, target_of

SIGN = 'a shop sign that says "New York City" at night'


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


def test_scores_of_known_readings() -> None:
    """11 letters. The reference: "salenewyorkciti" is 4 deletions and 1 substitution away."""
    for found, expected in (
        ("New York City", 1.0),
        ("Sale NewYork Citi", 6 / 11),
        ("ABBA", 0.0),  # no letter in common
        ("other text", 2 / 11),  # 9 edits by rapidfuzz 3.14
        ("", 0.0),
        ("NEW YORK CITY", 1.0),
        ("xx newyork\tcity yy", 1.0),  # anywhere
        ("New York Cit", 10 / 11),
        ("x" * 500, 0.0),  # capped: a long text costs no more than none
    ):
        assert similarity(found, "New York City") == pytest.approx(expected, abs=1e-12), found


LETTERS = st.one_of(st.text(alphabet="abc", max_size=7), st.text(max_size=30))


@settings(deadline=None)
@given(LETTERS, LETTERS)
def test_the_edit_distance_is_rapidfuzzs(a: str, b: str) -> None:
    rapidfuzz = pytest.importorskip("rapidfuzz.distance")
    assert edit_distance(a, b) == rapidfuzz.Levenshtein.distance(a, b)


def test_images_are_compared_with_their_own_prompts() -> None:
    """By rapidfuzz 3.14 "bread" is 10 edits from "newyorkcity"."""
    scorer = _scripted({0: "New York City", 100: "Sale NewYork Citi", 200: "bread"})
    prompts = [SIGN, SIGN, SIGN, 'a note with "bread" and "milk"']
    scores = scorer(batch_of(_greys(0, 100, 200, 200), prompts))
    torch.testing.assert_close(scores, torch.tensor([1, 6 / 11, 1 / 11, 1]), rtol=0, atol=1e-6)


def test_the_first_quotes_count_or_the_records_key() -> None:
    pizza = 'a 12" pizza box with "FOOD"'
    assert target_of('says "A" and "B"', {}, "", "here") == "A"
    assert target_of(pizza, {}, "", "here") == " pizza box with "  # as in the public code
    assert target_of(pizza, {"text": "FOOD"}, "text", "here") == "FOOD"
    assert fold(" New\u3000York\nCity ") == "newyorkcity"
    scorer = _scripted({0: "food"}, key="text")
    assert scorer(batch_of(_greys(0), ["a pizza box"], text=["FOOD"])).item() == 1


def test_prompts_without_a_text_are_refused_before_sampling(tmp_path: Path) -> None:
    for prompt, more, key, message in (
        ("a sign", {}, "", "double quotes"),
        ('a 12" pizza', {}, "", "double quotes"),
        ("a sign that says \u201cOPEN\u201d", {}, "", "straight double quotes"),
        ('a sign that says ""', {}, "", "not empty"),
        ('a sign that says " \t "', {}, "", "not empty"),
        ('says "x"', {}, "text", "'text', got None"),
        ('says "x"', {"text": 7}, "text", "'text', got 7"),
        ('says "x"', {"text": ""}, "text", "not empty"),
    ):
        record: dict[str, Any] = {"prompt": prompt, **more}
        with pytest.raises(DataError, match=f"^file, line 3: .*{message}"):
            ocr(key=key).check_record(record, "file, line 3")
        with pytest.raises(DataError, match=message):  # and if they come all the same
            _scripted({0: ""}, key=key)(batch_of(_greys(0), [prompt])._replace(meta=[record]))
    file = tmp_path / "signs.txt"
    file.write_text(f"{SIGN}\na tree\n", encoding="utf-8")
    with pytest.raises(DataError, match="signs.txt, line 2.*double quotes"):
        check_records(load_prompts(file), {"ocr": ocr()})


def test_a_failed_reading_is_no_score() -> None:
    scorer = _scripted({0: "New York City", 9: ValueError("bad\ntrace"), 10: MemoryError()})
    said = r"not scored \(NaN\): image 1 \('New York City'\): bad$"
    with pytest.warns(RuntimeWarning, match=said):
        scores = scorer(batch_of(_greys(0, 9), [SIGN] * 2))
    assert scores[0] == 1 and scores[1].isnan()
    with pytest.raises(RewardError, match="failed on all 2 images; image 0 .*: MemoryError"):
        scorer(batch_of(_greys(10, 9), [SIGN] * 2))
    assert scorer(batch_of(_greys(0), [SIGN])).item() == 1  # and it goes on afterwards


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
    said = r'rapidocr and onnxruntime .*pip install -e "\.\[ocr\]" in a checkout'
    for call in (ocr().probe, lambda: ocr()(batch_of(_greys(0), [SIGN]))):
        with pytest.raises(RunError, match=said):
            call()


class _Engine:
    """Stands in for rapidocr.RapidOCR: gives the answers of the list, one after the other."""

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
    nothing, odd = SimpleNamespace(txts=None, scores=None), SimpleNamespace(boxes=[1])
    _Engine.answers = [lines, nothing, odd]
    with pytest.warns(RuntimeWarning, match="image 2"):
        scores = ocr(threads=3)(batch_of(_greys(0, 0, 0), [SIGN] * 3))
    assert scores[:2].tolist() == [1, 0] and scores[2].isnan()
    threads = "EngineConfig.onnxruntime.intra_op_num_threads"
    assert _Engine.params["Global.text_score"] == 0  # else lines below 0.5 never come
    assert _Engine.params["Global.use_cls"] is False and _Engine.params[threads] == 3
    _Engine.answers = [lines]
    score = ocr(confidence=0.3)(batch_of(_greys(0), [SIGN])).item()
    assert score == pytest.approx(4 / 11)  # "City" alone
    assert _Engine.params[threads] == -1  # RapidOCR's word for its own choice


def _rendered(*lines: str, paper: str = "white", ink: str = "black") -> Tensor:
    """Draw lines of text with Pillow's own font."""
    image, font = Image.new("RGB", (320, 256), paper), ImageFont.load_default(40)
    for place, line in enumerate(lines):
        ImageDraw.Draw(image).text((20, 30 + 80 * place), line, fill=ink, font=font)
    return torch.tensor(np.asarray(image)).permute(2, 0, 1) / 255


def test_the_real_engine_reads_rendered_text() -> None:
    """11 letters: "newyork" lacks 4. No text at all is a score of 0, not a failure."""
    pytest.importorskip("rapidocr")
    pytest.importorskip("onnxruntime")
    scorer = ocr(threads=1)
    scorer.probe()
    two_lines = _rendered("New York", "City", paper="navy", ink="yellow")  # read from the top
    images = torch.stack([two_lines, _rendered("New York"), _rendered()])
    scores = scorer(batch_of(images, [SIGN] * 3)).tolist()
    assert scores == pytest.approx([1, 7 / 11, 0], abs=1e-6)
