"""What the pages say of imitation is what its result files hold."""

from __future__ import annotations

import json
from typing import Any

from docskit import PAGES, ROOT

RESULTS = ROOT / "assets/results"
PAGE = " ".join(PAGES["docs/methods/baselines.md"].split())
# the base model draws throughout; the layers that read the prompt are trained
STILL = "old={fn: ramp, slope: 0.0, limit: 1.0, start: 1.0}"
LAYERS = (
    "model.layers=[text_embedder.linear_1, text_embedder.linear_2, context_embedder, "
    "norm1_context.linear, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, attn.to_add_out, "
    '"ff_context.net.0.proj", "ff_context.net.2"]'
)


def read(name: str) -> dict[str, Any]:
    """Read a result file."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def trial(config: str, *overrides: str, without: str = "") -> dict[str, Any]:
    """Return the one trial of a config that has these overrides, and not that one."""
    found = [
        row
        for row in read("imitation-search")["trials"]
        if row["config"] == f"shapes/{config}"
        and set(overrides) <= set(row["set"])
        and without not in row["set"]
    ]
    assert len(found) == 1, (config, overrides, len(found))
    return dict(found[0])


def right(config: str, *overrides: str, without: str = "") -> dict[int, float]:
    """Return such a trial's right images of validation prompts, in percent, by iteration."""
    rows = trial(config, *overrides, without=without)["validation"]
    return {iteration: 100 * share for iteration, share in rows}


def test_what_few_steps_do() -> None:
    """The table of the page, and that spread and right images rise with the steps."""
    rows = {row["steps"]: row for row in read("few-steps")["rows"]}
    order = [5, 6, 10, 20, 40, "true scenes"]
    spreads = " | ".join(f"{rows[steps]['std']:.2f}" for steps in order)
    rights = " | ".join(f"{100 * rows[steps]['right']:.1f} %" for steps in order)
    assert f"| std of the latents | {spreads} |" in PAGE
    assert f"| right images | {rights} |" in PAGE
    for key in ("std", "right"):
        values = [rows[steps][key] for steps in order]
        assert values == sorted(values)


def test_the_trials_of_its_own_images_are_as_told() -> None:
    slow = right("best_of_n", "optimizer.lr=1.0e-5")
    fast = right("best_of_n", "optimizer.lr=3.0e-5")
    quick, ruined = right("best_of_n", "optimizer.lr=1.0e-4"), right("awm", "optimizer.lr=1.0e-3")
    said = f"from {slow[0]:.0f} % to {slow[36]:.0f} % after 36 iterations at 1e-5, to "
    said += f"{fast[36]:.0f} % at 3e-5, to {quick[18]:.0f} % after 18 at 1e-4, and to "
    assert f"{said}{ruined[24]:.0f} %" in PAGE
    forty = right("best_of_n", "plan={fn: ode, steps: 40, order: 2}")
    assert f"({forty[0]:.1f} to {forty[6]:.1f} % after 6 iterations at 1e-4)" in PAGE


def test_the_trials_of_guided_images_are_as_told() -> None:
    """Half of the prompts and of their noise levels would be 960 rows an iteration."""
    again = right("rwr", "train.guidance=3.5", without=STILL)
    said = f"for 3 iterations, {again[0]:.1f} to {again[3]:.1f} %, and ruined it by the sixth"
    assert f"{said}, {again[6]:.1f} %" in PAGE
    assert f"they took it to {right('rwr', STILL)[6]:.1f} % in 6" in PAGE
    hard = right("best_of_n", STILL, LAYERS)
    assert f"more than half of the prompts: {hard[4]:.1f} % after 4" in PAGE
    rows = trial("best_of_n", STILL, LAYERS)["trained"]
    assert sum(rows) / len(rows) < 48 * 40 / 2
    easy = right("best_of_n_guided", "credit.equal=true")
    assert f"With `credit.equal` it was {easy[4]:.1f} %" in PAGE


def test_imitation_of_guided_images_gains_as_measured() -> None:
    result, page = read("compare-imitation"), " ".join(PAGES["docs/compare.md"].split())
    ends = {entry["name"]: entry["summary"]["nfe"] for entry in result["configs"]}
    raft, rwr = (ends[f"shapes-{name}-guided"] for name in ("best-of-n", "rwr"))
    mean, low, high = (f"{100 * share:.1f}" for share in raft["gain"])
    said = f"**RAFT gains {mean} points** ({low} to {high}) after {raft['iteration']:.0f} "
    assert said in page and raft["gain"][1] > 0
    (seeds,) = (e["seeds"] for e in result["configs"] if e["name"] == "shapes-best-of-n-guided")
    scores = [f"{100 * seed['at']['nfe']['score']:.1f}" for seed in seeds]
    assert f"its seeds end at {scores[0]}, {scores[1]} and {scores[2]} %" in page
    mean, low, high = (f"{100 * share:.1f}" for share in rwr["gain"])
    assert f"**RWR gains {mean}** ({low} to {high}), which may be chance" in page
    assert rwr["gain"][1] < 0
    guided, best = (read(f"compare-imitation-{n}")["strict"] for n in ("guided", "best-of-8"))
    assert f"itself has more**, {100 * guided:.1f} %" in page and guided > raft["mean"]
    assert f"the best of eight images {100 * best:.1f} %" in page
    steps = {row["steps"]: row["right"] for row in read("few-steps")["rows"]}
    said = f"from {100 * steps[10]:.1f} % in ten to {100 * steps[40]:.1f} % in forty"
    assert said in page and steps[40] - steps[10] > max(raft["gain"][0], rwr["gain"][0])
    validation = right("rwr", STILL)
    assert f"and gained {validation[6] - validation[0]:.1f} points there" in page


def test_rwr_gains_in_six_iterations_as_measured() -> None:
    result, page = read("compare-rwr"), " ".join(PAGES["docs/compare.md"].split())
    (entry,) = result["configs"]
    end, base = entry["summary"]["nfe"], result["base"]
    mean, low, high = (f"{100 * share:.1f}" for share in end["gain"])
    scores = [f"{100 * seed['at']['nfe']['score']:.1f}" for seed in entry["seeds"]]
    said = f"**RWR gains {mean} points** ({low} to {high}); its seeds end at "
    assert f"{said}{scores[0]}, {scores[1]} and {scores[2]} %." in page
    assert end["gain"][1] > 0 and end["iteration"] == 6
    assert base["images"] == 2 * read("compare-imitation")["base"]["images"]
    guided = read("compare-rwr-guided")["strict"]
    assert f"a part of what it had been shown, {100 * guided:.1f} %." in page
    assert guided - end["mean"] > end["gain"][0]  # most of the lead is left
