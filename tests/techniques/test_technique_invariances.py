"""What scaling, shifting and equal rewards may do to any credit of a group, and what every rule for
the ratio does at a ratio of 1 (section 6 of the reference). By the definitions: each says why."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from groupkit import drawn, images
from losskit import loss_input
from torch import Tensor
from toykit import toy

from flowrl.algorithms.credit import advantages
from flowrl.algorithms.credit.advantages import group_norm
from flowrl.algorithms.losses import policy
from flowrl.algorithms.reward_mix.aggregate import gdpo
from flowrl.core.types import Eval, LossInput, Scores
from flowrl.techniques import group_credits, group_losses
from flowrl.techniques.prompt_histories import (
    risk_bundles,
    shrunken_mean,
    single_stream,
    smooth_norm,
)
from flowrl.training.trainer import Trainer

F64 = torch.float64
FLAT = [[0.3, 0.9, 0.4, 0.1], [0.2, 0.3, 0.7, 0.6], [0.5, 0.5, 0.5, 0.5]]
LOGS = torch.linspace(-2, -1, 24)
# whether a factor and a constant leave the advantages as they are; None: they are only scaled
GROUPS: dict[str, tuple[Callable[..., Tensor], dict[str, Any], bool | None, bool]] = {
    "group": (group_norm, {"eps": 0.0}, True, True),
    "global": (group_norm, {"eps": 0.0, "std": "global"}, True, True),
    "Dr.GRPO": (advantages.mean_centred, {}, None, True),
    "MC-GRPO": (group_credits.median_norm, {"eps": 1e-9}, True, True),
    "NGRPO": (group_credits.virtual_best, {"best": 2.0}, False, False),
    "BNPO": (group_credits.beta_norm, {}, False, False),
    "A-GRAE": (group_credits.difficulty_balanced, {}, False, False),
    "SLAS": (advantages.signed_power, {}, True, True),
    "COPO": (group_credits.consistency_blend, {"eps": 1e-9}, True, True),
    "unlikely": (group_credits.unlikely_norm, {"eps": 1e-9, "log_prob": LOGS}, True, False),
    "strata": (group_credits.strata_norm, {"blend": 0.5, "eps": 1e-9}, True, True),
}


@pytest.mark.parametrize("name", GROUPS)
def test_what_scaling_and_shifting_rewards_does(name: str) -> None:
    """Rewards times 1/2, and plus 1/16: what should not change does not, what should does."""
    credit, options, scales, shifts = GROUPS[name]
    reward, *rest = drawn(FLAT, noises=2 if name == "strata" else None)
    before, half, more = (
        credit(r, *rest, **options) for r in (reward, reward / 2, reward + 1 / 16)
    )
    if scales is None:
        torch.testing.assert_close(half, before / 2)
    else:
        assert torch.allclose(half, before, atol=2e-5) == scales
    assert torch.allclose(more, before, atol=2e-5) == shifts


@pytest.mark.parametrize("name", [n for n in GROUPS if n not in ("NGRPO", "COPO", "unlikely")])
def test_a_prompt_of_equal_rewards_has_exactly_no_advantage(name: str) -> None:
    """The third prompt. NGRPO, COPO and the unlikely one exist to give it one."""
    credit, options = GROUPS[name][:2]
    laid = drawn(FLAT, noises=2 if name == "strata" else None)
    assert images(credit, *laid, **options)[8:] == [0] * 4
    for other in ("NGRPO", "COPO", "unlikely"):
        credit, options = GROUPS[other][:2]
        assert any(images(credit, *drawn(FLAT), **options)[8:])


@pytest.mark.parametrize("name", ["group", "global", "Dr.GRPO", "unlikely", "strata", "BNPO"])
def test_centred_advantages_of_a_prompt_sum_to_zero(name: str) -> None:
    """BNPO weighs a prompt's centred rewards alike."""
    credit, options = GROUPS[name][:2]
    found = images(credit, *drawn(FLAT, noises=2 if name == "strata" else None), **options)
    for first in (0, 4, 8):
        assert sum(found[first : first + 4]) == pytest.approx(0, abs=1e-5)


# ------------------------------------------------------------------- credits that remember prompts

# what each prompt's images got at the first visit, and at the second
BEFORE = [[0.1, 0.2, 0.3, 0.4], [0.4, 0.9, 0.5, 0.8], [0.3, 0.2, 0.1, 0.6]]
NOW = [[0.3, 0.9, 0.4, 0.9], [0.2, 0.3, 0.7, 0.6], [0.5, 0.1, 0.6, 0.9]]


class Memory(NamedTuple):
    """A credit, who visited before, and what a factor and a constant change: on rewards of all
    visits, then on those of now alone. None: advantages are only scaled."""

    make: Callable[..., Any]
    earlier: tuple[int, ...]
    scales: bool | None
    shifts: bool
    now_scales: bool | None
    now_shifts: bool


MEMORIES = {
    # mean and std of all visits, in the units of the rewards: as plain standardising, but only if
    # the earlier rewards are changed as well
    "DCPO": Memory(smooth_norm, (0, 1, 2), True, True, False, False),
    # nothing came before: the group's own statistics
    "DCPO, first": Memory(smooth_norm, (), True, True, True, True),
    # the range of rewards is an option, so a factor changes how much a mean may deviate by chance;
    # a constant moves mean and baseline alike
    "V_0.5": Memory(shrunken_mean, (0, 1, 2), False, True, False, False),
    # its baseline is then the mean, and nothing is divided
    "V_0.5, first": Memory(shrunken_mean, (), None, True, None, True),
    # quantiles of the first batch move with the rewards, and sums are divided by their std
    "RiskPO, first": Memory(partial(risk_bundles, size=1), (), True, True, True, True),
    # at a visit quantiles move by .1 (level - share below), which knows no unit; a constant is in
    # the quantiles and in the sums, unless it comes between them
    "RiskPO": Memory(partial(risk_bundles, size=1), (0, 1, 2), False, True, False, False),
    # the worth of prompts that were seen equally often is the same linear function of their
    # rewards, and standardising over the batch takes out what they share
    "single-stream": Memory(partial(single_stream, keep=0.6), (0, 1, 2), True, True, False, True),
    # else the worth of 1/2 that all begin with weighs differently
    "single-stream, uneven": Memory(
        partial(single_stream, keep=0.6), (0,), False, False, False, True
    ),
}


def remembered(
    memory: Memory, factor: float = 1.0, more: float = 0.0, *, always: bool = True
) -> Tensor:
    """Change the rewards of all visits, or of the second one alone -> its advantages [12]."""
    credit, texts = memory.make(), ["a", "b", "c"]
    credit.start(texts)

    def laid(rewards: list[list[float]], rows: tuple[int, ...], change: bool) -> Any:
        reward, *rest = drawn([rewards[row] for row in rows])
        prompts = [texts[row] for row in rows for _ in rewards[row]]
        return (reward * factor + more if change else reward), *rest, prompts

    if memory.earlier:
        *seen, prompts = laid(BEFORE, memory.earlier, always)
        credit.update(*seen, prompts=prompts)
    *seen, prompts = laid(NOW, (0, 1, 2), True)
    return torch.tensor(images(credit, *seen, prompts=prompts))


@pytest.mark.parametrize("name", MEMORIES)
def test_what_scaling_and_shifting_does_to_what_remembers(name: str) -> None:
    """Rewards times 1/2, and plus 1/16; the table above says why."""
    memory = MEMORIES[name]
    before = remembered(memory)
    assert float(before.std()) > 0.1
    for always, scales in ((True, memory.scales), (False, memory.now_scales)):
        half = remembered(memory, factor=0.5, always=always)
        if scales is None:
            torch.testing.assert_close(half, before / 2)
        else:
            assert torch.allclose(half, before, atol=2e-5) == scales, (always, half, before)
    for always, shifts in ((True, memory.shifts), (False, memory.now_shifts)):
        moved = remembered(memory, more=1 / 16, always=always)
        assert torch.allclose(moved, before, atol=2e-5) == shifts, (always, moved, before)


def test_v_05_is_only_scaled_where_the_range_is_scaled_too() -> None:
    """Half the rewards with half the range: half of each advantage."""
    memory = MEMORIES["V_0.5"]
    half = memory._replace(make=partial(shrunken_mean, spread=0.25))
    torch.testing.assert_close(remembered(half, factor=0.5), remembered(memory) / 2)


def test_gdpo_sees_no_units_of_any_reward() -> None:
    """Each reward is standardised in its prompt, so factors and constants of its own change
    nothing; and the sum is centred, so that each prompt sums to 0."""
    first, leaf, tree = drawn(NOW)
    second = drawn(BEFORE[::-1])[0]

    def mixed(one: Tensor, two: Tensor) -> Tensor:
        scores = Scores({"one": one, "two": two}, {"one": 1.0, "two": 0.5}, leaf, tree)
        credit = partial(group_norm, leaf=leaf, tree=tree, eps=0.0, ddof=1)
        return gdpo(scores, credit, eps=0.0).advantage[leaf]

    before = mixed(first, second)
    torch.testing.assert_close(mixed(first / 2, 7 * second + 3), before, atol=2e-5, rtol=0)
    torch.testing.assert_close(before.view(3, 4).sum(1), torch.zeros(3), atol=1e-5, rtol=0)
    assert not torch.allclose(mixed(first, second.flip(0)), before, atol=0.1)


@pytest.mark.parametrize(
    ("credit", "moves"), [("group_norm", False), ("virtual_best", True), ("smooth_norm", True)]
)
def test_a_run_on_equal_rewards_moves_only_by_what_lies_outside_of_the_group(
    tmp_path: Path, credit: str, moves: bool
) -> None:
    """Every image gets .3. Its prompt's group says nothing; a virtual best of 1 does, and so do two
    earlier visits of mean .4 and std .3."""
    changes = ("rewards.red.fn=toykit.same", f"credit={{fn: {credit}}}")
    trainer = Trainer(toy(tmp_path, *changes))
    memory: Any = trainer.method.credit
    if credit == "smooth_norm":
        for rows, value in zip(memory.kept.values(), (2, 0.4, 0.3), strict=True):
            rows.fill_(value)
    metrics = trainer.step()
    assert (metrics.get("grad_norm", 0.0) != 0) == moves
    assert metrics["trained"] == (24 if moves else 0)


# -------------------------------------------------------------------------------- at a ratio of 1

CLIP: dict[str, Any] = {"clip_low": 1e-3, "clip_high": 1e-3}
IMAGE: dict[str, Any] = {"image_low": 1e-3, "image_high": 1e-3}
# every rule for the ratio, and the factor of its gradient
RULES: dict[str, tuple[Callable[..., Any], dict[str, Any], float]] = {
    "ppo_clip": (policy.ppo_clip, CLIP, 1.0),
    "one_sided": (group_losses.one_sided, CLIP, 1.0),
    "clamped_ratio": (policy.clamped_ratio, CLIP | {"scale": 10.0}, 10.0),
    "opmd": (group_losses.opmd, {"tau": 100.0}, 1.0),
    # 2 / scale times the policy gradient
    "ratio_regression": (group_losses.ratio_regression, {"scale": 0.5}, 4.0),
    "asymmetric_ratio": (group_losses.asymmetric_ratio, CLIP, 1.0),
    "kept_gradient": (group_losses.kept_gradient, CLIP | {"keep_low": 0.5, "keep_high": 0.5}, 1.0),
    "divergence_mask": (policy.divergence_mask, {"most": 1e-6}, 1.0),
    "velocity_mask": (group_losses.velocity_mask, {"most": 1e-6}, 1.0),
    "hybrid_ratio": (group_losses.hybrid_ratio, CLIP | IMAGE, 1.0),
}


def on_policy() -> LossInput:
    """Four draws of two numbers under the weights that made them, each an image of its own."""
    now = torch.tensor([-0.9, -1.1, -1.4, -0.7], dtype=F64).requires_grad_()
    a = torch.tensor([0.7, -1.3, 0.0, 2.0], dtype=F64)
    v = torch.ones(4, 2, dtype=F64)
    tensors = {"x": v, "v": v, "mean": v, "std": torch.full((4,), 0.5, dtype=F64)}
    data = loss_input(now, now.detach().clone(), a, **tensors, old_mean=v)
    return data._replace(
        under={"old": Eval(now.detach(), v, tensors["std"], v)},
        segment=torch.arange(4),
        reward_variance=torch.full((4,), 0.1, dtype=F64),
    )


@pytest.mark.parametrize("name", RULES)
def test_at_a_ratio_of_one_every_rule_is_the_policy_gradient(name: str) -> None:
    """The ratio is 1 to the bit, nothing is stopped, and d loss / d log-prob is -A, but for a
    constant."""
    loss, options, factor = RULES[name]
    data = on_policy()
    value, metrics = loss(data, **options)
    value.sum().backward()
    slope = data.now.log_prob.grad
    assert slope is not None
    torch.testing.assert_close(slope, -factor * data.batch.advantage)
    assert metrics["ratio"].tolist() == [1.0] * 4 and metrics["clip_frac"].tolist() == [0.0] * 4
