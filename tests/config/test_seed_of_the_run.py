"""A seed of a plan or a model that is null is the run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_sd3

from flowrl.algorithms.plans.windows import fork, random_window
from flowrl.config.load import load_config
from flowrl.core.seeds import generator
from flowrl.core.shipped_files import list_configs

ITERATIONS = range(30)


PINNED = (
    *("shapes/adv_grpo", "shapes/adv_grpo_gated", "shapes/flow_dppo"),
    *("shapes/flow_grpo", "shapes/flow_grpo_fast"),
)


@pytest.mark.parametrize("name", PINNED)
def test_recorded_runs_keep_their_windows(name: str) -> None:
    """The shipped results of all seeds were made with the windows of seed 0."""
    for seed in (0, 1, 2):
        config = load_config(name, [f"seed={seed}"])
        own: Any = {"fork": fork, "random_window": random_window}[config.plan.fn]
        plan = config.call("plan")
        for i in ITERATIONS:
            want = own(i, **{**config.plan.kwargs, "seed": 0})
            assert torch.equal(plan(i).noise, want.noise)


def test_only_plans_with_recorded_runs_of_other_seeds_are_pinned() -> None:
    """Every other shipped plan follows the run, and at the shipped seed 0 it is as before."""
    pinned = []
    for name in list_configs():
        call = load_config(name).plan
        if call.kwargs.get("seed") is not None:
            pinned.append(name)
    assert pinned == [*PINNED]
    for name in ("dpo_siblings", "gardo", "guard_window", "flash_grpo"):
        plan = load_config(f"shapes/{name}").call("plan")
        same = load_config(f"shapes/{name}", ["plan.seed=0"]).call("plan")
        assert all(torch.equal(plan(i).noise, same(i).noise) for i in ITERATIONS)


def test_windows_follow_the_run() -> None:
    """Where nothing is said, and after the config was written and read."""
    window = "plan={fn: random_window, steps: 9, size: 1, noise_scale: 0.4}"
    kwargs = {"steps": 9, "size": 1, "noise_scale": 0.4}
    starts = []
    for seed in (0, 5):
        config = load_config("shapes/flow_grpo_fast", [window, f"seed={seed}"])
        assert config.plan.kwargs["seed"] is None
        plan = config.call("plan")
        starts.append([int(plan(i).noise.argmax()) for i in ITERATIONS])
        want = [random_window(i, seed=seed, **kwargs) for i in ITERATIONS]  # type: ignore[arg-type]
        assert starts[-1] == [int(one.noise.argmax()) for one in want]
    assert starts[0] != starts[1]


def test_lora_follows_the_run(tmp_path: Path) -> None:
    """A is drawn in float32 from the seed, over the rank; the first layer's comes first."""
    folder = tiny_sd3(tmp_path / "sd3")
    model = f"model={{fn: sd3, path: {folder}, tune: lora, lora: {{rank: 2}}, device: cpu}}"
    for more, seed in (((), 5), (("model.seed=7",), 7)):
        config = load_config("shapes/flow_grpo", [model, "seed=5", *more])
        params = config.call("model")().trainable()
        first = next(value for name, value in params.items() if ".lora_A." in name)
        want = torch.randn(first.shape, generator=generator(seed, "lora")) / 2
        assert torch.equal(first.detach(), want)
