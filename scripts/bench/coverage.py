"""How often 95 % intervals hold the truth: the table of assets/results/coverage.json.

    python scripts/bench/coverage.py --out assets/results/coverage.json

Scores are drawn from known laws, with the intervals of `flowrl/evaluation/crossed_errors.py` around
their means, and those that hold the true mean are counted. Prompts lie in six tasks. "width" is the
mean width over that of the true standard error, 1.96 of which to each side are 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flowrl.core.files import write_json
from flowrl.evaluation.crossed_errors import Groups, contrast_error, weights_of
from flowrl.evaluation.statistics import Z95, prompts_error

TASKS, IMAGES = 6, 4
PROMPTS = (12, 24, 48, 120)
SPREADS = np.array([3.0, 1.0, 0.2, 1.0, 0.1, 0.1])  # of tasks that differ, the smallest first
SIZES = (2, 3, 4, 8, 16, 27)  # of tasks
SEEDS = (2, 3, 5)
ARMS = np.geomspace(0.4, 17.7, 12)  # spreads over seeds of twelve configs, in points
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


class Case(NamedTuple):
    """A law of scores, and how often intervals held its mean."""

    name: str
    prompts: int
    seeds: int
    held: float
    width: float

    def row(self) -> dict[str, Any]:
        """Return it as the result file has it."""
        return {**self._asdict(), "held": round(self.held, 4), "width": round(self.width, 3)}


# ------------------------------------------------------------------------------ over prompts alone


def _verdicts(one: float, other: float, images: int) -> Draw:
    """Draw differences of two models' shares of right images."""

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        return (rng.binomial(images, one, shape) - rng.binomial(images, other, shape)) / images

    return draw


# name -> (law, its mean, whether it is of verdicts)
LAWS: dict[str, tuple[Draw, float, bool]] = {
    "normal": (lambda rng, shape: rng.normal(0, 1, shape), 0.0, False),
    "tasks whose spreads differ 30 times": (lambda rng, shape: rng.normal(0, 1, shape), 0.0, False),
    "skewed: exponential": (lambda rng, shape: rng.exponential(1, shape), 1.0, False),
    "skewed: log-normal": (
        lambda rng, shape: rng.lognormal(0, 1, shape),
        float(np.exp(0.5)),
        False,
    ),
    "rare: 2 % against 5 % of four images": (_verdicts(0.05, 0.02, IMAGES), 0.03, True),
    "rare: none against 2 % of four images": (_verdicts(0.02, 0.0, IMAGES), 0.02, True),
    "rare: 2 % against 10 % of one image": (_verdicts(0.1, 0.02, 1), 0.08, True),
    "rare: 5 % of the prompts, whole": (_verdicts(0.05, 0.0, 1), 0.05, True),
    "one model: 98 % of four images right": (_verdicts(0.98, 0.0, IMAGES), 0.98, True),
}


def over_prompts(
    rng: np.random.Generator, sets: int, name: str, prompts: int, tags: list[str]
) -> Case:
    """Count for one law of values per prompt."""
    draw, truth, rare = LAWS[name]
    values, weights = draw(rng, (sets, prompts)), weights_of(tags)
    if "spreads differ" in name:
        values = values * SPREADS[np.array(tags, int)]
    half = prompts_error(values, weights, tags, float(rare)).half()
    spread = float((values @ weights).std())
    return _case(name, values @ weights - truth, half, spread, prompts, 1)


def _case(
    name: str, off: np.ndarray, half: np.ndarray, spread: float, prompts: int, seeds: int
) -> Case:
    held = float((np.abs(off) <= half + 1e-12).mean())
    return Case(name, prompts, seeds, held, float(half.mean()) / (Z95 * spread))


def _tags(sizes: tuple[int, ...]) -> list[str]:
    return [str(task) for task, size in enumerate(sizes) for _ in range(size)]


# ------------------------------------------------------------------------- over seeds and prompts


def _crossed(
    rng: np.random.Generator, sets: int, seeds: int, prompts: int, noise: float
) -> np.ndarray:
    """Draw scores [sets, seeds, prompts] around 0; `noise`: the std over seeds of their mean, in
    standard errors of the prompts."""
    own = noise * np.sqrt(seeds / prompts)
    shared = rng.normal(0, 1, (sets, 1, prompts))
    left = rng.normal(0, 1, (sets, seeds, prompts))
    return rng.normal(0, 1, (sets, seeds, 1)) * own + shared + left


def over_seeds(rng: np.random.Generator, sets: int, seeds: int, prompts: int, noise: float) -> Case:
    """Count for one config of several seeds."""
    tags = [str(place % TASKS) for place in range(prompts)]
    values, weights = _crossed(rng, sets, seeds, prompts, noise), weights_of(tags)
    mean = values.mean(1)
    half = contrast_error(Groups([values], [1 / seeds]), mean, weights, tags).half()
    off = mean @ weights
    name = f"one config, noise of seeds {noise:g} x that of prompts"
    return _case(name, off, half, float(off.std()), prompts, seeds)


def of_a_pair(rng: np.random.Generator, sets: int, seeds: int, prompts: int, equal: bool) -> Case:
    """Count for the difference of two configs, both noisy, or one ten times as noisy."""
    tags = [str(place % TASKS) for place in range(prompts)]
    noise = (2.0, 2.0) if equal else (0.3, 3.0)
    groups = [_crossed(rng, sets, seeds, prompts, one) for one in noise]
    gap, weights = groups[0].mean(1) - groups[1].mean(1), weights_of(tags)
    both = Groups(groups, [1 / seeds] * 2, equal)
    half = contrast_error(both, gap, weights, tags).half()
    off = gap @ weights
    name = f"a pair, {'spread pooled' if equal else 'each its own spread, one 10 x'}"
    return _case(name, off, half, float(off.std()), prompts, seeds)


def of_many(rng: np.random.Generator, sets: int, seeds: int, prompts: int) -> Iterator[Case]:
    """Count for twelve configs whose spreads over seeds lie between .4 and 17.7 points, each with
    its own; of them the first, the middle and the last."""
    tags = [str(place % TASKS) for place in range(prompts)]
    weights = weights_of(tags)
    for spread in (ARMS[0], ARMS[6], ARMS[-1]):
        noise = spread / 100 * np.sqrt(prompts / seeds) / 0.3
        values = 0.3 * _crossed(rng, sets, seeds, prompts, noise)
        mean = values.mean(1)
        half = contrast_error(Groups([values], [1 / seeds], False), mean, weights, tags).half()
        off = mean @ weights
        name = f"one of twelve configs, own spread of {spread:.1f} points"
        yield _case(name, off, half, float(off.std()), prompts, seeds)


def cases(sets: int, seed: int = 0) -> Iterator[Case]:
    """Count all cases, `sets` sets of scores each."""
    rng = np.random.default_rng(seed)
    for prompts in PROMPTS:
        for name in LAWS:
            tags = [str(place % TASKS) for place in range(prompts)]
            yield over_prompts(rng, sets, name, prompts, tags)
    for name in LAWS:
        case = over_prompts(rng, sets, name, sum(SIZES), _tags(SIZES))
        yield case._replace(name=f"{name}, tasks of {min(SIZES)} to {max(SIZES)} prompts")
    for seeds in SEEDS:
        for prompts in (24, 120):
            for noise in (0.0, 1.0, 2.0, 4.0):
                yield over_seeds(rng, sets, seeds, prompts, noise)
            for equal in (True, False):
                yield of_a_pair(rng, sets, seeds, prompts, equal)
    for seeds in (2, 4):
        yield from of_many(rng, sets, seeds, 120)


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = []
    for case in cases(args.sets, args.seed):
        rows.append(case.row())
        print(f"{case.held:.3f} {case.width:6.2f}  {case.prompts:4} {case.seeds}  {case.name}")
    command = f"python scripts/bench/coverage.py --out {args.out}"
    found = {"kind": "flowrl coverage of intervals", "command": command}
    least = min(row["held"] for row in rows)
    write_json(args.out, {**found, "sets": args.sets, "least": least, "rows": rows})


if __name__ == "__main__":
    main()
