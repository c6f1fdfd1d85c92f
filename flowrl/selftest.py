"""Test a reward as a user would want it tested: does it see damage, and does it judge each picture by itself?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from flowrl import checks
from flowrl.checks import Row, Subject
from flowrl.errors import ConfigError, DataError, FlowRLError, RewardError
from flowrl.prompts import PromptSet, check_records
from flowrl.scoring import Heard, Shot, score_shots
from flowrl.shapes.prompts import scenes_for, split_records
from flowrl.shapes.scene import SIZE, render
from flowrl.types import Reward

SKIPPABLE = ("blur", "noise", "prompt")


def rendered(count: int) -> list[Shot]:
    """Draw `count` scenes of the shapes benchmark with their true prompts, spread over its test prompts."""
    test = split_records()[1]
    records = [test[i * len(test) // count if count < len(test) else i % len(test)] for i in range(count)]
    pixels = (render(scenes_for(records, np.random.default_rng(0))) * 255).round().byte()
    return [
        Shot(partial(_unit, pixels[i]), (SIZE, SIZE), record, i, f"scene {i + 1}") for i, record in enumerate(records)
    ]


def kept(shots: Sequence[Shot]) -> list[Shot]:
    """Read the pictures once and keep them as bytes; each shot becomes a group of its own."""
    pixels = [(shot.load() * 255).round().byte() for shot in shots]
    return [shot._replace(load=partial(_unit, pixels[i]), group=i) for i, shot in enumerate(shots)]


def _unit(pixels: Tensor) -> Tensor:
    return pixels / 255


def selftest(
    name: str,
    reward: Reward,
    shots: Sequence[Shot],
    *,
    batch: int = 32,
    tolerance: float = 1e-4,
    skip: Sequence[str] = (),
    told: bool = True,
    progress: Callable[[int], Any] = lambda done: None,
) -> list[Row]:
    """Test one reward on undamaged pictures with true prompts, shot i being group i -> a row per check.

    Args:
        tolerance: differences up to this share of the largest score are rounding, and no difference.
        skip: the damages, of `SKIPPABLE`, that this reward is not meant to notice.
    Raises ConfigError, and DataError if the reward refuses these very pictures or prompts.
    """
    if len(shots) < 2 or not tolerance >= 0 or set(skip) - set(SKIPPABLE):
        raise ConfigError(
            f"self-test: expected at least 2 pictures, a tolerance >= 0 and damages of {', '.join(SKIPPABLE)} to skip, "
            f"got {len(shots)}, {tolerance} and {', '.join(skip) or 'none'}"
        )

    def ask(shown: Sequence[Shot], most: int) -> Heard:
        return score_shots({name: reward}, shown, batch=most, whole=True, told=told, progress=progress)[name]

    first = _first(name, reward, shots, partial(ask, most=batch))
    if "group" in first.reads:
        shots = [twin for i, shot in enumerate(shots) for twin in (shot, checks.damaged(shot, "noise", i))]
        first = ask(shots, batch)
    known = first.values[first.values.isfinite()].abs()
    slack = tolerance * (float(known.max()) if bool((known > 0).any()) else 1.0)
    test = Subject(name, reward, shots, ask, batch, first, slack)
    rows = [checks.answers(test), *checks.damages(test, skip), checks.prompts(test, skip)]
    return [*rows, *checks.invariances(test), checks.nan_pictures(test), *checks.probes(test)]


def _first(name: str, reward: Reward, shots: Sequence[Shot], ask: Callable[[Sequence[Shot]], Heard]) -> Heard:
    """Ask for the first time; a reward may be of another kind than these pictures and prompts."""
    records = [shot.record for shot in shots]
    places = [f"{shot.name}, prompt {shot.record['prompt']!r}" for shot in shots]
    try:
        check_records(PromptSet([record["prompt"] for record in records], records, "", "", places), {name: reward})
        return ask(shots)
    except (DataError, RewardError) as error:
        if isinstance(error, RewardError) and not isinstance(error.__cause__, FlowRLError):
            raise
        own = "test it on pictures and prompts that it is made for: flowrl score --selftest IMAGES --prompts FILE"
        raise DataError(f"self-test of {name!r}: {error}\n{own}") from error


def broken(rows: Sequence[Row]) -> list[Row]:
    """Return the failures that no taste explains."""
    return [row for row in rows if row.verdict == "fails" and row.hard]


def table(rows: Sequence[Row]) -> str:
    """Set the checks of all rewards as aligned text, with what follows from them."""
    width = max(len(row.check) for row in rows)
    lines = []
    for name in dict.fromkeys(row.reward for row in rows):
        lines += ["", name]
        lines += [f"  {r.check:<{width}}  {r.verdict or '-':<7}  {r.found}" for r in rows if r.reward == name]
    lines.append("")
    failed = [row for row in rows if row.verdict == "fails"]
    for row in failed:
        taste = "broken" if row.hard else "ranked the wrong way round; if that is not meant, look into it"
        lines.append(f"{row.reward}: {row.check}: {taste}")
    return "\n".join(lines[1:] if failed else [*lines[1:], "nothing fails"])
