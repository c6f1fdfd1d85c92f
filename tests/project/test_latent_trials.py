"""What the pages say of short runs against the judge of latents is what their file holds."""

from __future__ import annotations

import json

from docskit import PAGES, ROOT


def test_short_runs_are_as_said() -> None:
    file = ROOT / "assets/results/latent-trials.json"
    spo, dina, later, sure, told, *short = json.loads(file.read_text(encoding="utf-8"))["trials"]
    pages = [" ".join(PAGES[f"docs/methods/{name}.md"].split()) for name in ("spo", "dina_lrm")]
    first, *rest = [100 * row["strict"] for row in spo["eval"]]
    assert f"from {first:.1f} % to {rest[-1]:.1f}, at most {max(rest):.1f} between" in pages[0]
    first, *rest = [100 * row["strict"] for row in dina["eval"]]
    assert f"went from {first:.1f} % to {rest[-1]:.1f} " in pages[1]
    score = dina["reward/latent"]
    assert f"rose from {score[0]:.1f} to at most {max(score):.1f}" in pages[1]
    first, *_, last = [100 * row["strict"] for row in later["eval"]]
    after = later["eval"][-1]["iteration"]
    assert f"a run went from {first:.1f} % to {last:.1f} in {after} iterations" in pages[1]
    # a judge that is sure of all, and one that knows how candidates end
    first, *_, last = [100 * row["strict"] for row in sure["eval"]]
    after = sure["eval"][-1]["iteration"]
    assert f"from {first:.1f} % to {last:.1f} in {after}, while its judge's own" in pages[0]
    assert sum(sure["reward/latent"][-5:]) > sum(sure["reward/latent"][:5])
    first, *_, last = [100 * row["strict"] for row in told["eval"]]
    after = told["eval"][-1]["iteration"]
    assert f"went from {first:.1f} % to {last:.1f} in {after} iterations (`latent-" in pages[0]
    assert told["eval"][0]["iteration"] == 0 and len(told["reward/latent"]) == after
    ends = [f"{100 * trial['eval'][-1]['strict']:.1f}" for trial in short]
    first = 100 * short[0]["eval"][0]["strict"]
    assert {trial["eval"][-1]["iteration"] for trial in short} == {10}
    assert f"({first:.1f} % to {ends[0]}; at twice the rate {ends[1]}), nor surer" in pages[0]
    assert (
        f"nor surer pairs ({ends[2]}), nor true ends in the judge's place ({ends[3]})" in pages[0]
    )
    assert told["command"].startswith("flowrl train shapes/spo_latent --seed 100 train.threads=1")


def test_tdm_r1_was_begun_three_times() -> None:
    file = ROOT / "assets/results/tdm-r1-trial.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    page = " ".join(PAGES["docs/methods/tdm_r1.md"].split())
    before, after = found["eval"]
    ends = f"{100 * before['strict']:.1f} → {100 * after['strict']:.1f} | {after['iteration']} |"
    assert f"16 prompts | {ends}" in page
    assert f"stopped after {len(found['reward_gap'])} of 60 iterations |" in page
    second = found["second"]
    right, colours = second["right_in_training"], second["saturation"]
    best = max(right)
    ends = f"{100 * best:.1f} → {100 * right[-1]:.1f}, in training"
    assert f"{ends} | {right.index(best) + 1} → {len(right)} | broke: two fifths of" in page
    assert set(second["clip_frac"]) == {0.0} and 0.55 < colours[-1] / colours[0] < 0.65
    third = found["third"]
    first, last = third["reward_gap"][0], third["reward_gap"][-1]
    said = f"`reward_gap` {first:.4f} at first, {last:.4f} after {len(third['reward_gap'])} iter"
    assert said in page
    start, *_, end = third["eval"]
    ends = f"{100 * start['strict']:.1f} → {100 * end['strict']:.1f} | {end['iteration']} |"
    assert f"on which it is judged, too | {ends}" in page
    assert (
        45 < found["reward_gap"][-1] / last < 55 and "about a fiftieth of the first run's" in page
    )
    assert "surrogate.anchor=20" in third["command"] and third["eval"][-1]["strict"] < 0.52
    assert "surrogate.lr=1.0e-3" in found["command"] and "surrogate.lr=2e-3" in second["command"]


def test_tdm_r1_was_begun_twice_more() -> None:
    file = ROOT / "assets/results/tdm-r1-trial.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    page = " ".join(PAGES["docs/methods/tdm_r1.md"].split())
    fourth, fifth = found["fourth"], found["fifth"]
    colours = [run["saturation"][-1] / run["saturation"][0] for run in (fourth, fifth)]
    assert 0.15 < colours[0] < 0.25 and 0.65 < colours[1] < 0.75
    assert len(fourth["saturation"]) == 8 and len(fourth["eval"]) == 1
    assert "not judged again | 8 | broke: four fifths of the saturation lost" in page
    first, *_, last = [100 * row["strict"] for row in fifth["eval"]]
    after = fifth["eval"][-1]["iteration"]
    said = f"{first:.1f} → {last:.1f} | {after} | three tenths of the saturation lost"
    assert f"held to the teacher's velocity | {said}" in page


def test_ddpo_on_a_model_that_predicts_noise() -> None:
    """Right images do not become more; files become smaller."""
    file = ROOT / "assets/results/ddpo-sdxl-trials.json"
    trials = json.loads(file.read_text(encoding="utf-8"))["trials"]
    page = " ".join(PAGES["docs/methods/ddpo.md"].split())
    ends = []
    for trial in trials[:6]:
        first, last = trial["eval"][0], trial["eval"][-1]
        ends.append((100 * first["strict"], 100 * last["strict"]))
        assert last["strict"] < first["interval"][1]  # no gain that can be told from chance
    lost = [before - after for before, after in ends]
    assert f"at 2e-4 lose {lost[0]:.1f} points, LoRA at 1.5e-3 {lost[2]:.1f}" in page
    assert abs(lost[1]) < 2 and f"fall from {ends[5][0]:.1f} to {ends[5][1]:.1f} %" in page
    small, lora = trials[6:]
    sizes = [-small["reward"][0], -small["reward"][-1]]
    assert f"from {sizes[0]:.2f} to {sizes[1]:.2f} kB in ten iterations" in page
    assert len(small["reward"]) == 10 and small["eval"][-1]["strict"] == 0
    before, after = (-row["jpeg"] for row in (lora["eval"][0], lora["eval"][-1]))
    assert f"take {before:.2f} kB to {after:.2f} on validation prompts" in page


def test_what_ddpo_gains_on_a_model_that_predicts_noise() -> None:
    """Pages and header have the comparison's figures; the best of eight, and right images."""
    results, name = ROOT / "assets/results", "compare-ddpo-sdxl"
    found = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    (config,) = found["configs"]
    end, base = config["summary"]["nfe"], -found["base"]["score"]
    low, high = -end["interval"][1], -end["interval"][0]
    gain = f"{end['gain'][0]:.2f} less ({end['gain'][1]:.2f} to {end['gain'][2]:.2f})"
    both = f"from {base:.2f} to {-end['mean']:.2f} kB"
    compare, page = (
        " ".join(PAGES[f"docs/{file}.md"].split()) for file in ("compare", "methods/ddpo")
    )
    assert both in page and gain in page and gain.replace("less", "kB less") in compare
    assert both in (ROOT / "configs/shapes/ddpo_sdxl.yaml").read_text(encoding="utf-8")
    seeds = [f"{-run['at']['nfe']['score']:.2f}" for run in config["seeds"]]
    assert f"the seeds end at {seeds[0]}, {seeds[1]} and {seeds[2]} kB" in compare
    # beside it
    best = json.loads((results / f"{name}-best-of-8.json").read_text(encoding="utf-8"))
    most, least = (-end for end in best["interval"])
    assert (
        f"best of 8 by the reward | {-best['jpeg']:.2f} | {least:.2f} to {most:.2f} | | 160 |"
        in compare
    )
    assert most > high and -best["jpeg"] > high  # "behind"
    rows = json.loads((results / "ddpo-sdxl-alternatives.json").read_text("utf-8"))["rows"]
    sizes = sorted(-row["jpeg"] for row in rows)
    assert f"change nothing: {sizes[0]:.2f} to {sizes[-1]:.2f} kB on validation" in compare
    right = {}
    for key in ("base", "0", "1", "2"):
        judged = json.loads((results / f"{name}-right-{key}.json").read_text(encoding="utf-8"))
        right[key] = 100 * judged["strict"]
    after = (right["0"] + right["1"] + right["2"]) / 3
    bounds = [-end for end in found["base"]["interval"]]
    row = f"guidance 3 | {base:.2f} | {bounds[1]:.2f} to {bounds[0]:.2f} | {right['base']:.1f} % |"
    assert row in compare
    last = f"| `shapes/ddpo_sdxl` | {-end['mean']:.2f} | {low:.2f} to {high:.2f} | {after:.1f} % |"
    assert last in compare


def test_the_small_sdxl_is_as_its_training_says() -> None:
    folder = ROOT / "assets/shapes-sdxl"
    lines = (folder / "training.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(lines[-1])
    plain, guided = (100 * last[f"right, guidance {scale}"]["mean"] for scale in ("1.0", "3.0"))
    page = " ".join(PAGES["docs/shapes.md"].split())
    said = f"{plain:.0f} % right without guidance and {guided:.0f} % with guidance 3, in 10 steps"
    assert said in page and f"in {last['minutes']:.0f} minutes of one core's time" in page
    assert f"{64 * last['step'] // 1000},000 scenes" in page
    card = " ".join((folder / "README.md").read_text(encoding="utf-8").split())
    assert f"{plain:.0f} % without guidance and {guided:.0f} % with guidance 3" in card
