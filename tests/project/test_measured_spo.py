"""What the pages say of SPO with a judge of latents is what its result files hold."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from docskit import PAGES, ROOT
from scriptkit import script_module

from flowrl.evaluation.crossed_errors import contrast_error, crossed, weights_of

COMPARE, PAGE = (" ".join(PAGES[f"docs/{name}.md"].split()) for name in ("compare", "methods/spo"))


def read(name: str) -> dict[str, Any]:
    file = ROOT / f"assets/results/{name}.json"
    return dict(json.loads(file.read_text(encoding="utf-8")))


def test_the_judge_of_latents_shows_no_clear_gain() -> None:
    result = read("compare-spo-latent")
    (entry,) = result["configs"]
    end, base = entry["summary"]["nfe"], result["base"]
    mean, low, high = (f"{100 * share:.1f}" for share in end["gain"])
    assert end["gain"][1] < 0 < end["gain"][2] and not end["beats_base"]
    assert f"**No clear gain**: {mean} points ({low} to {high}); its two" in COMPARE
    assert f"no clear gain was shown, either: {mean} points ({low} to {high}), two seeds" in PAGE
    scores = [f"{100 * seed['at']['nfe']['score']:.1f}" for seed in entry["seeds"]]
    assert f"its two seeds end at {scores[0]} and {scores[1]} %." in COMPARE
    before, after = base["tasks"]["colors"], end["tasks"]["colors"]["mean"]
    assert f"Colours fall, {100 * before:.1f} to {100 * after:.1f} %" in COMPARE
    rising = [name for name in base["tasks"] if end["tasks"][name]["mean"] > base["tasks"][name]]
    assert len(rising) == 5
    told = read("latent-trials")["trials"][4]["eval"]
    gain = 100 * (told[-1]["strict"] - told[0]["strict"])
    assert f"run had {gain:.1f} points in {told[-1]['iteration']} iterations" in COMPARE


def test_longer_runs_show_no_gain_yet() -> None:
    """Gains by the one error model, from what each seed's evaluations hold."""
    found, module = read("spo-latent-longer"), script_module("alone_docs")
    base, tags = module._shares(found["base"]["outcomes"]), found["base"]["tags"]
    gains, means = [], []
    for mark, budget in enumerate(("80,000", "160,000", "240,000")):
        points = [seed["points"][mark] for seed in found["seeds"] if len(seed["points"]) > mark]
        shares = np.concatenate([module._shares(point["outcomes"]) for point in points])
        seen = crossed(shares - base, tags)
        low, high = (f"{100 * end:.1f}" for end in seen["interval"])
        said = f"{100 * seen['mean']:.1f} points ({low} to {high})"
        gains.append((said, seen["interval"][0]))
        means.append(sum(point["strict"] for point in points) / len(points))
        cells = [f"{100 * point['strict']:.1f}" for point in points]
        cells += ["–"] * (3 - len(points))
        assert (
            f"| {budget} | {' | '.join(cells)} | {gains[-1][0].replace(' points', '')} |" in COMPARE
        )
        if mark == 1:
            error = contrast_error(
                [shares - base], (shares - base).mean(0), weights_of(tags), tags, 1 / len(shares)
            )
            mean, half = (shares - base).mean(0) @ weights_of(tags), error.half(0.05 / 3)
            both = f"{100 * (mean - half):.1f} to {100 * (mean + half):.1f}"
            assert mean > half and f"three looks, the interval is {both}." in COMPARE
    said, least = gains[1]
    assert least > 0 and f"after 160,000, it is {said}, three seeds" in COMPARE
    assert f"no gain yet: {said} after 105 iterations, three seeds" in PAGE
    assert gains[2][1] < 0 and f"had been set it is {gains[2][0]}, two seeds" in COMPARE
    assert means[2] < means[1] - 0.04
    header = (ROOT / "configs/shapes/spo_latent.yaml").read_text(encoding="utf-8")
    both = f"{100 * found['base']['strict']:.0f} -> {100 * means[1]:.0f} %"
    after = found["seeds"][0]["points"][1]["iteration"]
    assert f"no gain yet: right images of test prompts {both} after {after} iter" in header
    guided = 100 * found["guided"]["strict"]
    assert f"alone has {guided:.0f} %" in header and f"guidance 3.5 {guided:.1f} (" in COMPARE


def test_validation_prompts_do_not_show_the_fall() -> None:
    checked = read("spo-latent-longer")["validation"]
    before = f"{100 * checked['base']['strict']:.1f}"
    said = {1: [], 2: []}  # type: dict[int, list[str]]
    for row in checked["rows"]:
        said[row["seed"]].append(f"{100 * row['strict']:.1f} after {row['iteration']}")
    assert f"From {before} %, checkpoints of the second seed have {', '.join(said[1])};" in COMPARE
    assert f"of the third {', '.join(said[2])}. Why" in COMPARE
    second = [row["strict"] for row in checked["rows"] if row["seed"] == 1]
    assert abs(second[-1] - second[0]) < 0.01
    # both kinds of prompts of the test list fall from the second look to the third
    for seed in read("spo-latent-longer")["seeds"][:2]:
        middle, last = seed["points"][1:]
        assert all(middle[kind] - last[kind] > 0.05 for kind in ("seen", "held_out"))


def test_how_candidates_end_that_the_judge_likes() -> None:
    found = read("candidate-judge")
    first, second, _ = found["steps"]
    sure = [row["better"] + row["worse"] + row["alike"] for row in (first, second)]
    assert found["least"] == 0.6  # as the config asks
    assert (
        f"of {first['states']} states of validation prompts it is sure of {sure[0]} after the "
        f"first step, where the candidate that it likes best ends better than the worst in "
        f"{first['better']} and worse in {first['worse']}, and of {sure[1]} after the second, with "
        f"{second['better']} and {second['worse']} ("
    ) in PAGE
