"""The script that trains a judge of candidates: its pairs, and what it learns from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scriptkit import script_module

from rewards._backbones.latent_judge import LatentJudge
from rewards.latent_preference import load_transformer


def seen_of(module: Any, estimate: torch.Tensor, state: list[int], end: list[float]) -> Any:
    count = len(end)
    draw = torch.Generator().manual_seed(1)
    cond = {
        "embeds": torch.randn(count, 5, 128, generator=draw),
        "pooled": torch.randn(count, 128, generator=draw),
    }
    step = torch.ones(count, dtype=torch.int64)
    return module.Seen(
        estimate, cond, torch.tensor(state), step, torch.tensor(end, dtype=torch.float64)
    )


def test_pairs_are_of_one_state_and_the_better_end_is_first() -> None:
    """By hand: ends 2, .2 and .3 of state 7, 1 and 1.1 of state 9. A gap of at most .15 is none;
    places count from 100."""
    module = script_module("assets/shapes_candidate_preference")
    seen = seen_of(module, torch.zeros(5, 1), [7, 7, 9, 7, 9], [2, 0.2, 1, 0.3, 1.1])
    pairs = module.pairs_of(seen, 100)
    assert sorted(pairs.unlike.tolist()) == [[100, 101], [100, 103]]
    assert sorted(pairs.alike.tolist()) == [[101, 103], [102, 104]]
    both, wanted = pairs.batch(10, torch.Generator().manual_seed(0))
    assert wanted.tolist() == [1.0] * 7 + [0.5] * 3
    assert all(row in pairs.unlike.tolist() for row in both[:7].tolist())
    assert all(row in pairs.alike.tolist() for row in both[7:].tolist())


@pytest.mark.integration
def test_the_judge_learns_how_candidates_end() -> None:
    """Random estimates, of which the better end is brighter by 0.5: at first the judge is at
    chance, after forty steps it prefers the better of nine in ten."""
    module = script_module("assets/shapes_candidate_preference")
    torch.manual_seed(0)
    base = torch.randn(24, 16, 8, 8)
    bright = torch.arange(24) % 2 == 0
    seen = seen_of(
        module,
        base + 0.5 * bright.view(-1, 1, 1, 1),
        [k // 4 for k in range(24)],
        [2.0 if better else 0.0 for better in bright.tolist()],
    )
    pairs = module.pairs_of(seen, 0)
    assert len(pairs.unlike) == 24 and len(pairs.alike) == 12
    judge = LatentJudge(load_transformer("assets/shapes-sd3"), taps=[1, 3], width=32, queries=2)

    def right() -> float:
        sigma = torch.full((24,), module.SIGMA)
        noise = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(5))
        x = (1 - module.SIGMA) * seen.estimate + module.SIGMA * noise
        with torch.no_grad():
            score = judge(x, sigma, **seen.cond)
        gap = score[pairs.unlike[:, 0]] - score[pairs.unlike[:, 1]]
        return float((gap > 0).double().mean())

    before = right()
    module.train(judge, seen, pairs, 40, 20)
    assert right() >= 0.9 > before


@pytest.mark.integration
def test_candidates_are_judged_by_how_they_end() -> None:
    """Of two prompts twelve candidates each: four of each of the three steps, of one state each. An
    end is graded plus strict, so right images have 2 and others less than 1."""
    module = script_module("assets/shapes_candidate_preference")
    seen = module.Candidates("train", 2, seed=3).draw(0)
    assert len(seen.end) == 24 and seen.estimate.shape == (24, 16, 8, 8)
    assert sorted(seen.step.unique().tolist()) == [1, 2, 3]
    for state in seen.state.unique():
        mine = seen.state == state
        assert int(mine.sum()) == 4 and len(seen.step[mine].unique()) == 1
    assert bool(((seen.end == 2) | (seen.end < 1)).all())


def test_candidates_themselves_are_shown_at_their_own_noise_level() -> None:
    """An estimate is noised to the script's sigma, by hand .6 x + .4 noise; a candidate is shown as
    it is, with its own sigma."""
    module = script_module("assets/shapes_candidate_preference")
    seen = seen_of(module, torch.arange(3.0)[:, None], [7, 7, 7], [2, 0.2, 1])
    places, noise = torch.tensor([2, 1]), torch.tensor([[1.0], [-1.0]])
    x, sigma = module.seen_by_judge(seen, places, noise)
    torch.testing.assert_close(x, torch.tensor([[1.6], [0.2]]))
    assert sigma.tolist() == pytest.approx([0.4, 0.4])
    own = seen._replace(level=torch.tensor([0.9, 0.7, 0.5]))
    x, sigma = module.seen_by_judge(own, places, noise)
    assert x.tolist() == [[2.0], [1.0]] and sigma.tolist() == pytest.approx([0.5, 0.7])


@pytest.mark.integration
def test_both_forms_draw_the_same_candidates() -> None:
    """The estimates of the one form are x - sigma v of the states of the other."""
    module = script_module("assets/shapes_candidate_preference")
    source = module.Candidates("train", 2, seed=3, states=True)
    states, estimates = source.draw(0), module.Candidates("train", 2, seed=3).draw(0)
    assert torch.equal(states.end, estimates.end) and estimates.level is None
    assert len(states.level.unique()) == 3
    with torch.no_grad():
        v = source.run.model.velocity(states.estimate, states.level, states.cond)
    known = states.estimate - states.level.view(-1, 1, 1, 1) * v
    torch.testing.assert_close(estimates.estimate, known, atol=1e-5, rtol=1e-5)
