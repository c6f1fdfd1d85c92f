"""One iteration of the trainer: on policy, what it logs, and what stops it."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rolloutkit import decisions, score_draws
from torch import Tensor
from toykit import faulty
from trainkit import (
    KL,
    ONE,
    Broken,
    flat,
    gradients,
    learnt,
    put,
    trainer_for,
    unchanged,
    weighed,
    weights_of,
)

from flowrl.core.errors import CheckpointError, ConfigError, RunError
from flowrl.core.pixels import from_bytes
from flowrl.core.processes import World
from flowrl.core.seeds import generator
from flowrl.models.toy import GaussianFlow, LinearFlow
from flowrl.training.learn import Trained, lr_share, reduce_metrics
from flowrl.training.weights import put_weights

# ------------------------------------------------------------------------------------- on policy


@pytest.mark.parametrize("size", [8, 1, 3, 5, 24])
def test_the_first_ratio_is_one(tmp_path: Path, size: int) -> None:
    """Exactly at equal geometry, 8 per call while sampling and training; else to rounding."""
    trainer = trainer_for(tmp_path, "train.updates=1", f"train.micro_batch={size}")
    for _ in range(3):
        assert trainer.step()["on_policy_gap"] <= (0 if size == 8 else 1e-5)


def test_the_gap_shows_a_policy_that_moved(tmp_path: Path) -> None:
    """Oracle: the ratios before the optimizer's first step, under weights that did not sample."""
    trainer = trainer_for(tmp_path, "train.updates=1")
    rows = trainer.rows()
    ro = trainer.sample(rows)
    ones = torch.ones(len(ro.x))
    with torch.no_grad():
        trainer.params["time"].add_(0.05)
        batch = decisions(ro, ones)
        log_prob = score_draws(trainer.model, batch, trainer.method.transition).log_prob
        ratio = (log_prob - batch.old_log_prob).exp()
    metrics = learnt(trainer, ro, ones, rows)
    assert metrics["on_policy_gap"] == pytest.approx(float((ratio - 1).abs().max()), rel=1e-4)
    assert metrics["on_policy_gap"] > 1e-3
    assert metrics["ratio_std"] == pytest.approx(float(ratio.std(correction=0)), rel=1e-4)


def test_noise_belongs_to_seed_iteration_and_place(tmp_path: Path) -> None:
    """Oracle: torch.randn from the documented key, drawn here."""
    trainer = trainer_for(tmp_path)
    trainer.state.iteration = 7
    ro = trainer.sample([0, 4])
    for place in range(2):
        want = torch.randn((4, 3, 2, 2), generator=generator(3, "rollout", 7, place))
        assert torch.equal(ro.x[place * 4 : place * 4 + 4], want)
    trainer.state.iteration = 8
    assert not torch.equal(trainer.sample([0, 4]).x[:8], ro.x[:8])


def test_what_iterations_have_in_common_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's grid and the shape of its latents; a plan is made once per iteration, and its
    cost was counted when it was rehearsed."""
    trainer = trainer_for(tmp_path)
    asked = Counter[str]()

    def counted(name: str, real: Any, *arguments: Any) -> Any:
        asked[name] += 1
        return real(*arguments)

    for name in ("sigmas", "latent_shape"):
        real = getattr(trainer.model, name)
        monkeypatch.setattr(trainer.model, name, partial(counted, name, real))
    monkeypatch.setattr("flowrl.training.task.cost_of_plan", partial(counted, "cost", None))
    plan: Any = trainer.method.plan
    before = plan.cache_info().misses
    for _ in range(3):
        trainer.step()
    assert asked == {"sigmas": 1, "latent_shape": 1}
    assert plan.cache_info().misses - before <= 3


# ------------------------------------------------------------------------------ formulas and logs


def test_ema_follows_its_formula(tmp_path: Path) -> None:
    """ema <- d ema + (1 - d) w, d = min(0.5, (1 + i) / (10 + i)), with plain tensors."""
    trainer = trainer_for(tmp_path, "train.ema=0.5")
    ema, decays = weights_of(trainer), []
    for i in range(10):
        trainer.step()
        decays.append(min(0.5, (1 + i) / (10 + i)))
        for name, p in trainer.params.items():
            ema[name] = decays[-1] * ema[name] + (1 - decays[-1]) * p.detach()
    assert decays[0] == 0.1 and decays[8] == decays[9] == 0.5
    found = trainer.weights.state_dict()["ema"]
    torch.testing.assert_close(found, ema, atol=1e-6, rtol=1e-5)
    assert float((flat(found.values()) - flat(trainer.params.values())).abs().max()) > 1e-4


def test_warm_up_is_linear_and_the_logged_rate_is_in_force(tmp_path: Path) -> None:
    """lr (u + 1) / (warmup + 1) at optimizer step u, the last of an iteration; then lr.

    Adam's very first step has length lr in every coordinate (g / sqrt(g^2)), up to eps / |g|.
    """
    trainer = trainer_for(tmp_path, "train.warmup=5")
    logged = [trainer.step()["lr"] for _ in range(4)]
    assert logged == pytest.approx([0.01 * 2 / 6, 0.01 * 4 / 6, 0.01, 0.01])
    changes = ("train.updates=1", "train.warmup=3", "optimizer.weight_decay=0")
    trainer = trainer_for(tmp_path, *changes)
    before = flat(trainer.params.values()).clone()
    lr = trainer.step()["lr"]
    moved = (flat(trainer.params.values()) - before).abs()
    assert lr == pytest.approx(0.0025)
    torch.testing.assert_close(moved, torch.full_like(moved, lr), atol=1e-6, rtol=1e-3)


def test_the_rate_falls_along_a_cosine(tmp_path: Path) -> None:
    """torch's own CosineAnnealingLR from lr to lr / 3 over 8 steps, as AWM's code has it, and a
    third from then on. A warm-up of w steps comes before, w steps long. By the log of a run: two
    optimizer steps an iteration, of which the second is logged."""
    weight = torch.nn.Parameter(torch.zeros(1))
    theirs = torch.optim.SGD([weight], lr=0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=8, eta_min=0.1)
    for update in range(9):
        found = 0.3 * lr_share(update, warmup=0, decay=8, decay_to=1 / 3)
        assert found == pytest.approx(schedule.get_last_lr()[0], abs=1e-9)
        late = 0.3 * lr_share(update + 5, warmup=5, decay=8, decay_to=1 / 3)
        assert late == pytest.approx(found, abs=1e-12)
        theirs.step()
        schedule.step()
    assert lr_share(900, warmup=0, decay=8, decay_to=1 / 3) == pytest.approx(1 / 3)
    assert lr_share(8, warmup=0, decay=8, decay_to=0.0) == 0.0
    assert [lr_share(k, warmup=1, decay=0, decay_to=0.5) for k in range(3)] == [0.5, 1.0, 1.0]
    run = trainer_for(tmp_path, "train.decay=4", "train.decay_to=0.5", "train.updates=2")
    # cos(pi / 4) at step 1 of 4, cos(3 pi / 4) at step 3, then the end
    half, there = 0.5 * 0.01, 0.25 * 0.01 * 2**0.5 / 2
    wanted = [half + 0.25 * 0.01 + there, half + 0.25 * 0.01 - there, half]
    assert [run.step()["lr"] for _ in range(3)] == pytest.approx(wanted)


def test_group_metrics(tmp_path: Path) -> None:
    """Diversity is the root mean square distance of two different images; by torch.cdist."""
    ro, batch, values, _, metrics = weighed(trainer_for(tmp_path))
    stds, distances = [], []
    for g in range(2):
        mine = ro.tree.group[ro.leaf] == g
        pixels = from_bytes(batch.images[mine]).flatten(1)
        pairs = torch.cdist(pixels, pixels).square().sum() / (4 * 3)
        distances.append(float((pairs / pixels.shape[1]).sqrt()))
        stds.append(float(values["red"][mine].std(correction=0)))
    assert metrics["reward_std"] == pytest.approx(sum(stds) / 2, rel=1e-5)
    assert metrics["diversity"] == pytest.approx(sum(distances) / 2, rel=1e-4)
    assert metrics["zero_std"] == 0


# ---------------------------------------------------------------------------------- what stops it


def test_unscored_images_get_weight_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 of 8 is a share of 0.25: allowed, and left out of all but the count; 3 are too many."""
    faulty = "rewards.red={fn: toykit.faulty, value: nan, count: 2}"
    options = (*ONE, "train.max_unscored=0.25", faulty)
    trainer = trainer_for(tmp_path, *options)
    ro, _, values, weight, metrics = weighed(trainer)
    reward = values["red"]
    assert reward.isnan().tolist() == [True] * 2 + [False] * 6
    assert metrics["reward"] == pytest.approx(float(reward[2:].mean()))
    # the baseline, too, is that of the scored ones
    expected = torch.zeros(8)
    for rows in (slice(2, 4), slice(4, 8)):
        centred = reward[rows] - reward[rows].mean()
        expected[rows] = centred / (reward[rows].std(correction=0) + 1e-4)
    torch.testing.assert_close(weight[ro.leaf], expected, atol=1e-5, rtol=1e-4)
    (grads,), metrics = gradients(trainer, monkeypatch)
    assert metrics["trained"] == 6 * 3 and bool(flat(grads.values()).isfinite().all())
    with pytest.raises(RunError, match="3 of 8 images"):
        trainer_for(tmp_path, *options, "rewards.red.count=3").step()


def nan_images(x: Tensor) -> Tensor:
    return torch.full((len(x), 3, 16, 16), math.nan)


# the config, what is broken in the trainer, the message; P0 and P1 are the prompts
STOPS: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "nan reward": (
        ("rewards.red={fn: toykit.faulty, value: nan, count: 1}", "train.max_unscored=0"),
        None,
        "iteration 0: reward 'red' gave nan .*P0 .1 of 8 images",
    ),
    "inf reward": (
        ("train.max_unscored=1",),  # spoiled later: at once it is found before anything is loaded
        lambda t: t.rewards.update(red=partial(faulty, value="inf", count=1)),
        "iteration 0: reward 'red' gave inf .*P0 .1 of 8 images",
    ),
    "shape of a reward": (
        (),
        lambda t: t.rewards.update(red=lambda batch: torch.ones(3)),
        r"'red': expected 8 numbers, one per image, got shape \[3\]",
    ),
    # the loss is finite, its gradient is not
    "gradient": (
        (),
        lambda t: t.params["time"].register_hook(lambda grad: grad * math.nan),
        r"iteration 0, optimizer step 1: the gradient of \['time'\] is not finite",
    ),
    "decoder": (
        (),
        lambda t: setattr(t.model, "decode", nan_images),
        "iteration 0: .*image of P0 that is not finite",
    ),
}
for at in (0, 2, 3):  # row 5 of 8 belongs to the second prompt; the reward never looks at it
    STOPS[f"sampler at {at}"] = (
        ("rewards.red.fn=toykit.same",),
        lambda t, at=at: put(t, model=Broken(t.model, step=at, training=False, row=5)),
        f"iteration 0: .*latent .* by denoising step {at} .*prompt P1",
    )


@pytest.mark.parametrize("name", STOPS)
def test_what_is_no_number_stops_it_with_the_weights_unchanged(tmp_path: Path, name: str) -> None:
    options, spoil, message = STOPS[name]
    trainer = trainer_for(tmp_path, *options)
    before = weights_of(trainer)
    for place, row in enumerate(trainer.rows()):
        message = message.replace(f"P{place}", repr(trainer.train_set.texts[row]))
    if spoil is not None:
        spoil(trainer)
    with pytest.raises(RunError, match=message):
        trainer.step()
    assert unchanged(trainer, before) and trainer.iteration == 0


@pytest.mark.parametrize("updates", [1, 2])
def test_a_loss_that_is_no_number_leaves_no_trace(tmp_path: Path, updates: int) -> None:
    """The model fails at denoising step 1 while training; mended, it goes on as if it had not."""
    trainer = trainer_for(tmp_path, f"train.updates={updates}")
    trainer.step()
    trainer.save(tmp_path / "good")
    before, model = weights_of(trainer), trainer.model
    assert isinstance(model, LinearFlow)
    put(trainer, model=Broken(model, step=1, training=True))
    prompts = "|".join(repr(trainer.train_set.texts[row]) for row in trainer.rows())
    message = "ratio is not finite at denoising step 1 of prompt"
    with pytest.raises(RunError, match=f"iteration 1, optimizer step 1: {message} ({prompts})"):
        trainer.step()
    assert unchanged(trainer, before)
    assert all(p.grad is None for p in trainer.params.values())  # else the next step adds to it
    fresh = trainer_for(tmp_path, f"train.updates={updates}")
    fresh.load(tmp_path / "good")
    put(trainer, model=model)
    trainer.step(), fresh.step()
    assert unchanged(trainer, weights_of(fresh))


def test_scoring_and_decoding_build_no_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, seen = trainer_for(tmp_path), []

    def watching(call: Any) -> Any:
        def watched(batch: Any) -> Tensor:
            seen.append(torch.is_grad_enabled())
            return call(batch)

        return watched

    monkeypatch.setitem(trainer.rewards, "red", watching(trainer.rewards["red"]))
    monkeypatch.setattr(trainer.model, "decode", watching(trainer.model.decode))
    trainer.step()
    assert seen == [False, False]


def test_nothing_to_train(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: toykit.linear has nothing to train"):
        trainer_for(tmp_path, model=GaussianFlow())


def test_another_models_checkpoint(tmp_path: Path) -> None:
    trainer_for(tmp_path).save(tmp_path / "c")
    wide = trainer_for(tmp_path, "model.channels=4")
    before = weights_of(wide)
    message = "3 of 3 trainable parameters do not fit this model .first: mix."
    with pytest.raises(CheckpointError, match=message):
        wide.load(tmp_path / "c")
    assert unchanged(wide, before)
    message = r"holds the weights \['ema'\], this config needs \['ema', 'ref'\]"
    with pytest.raises(CheckpointError, match=message):
        trainer_for(tmp_path, KL).load(tmp_path / "c")
    with pytest.raises(CheckpointError, match="another model.*first: mix|first: mix"):
        put_weights({"mix": wide.params["mix"]}, {"mix": torch.zeros(4, 3)}, tmp_path)


def test_the_share_of_the_kl_by_hand() -> None:
    """Losses without it: 0.5, -1, and 0.25 twice, 2 by size; the KL's terms are 1 by size."""
    loss, pull = torch.tensor([1.0, -1.0, 0.5, 0.0]), torch.tensor([0.5, 0.0, 0.25, -0.25])
    rows = torch.arange(4)
    parts = []
    for some in (rows[:3], rows[3:]):
        metrics = {"loss": loss[some], "kl_term": pull[some]}
        parts.append(Trained(metrics, some, some, some, 0))
    found = reduce_metrics(parts, [1.0], World())
    assert found["kl_share"] == pytest.approx(1 / 3) and "kl_term" not in found
    none = Trained({"loss": torch.zeros(4), "kl_term": torch.zeros(4)}, rows, rows, rows, 0)
    assert reduce_metrics([none], [0.0], World())["kl_share"] == 0
