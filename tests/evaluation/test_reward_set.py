"""The rewards of a run together: overlap, learned rewards, failures, missing scores, the log."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toykit import redness, toy
from trainkit import files_of, same_files, trainer_for, weights_of

from flowrl.algorithms.forest import KINDS, leaf_kinds
from flowrl.core.errors import CheckpointError, ConfigError, RewardError, RunError
from flowrl.core.pixels import from_bytes
from flowrl.core.types import RewardBatch
from flowrl.evaluation.reward_set import distances
from flowrl.runs.train import train
from flowrl.training import checkpoint
from flowrl.training import rollout as collect_file
from flowrl.training.rollout import broken_rows, collect
from flowrl.training.trainer import Trainer

FOUR = ("train.prompts=4", "train.parts=4")
TWO = "rewards.blue={fn: toykit.blueness, weight: 2.0}"
APPRENTICE = "rewards.red={fn: toykit.apprentice}"


def identity(reward: Tensor, leaf: Tensor, tree: Any) -> Tensor:
    """Put the mixed rewards on the leaves' nodes [V], so that a test sees them."""
    return reward.new_zeros(len(tree.parent)).index_put((leaf,), reward)


# ---------------------------------------------------------------------------------------- overlap


@pytest.mark.parametrize("more", [(), (APPRENTICE,)])
def test_overlapped_scoring_changes_no_bit(tmp_path: Path, more: tuple[str, ...]) -> None:
    one = trainer_for(tmp_path, *FOUR, *more, "train.overlap=true")
    two = trainer_for(tmp_path, *FOUR, *more, "train.overlap=false")
    for _ in range(3):
        assert one.step() == two.step()
    assert same_files(files_of(one, tmp_path / "a"), files_of(two, tmp_path / "b"))


def test_images_are_scored_while_the_next_are_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part's reward waits until the second part's sampling has begun."""
    trainer = trainer_for(tmp_path, *FOUR)
    begun, sampled, seen = threading.Event(), collect_file.sample_forest, []

    def sample(run: Any, rows: list[int], *, places: Sequence[int], **options: Any) -> Any:
        if places[0]:
            begun.set()
        return sampled(run, rows, places=places, **options)

    def waiting(batch: RewardBatch) -> Tensor:
        seen.append(begun.wait(20))
        return redness(batch)

    monkeypatch.setattr(collect_file, "sample_forest", sample)
    monkeypatch.setitem(trainer.rewards, "red", waiting)
    trainer.step()
    assert seen == [True] * 4


def test_parts_sample_the_same_images(tmp_path: Path) -> None:
    """Noise belongs to prompts: how many are sampled at a time changes rounding at most."""
    whole = trainer_for(tmp_path, "train.prompts=4")
    parts = trainer_for(tmp_path, "train.prompts=4", "train.parts=3")
    (one, a, x), (two, b, y) = (collect(trainer, [0, 1, 2, 3]) for trainer in (whole, parts))
    torch.testing.assert_close(one.x, two.x)
    assert torch.equal(one.leaf, two.leaf) and len(one.x) == int(one.leaf[0])
    torch.testing.assert_close((a.images, x["red"]), (b.images, y["red"]))
    assert a.prompts == b.prompts and a.group.tolist() == b.group.tolist()
    parent, group = two.tree.parent, two.tree.group
    child = parent >= 0
    assert bool((parent < torch.arange(len(parent))).all())
    assert torch.equal(group[two.leaf], one.tree.group[one.leaf])
    assert torch.equal(group[child], group[parent[child]])


# ---------------------------------------------------- learned rewards and aggregators with a state

STATEFUL = (APPRENTICE, TWO, "aggregate={fn: constrained, at_least: {blue: 0.9}}")


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
    assert second.step() == expected
    assert expected["dual/blue"] > 0 and expected["learned/red/taste"] > 3
    assert same_files(files_of(whole, tmp_path / "a"), files_of(second, tmp_path / "b"))
    message = r"parts \['copies', 'learned rewards'\], this run has \['copies'\]"
    with pytest.raises(CheckpointError, match=message):
        trainer_for(tmp_path).load(tmp_path / "half")
    message = r"reward states \['aggregate', 'reward-red'\], this config needs \['reward-red'\]"
    with pytest.raises(CheckpointError, match=message):
        trainer_for(tmp_path, APPRENTICE).load(tmp_path / "half")


def test_a_credit_remembers_the_rewards_that_it_was_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that the duals of the next iteration make of them: these are raised afterwards."""
    duals = "aggregate={fn: constrained, at_least: {blue: 0.9}, lr: 5.0}"
    credit = "credit={fn: history_norm, buffer: 4, least: 2}"
    blue = "rewards.blue={fn: toykit.blueness, weight: 0}"
    trainer = trainer_for(tmp_path, blue, duals, credit, "train.prompts=1")
    kept: Any = trainer.reward_set.credit
    asked, called = list[Tensor](), type(kept).__call__

    def ask(self: Any, reward: Tensor, *rest: Any, **more: Any) -> Tensor:
        asked.append(reward.double())
        return called(self, reward, *rest, **more)

    monkeypatch.setattr(type(kept), "__call__", ask)
    for _ in range(2):
        asked.clear()
        dual = trainer.step()["dual/blue"]
        rows = kept.kept["rewards"]
        seen = [row for row in rows if torch.equal(row, asked[0])]
        assert len(asked) == 1 and len(seen) == 1
    assert dual > 0


def test_the_policy_waits_while_the_reward_learns_alone(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, "rewards.red={fn: toykit.apprentice, every: 2}")
    before = weights_of(trainer)
    metrics = trainer.step()
    assert "ratio" not in metrics and metrics["learned/red/taste"] > 0
    assert all(torch.equal(p, before[name]) for name, p in trainer.params.items())
    assert "ratio" in trainer.step()
    assert not all(torch.equal(p, before[name]) for name, p in trainer.params.items())


# --------------------------------------------------------------------------------------- failures


def test_a_failure_in_the_thread_is_the_same_error(tmp_path: Path) -> None:
    """Two parts are scored, the third is not; no weight was changed."""
    trainer = trainer_for(tmp_path, *FOUR, "rewards.red={fn: toykit.moody, calls: 2}")
    before = weights_of(trainer)
    message = "iteration 0: reward 'red' failed with ConnectionError: gone away"
    with pytest.raises(RewardError, match=message):
        trainer.step()
    assert all(torch.equal(p, before[name]) for name, p in trainer.params.items())
    assert trainer.iteration == 0


def test_a_failed_reward_stops_the_run_with_a_checkpoint_that_goes_on(tmp_path: Path) -> None:
    """Judging before training takes one call, two iterations two more; then it ends unbroken."""
    options = ("rewards.strict={fn: toykit.reddish, weight: 0}", "eval.every=0", "samples.every=0")
    broken = toy(tmp_path, "rewards.red={fn: toykit.moody, calls: 3}", *options)
    message = r"(?s)iteration 2: reward 'red'.*gone away.*saved .*000002; go on with"
    with pytest.raises(RewardError, match=message):
        train(broken, tmp_path / "run", quiet=True)
    assert checkpoint.latest(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "000002"
    mended = toy(tmp_path, "rewards.red={fn: toykit.moody, calls: 99}", *options)
    train(mended, tmp_path / "run", quiet=True, resume=True)
    unbroken = Trainer(mended)
    for _ in range(4):
        unbroken.step()
    resumed, _ = checkpoint.load(tmp_path / "run" / "checkpoints" / "000004")
    assert same_files(resumed, files_of(unbroken, tmp_path / "whole"))


NOISY = "{fn: noisy_forward, false_refusal: {ocr: 0.1}}"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (["rewards.red={fn: toykit.moody, ready: false}"], RunError, "the server is down"),
        (
            ["aggregate={fn: gated, above: {sharp: 0.5}}"],
            ConfigError,
            "gated: above: there is no reward 'sharp'",
        ),
        (
            ["rewards.red.transform={fn: clip, low: 2, high: 1}"],
            ConfigError,
            "clip: expected low < high",
        ),
        (
            [f"rewards.strict.transform={NOISY}", "rewards.strict.weight=1"],
            ConfigError,
            "tags without",
        ),
    ],
)
def test_what_cannot_be_is_found_before_the_model_is_loaded(
    tmp_path: Path, changes: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        trainer_for(tmp_path, "model={fn: toykit.unloadable}", *changes)


# --------------------------------------------------------------------- missing scores, and the log


@pytest.mark.parametrize("aggregate", ["weighted_sum", "advantage_sum", "gdpo"])
def test_a_missing_score_counts_nowhere(tmp_path: Path, aggregate: str) -> None:
    """One reward leaves image 0 out: the others' weights are as if it had not been drawn."""
    changes = (TWO, f"aggregate.fn={aggregate}", "train.max_unscored=0.5")
    trainer = trainer_for(tmp_path, *changes)
    ro, batch, values = collect(trainer, [0, 1])
    mix, credit = trainer.reward_set.advantages, trainer.method.credit
    values["red"][0] = math.nan
    weight, metrics = mix(values, batch, ro.leaf, ro.tree, credit)
    assert float(weight[ro.leaf[0]]) == 0
    assert all(math.isfinite(value) for value in metrics.values())
    given = {name: field for name, field in batch._asdict().items() if field is not None}
    fewer = batch._replace(**{name: field[1:] for name, field in given.items()})
    rest = {name: row[1:] for name, row in values.items()}
    expected, _ = mix(rest, fewer, ro.leaf[1:], ro.tree, credit)
    torch.testing.assert_close(weight[ro.leaf[1:]], expected[ro.leaf[1:]])


def test_shares_and_correlations(tmp_path: Path) -> None:
    """By torch.cov and torch.corrcoef of the centred rows; shares of a sum add up to one."""
    trainer = trainer_for(tmp_path, TWO, "train.prompts=1", "train.group=8", "rewards.strict=null")
    ro, batch, values = collect(trainer, [0])
    mixed = trainer.reward_set.advantages(values, batch, ro.leaf, ro.tree, identity)
    metrics = {name: pytest.approx(value, rel=1e-5) for name, value in mixed[1].items()}
    red, blue = values["red"].double(), 2 * values["blue"].double()
    cov = torch.cov(torch.stack([red, blue, red + blue]))
    assert float(cov[0, 2] / cov[2, 2]) == metrics["share/red"]
    assert float(cov[1, 2] / cov[2, 2]) == metrics["share/blue"]
    assert float(torch.corrcoef(torch.stack([red, blue]))[0, 1]) == metrics["corr/red/blue"]
    assert float(blue.mean() / 2) == metrics["reward/blue"]
    assert float((red + blue).mean()) == metrics["reward"]


def test_transforms_act_on_what_is_learnt_and_not_on_what_is_logged(tmp_path: Path) -> None:
    changed = "rewards.red.transform=[{fn: rank}, {fn: clip, high: 0.5}]"
    plain = trainer_for(tmp_path, "rewards.strict=null")
    ranked = trainer_for(tmp_path, "rewards.strict=null", changed)
    ro, batch, values = collect(plain, [0, 1])
    raw, a = plain.reward_set.advantages(values, batch, ro.leaf, ro.tree, identity)
    got, b = ranked.reward_set.advantages(values, batch, ro.leaf, ro.tree, identity)
    raw, got = raw[ro.leaf], got[ro.leaf]
    order = torch.cat([row.argsort().argsort() / 3 for row in raw.reshape(2, 4)])
    torch.testing.assert_close(got, order.clamp(max=0.5).to(got))
    assert a["reward/red"] == b["reward/red"]


COMB = "plan={fn: comb, steps: 5, size: 3, noise_scale: 0.5, baseline: true}"
RAKE = "plan={fn: rake, steps: 5, branch: 2, low: 0, high: 2, noise_scale: 0.5, strides: [1, 2]}"
TREE = "plan={fn: tree, steps: 4, noise_scale: 0.5, splits: [0, 2], ode_last: 1}"


@pytest.mark.parametrize(
    ("plan", "want"),
    [
        # a root's leaves in the engine's order: baseline, previews after draws 0 and 1, the end;
        # each for both prompts with their two roots
        (COMB, [3] * 4 + [1] * 8 + [0] * 4),
        # at both steps both children with stride 1, then with stride 2; one root for each prompt
        (RAKE, [0] * 4 + [2] * 4 + [0] * 4 + [2] * 4),
        (TREE, [0] * 16),
    ],
)
def test_what_is_finished(tmp_path: Path, plan: str, want: list[int]) -> None:
    """The means of the leaves of each kind, taken apart here."""
    trainer = Trainer(toy(tmp_path, plan, "train.group=8", "rewards.strict=null"))
    ro, batch, values = collect(trainer, trainer.rows())
    batch = batch._replace(images=from_bytes(batch.images))
    assert leaf_kinds(ro.tree, ro.leaf).tolist() == want
    metrics = trainer.reward_set.advantages(
        values, batch, ro.leaf, ro.tree, lambda *_: torch.zeros(len(ro.tree.parent))
    )[1]
    scores, kinds = redness(batch), torch.tensor(want)
    for place, name in enumerate(KINDS):
        mine = scores[kinds == place]
        key = f"{name}/reward" if place else "reward"
        assert (key in metrics) == bool(len(mine))
        if len(mine):
            assert metrics[key] == pytest.approx(float(mine.mean()), abs=1e-6)
            assert metrics.get(f"{name}/images", len(mine)) == len(mine)
    assert metrics["reward/red"] == metrics["reward"]
    # as if nothing else had been drawn
    done = kinds == 0
    alone = batch._replace(images=batch.images[done], group=batch.group[done])
    assert metrics["diversity"] == pytest.approx(spread(alone), rel=1e-4)


def spread(batch: RewardBatch) -> float:
    """Return the mean over prompts of the root-mean-square distance of two images, pair by pair."""
    means = []
    for g in batch.group.unique():
        pixels = batch.images[batch.group == g].flatten(1).double()
        pairs = torch.pdist(pixels).square() / pixels.shape[1]
        means.append(float(pairs.mean().sqrt()))
    return sum(means) / len(means)


def test_distances_are_those_of_each_two_images() -> None:
    """Oracle: the root of the mean squared distance over all pairs, by `torch.pdist` in float64."""
    levels = torch.randint(0, 256, (9, 3, 8, 8), dtype=torch.uint8)
    group = torch.tensor([4, 4, 4, 1, 1, 1, 1, 4, 7])
    wanted = []
    for prompt in (1, 4):
        rows = levels[group == prompt].flatten(1).double() / 255
        wanted.append(float((torch.pdist(rows).square() / rows.shape[1]).mean().sqrt()))
    for images in (levels, from_bytes(levels), from_bytes(levels).double()):
        found = distances(images, group)
        assert found[:2].tolist() == pytest.approx(wanted, rel=1e-6) and found[2].isnan()
    assert distances(levels[:1].expand(4, -1, -1, -1), torch.zeros(4)).tolist() == [0]


def test_broken_rows() -> None:
    """Infinities of both signs, a sum that is too large though no term is, a NaN."""
    rows = torch.zeros(5, 2, 2)
    assert broken_rows(rows) == []
    rows[1] = 3e38
    assert broken_rows(rows) == []
    rows[2, 0] = torch.tensor([torch.inf, -torch.inf])
    rows[4, 1, 1] = torch.nan
    assert broken_rows(rows) == [2, 4]
