"""Rewards that ask a judge: one that is a process of its own, and one that fails."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from judge_process import GREY, NEW, RED, RIGHT, RULES, SIDES, judge_process
from judge_server import Act, Seen, grey, says, serving
from PIL import Image

from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.types import Reward, RewardBatch
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from rewards._judge.answer import Answer
from rewards._judge.wordings import fill
from rewards.consistency import consistency, theme
from rewards.edit_verifier import aggregated, edit_verifier, read_principles
from rewards.rubric import rubric
from rewards.rubric.file import Rule, load_rubric, save_rubric
from rewards.rubric.fit import accuracy, fit, objective, threshold
from rewards.rubric.learn import weigh

ROOT = Path(__file__).resolve().parents[2]
# the reference's, addendum 3.3
F = torch.tensor(
    [
        [0.8, 0.1, -0.2],
        [0.6, -0.2, 0.3],
        [0.4, 0.5, 0.1],
        [-0.3, 0.2, 0.4],
        [0.7, -0.1, -0.4],
        [0.5, 0.3, 0.2],
        [-0.1, 0.4, -0.3],
        [0.9, -0.3, 0.1],
    ]
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with judge_process(tmp_path_factory.mktemp("judge")) as address:
        yield address


def batch_of(
    images: torch.Tensor, prompts: list[str], meta: Any = None, source: Any = ()
) -> RewardBatch:
    count = len(prompts)
    rows = meta or [{"prompt": prompt} for prompt in prompts]
    return RewardBatch(images, prompts, torch.arange(count), rows, torch.zeros(count), list(source))


# ------------------------------------------------------------------------------------- rubrics


@pytest.mark.parametrize(
    ("strength", "w", "value", "right"),
    [
        (1.0, (1.12793402, 0, 0), 5.1338431, 0.75),
        (2.0, (2.11557195, 0, 0), 8.6754943, 0.75),
        (10.0, (4.7082709, 6.19771713, 1.5343895), 22.8499682, 1.0),
    ],
)
def test_the_fit_is_the_references(
    strength: float, w: tuple[float, ...], value: float, right: float
) -> None:
    found = fit(F, strength)
    torch.testing.assert_close(found, torch.tensor(w, dtype=torch.float64), atol=2e-6, rtol=0)
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
    """Pairs of a right scene and one of another caption, by the script, in two rounds: what tells
    them apart is kept, and the reward puts right scenes of other captions first."""
    records = [record for rows in all_records().values() for record in rows]
    mine, other = records[:96:8], records[100:196:8]
    right, wrong = scenes(mine, 0), scenes(other, 1)
    lines = []
    for i, record in enumerate(mine):
        for name, image in (("a", right[i]), ("b", wrong[i])):
            levels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
            Image.fromarray(levels).save(tmp_path / f"{i}{name}.png")
        names = ["a", "b"] if i % 2 else ["b", "a"]
        pair = {f"image_{k}": f"{i}{name}.png" for k, name in enumerate(names)}
        lines.append(json.dumps({"prompt": record["prompt"], **pair, "label_0": i % 2}) + "\n")
    (tmp_path / "pairs.jsonl").write_text("".join(lines))
    (tmp_path / "rules.txt").write_text("\n".join(RULES) + "\n")
    out = tmp_path / "rubric.json"
    script = ROOT / "scripts" / "assets" / "learn_rubric.py"
    command = [str(script), "--pairs", str(tmp_path / "pairs.jsonl"), "--out", str(out)]
    command += ["--rules", str(tmp_path / "rules.txt"), "--url", url, "--size", "64"]
    command += ["--rounds", "2", "--keep", "2", "--cache", str(tmp_path / "answers")]
    assert run_script(script, command) == 0
    rules = load_rubric(out)
    assert rules[0].text == RIGHT and rules[0].weight > 0 and len(rules) <= 2
    assert json.loads(out.read_text())["made"]["accuracy"] == 1
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
    found = rubric(file=str(out), url=url)(batch_of(images, prompts))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert {GREY, RED, SIDES, NEW} & {rule.text for rule in load_rubric(out)} == {GREY}


@pytest.mark.parametrize("text", [None, " \n"])
def test_rules_that_cannot_be_read_or_are_none(
    tmp_path: Path, text: str | None, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One message names the file; a traceback would be raised through `run_script`."""
    rules = tmp_path / "rules.txt"
    if text is not None:
        rules.write_text(text)
    script = ROOT / "scripts" / "assets" / "learn_rubric.py"
    command = [str(script), "--pairs", str(tmp_path / "pairs.jsonl"), "--rules", str(rules)]
    assert run_script(script, [*command, "--out", str(tmp_path / "out.json"), "--url", url]) != 0
    assert f"--rules {rules}: expected a text with a rule a line" in capsys.readouterr().err


def run_script(script: Path, command: list[str]) -> int:
    spec = importlib.util.spec_from_file_location("learn_rubric", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    given, sys.argv = sys.argv, command
    try:
        return int(module.main())
    finally:
        sys.argv = given


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": "flowrl rubric", "version": 2, "rules": []}', "of version 1, got version 2"),
        ('{"format": "flowrl rubric", "version": true, "rules": []}', "got version True"),
        ('{"rules": []}', "expected format 'flowrl rubric', got None"),
        ('{"format": "flowrl rubric", "version": 1, "rules": []}', "expected a rule or more"),
        (
            '{"format": "flowrl rubric", "version": 1, "rules": [{"text": "a", "weight": NaN}]}',
            "with text and weight",
        ),
        ("[", "expected a rubric, as scripts/assets/learn_rubric.py writes it"),
    ],
)
def test_a_file_that_is_no_rubric_of_this_version(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "rubric.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        rubric(file=str(file))


# ------------------------------------------------------------------------- consistency and edits


def likeness(a: int, b: int) -> float:
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
