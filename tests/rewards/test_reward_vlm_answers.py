"""How answers of judges are read, and the options of the judge: no server is needed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch
from rewards._judge.answer import Answer
from rewards.vlm import vlm
from rewards.vlm.answers import ReadingOptions, read

MISSING = None
ONE, TWO = "Image 1", "Image 2"
LONG = f"{ONE} is better at one thing, {TWO} is better at another. Both images are equally good."
THOUGHT = """<think>
1. Semantic consistency:
    Image 1 (9/10) - Image 2 is better here;
    Image 2 (7/10) - ...
Total score:
Image 1: 9+8+8=25
Image 2: 7+7+5=19
</think>
"""
WRITES = f"<think>I write <answer>{TWO} is better</answer> later</think>"
ACS = "Alignment Score (1-5): 4.5\n**Coherence Score (1-5):** 2\nStyle Score (1-5): 3"
BEAUTY = ACS.replace("Style", "Beauty")


def flex(winner: Any, *categories: Any) -> str:
    rows = []
    for i, side in enumerate(categories):
        rows.append({"name": f"c{i}", "dims": [{"score_1": 6}], "cat_winner": side})
    return json.dumps({"prompt": "a {cat}", "categories": rows, "reason": "", "winner": winner})


def shares(*pairs: tuple[float, float]) -> str:
    names = ("Alignment", "Coherence", "Style")
    rows = zip(names, pairs, strict=False)
    return "\n\n".join(f"{n} Score:\n Image 1: {a}\n Image 2: {b}" for n, (a, b) in rows)


def axes(*weights: float) -> dict[str, Any]:
    return {"axes": weights}


PLAIN: list[tuple[str, str, float | None]] = [
    ("pair_rank", f"{ONE} is better.", 1),
    ("pair_rank", f"... therefore\n{TWO} is better.", 0),
    ("pair_rank", "Both images are equally good.", 0.5),
    ("pair_rank", f"**{ONE}** is better", 1),
    ("pair_rank", "image  2 is\nbetter", 0),
    # the verdict is asked for at the end
    ("pair_rank", f"{ONE} is better in colour, yet on the whole {TWO} is better.", 0),
    ("pair_rank", LONG, 0.5),
    ("pair_rank", "Image 3 is better.", MISSING),
    ("pair_rank", f"{ONE} is good.", MISSING),
    ("pair_rank", "", MISSING),
    ("pair_rank", "I am sorry, I cannot compare these images.", MISSING),
    ("think", f"{THOUGHT}<answer>{ONE} is better</answer>", 1),
    ("think", f"{THOUGHT}<answer>\n{TWO} is better\n</answer>\n", 0),
    ("think", f"{THOUGHT}<answer>Both images are equally good</answer>", 0.5),
    ("think", f"{WRITES}<answer>{ONE} is better</answer>", 1),
    ("think", f"<think>an <answer> tag</think><answer>{ONE} is better</answer>", 1),
    ("think", f"<answer>{TWO} is better</answer>", 0),
    ("think", THOUGHT, MISSING),  # cut off before the verdict
    ("think", f"{THOUGHT}<answer>{ONE} is better", MISSING),
    ("think", f"{THOUGHT}{ONE} is better", MISSING),
    ("think", f"{THOUGHT}<answer>{ONE} is better or {TWO} is better</answer>", MISSING),
    ("think", f"{THOUGHT}<answer>neither</answer>", MISSING),
    ("think", f"<think><answer>{ONE} is better</answer></think>", MISSING),
    # r = (overall + mean(first three)) / 2, by hand
    ("flex", flex(ONE, ONE, TWO, ONE), (1 + 2 / 3) / 2),
    ("flex", flex(TWO, ONE, TWO, ONE), (0 + 2 / 3) / 2),
    ("flex", flex(ONE, ONE, ONE, ONE, TWO, TWO), 1),  # a fourth category does not count
    ("flex", flex(ONE), 1),
    ("flex", flex(ONE, "Tie", TWO), (1 + 0.25) / 2),
    ("flex", flex(ONE, "?", TWO), 0.5),  # the unreadable category is left out
    ("flex", flex("Tie"), 0.5),
    ("flex", flex("both are equal"), 0.5),
    ("flex", flex(2), 0),
    ("flex", flex("image1 wins"), 1),
    ("flex", f"```json\n{flex(TWO, TWO)}\n```", 0),
    ("flex", "<think>{what} a {pair}</think>\n" + flex(TWO, TWO), 0),
    ("flex", flex(TWO) + '\nConfidence: {"high": true}', 0),
    ("flex", f"{flex(ONE)}\nOn reflection:\n{flex(TWO)}", 0),
    ("flex", '{"winner": "Image 1", "categories": "none"}', 1),
    ("flex", '{"winner": "Image 1", "categories": [3, null]}', 1),
    ("flex", flex("Image 1/2", ONE, ONE), MISSING),  # the template's own words
    ("flex", flex(None, ONE, ONE), MISSING),
    ("flex", flex(12), MISSING),
    ("flex", flex("neither"), MISSING),
    ("flex", flex(ONE, TWO)[:-2], MISSING),  # cut off
    ("flex", '{"cat_winner": "Image 1"}', MISSING),
    ("flex", ONE, MISSING),
    ("flex", "{" * 3000, MISSING),
    # of 1 to 5, / 5
    ("point", "cat (animal): 1\nred (colour): 0\nFinal Score: 3.5", 0.7),
    ("point", "**Final Score:** 4/5", 0.8),
    ("point", "**Final Score**: 5", 1),
    ("point", "Final Score: 1.", 0.2),
    ("point", "Final Score: 2. No: Final Score:\n3", 0.6),
    ("point", "Final Score: 0", MISSING),
    ("point", "Final Score: 10", MISSING),
    ("point", "Final Score: 5.1", MISSING),
    ("point", "Final Score: -3", MISSING),
    ("point", "Final Score: X", MISSING),
    ("point", "Score: 4", MISSING),
    # of 1 to 5, (x - 1) / 4
    ("rating", 'Blurry. {"rating": 3.25}', 0.5625),
    ("rating", '{"rating" : 5}', 1),
    ("rating", '{"rating": 2} no, {"rating": 1}', 0),
    ("rating", '{"rating": 0.9}', MISSING),
    ("rating", '{"rating": 5.01}', MISSING),
    ("rating", '{"rating": 1.2.3}', MISSING),
    ("rating", '{"rating": "bad"}', MISSING),
]
TAG = r"<score>\s*(.*?)\s*</score>"
THREE = ((0.4, 0.6), (0.5, 0.5), (0.9, 0.1))
PRECISE = ((0.43569, 0.56431), (0.418, 0.58200002), (1, 0))
WITH_OPTIONS: list[tuple[str, str, float | None, dict[str, Any]]] = [
    ("rating", "<score>\n40</score>", 0.4, {"pattern": TAG, "low": 0.0, "high": 100.0}),
    ("rating", "<score>nan</score>", MISSING, {"pattern": TAG}),
    ("rating", "<score></score>", MISSING, {"pattern": r"<score>(\d)?</score>"}),
    # r = (w_o overall + w_d mean(first three)) / (w_o + w_d), by hand
    ("flex", flex(ONE, TWO, TWO, TWO), 0.25, {"w_overall": 1.0, "w_dims": 3.0}),
    ("flex", flex(ONE, TWO, TWO, TWO), 1, {"w_dims": 0.0}),
    ("flex", flex(ONE, TWO, TWO, TWO), 0, {"w_overall": 0.0}),
    # a weighted mean of three scores
    ("acs", ACS, (4.5 + 2 + 3) / 15, axes(1, 1, 1)),
    ("acs", ACS, (1.4 * 4.5 + 0.7 * 3) / (2.1 * 5), axes(1.4, 0, 0.7)),
    ("acs", ACS, 0.6, axes(0, 0, 3)),
    ("acs", BEAUTY, 6.5 / 10, axes(1, 1, 0)),
    ("acs", BEAUTY, MISSING, axes(1, 1, 0.1)),
    ("acs", ACS.replace(" 3", " 6"), MISSING, axes(1, 1, 1)),
    ("acs", ACS.replace(" 3", " Z"), MISSING, axes(1, 1, 1)),
    ("acs", "", MISSING, axes(1, 1, 1)),
    ("pair_score", shares(*THREE), 0.6, axes(1, 1, 1)),
    ("pair_score", shares(*THREE), (1.2 + 0.9) / 4, axes(3, 0, 1)),
    ("pair_score", shares(*PRECISE), (0.43569 + 0.418) / 2, axes(1, 1, 0)),
    ("pair_score", shares(*THREE[:2]), MISSING, axes(1, 1, 1)),
    ("pair_score", shares(*THREE[:2]), 0.45, axes(1, 1, 0)),
    ("pair_score", shares((0.4, 0.7), *THREE[1:]), MISSING, axes(1, 1, 1)),  # no shares of one
    ("pair_score", shares((4, 6), (5, 5), (9, 1)), MISSING, axes(1, 1, 1)),
    ("pair_score", shares((0, 0), *THREE[1:]), MISSING, axes(1, 1, 1)),
]


def check(template: str, text: str, expected: float | None, top: Any = None, **how: Any) -> None:
    out = read(Answer(text, list((top or {}).items())), ReadingOptions(template, **how))
    if expected is MISSING:
        assert isinstance(out, str) and " in the answer " in out, (template, text)
    else:
        assert out == pytest.approx(expected, abs=1e-7), (template, text)


def test_an_answer_is_read() -> None:
    for template, text, expected in PLAIN:
        check(template, text, expected)
    for template, text, expected, how in WITH_OPTIONS:
        check(template, text, expected, **how)


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
    """It has at most the smallest listed log-prob: sigmoid(-8) = 3e-4 of doubt, -5: 7e-3."""
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


def test_addresses() -> None:
    bases = {"http://a:1": "http://a:1/v1", "https://b/api/v1": "https://b/api/v1"}
    for url, base in bases.items():
        assert vlm(url=url).server.base == vlm(url=f"{url}/").server.base == base


def test_a_pair_template_scores_no_single_images() -> None:
    one = RewardBatch(torch.zeros(1, 3, 8, 8), ["a"], torch.zeros(1), [{}], torch.zeros(1))
    message = r"think compares two images; write .fn: win_rate, judge: .fn: vlm"
    with pytest.raises(ConfigError, match=message):
        vlm(template="think")(one)
    with pytest.raises(ConfigError, match=message):
        vlm(template="think").check_record({"prompt": "a"}, "line 1")


def test_a_wording_from_a_file(tmp_path: Path) -> None:
    """The hash is `printf 'Rate: [{}]' | sha256sum`: with {} for the caption, as published."""
    file = tmp_path / "wording.txt"
    sha = "c864a59c68a6dfc12a37dcdb082e61cf1a8e0de9d314fb63aa4decbb41b045d1"
    for text in ("Rate: [{}]", "Rate: [{prompt}]", "Rate: [{prompt}]\n"):
        file.write_text(text)
        assert vlm(template_file=str(file), template_sha256=sha[:16]).wording == "Rate: [{prompt}]"
    with pytest.raises(ConfigError, match=f"expected sha256 beef..., got {sha[:16]}"):
        vlm(template_file=str(file), template_sha256="beef")
    for data, message in (
        (b"no mark", r"expected \{prompt\} once, found \{\} 0 times"),
        (b"{prompt} {prompt}", r"found \{prompt\} 2 times"),
        (b'{prompt} {{"a": 1}}', "one brace in an f-string"),
        (b"\xff{prompt}", "UTF-8"),
    ):
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=message):
            vlm(template_file=str(file))
    # braces of JSON are fine where {prompt} marks the caption
    file.write_text('{prompt} {"a": {}}')
    assert json.loads(vlm(template_file=str(file)).wording.removeprefix("{prompt} ")) == {"a": {}}


def test_every_wording_has_its_mark_once() -> None:
    names = {"yes_no", "consistency", "level", *(row[0] for row in (*PLAIN, *WITH_OPTIONS))}
    wordings = {vlm(template=name).wording for name in names}  # type: ignore[arg-type]
    assert len(wordings) == 10
    assert all(text.count("{prompt}") == 1 and "{{" not in text for text in wordings)
