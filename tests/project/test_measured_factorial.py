"""What docs/factorial.md says in sentences of the factorial experiment is what its files hold."""

from __future__ import annotations

import json
from typing import Any

from alonekit import alone
from docskit import PAGES, ROOT

NOISE, START = "noise: 0.8 - 0.4", "start: shared - own"


def read_factorial(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read an experiment and the base model beside it."""
    results = ROOT / "assets/results"
    files = (results / f"factorial-{name}.json", results / f"factorial-{name}-base.json")
    found, base = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    return found, base


def test_the_factorial_experiment_is_as_measured() -> None:
    """The page says the means of its runs and of the base model, and that no effect is proven."""
    page = " ".join(PAGES["docs/factorial.md"].split())
    found, base = read_factorial("80000")
    runs = found["runs"]
    mean = sum(run["score"] for run in runs) / len(runs)
    assert f"{100 * mean:.1f} %, from the base model's {100 * base['strict']:.1f} %" in page
    cells: dict[str, list[float]] = {}
    for run in runs:
        cells.setdefault(run["cell"], []).append(run["score"])
    least = min(sum(scores) / len(scores) for scores in cells.values()) - base["strict"]
    below = sum(run["score"] < base["strict"] for run in runs)
    assert f"the lowest is {100 * least:.1f} points above it; three of the {len(runs)} runs" in page
    assert len(cells) == 32 and len(runs) == 96 and least > 0 and below == 3
    often = sorted(run["iterations"] for run in runs)
    assert f"after {often[0]} to {often[-1]} iterations" in page
    spread = max(run["last_quarter"]["ratio_std"] for run in runs)
    assert f"by at most {spread:.4f} around 1, and the clip is at 0.02" in page
    assert (base["setting"]["seed"], base["images"]) == (260004, 8 * len(found["tags"]))
    # beside it, from the same prompts
    assert mean < min(alone("factorial-80000", 260004, 66, images=8).values())


def test_its_effects_are_as_said() -> None:
    """No effect after the correction; the same two main effects are largest in both."""
    page = " ".join(PAGES["docs/factorial.md"].split())
    after = {}
    for name in ("80000", "shapes"):
        effects = read_factorial(name)[0]["effects"]
        assert min(effect["p_holm"] for effect in effects) > 0.05
        mains = {one["name"]: one for one in effects if one["kind"] == "main"}
        after[name] = (effects, mains)
        size = sorted(mains, key=lambda name: -abs(mains[name]["estimate"]))
        assert size[:2] == [NOISE, START]
    effects, mains = after["80000"]
    for words, name in (("a shared start", START), ("more noise", NOISE)):
        assert f"{words} ({told(mains[name])})" in page
    window = next(one for one in effects if one["name"] == "plan: window x start: shared")
    chance = f"p = {share(window['p'])}, after Holm {share(window['p_holm'])}"
    assert f"({100 * window['estimate']:+.1f}, {chance})" in page and len(effects) == 24
    # the smaller one
    less = after["shapes"][1]
    before = [f"{100 * less[name]['estimate']:+.1f}" for name in (NOISE, START)]
    assert f"({' and '.join(before)}, p = .06 each;" in page
    assert {f"{less[name]['p']:.2f}" for name in (NOISE, START)} == {"0.06"}
    # sizes and widths
    of = {name: 100 * abs(one["estimate"]) for name, one in mains.items()}
    most = [most_of(of, axis) for axis in ("plan", "credit")]
    assert f"more than {most[0]:.1f} points from the full one, no credit more than" in page
    assert f"no credit more than {most[1]:.1f} from the group's own std" in page
    wide = sorted(100 * (one["interval"][1] - one["interval"][0]) for one in mains.values())
    assert (round(wide[0]), round(wide[-1])) == (3, 4)
    # what another page says of it
    nearest = [f"{mains[name]['p_holm']:.2f}"[1:] for name in (START, NOISE)]
    other = " ".join(PAGES["docs/compare.md"].split())
    assert f"come nearest (p = {' and '.join(nearest)} after correction)" in other
    assert "96 runs of 80,000 evaluations" in other


def share(value: float) -> str:
    """Write a probability."""
    return f"{value:.3f}"[1:]


def told(effect: dict[str, Any]) -> str:
    """Write an effect with its interval and chance."""
    low, high = (f"{100 * end:.1f}" for end in effect["interval"])
    chance = f"p = {share(effect['p'])}, after Holm {share(effect['p_holm'])}"
    return f"{100 * effect['estimate']:+.1f} points, {low} to {high}; {chance}"


def most_of(sizes: dict[str, float], axis: str) -> float:
    """Return the largest size of an axis' effects."""
    return max(size for name, size in sizes.items() if name.startswith(axis))
