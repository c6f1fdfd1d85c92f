"""The judge that is included, scripts/judge, as the rewards ask it over HTTP; and one step of the
methods that train on it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scriptkit import module_of
from torch import Tensor

from flowrl.config.load import load_config
from flowrl.core.errors import RunError
from flowrl.core.shipped_files import resource
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.shapes.edits import KINDS, Edits, check_edits, draw_edits
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from flowrl.training.trainer import Trainer
from rewards._judge.ask import Judge
from rewards.edit_verifier import KINDS as PRINCIPLES
from rewards.edit_verifier import USUAL, edit_verifier
from rewards.rubric import rubric
from rewards.rubric.learn import ByJudge, Preferences
from rewards.rubric.reward import Checks, load_rubric

OPTIONS: dict[str, Any] = {"retries": 0, "backoff": 0.01, "workers": 4, "max_failed": 0.0}
EACH = 3


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with module_of("judge", "serve").serving() as address:
        yield address


@pytest.fixture(scope="module")
def edits() -> Edits:
    return draw_edits(np.random.default_rng(5), np.arange(EACH * len(KINDS)) % len(KINDS))


def asked(edits: Edits, images: Tensor) -> RewardBatch:
    """Return edits as a reward gets them; the record says nothing but the prompt."""
    prompts = [record["prompt"] for record in edits.records]
    meta: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    source: list[tuple[Tensor, ...]] = [(image,) for image in render(edits.before)]
    count = len(prompts)
    return RewardBatch(images, prompts, torch.arange(count), meta, torch.zeros(count), source)


def test_the_mean_digit_is_how_well_the_edit_was_made(url: str, edits: Edits) -> None:
    """A right edit gets 5, a copy of the source 0, blends of both what the checker's credit is: up
    to what a judge leaves to each other digit, a fifth of 2 %, and what it is never sure of."""
    reward = edit_verifier(protocol="level", url=url, **OPTIONS)
    reward.probe()
    before, after = render(edits.before), render(edits.after)
    for images in (after, before, (before + 2 * after) / 3):
        images = (images * 255).round() / 255
        expected = check_edits(images, render(edits.before), edits.records).graded
        torch.testing.assert_close(reward(asked(edits, images)), expected, atol=0.02, rtol=0)
    assert bool((reward(asked(edits, after)) > 0.98).all())
    assert bool((reward(asked(edits, before)) < 0.02).all())


def test_principles_are_answered_one_by_one(url: str, edits: Edits) -> None:
    """Of a copy what was kept and done is what the checker finds, as far as a judge is sure, and
    nothing was done; of a right edit all three hold."""
    before, after = render(edits.before), render(edits.after)
    verdict = check_edits(before, before, edits.records)
    for kind, found in (("keep", verdict.kept), ("follow", verdict.done)):
        alone = dict.fromkeys(PRINCIPLES, 0.0) | {kind: 1.0}
        reward = edit_verifier(url=url, **{**OPTIONS, **alone})
        copied = reward(asked(edits, before))
        torch.testing.assert_close(copied, found.clamp(0.02, 0.98), atol=1e-3, rtol=0)
        assert bool((reward(asked(edits, after)) > 0.97).all()), kind
    assert float(verdict.done.max()) == 0
    whole = edit_verifier(url=url, **OPTIONS)
    assert bool((whole(asked(edits, after)) > 0.97).all())
    assert USUAL.keys() == set(PRINCIPLES)


def test_what_it_cannot_read_is_no_answer(url: str, edits: Edits) -> None:
    """An instruction in other words stops the run, and says why; so does another model's name."""
    batch = asked(edits, render(edits.after))
    other = batch._replace(prompts=["make it nicer"] * len(batch.prompts))
    with pytest.raises(RunError, match="expected an instruction of assets/shapes-edits"):
        edit_verifier(protocol="level", url=url, **OPTIONS)(other)
    with pytest.raises(RunError, match="judge"):
        edit_verifier(protocol="level", url=url, model="qwen", **OPTIONS).probe()


# ------------------------------------------------------------------------------------------- scenes


def drawn(records: list[dict[str, Any]], seed: int) -> Tensor:
    return render(scenes_for(records, np.random.default_rng(seed)))


def judge_at(url: str) -> Judge:
    return Judge(
        "rewards.rubric",
        url=url,
        model="judge",
        api_key_env=None,
        timeout=20.0,
        encoding="png",
        cache=None,
        extra=None,
        **OPTIONS,
    )


def test_rules_of_the_caption_hold_for_its_scene_and_not_for_others(url: str) -> None:
    """Right scenes of all tasks keep every rule that names the caption, but for what the small
    network misreads; of another task's scene nearly all break one or more."""
    rules = [rule for rule in module_of("judge", "seen").RULES if "caption" in rule]
    assert len(rules) == 6
    mine = [records[0] for records in all_records().values()]
    mine += [records[7] for records in all_records().values()]
    prompts = [record["prompt"] for record in mine]
    right = Checks(judge_at(url))(drawn(mine, 0), prompts, rules)
    wrong = Checks(judge_at(url))(drawn([*mine[1:], mine[0]], 0), prompts, rules)
    assert set((right * 100).round().unique().tolist()) <= {2.0, 98.0}
    assert float((right > 0.5).double().mean()) > 0.95
    assert float((wrong > 0.5).all(1).double().mean()) < 0.2


def test_it_proposes_what_the_better_image_keeps(url: str) -> None:
    """Right scenes beside those of other captions: the rules are those that tell them apart."""
    mine = [records[0] for records in all_records().values()]
    pairs = Preferences(
        drawn(mine, 0), drawn([*mine[1:], mine[0]], 0), [record["prompt"] for record in mine]
    )
    found = ByJudge(judge_at(url))(pairs)
    assert set(found) <= module_of("judge", "seen").RULES.keys()
    assert sum("caption" in rule for rule in found) >= 4


def test_the_shipped_rules_are_the_judges_and_put_right_scenes_first(url: str) -> None:
    """Every rule is one that the judge can check; all with a positive weight are about the caption.
    Right scenes of all tasks are ahead of those of other captions in nearly all cases."""
    file = str(resource("assets/shapes-rubric/rubric.json"))
    rules = load_rubric(Path(file))
    assert {rule.text for rule in rules} <= module_of("judge", "seen").RULES.keys()
    assert all("caption" in rule.text for rule in rules if rule.weight > 0)
    mine = [records[k] for k in (1, 4, 9) for records in all_records().values()]
    prompts = [record["prompt"] for record in mine]
    reward = rubric(file=file, url=url, **OPTIONS)
    scores = []
    for shown in (mine, [*mine[1:], mine[0]]):
        meta: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
        images, count = drawn(shown, 3), len(mine)
        batch = RewardBatch(images, prompts, torch.arange(count), meta, torch.zeros(count))
        scores.append(reward(batch))
    assert float((scores[0] > scores[1]).double().mean()) > 0.85


# ------------------------------------------------------------------------------------- the training


@pytest.mark.integration
@pytest.mark.parametrize(("name", "reward"), [("edit_r1", "digit"), ("auto_rubric", "rules")])
def test_one_iteration_on_the_judge(url: str, name: str, reward: str) -> None:
    """Each image was scored over HTTP, and the weights moved."""
    small = ["train.prompts=2", "train.group=4", "train.warmup=0", "model.dtype=float32"]
    changes = [*small, f"rewards.{reward}.url={url}", "eval.images=1"]
    trainer = Trainer(load_config(f"shapes/{name}", changes))
    before = {name: p.detach().clone() for name, p in trainer.params.items()}
    metrics = trainer.step()
    assert math.isfinite(metrics[f"reward/{reward}"]) and metrics["grad_norm"] > 0
    assert any(not torch.equal(p, before[name]) for name, p in trainer.params.items())
