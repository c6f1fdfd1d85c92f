"""Copies of the weights that follow slowly: the policy that samples, and one that is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toykit import write_toy

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.training.trainer import Trainer

NFT = (
    "model={fn: toykit.linear, channels: 2}",
    "image={height: 8, width: 8}",
    "train={iterations: 9, prompts: 2, group: 4, updates: 1, micro_batch: 64, threads: 1}",
    "plan={fn: ode, steps: 4}",
    "likelihood={fn: forward, draws: 2, times: grid, last: 3}",
    "loss={fn: nft, beta: 1.0}",
)
AWM = (*NFT, "loss={fn: awm}", "kl={fn: velocity_kl_both, beta: 1.0, ref: 0.001, slow: 1.0}")
HALF = "old={fn: ramp, slope: 0.5, limit: 0.5}"
SLOW = "slow={fn: ramp, slope: 0.001, limit: 0.3}"


def trainer_of(folder: Path, *overrides: str) -> Trainer:
    return Trainer(load_config(write_toy(folder), overrides, ("toykit",)))


def copied(rows: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in rows.items()}


def test_a_copy_follows_by_its_decay_and_samples(tmp_path: Path) -> None:
    """Decay 0.5 after every step: half of the copy and half of the current weights. What is sampled
    is what a trainer with the copy's weights as its own would sample."""
    run = trainer_of(tmp_path, *NFT, HALF)
    old = copied(run.params)
    for _ in range(3):
        run.step()
        old = {name: 0.5 * old[name] + 0.5 * p.detach() for name, p in run.params.items()}
    for name, value in run.weights.state_dict()["old"].items():
        torch.testing.assert_close(value, old[name])
        assert not torch.equal(value, run.params[name])
    plain = trainer_of(tmp_path, *NFT)
    for name, value in run.weights.state_dict()["old"].items():
        plain.params[name].data.copy_(value)
    plain.state.iteration = run.iteration
    assert torch.equal(run.sample([0, 1]).x, plain.sample([0, 1]).x)


def test_old_and_new_share_a_network_call_where_they_are_equal(tmp_path: Path) -> None:
    """Per row 3 calls, and 1 for old weights that differ; 2 x 4 images of 4 steps, 2 rows each. A
    copy with decay 0 trains like no copy, to the bit."""
    alike, apart = 8 * 4 + 16 * 3, 8 * 4 + 16 * 4
    found, ends = {}, []
    for name, sections in {
        "none": (),
        "copied": ("old={fn: ramp, slope: 0.0, limit: 0.0}",),
        "slow": (HALF,),
        "waits": ("old={fn: ramp, slope: 0.5, limit: 0.5, wait: 2}",),
    }.items():
        run = trainer_of(tmp_path, *NFT, *sections)
        found[name] = [run.step()["nfe"] for _ in range(4)]
        ends.append(copied(run.params))
    assert found["none"] == found["copied"] == [alike] * 4
    assert found["slow"] == [alike, apart, apart, apart]
    assert found["waits"] == [alike, alike, alike, apart]
    for name, value in ends[0].items():
        assert torch.equal(ends[1][name], value) and not torch.equal(ends[2][name], value)


def test_a_second_step_has_its_own_old_weights(tmp_path: Path) -> None:
    """Two optimizer steps of 8 rows each: only the second needs the old weights evaluated."""
    run = trainer_of(tmp_path, *NFT, "train.updates=2")
    metrics = run.step()
    assert metrics["nfe"] == 8 * 4 + 8 * 3 + 8 * 4 and metrics["drift"] > 0


@pytest.mark.parametrize("method", [(*NFT, HALF), (*AWM, SLOW, HALF)])
def test_resume_is_bit_for_bit(tmp_path: Path, method: tuple[str, ...]) -> None:
    """Copies come back from a checkpoint; 2 + 2 iterations against 4. Without the section it is
    refused."""
    whole, first = (trainer_of(tmp_path, *method) for _ in range(2))
    metrics = [whole.step() for _ in range(4)]
    again = [first.step() for _ in range(2)]
    first.save(tmp_path / "middle")
    second = trainer_of(tmp_path, *method, "model.seed=9")
    second.load(tmp_path / "middle")
    again += [second.step() for _ in range(2)]
    assert again == metrics
    for name, p in whole.params.items():
        assert torch.equal(second.params[name], p)
    with pytest.raises(Exception, match="old, slow"):
        trainer_of(tmp_path, *NFT).load(tmp_path / "middle")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (AWM, "slow: missing"),
        ((*NFT, SLOW), "slow: neither loss nft nor kl"),
        ((*NFT, "loss.beta=0.0"), "beta > 0"),
        ((*NFT, "likelihood.draws=4"), "draws=4 different times"),
        ((*NFT, "likelihood={fn: forward, high: 1.5}"), "low < high < 1"),
        ((*NFT, "loss={fn: diffusion_dpo, beta: 1.0}"), "segment"),
        ((*NFT, "loss={fn: regression}"), "at least 0"),
        ((*NFT, "loss={fn: dgpo, beta: 1.0}"), "dgpo: compares all images of a prompt"),
        ((*NFT, "plan={fn: sa_solver, steps: 4}", "train.same_noise=true"), "train.same_noise"),
        ((*NFT, "old={fn: ramp, slope: 0.1, limit: 2.0}"), "limit <= 1"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(tmp_path, *overrides, "model={fn: toykit.unloadable}")


def test_a_refresh_inside_an_iteration_is_refused(tmp_path: Path) -> None:
    """Two optimizer steps an iteration: 15 steps end in the middle of the eighth."""
    updates, reset = "train.updates=2", "slow={fn: reset, every: 15}"
    with pytest.raises(ConfigError, match=r"slow\.every=15: .*multiple of 2, such as 14"):
        trainer_of(tmp_path, *AWM, updates, reset)
    trainer_of(tmp_path, *AWM, updates, "slow={fn: reset, every: 16}")
