"""The rewards of a run together: overlap, learned rewards, failures, missing scores, what is
logged."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toykit import redness, toy

from flowrl.core.errors import CheckpointError, ConfigError, RewardError, RunError
from flowrl.core.types import RewardBatch
from flowrl.runs.train import train
from flowrl.training import checkpoint
from flowrl.training import collect as collect_file
from flowrl.training.collect import collect
from flowrl.training.trainer import Trainer

FOUR = ("train.prompts=4", "train.parts=4")
TWO = "rewards.blue={fn: toykit.blueness, weight: 2.0}"


def trainer_for(folder: Path, *overrides: str) -> Trainer:
    return Trainer(toy(folder, *overrides))


def state_of(trainer: Trainer, folder: Path) -> dict[str, Any]:
    trainer.save(folder)
    files, _ = checkpoint.load(folder)
    return files


def equal(one: Any, two: Any) -> bool:
    return one.keys() == two.keys() and all(
        one[file].keys() == two[file].keys()
        and all(torch.equal(one[file][k], two[file][k]) for k in one[file])
        for file in one
    )


# ------------------------------------------------------------------------------------------ overlap


@pytest.mark.parametrize("more", [(), ("rewards.red={fn: toykit.apprentice}",)])
def test_overlapped_scoring_changes_no_bit(tmp_path: Path, more: tuple[str, ...]) -> None:
    one = trainer_for(tmp_path, *FOUR, *more, "train.overlap=true")
    two = trainer_for(tmp_path, *FOUR, *more, "train.overlap=false")
    for _ in range(3):
        assert one.step() == two.step()
    assert equal(state_of(one, tmp_path / "a"), state_of(two, tmp_path / "b"))


def test_images_are_scored_while_the_next_are_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part's reward waits for the second part's sampling to begin: in the synchronous
    order it never does."""
    trainer = trainer_for(tmp_path, *FOUR)
    begun, sampled, seen = threading.Event(), collect_file.sample, []

    def sample(run: Any, rows: list[int], *, first: int = 0) -> Any:
        if first:
            begun.set()
        return sampled(run, rows, first=first)

    def waiting(batch: RewardBatch) -> Tensor:
        seen.append(begun.wait(20))
        return redness(batch)

    monkeypatch.setattr(collect_file, "sample", sample)
    monkeypatch.setitem(trainer.rewards, "red", waiting)
    trainer.step()
    assert seen == [True] * 4


def test_parts_sample_the_same_images(tmp_path: Path) -> None:
    """Noise belongs to prompts: how many are sampled at a time changes rounding at most."""
    whole, parts = (
        trainer_for(tmp_path, "train.prompts=4"),
        trainer_for(tmp_path, "train.prompts=4", "train.parts=3"),
    )
    rows = [0, 1, 2, 3]
    one, a, x = collect(whole, rows)
    two, b, y = collect(parts, rows)
    torch.testing.assert_close(one.x[one.leaf], two.x[two.leaf])
    torch.testing.assert_close(a.images, b.images)
    torch.testing.assert_close(x["red"], y["red"])
    assert a.prompts == b.prompts and a.group.tolist() == b.group.tolist()
    assert bool((two.tree.parent < torch.arange(len(two.tree.parent))).all())
    assert torch.equal(two.tree.group[two.leaf], one.tree.group[one.leaf])
    child = two.tree.parent >= 0
    assert torch.equal(two.tree.group[child], two.tree.group[two.tree.parent[child]])


def test_a_failure_in_the_thread_is_the_same_error(tmp_path: Path) -> None:
    """Two parts are scored, the third is not: the message names iteration and reward, and no weight
    was changed."""
    trainer = trainer_for(tmp_path, *FOUR, "rewards.red={fn: toykit.moody, calls: 2}")
    before = {name: p.detach().clone() for name, p in trainer.params.items()}
    with pytest.raises(
        RewardError, match="iteration 0: reward 'red' failed with ConnectionError: gone away"
    ):
        trainer.step()
    assert (
        all(torch.equal(p, before[name]) for name, p in trainer.params.items())
        and trainer.iteration == 0
    )


# ----------------------------------------------------- learned rewards and aggregators with a state

STATEFUL = (
    "rewards.red={fn: toykit.apprentice}",
    TWO,
    "aggregate={fn: constrained, at_least: {blue: 0.9}}",
)


def test_resume_holds_learned_rewards_and_duals(tmp_path: Path) -> None:
    whole, first = trainer_for(tmp_path, *STATEFUL), trainer_for(tmp_path, *STATEFUL)
    for _ in range(4):
        expected = whole.step()
    first.step(), first.step()
    first.save(tmp_path / "half")
    second = trainer_for(tmp_path, *STATEFUL)
    second.load(tmp_path / "half")
    assert second.reward_set.learned_rewards()["red"].state_dict()["taste"] > 0
    second.step()
    assert (
        second.step() == expected
        and expected["dual/blue"] > 0
        and expected["learned/red/taste"] > 3
    )
    assert equal(state_of(whole, tmp_path / "a"), state_of(second, tmp_path / "b"))


def test_a_checkpoint_of_other_rewards_is_refused(tmp_path: Path) -> None:
    trainer_for(tmp_path, *STATEFUL).save(tmp_path / "half")
    with pytest.raises(
        CheckpointError,
        match=r"reward states \['aggregate', 'reward-red'\], this config needs \[\]",
    ):
        trainer_for(tmp_path).load(tmp_path / "half")


def test_the_policy_waits_while_the_reward_learns_alone(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, "rewards.red={fn: toykit.apprentice, every: 2}")
    before = {name: p.detach().clone() for name, p in trainer.params.items()}
    metrics = trainer.step()
    assert "ratio" not in metrics and metrics["learned/red/taste"] > 0
    assert all(torch.equal(p, before[name]) for name, p in trainer.params.items())
    assert "ratio" in trainer.step()
    assert not all(torch.equal(p, before[name]) for name, p in trainer.params.items())


# ----------------------------------------------------------------------------------------- failures


def test_a_failed_reward_stops_the_run_with_a_checkpoint_that_goes_on(tmp_path: Path) -> None:
    """Calls: judging before training takes one; two iterations two more. The resumed run ends as an
    unbroken one."""
    options = (
        "rewards.strict={fn: toykit.reddish, weight: 0}",
        "eval.every=0",
        "train.max_unscored=0",
    )
    broken = toy(tmp_path, "rewards.red={fn: toykit.moody, calls: 3}", *options)
    with pytest.raises(
        RewardError, match=r"(?s)iteration 2: reward 'red'.*gone away.*saved .*000002; go on with"
    ):
        train(broken, tmp_path / "run", quiet=True)
    assert checkpoint.latest(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "000002"
    whole = toy(tmp_path, "rewards.red={fn: toykit.moody, calls: 99}", *options)
    train(whole, tmp_path / "run", quiet=True, resume=True)
    unbroken = Trainer(whole)
    for _ in range(4):
        unbroken.step()
    resumed, _ = checkpoint.load(tmp_path / "run" / "checkpoints" / "000004")
    assert equal(resumed, state_of(unbroken, tmp_path / "whole"))


def test_a_reward_that_is_not_ready_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    config = toy(
        tmp_path, "rewards.red={fn: toykit.moody, ready: false}", "model={fn: toykit.unloadable}"
    )
    with pytest.raises(RunError, match="the server is down"):
        Trainer(config)


def test_impossible_mixes_are_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    never = "model={fn: toykit.unloadable}"
    with pytest.raises(ConfigError, match="gated: above: there is no reward 'sharp'"):
        Trainer(toy(tmp_path, never, "aggregate={fn: gated, above: {sharp: 0.5}}"))
    with pytest.raises(ConfigError, match="clip: expected low < high"):
        Trainer(toy(tmp_path, never, "rewards.red.transform={fn: clip, low: 2, high: 1}"))
    with pytest.raises(ConfigError, match="tags without"):
        noisy = "{fn: noisy_forward, false_refusal: {ocr: 0.1}}"
        Trainer(
            toy(tmp_path, never, f"rewards.strict.transform={noisy}", "rewards.strict.weight=1")
        )


# ----------------------------------------------------------------------------------- missing scores


@pytest.mark.parametrize("aggregate", ["weighted_sum", "advantage_sum", "gdpo"])
def test_a_missing_score_counts_nowhere(tmp_path: Path, aggregate: str) -> None:
    """One reward leaves image 0 out: its weight is 0, and the others' are as if it had not been
    drawn."""
    options = (TWO, f"aggregate.fn={aggregate}", "train.max_unscored=0.5")
    trainer = trainer_for(tmp_path, *options)
    _, batch, values = collect(trainer, [0, 1])
    ro = collect(trainer, [0, 1])[0]
    values["red"][0] = math.nan
    weight, metrics = trainer.reward_set.advantages(
        values, batch, ro.leaf, ro.tree, trainer.method.credit
    )
    assert float(weight[ro.leaf[0]]) == 0 and all(
        math.isfinite(value) for value in metrics.values()
    )
    keep = ro.leaf[1:]
    fewer = RewardBatch(
        batch.images[1:], batch.prompts[1:], batch.group[1:], batch.meta[1:], batch.sigma[1:]
    )
    rest = {name: row[1:] for name, row in values.items()}
    expected, _ = trainer.reward_set.advantages(rest, fewer, keep, ro.tree, trainer.method.credit)
    torch.testing.assert_close(weight[keep], expected[keep])


# ----------------------------------------------------------------------------------- what is logged


def test_shares_and_correlations(tmp_path: Path) -> None:
    """By torch.cov and torch.corrcoef of the centred rows; the shares of what is added sum to
    one."""
    trainer = trainer_for(tmp_path, TWO, "train.prompts=1", "train.group=8", "rewards.strict=null")
    ro, batch, values = collect(trainer, [0])
    metrics = trainer.reward_set.advantages(values, batch, ro.leaf, ro.tree, trainer.method.credit)[
        1
    ]
    red, blue = values["red"].double(), 2 * values["blue"].double()
    cov = torch.cov(torch.stack([red, blue, red + blue]))
    assert metrics["share/red"] == pytest.approx(float(cov[0, 2] / cov[2, 2]), rel=1e-5)
    assert metrics["share/red"] + metrics["share/blue"] == pytest.approx(1.0)
    assert metrics["corr/red/blue"] == pytest.approx(
        float(torch.corrcoef(torch.stack([red, blue]))[0, 1]), rel=1e-5
    )
    assert metrics["reward/blue"] == pytest.approx(float(blue.mean() / 2), rel=1e-5)
    assert metrics["reward"] == pytest.approx(float((red + blue).mean()), rel=1e-5)


def test_transforms_act_on_what_is_learnt_and_not_on_what_is_logged(tmp_path: Path) -> None:
    plain = trainer_for(tmp_path, "rewards.strict=null")
    ranked = trainer_for(
        tmp_path, "rewards.strict=null", "rewards.red.transform=[{fn: rank}, {fn: clip, high: 0.5}]"
    )
    ro, batch, values = collect(plain, [0, 1])
    raw, a = plain.reward_set.advantages(
        values, batch, ro.leaf, ro.tree, lambda reward, leaf, tree: reward
    )
    got, b = ranked.reward_set.advantages(
        values, batch, ro.leaf, ro.tree, lambda reward, leaf, tree: reward
    )
    order = torch.cat([row.argsort().argsort() / 3 for row in raw.reshape(2, 4)])
    torch.testing.assert_close(got, order.clamp(max=0.5).to(got))
    assert a["reward/red"] == b["reward/red"]
