"""How answers of judges are read, and the options of the judge: no server is needed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.core.errors import ConfigError, FlowRLError
from flowrl.core.types import RewardBatch
from rewards.vlm import vlm
from rewards.vlm.answers import Answer, ReadingOptions, read

MISSING = "missing"


def check(
    template: str, text: str, expected: float | str, top: dict[str, float] | None = None, **how: Any
) -> None:
    out = read(Answer(text, list((top or {}).items())), ReadingOptions(template, **how))
    if expected == MISSING:
        assert isinstance(out, str) and " in the answer " in out
    else:
        assert out == pytest.approx(expected, abs=1e-7)


# ----------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Image 1 is better.", 1),
        ("... therefore\nImage 2 is better.", 0),
        ("Both images are equally good.", 0.5),
        ("**Image 1** is better", 1),
        ("image  2 is\nbetter", 0),
        (
            "Image 1 is better in colour, yet on the whole Image 2 is better.",
            0,
        ),  # the verdict is asked for at the end
        (
            "Image 1 is better at one thing, Image 2 is better at another. Both images are equally "
            "good.",
            0.5,
        ),
        ("Image 3 is better.", MISSING),
        ("Image 1 is good.", MISSING),
        ("", MISSING),
        ("I am sorry, I cannot compare these images.", MISSING),
    ],
)
def test_pair_rank(text: str, expected: float | str) -> None:
    check("pair_rank", text, expected)


THOUGHT = """<think>
1. Semantic consistency:
    Image 1 (9/10) - Image 2 is better here;
    Image 2 (7/10) - ...
Total score:
Image 1: 9+8+8=25
Image 2: 7+7+5=19
</think>
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (THOUGHT + "<answer>Image 1 is better</answer>", 1),
        (THOUGHT + "<answer>\nImage 2 is better\n</answer>\n", 0),
        (THOUGHT + "<answer>Both images are equally good</answer>", 0.5),
        (
            "<think>I write <answer>Image 2 is better</answer> later</think><answer>Image 1 is "
            "better</answer>",
            1,
        ),
        ("<think>an <answer> tag</think><answer>Image 1 is better</answer>", 1),
        ("<answer>Image 2 is better</answer>", 0),
        (THOUGHT, MISSING),  # cut off before the verdict
        (THOUGHT + "<answer>Image 1 is better", MISSING),
        (THOUGHT + "Image 1 is better", MISSING),
        (THOUGHT + "<answer>Image 1 is better or Image 2 is better</answer>", MISSING),
        (THOUGHT + "<answer>neither</answer>", MISSING),
        ("<think><answer>Image 1 is better</answer></think>", MISSING),
    ],
)
def test_think(text: str, expected: float | str) -> None:
    check("think", text, expected)


def flex_answer(winner: Any, *categories: Any) -> str:
    rows = [
        {"name": f"c{i}", "dims": [{"score_1": 6}], "cat_winner": side}
        for i, side in enumerate(categories)
    ]
    return json.dumps({"prompt": "a {cat}", "categories": rows, "reason": "...", "winner": winner})


ONE, TWO = "Image 1", "Image 2"


@pytest.mark.parametrize(
    ("text", "expected", "how"),
    [
        # r = (w_o overall + w_d mean(first three)) / (w_o + w_d), by hand
        (flex_answer(ONE, ONE, TWO, ONE), (1 + 2 / 3) / 2, {}),
        (flex_answer(TWO, ONE, TWO, ONE), (0 + 2 / 3) / 2, {}),
        (flex_answer(ONE, ONE, ONE, ONE, TWO, TWO), 1, {}),  # a fourth category does not count
        (flex_answer(ONE, TWO, TWO, TWO), 0.25, {"w_overall": 1.0, "w_dims": 3.0}),
        (flex_answer(ONE, TWO, TWO, TWO), 1, {"w_dims": 0.0}),
        (flex_answer(ONE, TWO, TWO, TWO), 0, {"w_overall": 0.0}),
        (flex_answer(ONE), 1, {}),
        (flex_answer(ONE, "Tie", TWO), (1 + 0.25) / 2, {}),
        (flex_answer(ONE, "?", TWO), 0.5, {}),  # the unreadable category is left out
        (flex_answer("Tie"), 0.5, {}),
        (flex_answer("both are equal"), 0.5, {}),
        (flex_answer(2), 0, {}),
        (flex_answer("image1 wins"), 1, {}),
        ("```json\n" + flex_answer(TWO, TWO) + "\n```", 0, {}),
        ("<think>{what} a {pair}</think>\n" + flex_answer(TWO, TWO), 0, {}),
        (flex_answer(TWO) + '\nConfidence: {"high": true}', 0, {}),
        (flex_answer(ONE) + "\nOn reflection:\n" + flex_answer(TWO), 0, {}),
        ('{"winner": "Image 1", "categories": "none"}', 1, {}),
        ('{"winner": "Image 1", "categories": [3, null]}', 1, {}),
        (flex_answer("Image 1/2", ONE, ONE), MISSING, {}),  # the template's own words
        (flex_answer(None, ONE, ONE), MISSING, {}),
        (flex_answer(12), MISSING, {}),
        (flex_answer("neither"), MISSING, {}),
        (flex_answer(ONE, TWO)[:-2], MISSING, {}),  # cut off
        ('{"cat_winner": "Image 1"}', MISSING, {}),
        ("Image 1", MISSING, {}),
        ("{" * 3000, MISSING, {}),
    ],
)
def test_flex(text: str, expected: float | str, how: dict[str, Any]) -> None:
    check("flex", text, expected, **how)


# ------------------------------------------------------------------------------------------ ratings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cat (animal): 1\nred (colour): 0\nFinal Score: 3.5", 0.7),
        ("**Final Score:** 4/5", 0.8),
        ("**Final Score**: 5", 1),
        ("Final Score: 1.", 0.2),
        ("Final Score: 2. No: Final Score:\n3", 0.6),
        ("Final Score: 0", MISSING),
        ("Final Score: 10", MISSING),
        ("Final Score: 5.1", MISSING),
        ("Final Score: -3", MISSING),
        ("Final Score: X", MISSING),
        ("Score: 4", MISSING),
    ],
)
def test_point(text: str, expected: float | str) -> None:
    check("point", text, expected)


ACS = "Alignment Score (1-5): 4.5\n**Coherence Score (1-5):** 2\nStyle Score (1-5): 3"


@pytest.mark.parametrize(
    ("text", "axes", "expected"),
    [
        (ACS, (1.0, 1.0, 1.0), (4.5 + 2 + 3) / 15),
        (ACS, (1.4, 0.0, 0.7), (1.4 * 4.5 + 0.7 * 3) / (2.1 * 5)),
        (ACS, (0.0, 0.0, 3.0), 0.6),
        (ACS.replace("Style", "Beauty"), (1.0, 1.0, 0.0), 6.5 / 10),
        (ACS.replace("Style", "Beauty"), (1.0, 1.0, 0.1), MISSING),
        (ACS.replace(" 3", " 6"), (1.0, 1.0, 1.0), MISSING),
        (ACS.replace(" 3", " Z"), (1.0, 1.0, 1.0), MISSING),
        ("", (1.0, 1.0, 1.0), MISSING),
    ],
)
def test_acs(text: str, axes: tuple[float, float, float], expected: float | str) -> None:
    check("acs", text, expected, axes=axes)


def shares(*pairs: tuple[float, float]) -> str:
    names = ["Alignment", "Coherence", "Style"]
    return "\n\n".join(
        f"{n} Score:\n Image 1: {a}\n Image 2: {b}" for n, (a, b) in zip(names, pairs, strict=False)
    )


@pytest.mark.parametrize(
    ("text", "axes", "expected"),
    [
        (shares((0.4, 0.6), (0.5, 0.5), (0.9, 0.1)), (1.0, 1.0, 1.0), 0.6),
        (shares((0.4, 0.6), (0.5, 0.5), (0.9, 0.1)), (3.0, 0.0, 1.0), (1.2 + 0.9) / 4),
        (
            shares((0.43569, 0.56431), (0.418, 0.58200002), (1, 0)),
            (1.0, 1.0, 0.0),
            (0.43569 + 0.418) / 2,
        ),
        (shares((0.4, 0.6), (0.5, 0.5)), (1.0, 1.0, 1.0), MISSING),
        (shares((0.4, 0.6), (0.5, 0.5)), (1.0, 1.0, 0.0), 0.45),
        (shares((0.4, 0.7), (0.5, 0.5), (0.9, 0.1)), (1.0, 1.0, 1.0), MISSING),  # no shares of one
        (shares((4, 6), (5, 5), (9, 1)), (1.0, 1.0, 1.0), MISSING),
        (shares((0, 0), (0.5, 0.5), (0.9, 0.1)), (1.0, 1.0, 1.0), MISSING),
    ],
)
def test_pair_score(text: str, axes: tuple[float, float, float], expected: float | str) -> None:
    check("pair_score", text, expected, axes=axes)


@pytest.mark.parametrize(
    ("text", "expected", "how"),
    [
        ('Blurry. {"rating": 3.25}', 0.5625, {}),  # (3.25 - 1) / 4
        ('{"rating" : 5}', 1, {}),
        ('{"rating": 2} no, {"rating": 1}', 0, {}),
        ('{"rating": 0.9}', MISSING, {}),
        ('{"rating": 5.01}', MISSING, {}),
        ('{"rating": 1.2.3}', MISSING, {}),
        ('{"rating": "bad"}', MISSING, {}),
        (
            "<score>\n40</score>",
            0.4,
            {"pattern": r"<score>\s*(.*?)\s*</score>", "low": 0.0, "high": 100.0},
        ),
        ("<score>nan</score>", MISSING, {"pattern": r"<score>(.*?)</score>"}),
        ("<score></score>", MISSING, {"pattern": r"<score>(\d)?</score>"}),
    ],
)
def test_rating(text: str, expected: float | str, how: dict[str, Any]) -> None:
    check("rating", text, expected, **how)


# ---------------------------------------------------------------------------------------- log-probs


def test_yes_no() -> None:
    """PaCo-Reward: sigmoid(-.3 + 1.4); with `variants`, the ratio of summed probabilities."""
    top = {"Yes": -0.3, "No": -1.4, "Maybe": -6.0}
    check("yes_no", "Yes", 0.7502601056, top)
    check("consistency", "Yes", 0.7502601056, top)
    check("yes_no", "No", 1 - 0.7502601056, {"No": -0.3, "Yes": -1.4})
    p = {"Yes": 0.4, "yes": 0.1, " YES": 0.05, "No": 0.2, "no": 0.15, "Yesterday": 0.1}
    log = {token: math.log(value) for token, value in p.items()}
    check("yes_no", "Yes", 0.4 / 0.6, log)
    check("yes_no", "Yes", 0.55 / 0.9, log, variants=True)
    check("yes_no", "Yes", 1, {"Yes": -0.1, "No": -9999.0})


def test_a_word_that_is_not_listed_counts_only_where_it_cannot_matter() -> None:
    """The unlisted one has at most the smallest listed log-prob: sigmoid(-8) = 3e-4 of doubt,
    sigmoid(-5) = 7e-3."""
    check("yes_no", "Yes", 1, {"Yes": 0.0, "Sure": -8.0})
    check("yes_no", "No", 0, {"No": 0.0, "Nope": -8.0})
    check("yes_no", "Yes", MISSING, {"Yes": 0.0, "Sure": -5.0})
    check("yes_no", "Yes", MISSING, {"Yes": 0.0})
    check("yes_no", "The", MISSING, {"The": 0.0, "A": -20.0})
    check("yes_no", "yes", MISSING, {"yes": -0.1, "no": -2.0})
    check("yes_no", "Yes", MISSING)


def test_level() -> None:
    """UniWorld-V2: the mean digit under the softmax over six digits, / 5; numpy is the oracle."""
    logits = np.array([0.1, -2.0, 1.5, 0.3, 2.2, -0.7])
    p = np.exp(logits) / np.exp(logits).sum()
    top = dict(zip("012345", (logits - 9.0).tolist(), strict=True))  # a constant does not matter
    check("level", "4", float(p @ np.arange(6)) / 5, {"The": -0.5, **top})
    check("level", "5", 1, {"5": 0.0, "four": -12.0})
    check("level", "5", MISSING, {"5": 0.0, "4": -3.0})  # four digits could hold .2 of the mass
    check("level", "good", MISSING, {"good": 0.0, "bad": -30.0})
    check("level", "5", MISSING)


def test_a_cut_answer_says_so() -> None:
    out = read(Answer("Let me see. " * 50, [], cut=True), ReadingOptions("pair_rank"))
    assert isinstance(out, str) and "(it was cut off at max_tokens)" in out and len(out) < 260


# ------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8080"}, "url: expected one like http"),
        ({"url": "ftp://a"}, "url: expected one like http"),
        ({"url": "http://[::1"}, "url: expected one like http"),
        ({"url": "http://a:99999"}, "url: expected one like http"),
        ({"url": "http://a/v1?key=1"}, "url: expected one like http"),
        ({"template": "essay"}, "template: expected one of pair_rank, point"),
        ({"timeout": 0.0}, "timeout: expected seconds > 0, got 0.0"),
        ({"timeout": math.nan}, "timeout"),
        ({"retries": -1}, "retries: expected 0 or more"),
        ({"backoff": -1.0}, "backoff"),
        ({"workers": 0}, "workers: expected 1 or more"),
        ({"max_failed": 1.5}, "max_failed: expected a share"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"template": "acs", "alignment": 0.0, "coherence": 0.0, "style": 0.0}, "not all 0"),
        ({"template": "acs", "style": -1.0}, "weights >= 0"),
        ({"template": "flex", "w_overall": 0.0, "w_dims": 0.0}, "not both 0"),
        ({"template": "rating", "low": 5.0}, "expected low < high"),
        ({"template": "rating", "pattern": "("}, "pattern: expected a regular expression"),
        ({"template": "rating", "pattern": "score"}, "expected one group in 'score'"),
        ({"template": "point", "w_dims": 2.0}, "the template point makes no use of w_dims"),
        ({"template": "point", "style": 2.0}, "makes no use of alignment, coherence, style"),
        ({"template": "acs", "variants": True}, "makes no use of variants"),
        ({"extra": {"temperature": 1}}, "temperature cannot be given here"),
        ({"template_sha256": "9f"}, "needs a template_file"),
        ({"template_file": "/nowhere.txt"}, "cannot read it"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        vlm(**options)
    assert message in str(error.value)


def test_addresses() -> None:
    bases = [
        vlm(url=url).server.base
        for url in ("http://a:1", "http://a:1/", "https://b/api/v1", "https://b/api/v1/")
    ]
    assert bases == ["http://a:1/v1", "http://a:1/v1", "https://b/api/v1", "https://b/api/v1"]
    for url in ("http://me:secret@host", "ftp://me:secret@host"):
        with pytest.raises(FlowRLError) as error:
            vlm(url=url)
        assert "secret" not in str(error.value)


def test_a_pair_template_scores_no_single_images() -> None:
    one = RewardBatch(
        torch.zeros(1, 3, 8, 8), ["a"], torch.zeros(1, dtype=torch.int64), [{}], torch.zeros(1)
    )
    message = r"think compares two images; write .fn: win_rate, judge: .fn: vlm"
    with pytest.raises(ConfigError, match=message):
        vlm(template="think")(one)
    with pytest.raises(ConfigError, match=message):
        vlm(template="think").check_record({"prompt": "a"}, "line 1")


def test_a_wording_from_a_file(tmp_path: Path) -> None:
    """The hash is of the text with {} for the caption, as published; here: `printf 'Rate: [{}]' |
    sha256sum`."""
    file = tmp_path / "wording.txt"
    sha = "c864a59c68a6dfc12a37dcdb082e61cf1a8e0de9d314fb63aa4decbb41b045d1"
    for text in ("Rate: [{}]", "Rate: [{prompt}]", "Rate: [{prompt}]\n"):
        file.write_text(text)
        assert vlm(template_file=str(file), template_sha256=sha[:16]).wording == "Rate: [{prompt}]"
    with pytest.raises(ConfigError, match=f"expected sha256 beef..., got {sha[:16]}"):
        vlm(template_file=str(file), template_sha256="beef")
    for text, message in [
        ("no mark", "expected {prompt} once, found {} 0 times"),
        ("{prompt} {prompt}", "found {prompt} 2 times"),
        ('{prompt} {{"a": 1}}', "one brace in an f-string"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            vlm(template_file=str(file))
        assert message in str(error.value)
    file.write_bytes(b"\xff{prompt}")
    with pytest.raises(ConfigError, match="UTF-8"):
        vlm(template_file=str(file))
    file.write_text(
        '{prompt} {"a": {}}'
    )  # braces of JSON are fine where {prompt} marks the caption
    assert json.loads(vlm(template_file=str(file)).wording.removeprefix("{prompt} ")) == {"a": {}}


def test_every_wording_has_its_mark_once() -> None:
    names = [
        "pair_rank",
        "point",
        "acs",
        "pair_score",
        "think",
        "flex",
        "yes_no",
        "consistency",
        "level",
        "rating",
    ]
    wordings = [vlm(template=name).wording for name in names]  # type: ignore[arg-type]
    assert (
        all(text.count("{prompt}") == 1 and "{{" not in text for text in wordings)
        and len(set(wordings)) == 10
    )
