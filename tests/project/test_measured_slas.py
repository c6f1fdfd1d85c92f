"""What the pages say of SLAS, NormGuard and UniGRPO is what their result files hold."""

from __future__ import annotations

import json
from typing import Any

from docskit import PAGES, ROOT

COMPARE, PAGE = (" ".join(PAGES[f"docs/{name}.md"].split()) for name in ("compare", "methods/slas"))


def read(name: str) -> dict[str, Any]:
    file = ROOT / f"assets/results/{name}.json"
    return dict(json.loads(file.read_text(encoding="utf-8")))


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
    """AWM and DiffusionNFT, judged as SLAS and NormGuard: the gains are less apart than what the
    comparison could tell."""
    changed, plain = read("compare-slas"), read("compare-slas-controls")
    assert changed["base"]["outcomes"] == plain["base"]["outcomes"]
    said = []
    for one, other in zip(changed["configs"], plain["configs"], strict=True):
        with_line, without = (entry["summary"]["nfe"] for entry in (one, other))
        spent = {seed["at"]["nfe"]["nfe"] for entry in (one, other) for seed in entry["seeds"]}
        assert len(spent) == 1 and without["beats_base"] and len(other["seeds"]) == 3
        assert with_line["gain"][1] < without["gain"][0] < with_line["gain"][2]
        mean, low, high = (f"{100 * share:.1f}" for share in without["gain"])
        said.append((mean, f"{100 * without['mean']:.1f}", low, high))
        header = (ROOT / f"configs/{one['file']}.yaml").read_text(encoding="utf-8")
        assert "itself has as much" in header
    (a, score_a, low_a, high_a), (b, score_b, low_b, high_b) = said
    assert f"without it has {score_a} % (gain {a}, {low_a} to {high_a})" in COMPARE
    assert f"DiffusionNFT {score_b} ({b}, {low_b} to {high_b})" in COMPARE
    assert f"gain as much, {a} and {b} points" in PAGE
    tasks = plain["configs"][1]["summary"]["nfe"]["tasks"]
    assert f"as well, to {100 * tasks['single_object']['mean']:.1f} %." in COMPARE


def test_uni_grpo_does_not() -> None:
    trials = read("slas-trials")["trials"]
    ends = [f"{100 * trial['eval'][-1]['strict']:.1f}" for trial in trials]
    first = f"{100 * trials[0]['eval'][0]['strict']:.1f}"
    assert {f"{100 * trial['eval'][0]['strict']:.1f}" for trial in trials} == {first}
    assert f"went from {first} % to {ends[0]} and {ends[1]}." in COMPARE
    iterations = [trial["eval"][-1]["iteration"] for trial in trials]
    assert f"in {iterations[3]} iterations, {first} % to {ends[3]}, so it was not" in COMPARE
    assert f"from {first} % to {ends[2]} in {iterations[2]} iterations and to {ends[3]} in" in PAGE
    for trial in trials[2:]:
        seen = trial["right_in_training"]
        assert sum(seen[-10:]) > sum(seen[:10])
        assert trial["eval"][-1]["strict"] < trial["eval"][0]["interval"][1]
