"""FIND and ZO-RankSGD: the learned noise, its losses and the credits that go with it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from losskit import loss_input
from torch import Tensor
from torch.distributions import Independent, Normal

from flowrl.algorithms.credit.baselines import value_baseline
from flowrl.algorithms.credit.comparisons import rank_edges
from flowrl.algorithms.likelihoods.prior import ROW, prior
from flowrl.algorithms.losses.policy import clamped_ratio
from flowrl.algorithms.penalties import noise_moments
from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree
from flowrl.models.toy import LinearFlow

SHAPE, PROMPTS = (2, 1, 1), ["a", "b"]


def flat(reward: list[float], group: list[int]) -> tuple[Tensor, Tensor, Tree]:
    leaf = torch.arange(len(reward))
    tree = Tree(
        torch.full_like(leaf, -1), torch.zeros_like(leaf), leaf.float() * 0, torch.tensor(group)
    )
    return torch.tensor(reward), leaf, tree


def test_a_learned_spread_is_scored_as_torch_scores_it() -> None:
    """torch.distributions; noise that is drawn is mean + std z; a prompt that is not in the list
    starts from N(0, 1)."""
    noise = prior(own=True, start="noise", learn_spread=True, spread=0.5)
    model = noise.extend(LinearFlow(), SHAPE, PROMPTS)
    with torch.no_grad():
        noise.parameters["prior.spread"].mul_(torch.tensor([1.0, 3.0]).view(2, 1, 1, 1))
    cond = model.encode(["b", "elsewhere"])
    z = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(1))
    x = model.initial_noise(z, cond)  # type: ignore[attr-defined]
    assert torch.equal(x[1], z[1])
    mean = noise.parameters["prior.mean"][1].double()
    assert float(mean.detach().abs().sum()) > 0
    torch.testing.assert_close(x[0].double(), mean + 1.5 * z[0].double())
    oracle = Independent(Normal(mean, torch.full_like(mean, 1.5)), 3).log_prob(x[0].double()) / 2
    found = model.initial_log_prob(x, cond)  # type: ignore[attr-defined]
    assert float(found[0]) == pytest.approx(float(oracle), abs=1e-6)
    assert noise.describe(cond).shape == (2, 2 + 2 + 4)  # mean, std, the prompt's vector


def test_the_first_noise_is_drawn_by_the_run_s_seed() -> None:
    """Unless the likelihood has a seed: then runs with any seed begin at one noise."""
    starts = []
    for noise, seed in ((prior(own=True, start="noise"), 0), (prior(own=True, start="noise"), 1)):
        noise.extend(LinearFlow(), SHAPE, PROMPTS, seed)
        starts.append(noise.parameters["prior.mean"])
    assert not torch.equal(*starts)
    for seed in (0, 1):
        fixed = prior(own=True, start="noise", seed=1)
        fixed.extend(LinearFlow(), SHAPE, PROMPTS, seed)
        assert torch.equal(fixed.parameters["prior.mean"], starts[1])


def test_samples_can_start_from_the_model_s_own_noise_for_a_while() -> None:
    """As a comparison judges its base model; also after an error inside."""
    noise = prior(own=True, start="noise", spread=0.3)
    model: Any = noise.extend(LinearFlow(), SHAPE, PROMPTS)
    cond, z = model.encode(PROMPTS), torch.randn(len(PROMPTS), *SHAPE)
    learned = model.initial_noise(z, cond)
    assert not torch.equal(learned, z)
    with pytest.raises(ZeroDivisionError), model.plain_noise():
        assert torch.equal(model.initial_noise(z, cond), z)
        _ = 1 / 0
    assert torch.equal(model.initial_noise(z, cond), learned)


def test_the_penalty_is_find_s() -> None:
    """mean(m^2 + (q - 1)^2) by hand: (1 + 4)/2 + (0.25 + 1)/2, and with one std (5)/2 + 0.25."""
    mean, std = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 2.0]])
    one = torch.zeros(1)
    for value, known in ((std, 3.125), (torch.tensor([0.5]), 2.75)):
        data = loss_input(one, one, one, mean=mean, std=value)
        assert noise_moments(data).tolist() == pytest.approx([known])


def test_outside_the_range_nothing_is_learned_whatever_the_advantage() -> None:
    """The reference: with the clamp saturated the policy gradient is 0, also where PPO's is not."""
    ratio = torch.tensor([0.5, 1.1, 1.5, 0.5])
    log_prob = ratio.log().requires_grad_()
    advantage = torch.tensor([1.0, 2.0, -1.0, -1.0])
    data = loss_input(log_prob, torch.zeros(4), advantage)
    loss, metrics = clamped_ratio(data, clip_low=0.2, clip_high=0.2, scale=10.0)
    assert loss.tolist() == pytest.approx([-8, -22, 12, 8])
    loss.sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([0, -22, 0, 0])
    assert metrics["clip_frac"].tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("best", [0, 1, 3])
def test_rankings_are_weighed_as_the_published_direction(best: int) -> None:
    """Of m = 6 the k first in order: m - 1 - 2 r for rank r, -k for the rest, over k (k - 1) / 2 +
    k (m - k): the published code, without its shift by 1. Another scale of rewards changes
    nothing."""
    reward = [0.3, 5.0, -1.0, 0.9, 0.1, 2.0]
    order = sorted(range(6), key=lambda i: -reward[i])
    k = best or 6
    edges = k * (k - 1) / 2 + k * (6 - k)
    known = [0.0] * 6
    for rank, i in enumerate(order):
        known[i] = (5 - 2 * rank if rank < k else -k) / edges
    found = rank_edges(*flat(reward, [0] * 6), best=best)
    assert found.tolist() == pytest.approx(known)
    assert sum(known) == pytest.approx(0)
    again = rank_edges(*flat([math.exp(value) for value in reward], [0] * 6), best=best)
    assert torch.equal(found, again)


def test_ties_and_what_was_not_scored_are_not_compared() -> None:
    reward = [1.0, 1.0, float("nan"), 0.0, 7.0, 7.0]
    found = rank_edges(*flat(reward, [0, 0, 0, 0, 1, 1]))
    assert found.tolist() == pytest.approx([0.5, 0.5, 0, -1, 0, 0])


def test_whoever_equals_the_last_of_the_best_is_one_of_them() -> None:
    """Four of six are right, and two are asked for: the right ones stand before the others, whose
    order is not known. By hand: 4 x 2 edges; then 3 of the first and 2 over the last."""
    found = rank_edges(*flat([2.0, 0.5, 2.0, 2.0, 0.0, 2.0], [0] * 6), best=2)
    assert found.tolist() == pytest.approx([2 / 8, -4 / 8, 2 / 8, 2 / 8, -4 / 8, 2 / 8])
    found = rank_edges(*flat([3.0, 2.0, 2.0, 1.0], [0] * 4), best=2)
    assert found.tolist() == pytest.approx([3 / 5, 0, 0, -3 / 5])
    assert rank_edges(*flat([1.0] * 4, [0] * 4), best=2).tolist() == [0] * 4


def test_the_baseline_learns_what_each_state_is_worth() -> None:
    """Rewards are 3 for state (1, 0) and -1 for (0, 1): then nothing is left of them. A call
    changes nothing, entries stay whole, and what is saved goes on as it would have."""
    credit = value_baseline(lr=0.01, rounds=20, buffer=6)
    data = flat([3.5, 2.5, -1.0, float("nan")], [0, 0, 1, 1])
    state = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    first = credit(*data, state=state)
    assert torch.equal(first, credit(*data, state=state)) and float(first[0]) > 2
    for _ in range(20):
        credit.update(*data, prompts=[], state=state)
    found = credit(*data, state=state)
    assert found.tolist() == pytest.approx([0.5, -0.5, 0, 0], abs=0.05)
    assert credit.seen.shape == (6, 2) and torch.equal(
        credit.worth, credit.seen @ torch.tensor([3.0, -1.0])
    )
    other = value_baseline(lr=0.01, rounds=20, buffer=6, seed=4)
    other.load_state_dict({name: value.clone() for name, value in credit.state_dict().items()})
    assert torch.equal(other(*data, state=state), found)


def test_the_baseline_s_network_has_as_many_layers_as_it_is_told() -> None:
    """FIND's has three hidden layers of 256. Of 2 inputs: 2 * 256 + 256, then 256 * 256 + 256 for
    each further one, then 256 + 1. Saved and loaded, it says the same."""
    data, state = flat([1.0, 0.0], [0, 1]), torch.eye(2)
    for layers in (2, 3):
        credit = value_baseline(layers=layers)
        credit.update(*data, prompts=[], state=state)
        assert credit.network is not None
        count = sum(p.numel() for p in credit.network.parameters())
        assert count == 768 + (layers - 1) * 65792 + 257
        other = value_baseline(layers=layers, seed=1)
        other.load_state_dict(credit.state_dict())
        assert torch.equal(other(*data, state=state), credit(*data, state=state))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: prior(spread=0.0), "spread"),
        (lambda: prior(own=True, reads="text"), "without `reads`"),
        (lambda: prior(start="noise"), "needs it"),
        (lambda: value_baseline(rounds=0), "rounds"),
        (lambda: value_baseline(layers=0), "layers"),
        (lambda: rank_edges(*flat([0.0], [0]), best=-1), "best"),
    ],
)
def test_options_that_cannot_be_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_a_vector_that_the_model_does_not_have_is_named_with_those_it_has() -> None:
    with pytest.raises(ConfigError, match="reads='pooled' is no vector of a prompt.*it has text"):
        prior(reads="pooled").extend(LinearFlow(), SHAPE)


class _Editor(LinearFlow):
    """A toy that only encodes prompts with their sources, as an editor does."""

    def encode(self, prompts: list[str]) -> Any:
        raise ConfigError("edits images, but no prompt has a source")

    def encode_with_sources(self, prompts: list[str], sources: Any) -> Any:
        return {**LinearFlow().encode(prompts), "source": torch.ones(len(prompts), 2)}


def test_a_model_that_encodes_sources_keeps_its_noise_apart() -> None:
    """Each prompt's row comes with what the model encodes; a model without sources has no such
    method under the noise either."""
    noise = prior(own=True)
    model: Any = noise.extend(_Editor(), (2, 2), ["a", "b"])
    cond = model.encode_with_sources(["b", "c", "a"], [(), (), ()])
    assert cond[ROW].tolist() == [1, -1, 0] and "source" in cond
    assert noise.mean(cond, 3).shape == (3, 2, 2)
    assert not hasattr(prior().extend(LinearFlow(), (2, 2)), "encode_with_sources")
