"""What the pages say of SPO with a judge of latents is what its result files hold."""

from __future__ import annotations

import json
from typing import Any

from docskit import PAGES, ROOT

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
    header = (ROOT / "configs/shapes/spo_latent.yaml").read_text(encoding="utf-8")
    both = f"{100 * base['score']:.0f} -> {100 * end['mean']:.0f} %"
    assert f"right images of test prompts {both}, two seeds, no clear gain" in header
    told = read("latent-trials")["trials"][4]["eval"]
    gain = 100 * (told[-1]["strict"] - told[0]["strict"])
    said = f"A validation run has more**: {gain:.1f} points in {told[-1]['iteration']} iterations"
    assert said in COMPARE


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
