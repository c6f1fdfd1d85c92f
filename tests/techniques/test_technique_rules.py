"""Group techniques: numbers of the reference's fixtures (computed in numpy from published code or
formulas), and what each must not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from losskit import loss_input, on_tensors
from selectkit import forest
from torch import Tensor

from flowrl.algorithms.credit import advantages
from flowrl.algorithms.losses import policy
from flowrl.algorithms.penalties import norm_guard, velocity_kl
from flowrl.core.errors import ConfigError
from flowrl.core.types import Eval, SelectInput, Tree
from flowrl.techniques import group_credits, group_losses, selections

NAN = float("nan")
CREDITS = [
    advantages.mean_centred,
    group_credits.median_norm,
    group_credits.virtual_best,
    group_credits.beta_norm,
    group_credits.difficulty_balanced,
    advantages.signed_power,
]
FOUR: list[list[float]] = [
    [1, 0, 0, 0],
    [1, 1, 1, 0],
    [1, 1, 0, 0],
    [1, 0, 0, 0],
]  # success rates .25 .75 .5 .25
ROWS: list[tuple[Callable[..., Tensor], dict[str, Any], list[list[float]], list[float]]] = [
    (advantages.mean_centred, {}, [[0.2, 0.8], [0.5, 0.5]], [-0.3, 0.3, 0, 0]),
    (advantages.mean_centred, {"lower": 0.1}, [[0.2, 0.8]], [-0.2, 0.4]),
    (
        group_credits.median_norm,
        {},
        [[0.2, 0.9, 0.5, 0.55, 0.1]],
        [-0.996678, 1.328904, 0, 0.166113, -1.328904],
    ),
    (group_credits.virtual_best, {}, [[0, 0, 0, 0]], [-0.447213] * 4),
    (group_credits.virtual_best, {}, [[0, 1, 0, 1]], [-1.095443, 0.730295] * 2),
    (group_credits.beta_norm, {}, FOUR, [0.630577, -0.210192, -0.210192, -0.210192]),
    (group_credits.difficulty_balanced, {}, FOUR, [0.656247, -0.499998, -0.499998, -0.499998]),
    (
        group_credits.difficulty_balanced,
        {},
        FOUR[1:2] + FOUR[:1] + FOUR[2:],
        [*[0.514467] * 3, -3.527773],
    ),
    # the fixture .3535534 .0894427 -.0316228 -.4647580 over its mean magnitude .2348442
    (
        advantages.signed_power,
        {},
        [[1.5, 1.2, 0.9, 0.4]],
        [1.505481, 0.380860, -0.134654, -1.978998],
    ),
]


def grouped(rewards: list[list[float]]) -> tuple[Tensor, Tensor, Tree]:
    """Lay rewards out as prompts whose images are leaves without anything above them."""
    group = torch.repeat_interleave(
        torch.arange(len(rewards)), torch.tensor([len(row) for row in rewards])
    )
    leaf = torch.arange(len(group))
    root = torch.full_like(leaf, -1)
    tree = Tree(root, torch.zeros_like(leaf), torch.zeros(len(leaf)), group)
    return torch.tensor(sum(rewards, [])), leaf, tree


@pytest.mark.parametrize(("credit", "options", "rewards", "wanted"), ROWS)
def test_advantages_are_those_of_the_fixtures(
    credit: Callable[..., Tensor],
    options: dict[str, Any],
    rewards: list[list[float]],
    wanted: list[float],
) -> None:
    found = credit(*grouped(rewards), **options)[: len(wanted)]
    torch.testing.assert_close(found, torch.tensor(wanted).float(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("credit", CREDITS)
def test_what_was_not_scored_has_no_advantage_and_changes_no_other(
    credit: Callable[..., Tensor],
) -> None:
    whole = credit(*grouped([[0.2, 0.9, 0.4], [1.0, 0.0, 0.3]]))
    holed = credit(*grouped([[0.2, NAN, 0.9, 0.4], [1.0, 0.0, 0.3], [NAN, NAN]]))
    assert holed[[1, 7, 8]].tolist() == [0, 0, 0]
    torch.testing.assert_close(holed[[0, 2, 3, 4, 5, 6]], whole)


def test_equal_rewards_leave_a_signal_only_below_the_virtual_best() -> None:
    equal = grouped([[0.3, 0.3, 0.3], [0.7, 0.7, 0.7]])
    for credit in CREDITS:
        found = credit(*equal)
        assert (found == 0).all() == (credit is not group_credits.virtual_best), credit
    assert (group_credits.virtual_best(*grouped([[1.0, 1.0]])) == 0).all()


@pytest.mark.parametrize(
    ("credit", "rewards", "options", "words"),
    [
        (group_credits.virtual_best, [[0.5, 1.5]], {}, "best=1.0 has to be the highest"),
        (group_credits.virtual_best, [[0.5, 1.0]], {"count": 0}, "count >= 1"),
        (group_credits.beta_norm, [[-0.1, 1.0]], {}, "rewards from 0 to 1, got -0.1 to 1"),
        (group_credits.difficulty_balanced, [[0.5, 2.0]], {}, "rewards from 0 to 1"),
        (group_credits.difficulty_balanced, [[0.5]], {"damp": 0.0}, "damp > 0"),
        (group_credits.median_norm, [[0.5]], {"eps": 0.0}, "eps > 0"),
        (advantages.signed_power, [[0.5]], {"gamma": -1.0}, "gamma > -1"),
    ],
)
def test_bad_rewards_and_options_are_named(
    credit: Callable[..., Tensor], rewards: list[list[float]], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        credit(*grouped(rewards), **options)


def slopes(loss: Callable[..., Any], ratio: list[float], a: list[float], **rest: Any) -> Tensor:
    """Return d loss / d log_prob of rows with these ratios and advantages, over -A."""
    now = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
    advantage = torch.tensor(a, dtype=torch.float64)
    on_tensors(loss)(now, torch.zeros_like(now), advantage, **rest)[0].sum().backward()
    assert now.grad is not None
    return now.grad / -advantage


WIDE: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
RATIOS = [0.5, 0.9, 1.1, 1.3, 4.0]


@pytest.mark.parametrize(
    ("loss", "a", "wanted"),
    [
        # the reference's fixture, eps .2
        (group_losses.asymmetric_ratio, 1.0, [2, 1 / 0.9, 1 / 1.1, 0, 0]),
        (group_losses.asymmetric_ratio, -1.0, [0, 0.9, 1.1, 1.3, 3]),
        # the mask, without an importance weight
        (group_losses.one_sided, 1.0, [1, 1, 1, 0, 0]),
        (group_losses.one_sided, -1.0, [0, 1, 1, 1, 1]),
    ],
)
def test_weights_of_the_gradient(loss: Callable[..., Any], a: float, wanted: list[float]) -> None:
    found = slopes(loss, RATIOS, [a] * 5, **WIDE)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))


def test_a_capped_inverse_ratio() -> None:
    """r = .1 would weigh 10; the cap is 3."""
    assert slopes(group_losses.asymmetric_ratio, [0.1], [1.0], **WIDE).item() == pytest.approx(3)


def test_pulls_end_where_the_closed_form_says() -> None:
    """d/dl (-A l + tau l^2 / 2) = 0 at l = A / tau; (l / scale - A)^2 is least at l = scale A."""
    a, tau, scale = 0.5, 4.0, 0.01
    at = torch.tensor([a / tau]).exp().tolist()
    assert slopes(group_losses.opmd, at, [a], tau=tau).item() == pytest.approx(0, abs=1e-6)
    at = torch.tensor([scale * a]).exp().tolist()
    assert slopes(group_losses.ratio_regression, at, [a], scale=scale).item() == pytest.approx(
        0, abs=1e-3
    )


def test_the_divergence_masks_what_moves_outward() -> None:
    """The reference's fixture: D = 2e-6 everywhere, keep 0, 1, 1, 0, 1, mean .0040000667."""
    now = torch.tensor([0.01, 0.01, -0.01, -0.01, 0.0], dtype=torch.float64).requires_grad_()
    a = torch.tensor([1, -1, 1, -1, 0], dtype=torch.float64)
    std = torch.full((5,), 0.5, dtype=torch.float64)
    mean = torch.full((5, 3), (2e-6 * 2 * 0.25) ** 0.5, dtype=torch.float64)
    tensors = {"mean": mean, "old_mean": torch.zeros_like(mean), "std": std}
    loss, metrics = on_tensors(policy.divergence_mask)(
        now, torch.zeros_like(now), a, most=1e-6, **tensors
    )
    loss.sum().backward()
    assert now.grad is not None
    assert (now.grad != 0).tolist() == [False, True, True, False, False]  # A = 0 has no slope
    assert metrics["clip_frac"].tolist() == [1, 0, 0, 1, 0]
    torch.testing.assert_close(metrics["divergence"], torch.full_like(a, 2e-6))
    assert (loss.detach()[[1, 2, 4]].sum() / 5).item() == pytest.approx(0.0040000667, abs=1e-10)


@pytest.mark.parametrize(
    ("loss", "options", "words"),
    [
        ("one_sided", {"clip_low": 0.0, "clip_high": 0.1}, "clip_low"),
        ("opmd", {"tau": 0.0}, "tau > 0"),
        ("ratio_regression", {"scale": -1.0}, "scale > 0"),
        ("asymmetric_ratio", {**WIDE, "cap": 1.0}, "cap > 1"),
        ("divergence_mask", {"most": 0.0}, "most > 0"),
        ("divergence_mask", {"most": 1e-6}, "transition means"),
    ],
)
def test_bad_options_of_losses_are_named(loss: str, options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        slopes(
            getattr(policy if loss == "divergence_mask" else group_losses, loss),
            [1.0],
            [1.0],
            **options,
        )


SCORES = [-1.2, 0.1, 0.9, -0.05, 1.6, -0.7, 0.3, -0.95]  # of the reference


def kept(
    function: Callable[..., Tensor], advantages: list[float], *, iteration: int = 0, **options: Any
) -> list[int]:
    """Return which of a prompt's images are trained, one draw each, by their order."""
    ro = forest([1, 0], groups=[0] * len(advantages))
    advantage = torch.zeros(len(ro.tree.parent))
    above = ro.tree.parent[ro.leaf]
    advantage[ro.leaf] = advantage[above] = torch.tensor(advantages)
    factor = function(SelectInput(ro, advantage, None, iteration, torch.Generator()), **options)
    assert set(factor.nonzero().flatten().tolist()) <= set(above.tolist())
    return factor[above].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("function", "options", "scores", "wanted"),
    [
        (selections.largest, {"share": 0.5}, SCORES, [0, 2, 4, 7]),
        (selections.spread, {"keep": 4}, SCORES, [0, 2, 4, 7]),
        # floor(5 * 0.2) = 1 is left out, though 5 (1 - 0.8) is below 1 in floating point
        (selections.largest, {"share": 0.8}, SCORES[:5], [0, 1, 2, 4]),
        # all large ones are positive; the variances of the widest sets of three are 7.9 and 6.9
        (selections.largest, {"share": 0.5}, [5.0, 4.9, 4.8, -1.0, 0.0, 0.1], [0, 1, 2]),
        (selections.spread, {"keep": 3}, [5.0, 4.9, 4.8, -1.0, 0.0, 0.1], [0, 1, 3]),
    ],
)
def test_which_images_are_trained(
    function: Callable[..., Tensor],
    options: dict[str, Any],
    scores: list[float],
    wanted: list[int],
) -> None:
    assert kept(function, scores, **options) == wanted


def test_d3s_loosens_over_training() -> None:
    """(1 - t) 3 + t 8 of 8 images, rounded down, over 10 iterations: 3, 3.5, 4 ... 7.5, 8, then 8;
    at 4 the reference's set, of its variance."""
    options = {"keep": 3, "keep_last": 8, "over": 10}
    found = [kept(selections.spread, SCORES, iteration=k, **options) for k in range(12)]
    assert [len(images) for images in found] == [3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8]
    assert found[2] == [0, 2, 4, 7]
    variance = torch.tensor([SCORES[image] for image in found[2]]).var(correction=0)
    assert float(variance) == pytest.approx(1.420469, abs=1e-6)
    # downwards as well, and at once
    assert len(kept(selections.spread, SCORES, iteration=1, keep=8, keep_last=2, over=1)) == 2


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (selections.largest, {"share": 1.0}, "share above 0"),
        (
            selections.spread,
            {"keep": 9},
            "keep=9 must be from 2 to the number of leaves of a prompt, 8",
        ),
        (
            selections.spread,
            {"keep": 4, "keep_last": 9, "over": 5},
            "keep_last=9 must be from 2 to",
        ),
        (selections.spread, {"keep": 4, "keep_last": 8}, "keep_last=8 and over=0"),
        (selections.spread, {"keep": 4, "over": 8}, "keep=4 and keep_last=0 must be from 2"),
        (selections.spread, {"keep": 4, "keep_last": 8, "over": -1}, "over=-1"),
    ],
)
def test_bad_selections_are_named(
    function: Callable[..., Tensor], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        kept(function, SCORES, **options)


def test_penalties_on_velocities() -> None:
    """v_ref = (3, 4), v = 1.2 v_ref: mean((v - v_ref)^2) = .5, (1.2 - 1)^2 = .04; .9 v_ref: 0."""
    ref = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    v = ref * torch.tensor([[1.2], [0.9]])
    zero = torch.zeros(2)
    data = loss_input(zero, zero, zero, v=v)._replace(under={"ref": Eval(zero, ref, zero, ref)})
    torch.testing.assert_close(velocity_kl(data), torch.tensor([0.5, 0.125]))
    torch.testing.assert_close(norm_guard(data), torch.tensor([0.04, 0.0]))
    blind = data._replace(now=data.now._replace(v=None))
    with pytest.raises(ConfigError, match="has no velocity"):
        norm_guard(blind)
