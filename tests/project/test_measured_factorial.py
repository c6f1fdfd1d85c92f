"""What docs/compare.md says in sentences of the factorial experiment is what its files hold."""

from __future__ import annotations

import json
from typing import Any

from alonekit import alone
from docskit import PAGES, ROOT


def read_factorial(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read an experiment and the base model beside it."""
    results = ROOT / "assets/results"
    files = (results / f"factorial-{name}.json", results / f"factorial-{name}-base.json")
    found, base = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    return found, base


def test_the_factorial_experiment_is_as_measured() -> None:
    """compare.md says the means of its runs and of the base model, and that no effect is proven."""
    page = " ".join(PAGES["docs/compare.md"].split())
    found, base = read_factorial("80000")
    runs = found["runs"]
    mean = sum(run["score"] for run in runs) / len(runs)
    assert f"{100 * mean:.1f} %, from the base model's {100 * base['strict']:.1f} %" in page
    cells: dict[str, list[float]] = {}
    for run in runs:
        cells.setdefault(run["cell"], []).append(run["score"])
    assert min(sum(scores) / len(scores) for scores in cells.values()) > base["strict"]
    assert f"all {len(cells)} lie above the base model" in page and len(runs) == 64
    often = sorted(run["iterations"] for run in runs)
    assert f"after {often[0]} to {often[-1]} iterations" in page
    spread = max(run["last_quarter"]["ratio_std"] for run in runs)
    assert f"by at most {spread:.4f} around 1, and the clip is at 0.02" in page
    assert (base["setting"]["seed"], base["images"]) == (260004, 8 * len(found["tags"]))
    # beside it, from the same prompts
    assert mean < min(alone("factorial-80000", 260004, 66, images=8).values())


def test_its_effects_are_as_said() -> None:
    """No effect after the correction; the same two main effects are largest in both."""
    page = " ".join(PAGES["docs/compare.md"].split())
    said = []
    for name in ("80000", "shapes"):
        effects = read_factorial(name)[0]["effects"]
        assert min(effect["p_holm"] for effect in effects) > 0.05
        mains = [one for one in effects if one["kind"] == "main"]
        mains.sort(key=lambda one: -abs(one["estimate"]))
        assert [one["name"] for one in mains[:2]] == ["noise: 0.8 - 0.4", "start: shared - own"]
        said += [(f"{100 * one['estimate']:+.1f}", f"{one['p']:.2f}"[1:]) for one in mains[:2]]
        if name == "80000":
            of = {one["name"]: 100 * abs(one["estimate"]) for one in mains}
            most = [most_of(of, axis) for axis in ("plan", "credit")]
            wide = sorted(100 * (one["interval"][1] - one["interval"][0]) for one in mains)
    (noise, p), (start, q), (before, r), (then, s) = said
    assert f"more noise ({noise} points, p = {p}) and a shared start ({start}, p = {q})" in page
    assert f"({before} and {then}, p = {r} each;" in page and r == s
    assert f"more than {most[0]:.1f} points from the full one, no credit more than" in page
    assert f"no credit more than {most[1]:.1f} from the group's own std" in page
    assert (round(wide[0]), round(wide[-1])) == (4, 6)


def most_of(sizes: dict[str, float], axis: str) -> float:
    """Return the largest size of an axis' effects."""
    return max(size for name, size in sizes.items() if name.startswith(axis))
