"""What the pages say of SLAS, NormGuard and UniGRPO is what their result files hold."""

from __future__ import annotations

import json
from typing import Any

from docskit import PAGES, ROOT
from scriptkit import script_module

from flowrl.evaluation.crossed_errors import contrast_error, weights_of

COMPARE, PAGE = (" ".join(PAGES[f"docs/{name}.md"].split()) for name in ("compare", "methods/slas"))


def read(name: str) -> dict[str, Any]:
    file = ROOT / f"assets/results/{name}.json"
    return dict(json.loads(file.read_text(encoding="utf-8")))


def tables(names: tuple[str, ...]) -> list[str]:
    """Return what the comparisons wrote beside their files."""
    return [(ROOT / f"assets/results/compare-{name}.md").read_text("utf-8") for name in names]


def test_two_gain() -> None:
    result = read("compare-slas")
    base, said = result["base"], []
    for entry in result["configs"]:
        end = entry["summary"]["nfe"]
        assert end["beats_base"] and len(entry["seeds"]) == 3
        mean, low, high = (f"{100 * share:.1f}" for share in end["gain"])
        scores = [f"{100 * seed['at']['nfe']['score']:.1f}" for seed in entry["seeds"]]
        said.append((f"({low} to {high})", mean, scores))
        both = f"{100 * base['score']:.0f} -> {100 * end['mean']:.0f} %"
        header = (ROOT / f"configs/{entry['file']}.yaml").read_text(encoding="utf-8")
        after = entry["seeds"][0]["iterations"]
        assert f"right images of test prompts {both} in {after} iterations, three seeds" in header
    assert ", place " not in PAGE  # each has a control of its own; they are no rivals
    (range_a, a, seeds_a), (range_b, b, seeds_b) = said
    assert f"SLAS {a} points {range_a}, its seeds at {seeds_a[0]}, {seeds_a[1]} and" in COMPARE
    assert f"and {seeds_a[2]} %; NormGuard {b} {range_b}, at {seeds_b[0]}, {seeds_b[1]}" in COMPARE
    first, second = (entry["summary"]["nfe"]["tasks"] for entry in result["configs"])
    assert all(first[task]["mean"] > share for task, share in base["tasks"].items())
    falling = [task for task, share in base["tasks"].items() if second[task]["mean"] < share]
    assert falling == ["single_object"]
    before, after = base["tasks"]["single_object"], second["single_object"]["mean"]
    assert f"single objects fall, {100 * before:.1f} to {100 * after:.1f} %" in COMPARE
    guided = 100 * read("compare-slas-guided")["strict"]
    for entry in result["configs"]:
        header = (ROOT / f"configs/{entry['file']}.yaml").read_text(encoding="utf-8")
        assert f"alone has {guided:.0f} %" in header


def test_what_they_change_gains_as_much() -> None:
    """AWM and DiffusionNFT, judged as SLAS and NormGuard: less than a point apart in the mean."""
    changed, plain = read("compare-slas"), read("compare-slas-controls")
    assert changed["base"]["outcomes"] == plain["base"]["outcomes"]
    said = []
    for one, other in zip(changed["configs"], plain["configs"], strict=True):
        with_line, without = (entry["summary"]["nfe"] for entry in (one, other))
        spent = {seed["at"]["nfe"]["nfe"] for entry in (one, other) for seed in entry["seeds"]}
        assert len(spent) == 1 and without["beats_base"] and len(other["seeds"]) == 3
        assert abs(with_line["mean"] - without["mean"]) < 0.01
        mean, low, high = (f"{100 * share:.1f}" for share in without["gain"])
        said.append((mean, f"{100 * without['mean']:.1f}", low, high))
        header = (ROOT / f"configs/{one['file']}.yaml").read_text(encoding="utf-8")
        assert "itself has as much then" in header
    (a, score_a, low_a, high_a), (b, score_b, low_b, high_b) = said
    assert f"without it has {score_a} % (gain {a}, {low_a} to {high_a})" in COMPARE
    assert f"DiffusionNFT {score_b} ({b}, {low_b} to {high_b})" in COMPARE
    assert f"gain as much, {a} and {b} points" in PAGE
    assert all("about 6." in notes for notes in tables(("slas", "slas-controls")))
    tasks = plain["configs"][1]["summary"]["nfe"]["tasks"]
    assert f"as well, {100 * tasks['single_object']['mean']:.1f} %, within" in COMPARE


def test_uni_grpo_gains_with_a_small_penalty() -> None:
    result = read("compare-uni-grpo")
    (entry,) = result["configs"]
    end, base = entry["summary"]["nfe"], result["base"]
    assert end["beats_base"] and len(entry["seeds"]) == 3
    mean, low, high = (f"{100 * share:.1f}" for share in end["gain"])
    a, b, c = (f"{100 * seed['at']['nfe']['score']:.1f}" for seed in entry["seeds"])
    assert f"**It gains** {mean} points ({low} to {high}), its seeds at {a}, {b} and {c}" in COMPARE
    assert f"UniGRPO gains {mean} points" in PAGE
    assert all(end["tasks"][task]["mean"] >= share for task, share in base["tasks"].items())
    header = (ROOT / "configs/shapes/uni_grpo.yaml").read_text(encoding="utf-8")
    both = f"{100 * base['score']:.0f} -> {100 * end['mean']:.0f} %"
    after = entry["seeds"][0]["iterations"]
    assert f"test prompts {both} in {after} iterations, three seeds" in header
    guided = read("compare-uni-grpo-guided")["strict"]
    assert f"alone has {100 * guided:.0f} %" in header and guided > end["mean"] + 0.05


def test_without_its_penalty_one_run_falls() -> None:
    """The same budget, prompts, noise and seeds; the difference by the one error model."""
    result, free = read("compare-uni-grpo"), read("compare-uni-grpo-free")
    assert result["base"]["outcomes"] == free["base"]["outcomes"]
    (with_it,), (without,) = result["configs"], free["configs"]
    assert "kl" not in without["config"] and with_it["config"]["kl"]["beta"] == 0.001
    rest = {key: part for key, part in with_it["config"].items() if key not in ("kl", "name")}
    assert all(without["config"][key] == part for key, part in rest.items())
    end = without["summary"]["nfe"]
    mean, low, high = (f"{100 * share:.1f}" for share in end["gain"])
    assert not end["beats_base"] and f"{mean} points ({low} to {high}), 229 to 235" in COMPARE
    assert f"without the penalty it is {mean} points ({low} to {high})" in PAGE
    assert {seed["iterations"] for seed in without["seeds"]} == {229, 234, 235}
    scores = [seed["at"]["nfe"]["score"] for seed in without["seeds"]]
    a, b, c = (f"{100 * score:.1f}" for score in scores)
    assert f"its seeds end at {a}, {b} and {c} %. One run lost" in COMPARE
    base = result["base"]["score"]
    assert [score > base for score in scores] == [True, True, False]
    assert all(seed["at"]["nfe"]["score"] > base for seed in with_it["seeds"])
    module, tags = script_module("alone_docs"), result["base"]["tags"]
    one, other = module.seeds_of(with_it), module.seeds_of(without)
    gap, weights = one.mean(0) - other.mean(0), weights_of(tags)
    half = contrast_error([one, other], gap, weights, tags, 2 / 3).half()
    less = float(gap @ weights)
    span = f"{100 * (less - half):.1f} to {100 * (less + half):.1f}"
    assert f"difference of the means, {100 * less:.1f} points ({span}), may be" in COMPARE


def quarters(values: list[float]) -> list[float]:
    """Return the mean of each quarter."""
    size = len(values) // 4
    return [sum(values[n * size : (n + 1) * size]) / size for n in range(4)]


def test_what_was_tried_before() -> None:
    trials = read("slas-trials")["trials"]
    first = [f"{100 * trial['eval'][0]['strict']:.1f}" for trial in trials]
    last = [f"{100 * trial['eval'][-1]['strict']:.1f}" for trial in trials]
    assert set(first[:4]) == {first[0]}
    assert f"went from {first[0]} % to {last[0]} and {last[1]}." in COMPARE
    after = [trial["eval"][-1]["iteration"] for trial in trials]
    assert f"{first[0]} % became {last[2]} in {after[2]} iterations; with 0.03" in COMPARE
    assert f"config of today {last[3]} in {after[3]}, and" in COMPARE
    assert f"{first[0]} % became {last[3]} in {after[3]} iterations; with 0.001 {first[4]}" in PAGE
    assert f"from {first[4]} % to {last[4]} in {after[4]}, and the" in COMPARE
    # mean distance of each quarter: it stops rising, or does not
    large, smaller, small = (quarters(trial["kl"]) for trial in trials[2:])
    assert large[3] < large[1] and small == sorted(small)
    assert {f"{mean:.3f}" for mean in smaller[1:]} == {"0.003"} and "stayed at 0.003" in COMPARE
    assert f"and the distance to {small[3]:.2f} in the last" in COMPARE
    assert max(trials[3]["kl"]) < 0.005 and "it stays below 0.005" in PAGE
    assert (
        small[0] > 0.02 and small[1] < 0.03 and f"to {max(trials[4]['kl']) - 0.005:.2f} |" in PAGE
    )
    # the two with a large penalty stay within the first evaluation's interval
    for trial in trials[2:4]:
        assert trial["eval"][-1]["strict"] < trial["eval"][0]["interval"][1]
    assert trials[4]["eval"][-1]["strict"] > trials[4]["eval"][0]["interval"][1]
