"""Rewards that ask a judge for more than a score: learnt rubrics, consistency, checks of edits, and
the benchmarks that are questions."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from judge_server import OPTIONS, Act, Seen, brightness, grey, says, serving
from runkit import rows
from toykit import toy

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.prompts import load_prompts
from flowrl.core.types import Reward, RewardBatch
from flowrl.evaluation.suites.catalogue import overrides_of
from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from flowrl.runs.suite import run_suite
from rewards._judge.answer import Answer
from rewards._judge.ask import Judge, fill
from rewards.consistency import consistency, theme
from rewards.edit_verifier import aggregated, edit_verifier, read_principles
from rewards.questions import questions
from rewards.questions.protocols import POINTS, Dpg, GenEval2, Slips, UniGenBench
from rewards.rubric import rubric
from rewards.rubric.learn import (
    ByJudge,
    Preferences,
    accuracy,
    best_of,
    fit,
    learn,
    objective,
    threshold,
    weigh,
)
from rewards.rubric.reward import Checks, Rule, load_rubric, save_rubric

# ------------------------------------------------------------------------------- a judge that looks


RIGHT = "It shows what the caption says."
GREY = "The background is light grey."
RED = "There is something red."
SIDES = "The left half is darker than the right half."
NEW = "Its objects are those of the caption."  # what it proposes itself


def yes(share: float) -> Act:
    """Say Yes with a probability, the rest No."""
    return says("Yes" if share > 0.5 else "No", {"Yes": math.log(share), "No": math.log1p(-share)})


def looks(seen: Seen) -> Act:
    """Answer a question about a rule, or two images, or propose rules: what is said follows from
    the images and the question alone."""
    text = seen.text
    if "Does it keep this rule?" in text:
        caption, rule = re.findall(r'caption: "(.*)"\nDoes it keep this rule\? (.*)\n', text)[0]
        return yes(kept(rule, caption, seen.images[0]))
    if "beginning with 'Rule:'" in text:
        return says(f"The first one is right.\nRule: {NEW}\n- Rule: {RED}")
    if "lines that begin with 'Keep:'" in text:
        return says("Quality: No specks.\nKeep: The background.\nFollow: It moved.\nkeep: Colours.")
    # how alike two images are by their mean levels, in one form or the other
    a, b = (float(image.mean()) for image in seen.images)
    if "from 0 (not at all) to 5" in text:
        digits = [1 + 4 * (k == round(a / 51)) for k in range(6)]
        return says("3", {str(k): math.log(part / sum(digits)) for k, part in enumerate(digits)})
    return yes(min(max(b / 255, 0.01), 0.99) if "artefacts" in text else likeness(a, b))


def kept(rule: str, caption: str, image: np.ndarray) -> float:
    """Return P(yes), never 0 or 1; scenes of shapes by the benchmark's own checker."""
    levels = image.astype(np.float64)
    red = (levels[..., 0] > 150) & (levels[..., 1] < 90) & (levels[..., 2] < 90)
    half = image.shape[1] // 2
    darker = levels[:, :half].mean() < levels[:, half:].mean()
    holds = {GREY: levels[0, 0].min() > 180, RED: red.sum() > 8, SIDES: darker}
    if rule not in (RIGHT, NEW):
        return 0.9 if holds[rule] else 0.1
    records = {r["prompt"]: r for rows in all_records().values() for r in rows}
    pixels = torch.from_numpy(levels / 255).permute(2, 0, 1).float()[None]
    found = check(pixels, [records[caption]])
    return 0.95 if bool((found.strict if rule == RIGHT else found.count_ok)[0]) else 0.05


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(looks) as server:
        server.models = Act(b'{"object": "list", "data": [{"id": "judge"}]}')
        yield server.url


def batch_of(
    images: torch.Tensor, prompts: list[str], meta: Any = None, source: Any = ()
) -> RewardBatch:
    count = len(prompts)
    rows = meta or [{"prompt": prompt} for prompt in prompts]
    return RewardBatch(images, prompts, torch.arange(count), rows, torch.zeros(count), list(source))


# ------------------------------------------------------------------------------------------ rubrics


# the reference's, addendum 3.3
ROWS = [[0.8, 0.1, -0.2], [0.6, -0.2, 0.3], [0.4, 0.5, 0.1], [-0.3, 0.2, 0.4], [0.7, -0.1, -0.4]]
F = torch.tensor([*ROWS, [0.5, 0.3, 0.2], [-0.1, 0.4, -0.3], [0.9, -0.3, 0.1]])


def test_the_fit_is_the_references() -> None:
    for strength, w, value, right in (
        (1.0, (1.12793402, 0, 0), 5.1338431, 0.75),
        (2.0, (2.11557195, 0, 0), 8.6754943, 0.75),
        (10.0, (4.7082709, 6.19771713, 1.5343895), 22.8499682, 1.0),
    ):
        found, expected = fit(F, strength), torch.tensor(w, dtype=torch.float64)
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
        assert float(objective(found, F.double(), strength)) == pytest.approx(value, abs=1e-6)
        assert accuracy(found, F) == right
    assert threshold(F) == pytest.approx(0.5714286, abs=1e-7)
    assert not fit(F, 0.5714).any() and fit(F, 0.5716).any()


def test_three_informative_rules_of_fifty_are_found() -> None:
    """The reference's synthetic test: weights (2, 1, -1) and noise, for a range of strengths."""
    draw = torch.Generator().manual_seed(0)
    gaps = torch.randn(400, 50, generator=draw)
    score = gaps[:, [3, 17, 41]] @ torch.tensor([2.0, 1.0, -1.0])
    sign = torch.where(score + 0.3 * torch.randn(400, generator=draw) > 0, 1.0, -1.0)
    for strength in (0.05, 0.1, 0.3):
        found = weigh(gaps * sign[:, None], strength, 3)
        assert found.nonzero()[:, 0].tolist() == [3, 17, 41]
        assert found[3] > found[17] > 0 > found[41]
    # a rule whose answers hardly vary is not punished for that
    small = gaps * sign[:, None]
    small[:, 3] /= 100
    assert float(weigh(small, 0.1, 3)[3]) == pytest.approx(
        100 * float(weigh(gaps * sign[:, None], 0.1, 3)[3]), rel=1e-6
    )


def scenes(records: list[dict[str, Any]], seed: int) -> torch.Tensor:
    return render(scenes_for(records, np.random.default_rng(seed)))


@pytest.mark.integration
def test_a_rubric_is_learnt_on_shapes_and_rewards_right_scenes(url: str, tmp_path: Path) -> None:
    """Pairs of a right scene and one of another caption, in two rounds: what tells them apart is
    kept, and the reward puts right scenes of other captions first."""
    records = [record for rows in all_records().values() for record in rows]
    mine, prompts = records[:96:8], [record["prompt"] for record in records[:96:8]]
    pairs = Preferences(scenes(mine, 0), scenes(records[100:196:8], 1), prompts)
    judge = Judge(
        "rewards.rubric", url=url, cache=None, extra=None, **{**OPTIONS, "model": "judge"}
    )
    pool, checks = [GREY, RED, RIGHT, SIDES], Checks(judge)
    found = learn(pairs, pool, checks, strength=1.0, keep=2, rounds=2, propose=ByJudge(judge))
    best, out = best_of(found), tmp_path / "rubric.json"
    assert best.accuracy == 1 and len(best.rules) <= 2 and found[1].asked > len(found[0].rules)
    save_rubric(out, best.rules)
    assert load_rubric(out) == best.rules and best.rules[0].text == RIGHT
    assert best.rules[0].weight > 0
    reward = rubric(file=str(out), url=url)
    reward.probe()
    held = records[4:96:16]
    prompts = [record["prompt"] for record in held] * 2
    images = torch.cat([scenes(held, 2), scenes(records[204:296:16], 3)])
    good, bad = reward(batch_of(images, prompts)).chunk(2)
    assert bool((good > bad).all())
    # what a rule is worth: P(yes) .95 or .05 times its weight, here of one rule alone
    save_rubric(out, [Rule(RIGHT, 2.0), Rule(GREY, -1.0)])
    expected = torch.tensor([2 * 0.95 - 0.9] * len(held) + [2 * 0.05 - 0.9] * len(held))
    scores = rubric(file=str(out), url=url)(batch_of(images, prompts))
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def test_a_file_that_is_no_rubric_of_this_version(tmp_path: Path) -> None:
    file, head = tmp_path / "rubric.json", '{"format": "flowrl rubric", "version": '
    for text, said in (
        (head + '2, "rules": []}', "of version 1, got version 2"),
        (head + 'true, "rules": []}', "got version True"),
        ('{"rules": []}', "expected format 'flowrl rubric', got None"),
        (head + '1, "rules": []}', "expected a rule or more"),
        (head + '1, "rules": [{"text": "a", "weight": NaN}]}', "with text and weight"),
        ("[", "expected a rubric, as "),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            rubric(file=str(file))


# ---------------------------------------------------------------------------- consistency and edits


def likeness(a: float, b: float) -> float:
    """What the judge says of two flat images."""
    return min(max(1 - abs(a - b) / 255, 0.01), 0.99)


def test_consistency_of_grids_and_of_edits(url: str) -> None:
    """Cells by hand, odd pixels cut off; the mean over pairs, criteria, dimensions; and the square
    root of both answers about an edit."""
    levels = [[200, 40], [120, 80]]
    grid = torch.zeros(1, 3, 17, 17)
    for i in range(2):
        for j in range(2):
            grid[:, :, 8 * i : 8 * i + 8, 8 * j : 8 * j + 8] = levels[i][j] / 255
    flat = [200, 40, 120, 80]
    pairs = [likeness(a, b) for i, a in enumerate(flat) for b in flat[i + 1 :]]
    prompt = "A 2x2 set of cats. LEFT: one. RIGHT: two"
    assert theme(prompt) == "A 2x2 set of cats." and theme("plain, no cells") == "plain, no cells."
    assert theme("A set. [TOP-LEFT]: one") == "A set."
    found = consistency(url=url, model="judge")(batch_of(grid, [prompt]))
    assert found.tolist() == pytest.approx([sum(pairs) / 6], abs=1e-5)
    record = {"prompt": prompt, "criteria": {"style": ["same", "alike"], "logic": {"1": "so"}}}
    asked = consistency(url=url, model="judge", criteria=True)
    asked.check_record(record, "here")
    found = asked(batch_of(grid, [prompt], [record]))
    assert found.tolist() == pytest.approx([sum(pairs) / 6], abs=1e-5)  # all criteria answer alike
    with pytest.raises(DataError, match="expected criteria"):
        asked.check_record({"prompt": prompt, "criteria": {"style": []}}, "here")
    with pytest.raises(DataError, match="grid"):
        asked.check_record({"prompt": "a 1024x1024 photo"}, "here")
    edits = batch_of(grey([90, 30]), ["darker"] * 2, source=[(grey([120])[0],), (grey([250])[0],)])
    found = consistency(url=url, model="judge", mode="edit")(edits)
    expected = [math.sqrt(likeness(120, 90) ** 2), math.sqrt(likeness(250, 30) ** 2)]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(DataError, match="without its source"):
        consistency(url=url, model="judge", mode="edit")(edits._replace(source=[]))


def test_edits_by_principles_and_by_the_expected_digit(url: str) -> None:
    """The usual three and written ones, by hand; the digit's expectation / 5."""
    edits = batch_of(grey([90, 30]), ["darker"] * 2, source=[(grey([120])[0],), (grey([250])[0],)])
    like = [likeness(120, 90), likeness(250, 30)]
    bright = [90 / 255, 30 / 255]  # what it says of artefacts
    found = edit_verifier(url=url, quality=2.0)(edits)
    expected = [(2 * a + 2 * b) / 4 for a, b in zip(like, bright, strict=True)]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    # the judge's own principles: two to keep, one to follow, one of quality, none of artefacts
    found = edit_verifier(url=url, principles="ask")(edits)
    assert found.tolist() == pytest.approx(like, abs=1e-5)
    # the source's level says which digit has 5 of 10 parts, the others have 1 each
    digits = [round(120 / 51), round(250 / 51)]
    found = edit_verifier(url=url, protocol="level")(edits)
    assert found.tolist() == pytest.approx([(15 + 4 * k) / 10 / 5 for k in digits], abs=1e-5)
    assert aggregated({"keep": [1.0, 0.0], "quality": [1.0]}, {"keep": 1, "quality": 3}) == 0.875
    assert math.isnan(aggregated({}, {})) and isinstance(read_principles(Answer("?", [])), str)
    told = {"prompt": "p", "source": "a.png", "principles": {"follow": ["it moved"]}}
    recorded = edit_verifier(url=url, principles="record")
    recorded.check_record(told, "here")
    for wrong in ({"taste": ["x"]}, {"keep": [""]}, {}, None):
        with pytest.raises(DataError, match="expected principles"):
            recorded.check_record({**told, "principles": wrong}, "here")
    unpaid = edit_verifier(url=url, principles="record", quality=0.0)
    with pytest.raises(DataError, match="of kinds whose weight is 0, .*: quality; give"):
        unpaid.check_record({**told, "principles": {"quality": ["sharp"]}}, "here")
    with pytest.raises(DataError, match="expected a record with a source"):
        recorded.check_record({"prompt": "p"}, "here")
    assert fill("{prompt} {criterion}", prompt="{criterion}", criterion="x") == "{criterion} x"


def test_a_failed_judge_is_missing_never_a_score(tmp_path: Path) -> None:
    """Answers without log-probs, HTTP 400 and a half answered edit: NaN where the published codes
    say 0; beyond `max_failed` the run stops."""
    file = tmp_path / "rubric.json"
    save_rubric(file, [Rule("bright", 1.0), Rule("dark", 1.0)])

    def act(seen: Seen) -> Act:
        if seen.images[-1].mean() < 50 and ("dark" in seen.text or "do what" in seen.text):
            return Act(b"no", 400)
        if seen.images[-1].mean() > 200:
            return says("Maybe", {"Maybe": -0.1})
        return says("Yes", {"Yes": math.log(0.8), "No": math.log(0.2)})

    images, sources = grey([30, 120, 250]), [(grey([99])[0],)] * 3
    batch = batch_of(images, ["a"] * 3, source=sources)
    with serving(act) as server, pytest.warns(UserWarning, match="questions failed"):
        given: dict[str, Any] = {"url": server.url, "model": "UnifiedReward", "backoff": 0.0}
        given |= {"max_failed": 1.0}
        rewards: list[tuple[Reward, float]] = [
            (rubric(file=str(file), **given), 1.6),
            (consistency(mode="edit", **given), 0.8),
            (edit_verifier(**given, wordings={"check": "{prompt} dark {criterion}"}), 0.8),
        ]
        for reward, whole in rewards:
            found = reward(batch)
            assert found.isnan().tolist() == [True, False, True], type(reward)
            assert float(found[1]) == pytest.approx(whole, abs=1e-6)
        strict = rubric(file=str(file), **{**given, "max_failed": 0.0})
        with pytest.raises(RunError, match="rewards.rubric: expected answers to at least 100%"):
            strict(batch)
        with pytest.raises(RunError, match="rewards.rubric: .* offers no model 'x'"):
            rubric(file=str(file), **{**given, "model": "x"}).probe()
    with pytest.raises(ConfigError, match="expected {criterion} once"):
        rubric(file=str(file), wording="{prompt}")


# -------------------------------------------------------------------- benchmarks that are questions


HEAD = "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,"
HEAD += "question_natural_language\n"


def chain(*order: int) -> dict[str, Any]:
    """Make a record whose questions 1 <- 2 <- 3 are listed in an order."""
    parents: dict[int, list[int]] = {1: [], 2: [1], 3: [2]}
    asked = []
    for one in order:
        asked.append({"id": one, "question": "?", "tuple": "x (y)", "parents": parents[one]})
    return {"prompt": "p", "questions": asked}


def test_dpg_fixtures_of_the_published_code() -> None:
    """The reference's table (addendum 4.2). A failed parent fails all below it; the code, walking
    the list once, misses a child that is listed first."""
    dpg, code = Dpg(Slips()), Dpg(Slips(zeroes_in_listed_order=True))
    for values, expected in [((0, 1, 1), 0), ((1, 1, 1), 1), ((1, 0, 1), 1 / 3)]:
        assert dpg.score(chain(1, 2, 3), values) == pytest.approx(expected)
        assert code.score(chain(1, 2, 3), values) == pytest.approx(expected)
    assert code.score(chain(3, 2, 1), (1, 1, 0)) == pytest.approx(1 / 3)
    assert dpg.score(chain(3, 2, 1), (1, 1, 0)) == 0
    two = chain(1, 2, 3)
    two["questions"][1]["parents"], two["questions"][2]["parents"] = [], [1, 2]
    assert dpg.score(two, (1, 0, 1)) == pytest.approx(1 / 3)
    # categories: answers as they are, over all images, or of the last one as published
    record = {"prompt": "p", "asked": ["attribute - color (sky)", "entity - whole (sky)"]}
    told = [{**record, "answers": [1.0, 0.0], "score": 1.0}]
    told.append({**record, "answers": [0.0, 1.0], "score": 0.0})
    found = dpg.tables(told)
    assert found["dpg"] == 50 and found["1: attribute"] == found["2: entity - whole"] == 0.5
    assert Dpg(Slips(categories_of_last_image=True)).tables(told)["1: entity"] == 1.0
    for text, value in [("Yes.", 1.0), (" no", 0.0), ("yes and no", "neither yes nor no")]:
        assert dpg.read(Answer(text, []), record, 0) == value
    assert Dpg(Slips(other_answers_mean_no=True)).read(Answer("maybe", []), record, 0) == 0


def test_unigenbench_answers_and_tables() -> None:
    """27 points in 10 primaries; apostrophes do no harm, quoted scores count, another length does
    not; accuracies are pooled over images, then primaries averaged."""
    assert len(POINTS) == 27 and len({name.partition(" - ")[0] for name in POINTS}) == 10
    bench = UniGenBench()
    points = ["Style", "Action - Hand (Character/Anthropomorphic)", "Action-Animal"]
    record = {"prompt": "p", "testpoints": points, "descriptions": ["a", "b", "c"]}
    bench.check(record, "here")
    (asked,) = bench.ask(record)
    assert "2. Action - Hand (Character/Anthropomorphic) (an action of hands" in asked
    text = "<analysis>['it's fine', 'no', 'no']</analysis><score>[1, '0', 1]</score>"
    values = bench.read(Answer(text, []), record, 0)
    assert values == [1.0, 0.0, 1.0] and bench.score(record, [values]) == pytest.approx(2 / 3)
    for wrong, said in [("[1, 0]", "2 scores for 3"), ("[1, 2, 0]", "other than 0 and 1")]:
        assert said in bench.read(Answer(f"<score>{wrong}</score>", []), record, 0)
    assert bench.read(Answer("looks good", []), record, 0) == "no <score>[...]</score>"
    row = {"asked": bench.names(record), "answers": [values], "score": 2 / 3}
    found = bench.tables([row, {**row, "answers": [[0.0, 1.0, 1.0]]}])
    assert found["2: Action - Hand"] == 0.5 and found["1: Action"] == 0.75
    assert found["1: Style"] == 0.5 and found["unigenbench"] == pytest.approx(0.625)
    with pytest.raises(DataError, match="expected test points of UniGenBench, got .'Taste'"):
        bench.check({**record, "testpoints": ["Style", "Taste", "Style"]}, "here")


def test_soft_tifa_fixtures() -> None:
    """The reference's numbers (addendum-2026, 6): (.9, .99, .95, .2) has AM .76, GM .6414427; any 0
    has GM 0. Probabilities of all forms are summed; what is not listed may not matter."""
    values = (0.9, 0.99, 0.95, 0.2)
    assert GenEval2(False).score({}, values) == pytest.approx(0.76)
    assert GenEval2(True).score({}, values) == pytest.approx(0.6414427, abs=1e-7)
    assert GenEval2(True).score({}, (0.5, 0.0)) == 0
    record = {"prompt": "p", "vqa_list": [["How many?", "two"], ["Red?", "Yes"]]}
    bench = GenEval2(False)

    def read(number: int, **shares: float) -> Any:
        top = [(token.replace("_", " "), math.log(share)) for token, share in shares.items()]
        return bench.read(Answer("", top), record, number)

    own = {"two": 0.5, "_2": 0.25, "Two": 0.1, "three": 0.1, "x": 0.049, "y": 0.001}
    assert read(0, **own) == pytest.approx(0.85)
    assert read(1, Yes=0.6, _yes=0.1, No=0.2999, z=0.0001) == pytest.approx(0.7)
    assert "open" in read(1, No=0.5, Nope=0.3)  # yes could be up to 0.2
    assert read(1) == "no log-probs of the first token"
    row = {"asked": ["count", "attribute"], "answers": [0.25, 1.0], "tag": "2 atoms"}
    found = bench.tables([row, {**row, "answers": [1.0, 1.0]}])
    assert found["soft-TIFA AM"] == pytest.approx(81.25) and found["AM, count"] == 62.5
    assert found["GM, 2 atoms"] == pytest.approx(75) == found["soft-TIFA GM"]


def test_files_of_the_benchmarks(tmp_path: Path) -> None:
    """In their own formats, with the line of what is wrong."""
    dpg = tmp_path / "dpg.csv"
    one = "0,a red sky,k,1,0,b,c,entity - whole (sky),Is there a sky?\n"
    two = '0,a red sky,k,2,"1",b,c,attribute - color (sky; red),Is the sky red?\n'
    other = "5,a cat,k,1,0,b,c,entity - whole (cat),Is there a cat?\n"
    dpg.write_text(HEAD + one + two + other)
    found = load_prompts(f"dpg:{dpg}")
    assert found.texts == ["a red sky", "a cat"] and found.places[1].endswith("dpg.csv, line 4")
    first = found.records[0]["questions"]
    assert [q["parents"] for q in first] == [[], [1]]
    assert Dpg(Slips(skips_first_question=True)).ask(found.records[0]) == [
        "Is the sky red? Answer with yes or no alone."
    ]
    for bad, said in [
        ("9", "line 2: prompt 0: expected questions"),
        ("x", "line 3: expected whole"),
    ]:
        dpg.write_text(HEAD + one + two.replace('"1"', bad))
        with pytest.raises(DataError, match=said):
            load_prompts(f"dpg:{dpg}")
    unigen = tmp_path / "unigen.csv"
    told = json.dumps({"Testpoints": ["Style"], "Testpoint Description": ["ink"]})
    cell = '"' + told.replace('"', '""') + '"'
    unigen.write_text(f'index,prompt_en,sub_dims_en\n0,a fox,{cell}\n1,an ox,{cell[:-3]}"\n')
    with pytest.raises(DataError, match="unigen.csv, line 3: column sub_dims_en: expected JSON"):
        load_prompts(f"unigenbench:{unigen}")
    line = {"prompt": "four cows", "atom_count": 2, "vqa_list": [["How many?", "four"]]}
    second = tmp_path / "g2.jsonl"
    second.write_text(
        json.dumps({**line, "skills": ["count"]}) + "\n" + json.dumps({"prompt": "x"})
    )
    with pytest.raises(DataError, match='g2.jsonl, line 2: expected an object with a "vqa_list"'):
        load_prompts(f"geneval2:{second}")
    # a folder of lists: each is a task
    (tmp_path / "styles").mkdir()
    (tmp_path / "styles" / "anime.json").write_text('["a girl", "a boy"]')
    (tmp_path / "styles" / "photo.txt").write_text("a street\n")
    styles = load_prompts(tmp_path / "styles")
    assert [record["tag"] for record in styles.records] == ["anime", "anime", "photo"]


def test_prompts_of_the_hub(tmp_path: Path) -> None:
    """A local data set by the library itself; a hub that is not in reach (tests are offline)."""
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text("Prompts,Category\na red car,Colors\n,Colors\n")
    with pytest.raises(DataError, match="set, row 2: expected a text"):
        load_prompts(f"hub:{tmp_path / 'set'}")
    (tmp_path / "set" / "train.csv").write_text("Prompts,Category\na red car,Colors\n")
    found = load_prompts(f"hub:{tmp_path / 'set'}@train")
    assert found.records[0] == {"Prompts": "a red car", "Category": "Colors", "prompt": "a red car"}
    with pytest.raises(ConfigError, match="hub:nobody/nothing: the data set cannot be read"):
        load_prompts("hub:nobody/nothing")


def test_files_and_rows_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files from a cache as huggingface_hub keeps it, with the network off; a benchmark's own rows
    in a local data set; without the package, what to install."""
    commit, home = "0" * 40, tmp_path / "datasets--zhwang--HPDv2"
    folder = home / "snapshots" / commit / "benchmark"
    folder.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"hub:zhwang/HPDv2/benchmark/\*.json: .*no file"):
        load_prompts("hpdv2/test")
    (folder / "anime.json").write_text('["a girl", "a boy"]')
    (folder / "photo.json").write_text('["a street"]')
    found = load_prompts("hpdv2/test")
    assert [record["tag"] for record in found.records] == ["anime", "anime", "photo"]
    assert found.places[1] == "hub:zhwang/HPDv2/benchmark/anime.json, entry 2"
    assert found.name == "hpdv2-test"
    with pytest.raises(ConfigError, match="hub:nobody/set/x.txt: .* --prompts FILE"):
        load_prompts("hub:nobody/set/x.txt")
    with pytest.raises(ConfigError, match="from the hub: drawbench.*did you mean 'drawbench'"):
        load_prompts("drawbenc")
    # rows
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    points = {"Testpoints": ["Style"], "Testpoint Description": ["ink"]}
    row = json.dumps({"index": 0, "prompt_en": "a cat", "sub_dims_en": json.dumps(points)})
    (tmp_path / "set" / "train.jsonl").write_text(row + "\n")
    (record,) = load_prompts(f"unigenbench:hub:{tmp_path / 'set'}").records
    assert (record["prompt"], record["testpoints"]) == ("a cat", ["Style"])
    with pytest.raises(DataError, match="expected columns item_id"):
        load_prompts(f"dpg:hub:{tmp_path / 'set'}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install.*hub.*--prompts FILE"):
        load_prompts("partiprompts")


def sees(seen: Seen) -> Act:
    """Say yes of bright images, and nonsense of black ones."""
    level = brightness(seen.images[0])
    return says("a fine image" if level == 0 else "Yes" if level > 100 else "No.")


@pytest.mark.integration
def test_a_suite_by_a_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Grey images of 200 and 40: yes and no; a nonsensical answer is a missing score, and the error
    quotes it; a suite has the benchmark's own numbers."""
    record = chain(1, 2, 3)
    with serving(sees) as server:
        reward = questions(protocol="dpg", url=server.url, backoff=0.01, cache=str(tmp_path / "c"))
        batch = batch_of(grey([200, 40]), ["p"] * 2, [record] * 2)
        scores, told = reward.explain(batch)
        assert scores.tolist() == [1.0, 0.0] and told[1]["answers"] == [0.0, 0.0, 0.0]
        asked = len(server.seen)
        assert reward(batch).tolist() == [1.0, 0.0] and len(server.seen) == asked  # from the cache
        black = batch._replace(images=grey([0, 200]))
        with pytest.raises(RunError, match="neither yes nor no in the answer 'a fine image'"):
            reward(black)
        lenient = questions(protocol="dpg", url=server.url, backoff=0.01, max_failed=0.9)
        with pytest.warns(UserWarning, match="questions failed"):
            assert lenient(black).isnan().tolist() == [True, False]
        # the suite
        file = tmp_path / "prompts.jsonl"
        file.write_text(json.dumps(record) + "\n")
        call = f'rewards={{dpg: {{fn: questions, protocol: dpg, url: "{server.url}"}}}}'
        config = toy(tmp_path / "toy", call, f"prompts.test={file}", "eval.score=''")
        server.models = Act(json.dumps({"data": [{"id": "judge"}]}).encode())
        report = run_suite(config.call("model")(), config, "dpg", tmp_path / "out", target="toy")
    values = [line["scores"]["dpg"] for line in rows(tmp_path / "out" / "scores.jsonl")]
    assert report["dpg"] == pytest.approx(sum(values) / len(values))
    assert report["tables"]["dpg"]["dpg"] == pytest.approx(100 * report["dpg"])
    assert set(report["table_intervals"]["dpg"].values()) == {None}  # there is one prompt
    assert len(rows(tmp_path / "out" / "dpg.jsonl")) == len(values) == 2


def test_suites_read_the_benchmark_s_own_format() -> None:
    assert "prompts.test=dpg:x.csv" in overrides_of("dpg", "x.csv")
    assert "prompts.test=geneval2:x.jsonl" in overrides_of("geneval2", "x.jsonl")
    assert "prompts.test=own.jsonl" in overrides_of("unigenbench", "own.jsonl")
    assert "prompts.test=hub:a/b" in overrides_of("drawbench", "hub:a/b")
    assert "prompts.test=dpg:hub:a/b" in overrides_of("dpg", "hub:a/b")
    config = load_config("shapes/awm", overrides_of("unigenbench", "x.csv"))
    assert config.headline == "unigenbench" and config.prompts.test == "unigenbench:x.csv"


def test_equal_images_of_other_records_have_their_own_answers(tmp_path: Path) -> None:
    """The same question of two equal images, whose right answers differ: by the judge's
    probabilities .9 and .05, whichever comes first, also from the cache."""
    shares = {"two": 0.9, "three": 0.05, "four": 0.04, "x": 0.009, "y": 0.001}
    top = {token: math.log(share) for token, share in shares.items()}
    asked = [[["How many dogs?", answer]] for answer in ("two", "three")]
    records = [{"prompt": "dogs", "vqa_list": one, "skills": ["c"]} for one in asked]
    with serving(lambda seen: says("two", top)) as server:
        reward = questions(protocol="geneval2", url=server.url, cache=str(tmp_path / "c"))
        for order in ((0, 1), (1, 0), (0, 1)):
            meta = [records[i] for i in order]
            batch = batch_of(torch.zeros(2, 3, 8, 8), ["dogs"] * 2, meta)
            expected = [(0.9, 0.05)[i] for i in order]
            assert reward(batch).tolist() == pytest.approx(expected, abs=0.002)
