"""Windows that each prompt draws for itself: which, what they cost, and one forest of all."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rolloutkit import SHAPE, Counting, check_forest, run, seeds, sigmas_of
from torch import Tensor
from trainkit import halves, task_of, trainer_for

from flowrl.algorithms.forest import leaf_places, merge, of_prompt
from flowrl.algorithms.plans.windows import random_window
from flowrl.algorithms.rollout.engine import sample
from flowrl.algorithms.rollout.plan_steps import plan_of, total_counts, windows_of
from flowrl.algorithms.transitions import dance_sde
from flowrl.core.errors import ConfigError
from flowrl.core.types import Plan, Rollout
from flowrl.models.toy import LinearFlow
from flowrl.training.checks import check_processes

TEXTS = [f"prompt {number}" for number in range(7)]


def drawn(low: int = 0, high: int = 4, size: int = 1, iteration: int = 0) -> Plan:
    """Return a plan of five steps with a window of each prompt."""
    return random_window(
        iteration, steps=5, noise_scale=0.5, size=size, low=low, high=high, each="prompt"
    )


def forest(plan: Plan, places: list[int], model: Any = None, **options: Any) -> Rollout:
    """Sample three images of each prompt at these places; noise follows from the place alone."""
    model = model or LinearFlow()
    return sample(
        model,
        model.encode([TEXTS[place] for place in places]),
        plan,
        dance_sde,
        group_size=3,
        generators=seeds(*places),
        group_ids=torch.tensor(places),
        sigmas=sigmas_of(plan),
        shape=SHAPE,
        **options,
    )


def same(one: Rollout, two: Rollout) -> bool:
    """Say whether two rollouts are equal, numbers to float32 rounding, but for how blocks are
    numbered."""
    fields = ("x", "log_prob", "noise_scale", "leaf", "twin", "group_ids", "mean")
    pairs = [(getattr(one, name), getattr(two, name)) for name in fields]
    pairs += [*zip(one.tree, two.tree, strict=True)]
    return all(a is b is None or torch.allclose(a, b, atol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("options", [{}, {"same_noise": True}, {"keep_mean": True}])
@pytest.mark.parametrize(("size", "high"), [(1, 4), (2, 5)])
def test_every_prompt_is_sampled_along_its_own_plan(
    size: int, high: int, options: dict[str, Any]
) -> None:
    """Its trees are those of sampling it alone, by the engine, with noise on its window; nodes of
    the forest keep the engine's promises."""
    plan, places = drawn(size=size, high=high), list(range(7))
    ro = forest(plan, places, **options)
    check_forest(ro)
    assert ro.group_ids.tolist() == places and ro.cond["text"].shape[0] == 7
    starts = set()
    for place in places:
        own = plan_of(plan, place)
        steps = own.noise.nonzero().flatten().tolist()
        assert len(steps) == size and steps[-1] < high
        starts.add(steps[0])
        alone = run(
            own,
            prompts=[TEXTS[place]],
            generators=seeds(place),
            group_ids=torch.tensor([place]),
            group_size=3,
            **options,
        )
        mine = of_prompt(ro, place)
        assert same(mine, alone)
        # one window for all images of the prompt
        made = mine.tree.step[mine.tree.std > 0]
        assert Counter(made.tolist()) == {step + 1: 3 for step in steps}
    assert len(starts) > 1


def test_any_division_of_the_prompts_makes_the_same_forest() -> None:
    """Turns and processes, whatever windows they have: merged, and where each part's images go."""
    plan = drawn()
    whole = forest(plan, list(range(7)))
    for cuts in ([3, 7], [1, 2, 7], [6, 7]):
        parts, first = [], 0
        for end in cuts:
            parts.append(forest(plan, list(range(first, end))))
            at = leaf_places(parts[-1], first=first, prompts=7)
            assert torch.equal(at, torch.arange(3 * first, 3 * end))
            first = end
        joined, place, order = merge(parts)
        assert same(joined, whole) and torch.equal(joined.cond["text"], whole.cond["text"])
        assert torch.equal(joined.x[place], torch.cat([part.x for part in parts]))
        assert torch.equal(order, torch.arange(21))
    # leaves are the last nodes, or their latents could not be dropped
    assert torch.equal(whole.leaf, torch.arange(len(whole.x) - 21, len(whole.x)))


def test_noise_that_is_given_goes_to_its_prompt() -> None:
    """As scouting gives it: the roots are these latents, prompt by prompt."""
    noise = torch.randn(21, *SHAPE, generator=torch.Generator().manual_seed(0))
    ro = forest(drawn(), list(range(7)), noise=noise)
    assert torch.equal(ro.x[ro.tree.parent < 0], noise)


def test_windows_are_drawn_evenly_and_anew() -> None:
    """Of 6,000 prompts a tenth at each of ten steps, as 5 standard errors allow: sqrt(.09 / n). The
    draw depends on place, iteration and seed alone."""

    def steps(iteration: int = 0, **more: Any) -> Tensor:
        options: dict[str, Any] = {"steps": 20, "noise_scale": 0.5, "size": 1, "high": 10, **more}
        plan = random_window(iteration, each="prompt", **options)
        found = [int(plan_of(plan, place).noise.nonzero()) for place in range(6000)]
        return torch.tensor(found)

    first = steps()
    shares = torch.bincount(first, minlength=10) / 6000
    assert len(shares) == 10 and float((shares - 0.1).abs().max()) < 5 * math.sqrt(0.09 / 6000)
    assert torch.equal(first, steps())
    for other in (steps(iteration=1), steps(seed=1)):
        # two independent draws agree in a tenth
        assert float((first == other).float().mean()) == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("same_noise", [False, True])
@pytest.mark.parametrize(("size", "high"), [(1, 4), (2, 5)])
def test_the_cost_is_what_the_engine_does(size: int, high: int, same_noise: bool) -> None:
    """Rows of the network, leaves, and draws that can be trained: those of the last step cannot."""
    plan, model = drawn(size=size, high=high), Counting(LinearFlow())
    ro = forest(plan, list(range(7)), model, same_noise=same_noise)
    found = total_counts(plan, 7, 3, same_noise=same_noise)
    draws = (ro.tree.std > 0) & (ro.tree.step < 5)
    assert (found.nfe, found.leaves, found.decisions) == (model.nodes, 21, int(draws.sum()))
    if not same_noise:
        assert model.nodes == 7 * 3 * 5
    # prompts with the same window share network calls: 5 for each of the windows that were drawn
    starts = {int(plan_of(plan, place).noise.nonzero().min()) for place in range(7)}
    assert model.calls == 5 * len(starts) < 5 * 7


def test_a_plan_without_windows_is_the_engine_s() -> None:
    plan = random_window(0, steps=5, noise_scale=0.5, size=2)
    assert windows_of(plan) == [plan] and plan_of(plan, 3) is plan
    assert len(windows_of(drawn(size=2, low=1, high=4))) == 2
    alone = run(
        plan,
        prompts=TEXTS[:2],
        generators=seeds(0, 1),
        group_ids=torch.tensor([0, 1]),
        group_size=3,
    )
    assert same(forest(plan, [0, 1]), alone)
    with pytest.raises(ConfigError, match="engine.sample"):
        run(drawn())


# ------------------------------------------------------------------------------- whole iterations

FLASH = "plan={fn: random_window, steps: 4, size: 1, low: 0, high: 3, noise_scale: 0.5"
OWN = [f"{FLASH}, each: prompt}}", "train.prompts=4", "train.same_noise=true"]
OWN += ["select={fn: gradient_scale, high: 3}"]


def test_a_run_trains_one_step_of_each_prompt(tmp_path: Path) -> None:
    """Every prompt's four images have one draw each; the ratio is 1 before the first update, the
    network calls are those that were counted, and turns change nothing but rounding."""
    whole = trainer_for(tmp_path, *OWN, "train.updates=1")
    parts = trainer_for(tmp_path, *OWN, "train.updates=1", "train.parts=3")
    work = whole.cost
    one, two = whole.step(), parts.step()
    assert one["on_policy_gap"] < 1e-5 and one["trained"] == 16 and work.decisions == 16
    # 4 states with a shared start where the window is the first step, else one state too
    assert one["nfe"] == work.nfe + 3 * one["backwards"]
    assert one["reward"] == pytest.approx(two["reward"], abs=1e-6)
    assert one["loss"] == pytest.approx(two["loss"], abs=1e-6)


def test_a_resumed_run_draws_the_same_windows(tmp_path: Path) -> None:
    halves(partial(trainer_for, tmp_path, *OWN), tmp_path)


def test_fsdp_is_refused(tmp_path: Path) -> None:
    """Processes with different windows would make different numbers of network calls."""
    config = trainer_for(tmp_path, *OWN).config
    check_processes(task_of(config))
    with pytest.raises(ConfigError, match=r"plan random_window: .* set plan\.each=iteration"):
        check_processes(task_of(config, sharded=True))


def test_a_window_that_no_prompt_could_train(tmp_path: Path) -> None:
    """Found for every window before the first iteration, whichever prompt would have drawn it."""
    with pytest.raises(ConfigError, match="the only noise is on step 3, the last of 4"):
        trainer_for(tmp_path, *OWN, "plan.high=4", "select=null")
