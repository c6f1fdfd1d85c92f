"""Copies of the weights that follow slowly, or are refreshed: the policy that samples, and one that
is looked at."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from toykit import write_toy
from trainkit import halves, trainer_for

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.core.processes import World
from flowrl.training.learn import Trained
from flowrl.training.parts.copies import decay_of, follow, largest_kl
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
    halves(partial(trainer_of, tmp_path, *method), tmp_path, 2, 2, "model.seed=9")
    with pytest.raises(Exception, match="trained with the section old"):
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


# ------------------------------------- refreshed when the policy is far, or after a time (GARDO)

KL = ("kl={fn: transition_kl_slow, beta: 0.01}", "train.updates=2", "train.prompts=4")


def gardo(folder: Path, slow: str, *more: str) -> Trainer:
    """Return a trainer whose penalty measures from a copy that `slow` refreshes."""
    return trainer_for(folder, *KL, f"slow={{fn: reset, {slow}}}", *more)


def test_when_it_is_refreshed(tmp_path: Path) -> None:
    """By hand, an optimizer step an iteration, `every` 4: after 4 steps without a refresh, and
    where the KL is too large; then the 4 steps begin anew. GARDO's code: reset, or epoch -
    prev_epoch > 15."""
    run = gardo(tmp_path, "every: 4, above: 0.1", "train.updates=1")
    far = [False, True, False, False, False, False, True, True, False, False]
    wanted = [1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    for iteration, (one, decay) in enumerate(zip(far, wanted, strict=True)):
        run.state.iteration = iteration
        assert decay_of(run, "slow", far=one) == decay
        assert follow(run, kl=0.2 * one) == {"refreshed/slow": float(decay == 0)}
    assert run.state.memory == {"refreshed": {"slow": 8}}


def test_the_largest_kl_of_a_step() -> None:
    """Two network calls of the first optimizer step and one of the second: (1 + 2 + 6) / 3 = 3, and
    4. Every row counts alike; two processes that are alike change no mean."""

    def call(update: int, *kl: float) -> Trained:
        some = torch.zeros(len(kl), dtype=torch.int64)
        return Trained({"kl": torch.tensor(kl)}, some, some, some, update)

    seen = [call(0, 1.0, 2.0), call(0, 6.0), call(1, 4.0)]
    assert largest_kl(seen, World()) == 4.0
    assert largest_kl(seen[:2], World()) == 3.0 and largest_kl([], World()) == 0.0

    class Two(World):
        def gather(self, mine: Any) -> list[Any]:
            return [mine, mine]

    assert largest_kl(seen, Two()) == 4.0


def test_a_run_refreshes_where_the_kl_is_large(tmp_path: Path) -> None:
    """The copy is the current weights after an iteration that says so, and stays else. Two
    iterations are sampled to find a limit between their KLs."""
    free = gardo(tmp_path, "every: 100, above: 1.0e+9")
    kl = [free.step()["kl_most"] for _ in range(3)]
    assert kl[0] < kl[1] < kl[2]  # the policy goes away from where it began
    limit = (kl[0] + kl[1]) / 2
    run = gardo(tmp_path, f"every: 100, above: {limit!r}")
    for wanted in (0.0, 1.0):
        before = {name: p.clone() for name, p in run.weights.state_dict()["slow"].items()}
        metrics = run.step()
        assert metrics["refreshed/slow"] == wanted and metrics["kl_most"] >= metrics["kl"]
        for name, copy in run.weights.state_dict()["slow"].items():
            assert torch.equal(copy, run.params[name] if wanted else before[name])
    # measured from the new reference the next KL is small again
    assert run.step()["kl_most"] < kl[2]


def test_with_one_update_it_is_the_kl_of_the_log(tmp_path: Path) -> None:
    run = gardo(tmp_path, "every: 100, above: 1.0e+9", "train.updates=1")
    assert run.step()["kl"] == 0 and "refreshed" not in run.state.memory  # the copy is it
    metrics = run.step()
    assert metrics["kl_most"] == pytest.approx(metrics["kl"], rel=1e-6) and metrics["kl"] > 0


def test_a_resumed_run_knows_when_it_was_refreshed(tmp_path: Path) -> None:
    """2 + 4 iterations against 6: the second refresh comes 3 iterations after the one by KL, which
    the resumed run did not see."""
    first_kl = gardo(tmp_path, "every: 100, above: 1.0e+9").step()["kl_most"]
    slow = f"every: 6, above: {first_kl * 1.5!r}"
    whole, second, metrics = halves(partial(gardo, tmp_path, slow), tmp_path, 2, 4)
    assert second.state.memory == whole.state.memory
    assert any(row["refreshed/slow"] for row in metrics[:2])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("slow={fn: reset, every: 2, above: 0.0}",), "above > 0, got every=2, above=0.0"),
        (("kl.beta=0.0",), r"slow\.above=0.1: a limit of the KL, but the run has no kl section"),
    ],
)
def test_limits_that_cannot_be(tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        gardo(tmp_path, "every: 2, above: 0.1", *more)
