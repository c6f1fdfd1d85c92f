"""Methods that are no policy gradients on draws: each is a small function and a few lines."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from toykit import write_toy
from trainkit import halves, put, rise, weights_of

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs, needs_of
from flowrl.core.types import LossInput
from flowrl.runs.train import train
from flowrl.training.trainer import Trainer

ITERATIONS = 30
SMALL = (
    "model={fn: toykit.linear, channels: 2}",
    "image={height: 8, width: 8}",
    "train={iterations: 99, prompts: 4, group: 8, updates: 1, micro_batch: 64, threads: 1}",
    "optimizer.lr=0.02",
    # the sampler draws nothing after the initial noise
    "plan={fn: full, steps: 4, noise_scale: 0.0}",
)
CLIP = "loss={fn: ppo_clip, clip_low: 0.2, clip_high: 0.2}"
METHODS: dict[str, tuple[str, ...]] = {
    "matching": ("likelihood={fn: forward, draws: 2}", "loss={fn: toymethods.matching}"),
    "preference": (
        "likelihood={fn: forward, draws: 2, shared: true}",
        "credit={fn: best_worst}",
        "segment={fn: prompt}",
        "select={fn: nonzero}",
        "loss={fn: toymethods.preference, beta: 5.0}",
    ),
    "prior": ("likelihood={fn: prior}", "loss={fn: toymethods.reinforce}"),
    "prior_ppo": ("likelihood={fn: prior, reads: text}", CLIP, "train.updates=2"),
    "find": (
        "likelihood={fn: prior, reads: text, learn_spread: true}",
        "credit={fn: value_baseline, lr: 0.01}",
        "loss={fn: clamped_ratio, clip_low: 0.2, clip_high: 0.2, scale: 10.0}",
        "kl={fn: noise_moments, beta: 0.01}",
    ),
    "rank_search": (
        "likelihood={fn: prior, own: true, start: noise, spread: 0.3}",
        "credit={fn: rank_edges, best: 3}",
        CLIP,
        "optimizer.lr=0.05",
    ),
    "step_preference": (
        "plan={fn: candidates, steps: 4, noise_scale: 0.5, branch: 4, first: 1}",
        "train.group=9",
        "credit={fn: candidate_pairs, least: 0.05}",
        "segment={fn: siblings}",
        "select={fn: nonzero}",
        "loss={fn: step_preference}",
    ),
    "negative_aware": (
        "likelihood={fn: forward}",
        "loss={fn: toymethods.negative_aware, beta: 1.0}",
    ),
    "forward_ppo": ("likelihood={fn: forward, draws: 2, times: grid}", CLIP, "train.updates=2"),
}


def trainer_of(folder: Path, name: str, *overrides: str) -> Trainer:
    changes = (*SMALL, *METHODS[name], *overrides)
    return Trainer(load_config(write_toy(folder), changes, ("toykit", "toymethods")))


@pytest.mark.learning
@pytest.mark.parametrize("name", METHODS)
def test_the_reward_rises_far_outside_the_noise(tmp_path: Path, name: str) -> None:
    """Mean red minus mean green, in [-1, 1]: the last 8 iterations against the first 8. Measured:
    at least 0.18; test_learning_toy.py's control moves by 0.04 at most."""
    trainer = trainer_of(tmp_path, name, "seed=0", "model.seed=0")
    rows = [trainer.step() for _ in range(ITERATIONS)]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    gain = rise([row["reward/red"] for row in rows], 8)
    print(f"{name}: gain {gain:.3f}")
    assert gain > 0.12


@pytest.mark.parametrize(
    ("name", "trained"),
    [("matching", 3 * 64), ("negative_aware", 3 * 32), ("preference", 4 * 16), ("prior", 0)],
)
def test_metrics_and_network_calls_are_those_of_the_method(
    tmp_path: Path, name: str, trained: int
) -> None:
    """4 prompts x 8 images x 4 steps, then per noised leaf 3, and 1 for each other weights; the old
    ones are none before the first step."""
    metrics = trainer_of(tmp_path, name).step()
    assert metrics["nfe"] == 4 * 8 * 4 + trained
    if name == "matching":  # two draws of each image; no ratio is asked for
        assert metrics["error"] > 0 and metrics["trained"] == 4 * 8 * 2
        assert "ratio" not in metrics and "on_policy_gap" not in metrics


@pytest.mark.parametrize("name", ["matching", "negative_aware", "preference"])
def test_calls_do_not_change_a_step(tmp_path: Path, name: str) -> None:
    """Fresh noise belongs to a leaf, or to a prompt, and not to the network call it is in."""
    made = []
    for size in (64, 6):
        trainer = trainer_of(tmp_path, name, f"train.micro_batch={size}")
        trainer.step()
        made.append(weights_of(trainer))
    torch.testing.assert_close(*made, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["forward_ppo", "prior_ppo"])
def test_the_first_ratio_is_one(tmp_path: Path, name: str) -> None:
    """Forward: the old log-prob is that of the weights that sampled; prior: the rollout's."""
    metrics = trainer_of(tmp_path, name).step()
    assert metrics["on_policy_gap"] < 1e-6 and metrics["ratio_std"] > 0


@pytest.mark.parametrize("name", ["preference", "prior_ppo", "negative_aware", "find"])
def test_resume_is_bit_for_bit(tmp_path: Path, name: str) -> None:
    """Own parameters, averages and copies of the weights come back; 2 + 2 iterations against 4."""
    halves(partial(trainer_of, tmp_path, name), tmp_path, 2, 2, "model.seed=9")


def test_a_prior_trains_the_noise_alone_and_is_sampled_with(tmp_path: Path) -> None:
    """Also under the averaged weights: the noise that a rollout starts from is N(mean, 1)."""
    trainer = trainer_of(tmp_path, "prior")
    before, start = weights_of(trainer), trainer.sample([0, 1]).x[:16]
    for _ in range(3):
        trainer.step()
    after = weights_of(trainer)
    assert [k for k in before if not torch.equal(before[k], after[k])] == ["prior.mean"]
    trainer.state.iteration = 0
    shift = trainer.sample([0, 1]).x[:16] - start
    torch.testing.assert_close(shift, after["prior.mean"].expand_as(shift))
    with trainer.weights.using("ema"):
        ema = trainer.sample([0, 1]).x[:16] - start
    assert 0 < float(ema.abs().sum()) < float(shift.abs().sum())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.same_noise=true", "train.same_noise"),
        ("likelihood={fn: reverse}", "no step has noise"),
    ],
)
def test_what_cannot_be_trained_is_said_before_the_model_is_loaded(
    tmp_path: Path, change: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(tmp_path, "prior", "model={fn: toykit.unloadable}", change)


@pytest.mark.parametrize("name", ["accuracy", "reward", "kl"])
def test_a_loss_cannot_overwrite_what_the_run_measures(tmp_path: Path, name: str) -> None:
    """`accuracy`, say, is the headline reward's in every log: a loss's own would be lost."""
    run = trainer_of(tmp_path, "preference")
    loss = run.method.loss

    @needs(*needs_of(loss))
    def taking(data: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value, metrics = loss(data)
        return value, metrics | {name: value.detach()}

    put(run, method=replace(run.method, loss=taking))
    with pytest.raises(ConfigError, match=f"returns a metric '{name}'.*give it another name"):
        run.step()


def test_the_pairs_of_a_loss_are_counted_beside_the_headline_reward(tmp_path: Path) -> None:
    """Of Diffusion-DPO a run's log has both: the reward's `accuracy`, and `pair_accuracy`."""
    changes = ("loss={fn: diffusion_dpo, beta: 5.0}", "train.iterations=2", "eval.every=2")
    config = write_toy(tmp_path)
    train(
        load_config(config, (*SMALL, *METHODS["preference"], *changes), ("toykit", "toymethods")),
        run=tmp_path / "run",
    )
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["accuracy"] == row["reward/red"] and 0 <= row["pair_accuracy"] <= 1
