"""What docs/compare.md says of the ten methods that were compared last is what their files hold."""

from __future__ import annotations

import json
from typing import Any

from alonekit import alone
from docskit import PAGES, ROOT

from flowrl.config.load import load_config
from flowrl.training.rehearsal import check_plan

EARLIER = ROOT / "assets/results/earlier/demonstration-4.json"
EARLIER_ITERATIONS = 45  # of shapes/awm there

FILES = ("steps", "gradients", "ram")


def read(name: str) -> dict[str, Any]:
    """Read a result file of these comparisons."""
    file = ROOT / f"assets/results/compare-{name}.json"
    return dict(json.loads(file.read_text(encoding="utf-8")))


def section() -> str:
    """Return the page from this section's head on, in one line."""
    return " ".join(PAGES["docs/compare.md"].split()).split("## Ten more methods", 1)[1]


def points(share: float) -> str:
    return f"{100 * share:.1f}"


def test_all_start_from_one_base_model_and_what_costs_no_training_is_ahead() -> None:
    results = [read(name) for name in FILES]
    base = results[0]["base"]
    assert all(one["base"]["score"] == base["score"] for one in results)
    shares = alone("compare-steps", 260016, 136)
    ends = [entry["summary"]["nfe"] for one in results for entry in one["configs"]]
    assert max(end["mean"] for end in ends) < shares["guided"] < shares["best-of-8"]


def test_who_learnt_is_as_measured() -> None:
    """RAM and Sol-RL are above zero at (a), DRaFT-LV at (b) alone; the intervals in the text."""
    entries = {entry["name"]: entry for name in FILES for entry in read(name)["configs"]}
    assert len(entries) == 10 and all(len(entry["seeds"]) == 3 for entry in entries.values())
    above = {
        budget: {name for name, one in entries.items() if one["summary"][budget]["gain"][1] > 0}
        for budget in ("nfe", "seconds")
    }
    assert above["nfe"] == {"shapes-ram", "shapes-sol-rl"}
    assert above["seconds"] == {"shapes-draft-lv"}
    page = section()
    for name, budget in (("ram", "nfe"), ("sol-rl", "nfe"), ("draft-lv", "seconds")):
        mean, low, high = map(points, entries[f"shapes-{name}"]["summary"][budget]["gain"])
        said = (f"{mean} points ({low} to {high})", f"{mean} ({low} to {high})")
        assert any(words in page for words in said), said
    for name, iterations in (("ram", 11), ("sol-rl", 7)):
        assert entries[f"shapes-{name}"]["summary"]["nfe"]["iteration"] == iterations
    gains = [points(entry["summary"]["nfe"]["gain"][0]) for entry in read("steps")["configs"]]
    span = sorted(gains, key=float)
    assert f"All gain, by {span[0]} to {span[-1]} points" in page


def test_ram_s_scale_was_found_as_its_page_says() -> None:
    """On validation prompts, by the mean of two seeds; the shipped scale is the best of three."""
    file = ROOT / "assets/results/ram-search.json"
    search = json.loads(file.read_text(encoding="utf-8"))
    assert "prompts.test=assets/shapes/validation.jsonl" in search["design"]["set"]
    scales = {cell["name"]: cell["levels"]["scale"] for cell in search["cells"]}
    means = {}
    for name, scale in scales.items():
        scores = [run["score"] for run in search["runs"] if run["cell"] == name]
        means[scale] = sum(scores) / len(scores)
    best = max(means, key=means.__getitem__)
    assert load_config("shapes/ram").to_dict()["loss"]["advantage_scale"] == float(best)
    page = " ".join(PAGES["docs/methods/ram.md"].split())
    ends = [points(means[scale]) for scale in ("100", "10", "3")]
    assert f"100 ended at {ends[0]} %, 10 at {ends[1]} %, 3 at {ends[2]} %" in page


def test_guidance_in_sampling_did_to_ram_what_its_page_says() -> None:
    """On validation prompts, three seeds a scale; no difference from none is told from zero."""
    search = json.loads((ROOT / "assets/results/guidance-search.json").read_text(encoding="utf-8"))
    assert "prompts.test=assets/shapes/validation.jsonl" in search["design"]["set"]
    means = {}
    for cell in search["cells"]:
        scores = [run["score"] for run in search["runs"] if run["cell"] == cell["name"]]
        assert len(scores) == 3
        spent = {run["iterations"] for run in search["runs"] if run["cell"] == cell["name"]}
        assert spent == {7 if cell["levels"]["guidance"] == "none" else 5}
        means[cell["levels"]["guidance"]] = points(sum(scores) / 3)
    page = " ".join(PAGES["docs/methods/ram.md"].split())
    none, some, much = (means[scale] for scale in ("none", "2", "3.5"))
    assert f"{none} % without guidance, {some} % with 2 and {much} % with 3.5" in page
    effects = {one["name"]: one["interval"] for one in search["effects"]}
    assert all(low < 0 < high for low, high in effects.values())
    low, high = map(points, effects["guidance: 3.5 - none"])
    assert f"3.5 against none: {low} to {high} points" in page


def test_spo_s_judge_is_as_weak_as_its_page_says() -> None:
    """Its shares of new pairs; the run against it ended far below the base model."""
    judge = json.loads((ROOT / "assets/results/step-aware.json").read_text(encoding="utf-8"))
    page = " ".join(PAGES["docs/methods/spo.md"].split())
    levels = {one["sigma"]: f"{100 * one['right'] / one['pairs']:.0f} %" for one in judge["levels"]}
    (pairs,) = {one["pairs"] for one in judge["levels"]}  # the same ones at each level
    assert len(levels) == 4
    text = f"of {100 * judge['share']:.0f} % of {pairs} new pairs, each at four noise levels"
    assert f"{text}: {levels[0.0]} without noise and {levels[0.75]} at sigma 0.75" in page
    result = read("spo")
    (run,) = result["configs"]
    assert len(run["seeds"]) == 1 and run["summary"]["nfe"]["mean"] < result["base"]["score"] - 0.2


def distillation() -> str:
    """Return what compare.md says of Flow-OPD, in one line."""
    page = " ".join(PAGES["docs/compare.md"].split())
    return page.split("## Distillation: one student", 1)[1].split(" ## ", 1)[0]


def test_the_student_of_two_specialists_is_as_measured() -> None:
    """Its gain, both teachers on the whole list, what each knows, and the base model beside it."""
    result, page = read("opd"), distillation()
    (student,) = result["configs"]
    end = student["summary"]["nfe"]
    mean, low, high = map(points, end["gain"])
    assert end["gain"][1] > 0 and len(student["seeds"]) == 3
    assert f"{mean} points ({low} to {high}) after {end['iteration']:.0f} iterations" in page
    shares = alone("compare-opd", 260017, 136)
    assert shares["guided"] < end["mean"] < shares["best-of-8"]
    tasks, ahead = {"student": end["tasks"]}, {}
    for name in ("objects", "layout"):
        found = read(f"opd-teacher-{name}")
        assert f"| teacher of {name} alone | {points(found['strict'])} % | " in page
        ahead[name] = points(found["strict"] - end["mean"])
        assert (found["setting"]["seed"], found["images"]) == (260017, 4 * 136)
        tasks[name] = found["tasks"]
    # what it cost to have teachers, and what one run on all prompts reaches for less
    awm = load_config("shapes/awm")
    teacher = 30 * check_plan(awm).calls
    assert "each of these cost about three times its budget" in page
    assert 2.5 < teacher / result["budgets"]["nfe"] < 3.5
    assert EARLIER_ITERATIONS * teacher / 30 < 2 * teacher + result["budgets"]["nfe"]
    alone_found = json.loads(EARLIER.read_text("utf-8"))["rl"]
    assert f"and has {points(alone_found['mean'])} % of the test prompts (five seeds" in page
    assert alone_found["seeds"] == 5
    colors, counts = (
        {who: points(found[task]["mean"]) for who, found in tasks.items()}
        for task in ("color_attr", "counting")
    )
    assert f"has {colors['layout']} % and the other {colors['objects']};" in page
    assert f"of counts it is {counts['layout']} and {counts['objects']}." in page
    said = f"{ahead['objects']} points ahead of the student, and that of layout {ahead['layout']}"
    assert said in page and float(ahead["layout"]) < 100 * (end["interval"][1] - end["mean"])
    pairs = {who: points(found["two_object"]["mean"]) for who, found in tasks.items()}
    assert f"Of pairs it has {pairs['student']} %, as the base model, where" in page
    assert abs(end["tasks"]["two_object"]["gain"][0]) < 0.01
    assert f"their teacher has {pairs['objects']}." in page
    assert f"The student has {colors['student']} and {counts['student']} %." in page


def test_ddpo_needs_four_times_the_budget() -> None:
    """Above zero at the end, not at half of it; three seeds at its own rate."""
    result = read("ddpo")
    (entry,) = result["configs"]
    ends = entry["summary"]
    mean, low, high = map(points, ends["nfe"]["gain"])
    page = " ".join(PAGES["docs/compare.md"].split())
    said = f"{mean} points ({low} to {high}) after {ends['nfe']['iteration']:.0f} iterations"
    assert said in page and len(entry["seeds"]) == 3
    low, _, high = sorted(ends["seconds"]["gain"])
    assert ends["nfe"]["gain"][1] > 0 > low and high > 0
    assert result["budgets"]["nfe"] == 240_000
    assert result["base"]["score"] == read("opd")["base"]["score"]
    shares = alone("compare-opd", 260017, 136)
    beside = f"guidance has {points(shares['guided'])} % and the best of eight"
    assert f"{beside} {points(shares['best-of-8'])}" in page
    (spo,) = read("spo")["configs"]
    assert f"**SPO fell** by {points(-spo['summary']['nfe']['gain'][0])} points, one seed" in page


def test_find_gains_with_four_times_the_budget_and_stepwise_does_not_yet() -> None:
    """Above zero at the end, not at the earlier look; seeds of the other that lie too far apart."""
    page = " ".join(PAGES["docs/compare.md"].split())
    (find,), (steps,) = (read(name)["configs"] for name in ("find", "stepwise"))
    ends = find["summary"]
    mean, low, high = map(points, ends["nfe"]["gain"])
    assert f"{mean} points ({low} to {high}) after {ends['nfe']['iteration']:.0f} iter" in page
    assert f"its own base model of {points(read('find')['base']['score'])} %" in page
    assert ends["nfe"]["gain"][1] > 0 > ends["seconds"]["gain"][1] and len(find["seeds"]) == 3
    assert f"after {ends['seconds']['nfe'] / 1000:.0f},000 of the evaluations" in page
    mean, low, high = map(points, steps["summary"]["nfe"]["gain"])
    assert f"still not told from zero**: {mean} points ({low} to {high})" in page
    scores = [points(seed["at"]["nfe"]["score"]) for seed in steps["seeds"]]
    assert f"{scores[0]}, {scores[1]} and {scores[2]} %" in page
    shares = alone("compare-find", 260018, 136)
    assert max(ends["nfe"]["mean"], steps["summary"]["nfe"]["mean"]) < shares["guided"]


def test_dense_grpo_and_spo_s_pairs_gain_with_four_times_the_budget() -> None:
    """Above zero at both looks, three seeds each; both below what costs no training."""
    page = " ".join(PAGES["docs/compare.md"].split())
    shares = alone("compare-dense", 260020, 136)
    base = read("dense")["base"]
    for name, words in (
        ("dense", "**DenseGRPO learns**: "),
        ("spo-finished", "comparison is right: "),
    ):
        result = read(name)
        (entry,) = result["configs"]
        ends = entry["summary"]
        mean, low, high = map(points, ends["nfe"]["gain"])
        said = f"{mean} points ({low} to {high}) after {ends['nfe']['iteration']:.0f} iterations"
        assert words + said in page
        scores = [points(seed["at"]["nfe"]["score"]) for seed in entry["seeds"]]
        assert f"its seeds end at {scores[0]}, {scores[1]} and {scores[2]} %" in page
        assert ends["nfe"]["gain"][1] > 0 and ends["seconds"]["gain"][1] > 0
        assert result["base"]["score"] == base["score"] and result["budgets"]["nfe"] == 240_000
        assert ends["nfe"]["mean"] < min(shares.values())
        assert points(ends["nfe"]["tasks"]["single_object"]["mean"]) == "93.8"
    # what the quickstart's method reaches with about as many
    awm = load_config("shapes/awm")
    assert 0.9 < EARLIER_ITERATIONS * check_plan(awm).calls / 240_000 < 1.2
    rl = json.loads(EARLIER.read_text("utf-8"))["rl"]
    assert f"evaluations of `shapes/awm` end at {points(rl['mean'])} % (five seeds" in page
    mean, low, high = map(points, ends["nfe"]["gain"])
    spo = " ".join(PAGES["docs/methods/spo.md"].split())
    assert f"and the same loss gain {mean} points ({low} to {high}), three seeds" in spo


def test_draft_lv_shows_nothing_with_twice_the_budget() -> None:
    result, page = read("draft-lv"), " ".join(PAGES["docs/compare.md"].split())
    (entry,) = result["configs"]
    mean, low, high = map(points, entry["summary"]["nfe"]["gain"])
    assert f"and five seeds: {mean} points ({low} to {high})" in page and float(low) < 0
    (first,) = (c for c in read("gradients")["configs"] if c["name"] == "shapes-draft-lv")
    assert first["summary"]["seconds"]["gain"][1] > 0 and len(first["seeds"]) == 3
    assert result["budgets"]["nfe"] == 2 * read("gradients")["budgets"]["nfe"]
    assert result["base"]["score"] == read("dense")["base"]["score"]
    assert len(entry["seeds"]) == 5


def test_stepwise_flow_grpo_with_five_seeds() -> None:
    result, page = read("stepwise-five"), " ".join(PAGES["docs/compare.md"].split())
    (entry,) = result["configs"]
    end = entry["summary"]["nfe"]
    mean, low, high = map(points, end["gain"])
    after = f"{mean} points ({low} to {high}) after {end['iteration']:.0f} iterations"
    assert "Stepwise-Flow-GRPO learns" in page and after in page
    assert (
        end["gain"][1] > 0 and end["mean"] < alone("compare-stepwise-five", 260026, 136)["guided"]
    )
    scores = [points(seed["at"]["nfe"]["score"]) for seed in entry["seeds"]]
    assert [seed["seed"] for seed in entry["seeds"]] == list(range(5))
    assert f"end at {', '.join(scores[:-1])} and {scores[-1]} %" in page
    first = read("stepwise")["configs"][0]["summary"]["nfe"]["gain"]
    assert (
        f"had gained {points(first[0])} points ({points(first[1])} to {points(first[2])})" in page
    )


def test_the_judge_of_latents_is_as_measured() -> None:
    found = json.loads((ROOT / "assets/results/latent-judge.json").read_text(encoding="utf-8"))
    page = " ".join(PAGES["docs/methods/dina_lrm.md"].split())
    shares = [f"{100 * row['right'] / row['pairs']:.1f}" for row in found["levels"]]
    assert [row["sigma"] for row in found["levels"]] == [0.1, 0.4, 0.7]
    assert {row["pairs"] for row in found["levels"]} == {793}
    assert f"{shares[0]} % at sigma 0.1, {shares[1]} at 0.4, {shares[2]} at 0.7" in page
    ends = sorted(round(float(share)) for share in shares)
    assert f"{ends[0]} to {ends[-1]} % of 793 pairs of a right and a wrong image" in page
