"""Models that are trained along: they move only themselves, and a resume is exact."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from toykit import axes, toy
from trainkit import halves, unchanged, weights_of

from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.training.parts.companions import Companions
from flowrl.training.rehearsal import check_plan
from flowrl.training.trainer import Trainer

SETTING = [*axes("shapes/tdm_r1"), "surrogate.alone=0", "train.ema=0", "eval.weights=current"]
# every step of an image, and one update of each model
WHOLE = ["select=null", "train.updates=1", "fake={fn: score}", "surrogate={fn: preference}"]
# one step of each image, the finished ones for the surrogate, two updates
THIN = ["select={fn: one_step}", "train.updates=2", "fake={fn: score, updates: 2, steps: one}"]
THIN += ["surrogate={fn: preference, updates: 2, weigh: last, interval: reverse, shared: true}"]


def trainer(folder: Path, *more: str) -> Trainer:
    return Trainer(toy(folder, *SETTING, *more))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], rows) for name, rows in other.items())


def test_only_the_companion_moves(tmp_path: Path) -> None:
    """With a policy that stands still: its weights are the same bits, the others have moved, and
    the slow copy has moved less than what it follows."""
    run = trainer(tmp_path, "optimizer.lr=1.0e-30", *WHOLE)
    before = weights_of(run)
    metrics = run.step()
    kept = run.weights.state_dict()
    for name, p in run.params.items():
        torch.testing.assert_close(p.detach(), before[name], atol=1e-12, rtol=0)
        assert torch.equal(kept["ref"][name], before[name])
    moved = {}
    for copy in ("fake", "surrogate", "surrogate-slow"):
        gaps = [(kept[copy][name] - before[name]).abs().sum() for name in before]
        moved[copy] = float(sum(gaps))
    assert moved["fake"] > 0 and moved["surrogate"] >= moved["surrogate-slow"] > 0
    # on the first update the surrogate is the teacher: w = 1/2
    assert metrics["surrogate/weight"] == pytest.approx(0.5)
    assert metrics["fake/error"] > 0 and metrics["surrogate/gap"] == 0
    # the teacher sees another state than the policy, so their lengths are not compared
    assert "velocity_length" not in metrics
    # for each step of an image: 3 and three other models; 3; 3 and two others
    work = run.cost
    assert work.states == 4 * work.images
    assert metrics["nfe"] == work.nfe + (6 + 3 + 5) * work.states == check_plan(run.config).calls


def test_one_step_of_an_image_costs_a_quarter(tmp_path: Path) -> None:
    """Of each image: one step for the policy, one for the fake model, and the last for the
    surrogate; the latter two in two updates each. The selection leaves the surrogate's groups
    whole."""
    run = trainer(tmp_path, *THIN)
    metrics = run.step()
    work = run.cost
    assert work.states == 4 * work.images
    assert metrics["nfe"] == work.nfe + (6 + 2 * 3 + 2 * 5) * work.images
    assert check_plan(run.config).calls == metrics["nfe"]  # as the dry run says
    assert metrics["backwards"] == 5 * work.images


def test_the_policy_follows_what_was_learnt_before(tmp_path: Path) -> None:
    """The surrogate alone for two iterations, in which it and the fake model learn; then the policy
    and the fake model go on, and the surrogate stands still. What does not learn costs nothing."""
    run = trainer(tmp_path, *WHOLE, "surrogate={fn: preference, alone: 2, iterations: 2}")

    def kept(name: str) -> dict[str, torch.Tensor]:
        return {key: rows.clone() for key, rows in run.weights.state_dict()[name].items()}

    own = weights_of(run)
    for _ in range(2):
        before = kept("surrogate")
        assert not run.trains_policy()
        metrics = run.step()
        assert unchanged(run, own)
        assert not same(kept("surrogate"), before)
        assert "trained" not in metrics and metrics["nfe"] == run.cost.nfe + 8 * run.cost.states
    before, fake = kept("surrogate"), kept("fake")
    assert run.trains_policy()
    metrics = run.step()
    assert same(kept("surrogate"), before) and not same(kept("fake"), fake)
    assert not unchanged(run, own)
    assert metrics["trained"] == run.cost.states
    assert metrics["nfe"] == run.cost.nfe + (6 + 3) * run.cost.states
    assert metrics["nfe"] == check_plan(run.config).calls  # the dry run counts the last iteration
    assert "surrogate/weight" not in metrics


def test_a_resume_is_exact(tmp_path: Path) -> None:
    """Two iterations in one go, or with a checkpoint between them."""
    halves(partial(trainer, tmp_path), tmp_path, 1, 1)
    other = Trainer(toy(tmp_path, "train.ema=0", "eval.weights=current"))
    with pytest.raises(CheckpointError):
        other.load(tmp_path / "middle")


def test_other_settings_of_a_companion_are_refused(tmp_path: Path) -> None:
    """As of the policy: before a weight is changed, and the learning rate may be another."""
    first = trainer(tmp_path, "fake.betas=[0.5, 0.9]")
    first.step()
    first.save(tmp_path / "kept")
    other = trainer(tmp_path, "fake.betas=[0.6, 0.9]")
    before = weights_of(other)
    said = r"fake\.betas: the config says \[0.6, 0.9\], and .*kept was trained with \[0.5, 0.9\]"
    with pytest.raises(CheckpointError, match=said):
        other.load(tmp_path / "kept")
    assert unchanged(other, before)
    again = trainer(tmp_path, "fake.betas=[0.5, 0.9]", "fake.lr=0.125")
    again.load(tmp_path / "kept")
    companions = again.parts.get(Companions)
    assert companions is not None
    assert [group["lr"] for group in companions.optimizers["fake"].param_groups] == [0.125]


def trained(folder: Path) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """Save a trainer after a step as `kept` -> it, and the weights that it began with."""
    run = trainer(folder, "optimizer.lr=0.1")
    own = weights_of(run)
    run.step()
    run.save(folder / "kept")
    return run, own


def test_a_run_begins_with_given_weights(tmp_path: Path) -> None:
    """The policy has the checkpoint's weights; what it is measured from has the model's own."""
    first, own = trained(tmp_path)
    second = trainer(tmp_path, f"train.start={tmp_path}/kept")
    for name, p in second.params.items():
        assert torch.equal(p, first.params[name]) and not torch.equal(p, own[name])
        assert torch.equal(second.weights.state_dict()["ref"][name], own[name])
        assert torch.equal(second.weights.state_dict()["fake"][name], own[name])


def test_a_surrogate_may_begin_with_given_weights(tmp_path: Path) -> None:
    """And its slow copy; policy and fake model have the model's own. One that learns in none of the
    iterations keeps them."""
    first, own = trained(tmp_path)
    begun = f"surrogate={{fn: preference, begin: '{tmp_path}/kept', iterations: 0}}"
    second = trainer(tmp_path, begun)
    for _ in range(2):
        kept = second.weights.state_dict()
        for name, p in first.params.items():
            assert torch.equal(kept["surrogate"][name], p)
            assert torch.equal(kept["surrogate-slow"][name], p)
            assert torch.equal(kept["ref"][name], own[name])
        if second.iteration == 0:
            assert unchanged(second, own)
            assert second.step()["reward_gap"] > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("surrogate=null", "add the section"),
        ("loss={fn: tdm}", "leave the section out"),
        ("plan={fn: ode, steps: 4}", "few_step"),
        ("kl={fn: velocity_kl, beta: 0.1}", "leave the section kl out"),
        ("segment=null", "segment="),
        ("likelihood={fn: forward}", "likelihood generated"),
        ("train.start=nowhere.safetensors", "train.start"),
        ("surrogate.lr=-1", "lr > 0"),
        ("surrogate.alone=-1", "alone >= 0"),
        ("surrogate={fn: preference, alone: 3, iterations: 2}", "at least 3"),
        ("fake.iterations=-2", "at least 0"),
        ("surrogate.begin=nowhere.safetensors", "surrogate.begin"),
        ("surrogate.alone=1000", "leaves it none"),
    ],
)
def test_what_does_not_fit_is_said_before_the_model_is_loaded(
    tmp_path: Path, change: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        trainer(tmp_path, "model={fn: toykit.unloadable}", change)
