"""What README and docs say of runs that stand beside the demonstration is what their files hold."""

from __future__ import annotations

import json

from docskit import PAGES, ROOT

from flowrl.config.load import load_config


def test_what_pre_training_for_longer_gains_is_as_measured() -> None:
    """One seed, the lower one of two rates; training gains far more."""
    results = ROOT / "assets/results"
    found = json.loads((results / "fine-tuning-rendered.json").read_text(encoding="utf-8"))
    gain = found["fine_tuned_minus_base"]
    low, high = (f"{100 * end:.1f}" for end in gain["interval"])
    said = f"{100 * gain['mean']:.1f} points ({low} to {high}"
    shapes = " ".join(PAGES["docs/shapes.md"].split())
    assert f"a gain of {said}, over prompts alone)" in shapes
    ends = [f"{100 * found[key]['mean']:.1f}" for key in ("base", "fine_tuned")]
    assert f"from {' to '.join(ends)} % of the test prompts" in shapes
    rates = {row["lr"]: row["validation"] for row in found["search"]}
    assert max(rates, key=rates.__getitem__) == found["fine_tuned"]["lr"] == min(rates)
    assert found["fine_tuned"]["seeds"] == 1


def test_pepg_without_the_divisor_s_gradient_gains_as_measured() -> None:
    """Its page and docs/compare.md say the means and the interval of its result file."""
    found = json.loads((ROOT / "assets/results/compare-pepg.json").read_text(encoding="utf-8"))
    (entry,) = found["configs"]
    table = (ROOT / "assets/results/compare-pepg.md").read_text(encoding="utf-8").splitlines()
    cells = next(line for line in table if line.startswith("| shapes-pepg")).split("|")
    after, gain = float(cells[4].split()[0]), cells[5].split("[")[1].split("]")[0].split(", ")
    before = 100 * found["base"]["score"]
    low, high = (end.removeprefix("+") for end in gain)
    said = f"a gain of {after - round(before, 1):.1f} points ({low} to {high}"
    for page in ("docs/compare.md", "docs/methods/pepg.md"):
        text = " ".join(PAGES[page].split())
        assert f"{before:.1f} to {after:.1f} %" in text and said in text
    assert len(entry["seeds"]) == 3 and not any(run["failed"] for run in entry["seeds"])


def test_the_quickstart_without_bfloat16_takes_as_long_as_measured() -> None:
    """Minutes, test score and best checkpoint of the timed run; the README rounds the minutes."""
    file = ROOT / "assets/results/quickstart-float32.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    shapes, readme = (" ".join(PAGES[p].split()) for p in ("docs/shapes.md", "README.md"))
    each, score = found["iteration_seconds"]["median"], 100 * found["test"]["mean"]
    scores = dict(found["validation"])
    best = max(scores, key=lambda iteration: scores[iteration])
    done, whole = max(scores), load_config("shapes/awm").train.iterations
    assert done == whole
    took = f"the {done} iterations took {found['minutes']:.1f} minutes with evaluations, more than"
    assert took in shapes and found["minutes"] > 15
    assert f"the target of 15; an iteration alone takes {each:.0f} seconds (median)." in shapes
    said = f"ended at {score:.1f} %, opened at the best checkpoint, that of iteration {best}"
    assert said in shapes
    assert f"and [{found['minutes']:.0f} minutes](docs/shapes.md" in readme
