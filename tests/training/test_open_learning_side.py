"""Methods that are no policy gradients on draws: their fresh noise, their own parameters, their
metrics."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from toykit import write_toy
from trainkit import halves, put, weights_of

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs, needs_of
from flowrl.core.types import LossInput
from flowrl.runs.train import train
from flowrl.training.trainer import Trainer

SMALL = (
    "model={fn: toykit.linear, channels: 2}",
    "image={height: 8, width: 8}",
    "train={iterations: 99, prompts: 4, group: 8, updates: 1, micro_batch: 64, threads: 1}",
    "optimizer.lr=0.02",
    # the sampler draws nothing after the initial noise
    "plan={fn: full, steps: 4, noise_scale: 0.0}",
)
PPO = "loss={fn: ppo_clip, clip_low: 0.2, clip_high: 0.2}"
METHODS: dict[str, tuple[str, ...]] = {
    "matching": ("likelihood={fn: forward, draws: 2}", "loss={fn: awm}"),
    "preference": (
        "likelihood={fn: forward, draws: 2, shared: true}",
        "credit={fn: best_worst}",
        "segment={fn: prompt}",
        "select={fn: nonzero}",
        "loss={fn: diffusion_dpo, beta: 5.0}",
    ),
    "negative_aware": ("likelihood={fn: forward}", "loss={fn: nft, beta: 1.0}"),
    "prior": ("likelihood={fn: prior}", PPO),
    "find": (
        "likelihood={fn: prior, reads: text, learn_spread: true}",
        "credit={fn: value_baseline, lr: 0.01}",
        "loss={fn: clamped_ratio, clip_low: 0.2, clip_high: 0.2, scale: 10.0}",
        "kl={fn: noise_moments, beta: 0.01}",
    ),
    "forward_ppo": ("likelihood={fn: forward, draws: 2, times: grid}", PPO, "train.updates=2"),
}


def trainer_of(folder: Path, name: str, *overrides: str) -> Trainer:
    changes = (*SMALL, *METHODS[name], *overrides)
    return Trainer(load_config(write_toy(folder), changes, ("toykit",)))


@pytest.mark.parametrize("name", ["matching", "negative_aware", "preference"])
def test_calls_do_not_change_a_step(tmp_path: Path, name: str) -> None:
    """Fresh noise belongs to a leaf, or to a prompt, and not to the network call it is in."""
    made = []
    for size in (64, 6):
        trainer = trainer_of(tmp_path, name, f"train.micro_batch={size}")
        trainer.step()
        made.append(weights_of(trainer))
    torch.testing.assert_close(*made, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["forward_ppo", "find"])
def test_on_policy_and_resumed_bit_for_bit(tmp_path: Path, name: str) -> None:
    """Forward: the old log-prob is that of the weights that sampled; prior: the rollout's. Own
    parameters, averages and copies of the weights come back; 2 + 2 iterations against 4."""
    *_, metrics = halves(partial(trainer_of, tmp_path, name), tmp_path, 2, 2, "model.seed=9")
    assert metrics[0]["on_policy_gap"] < 1e-6 and metrics[0]["ratio_std"] >= 0


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


def test_one_noise_for_all_images_cannot_be_learned(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train.same_noise"):
        trainer_of(tmp_path, "prior", "model={fn: toykit.unloadable}", "train.same_noise=true")


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
    trainer = trainer_of(tmp_path, "preference", "train.iterations=2", "eval.every=2")
    train(trainer.config, run=tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["accuracy"] == row["reward/red"] and 0 <= row["pair_accuracy"] <= 1
