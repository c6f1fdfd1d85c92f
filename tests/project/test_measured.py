"""What the docs say of single measurements is what their result files hold."""

from __future__ import annotations

import json
from typing import Any

from alonekit import alone
from docskit import PAGES, ROOT
from scriptkit import script_module


def test_what_fine_tuning_gains_is_as_measured() -> None:
    """docs/shapes.md says the mean and the loss of its result file."""
    found = json.loads((ROOT / "assets/results/fine-tuning.json").read_text(encoding="utf-8"))
    gain = found["fine_tuned_minus_base"]
    mean = f"{100 * found['fine_tuned']['mean']:.1f} %"
    less = -100 * gain["mean"]
    shapes = " ".join(PAGES["docs/shapes.md"].split())
    assert mean in shapes and f"{less:.1f} points below the base model" in shapes
    assert found["fine_tuned"]["seeds"] == 3


def test_what_fine_tuning_on_guided_images_gains_is_as_measured() -> None:
    """Two seeds, the best of three rates."""
    results = ROOT / "assets/results"
    found = json.loads((results / "fine-tuning-guided.json").read_text(encoding="utf-8"))
    gain = found["fine_tuned_minus_base"]
    low, high = gain["interval"]
    said = f"{100 * gain['mean']:.1f} points ({100 * low:.1f} to {100 * high:.1f})"
    ends = [f"{100 * found[key]['mean']:.1f}" for key in ("base", "fine_tuned")]
    shapes = " ".join(PAGES["docs/shapes.md"].split())
    tried = [f"{100 * row['validation']:.1f}" for row in found["search"]]
    assert "{}, {} and {} % of validation prompts".format(*tried) in shapes
    assert f"{' to '.join(ends)} % of the test prompts" in shapes
    assert found["fine_tuned"]["seeds"] == 2 and len(found["search"]) == 3
    trained = json.loads((results / "demonstration.json").read_text(encoding="utf-8"))
    more = 100 * trained["rl_minus_base"]["mean"]
    assert f"a gain of {said}, where training gains {more:.1f}" in shapes
    # what training mends of what the base model with guidance gets wrong
    wrong = 1 - trained["base_best_guidance"]["mean"]
    share = trained["rl_best_guidance_minus_base_best_guidance"]["mean"] / wrong
    assert (
        0.45 < share < 0.5
        and "the target, half of the base model's errors, was missed narrowly" in shapes
    )


def test_the_card_says_what_the_base_model_does_on_other_prompts() -> None:
    """The base model's card has the figures of its result file, without guidance and with it."""
    lists = json.loads((ROOT / "assets/results/base-checks.json").read_text("utf-8"))["lists"]
    card = " ".join((ROOT / "assets/shapes-sd3/README.md").read_text("utf-8").split())
    hard, far = (
        [f"{100 * lists[name][key]['mean']:.1f} %" for key in ("base", "base_best_guidance")]
        for name in ("hard", "out of distribution")
    )
    assert f"harder tier of prompts {hard[0]} are right, with guidance {hard[1]}" in card
    assert f"out of distribution {far[0]} and {far[1]}" in card


def test_what_costs_no_training_stands_beside_the_families() -> None:
    """compare.md says score, interval and cost of each; every family's mean lies below, as it
    says."""
    file = ROOT / "assets/results/compare-families.json"
    families = json.loads(file.read_text(encoding="utf-8"))
    base = families["base"]
    shares = alone("compare-families", 260011, 136)
    for config in families["configs"]:
        mean = config["summary"]["nfe"]["mean"]
        assert base["score"] < mean < shares["guided"] < shares["best-of-8"], config["name"]
    # what the sentences below the table say
    page, named = " ".join(PAGES["docs/compare.md"].split()), families["configs"]
    first = {b: max(named, key=lambda one: one["summary"][b]["mean"]) for b in ("nfe", "seconds")}
    assert [one["name"] for one in first.values()] == ["shapes-diffusion-dpo", "shapes-draft"]
    pairs = families["pairs"]["nfe"]
    differ = [pair for pair, p in _pairs(pairs) if p < 0.05]
    assert [set(pair) for pair in differ] == [{"shapes-diffusion-dpo", "shapes-branch-grpo"}]
    often = sorted(run["at"]["nfe"]["iteration"] for one in named for run in one["seeds"])
    assert f"40,000 evaluations are {often[0]} to {often[-1]} iterations" in page


def test_methods_at_their_own_rates_are_as_measured() -> None:
    """compare.md says which learn, between which gains, and which do not; guidance and best of
    eight stand beside them."""
    file = ROOT / "assets/results/compare-own-rates.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    shares = alone("compare-own-rates", 260012, 136)
    ends = {one["name"]: one["summary"]["nfe"] for one in found["configs"]}
    assert max(end["mean"] for end in ends.values()) < shares["guided"] < shares["best-of-8"]
    learnt = [name for name, end in ends.items() if end["gain"][1] > 0]
    names = ("crd", "flow-dppo", "pepg", "refl", "pref-grpo")
    assert set(learnt) == {f"shapes-{name}" for name in names}
    gains = [100 * ends[name]["gain"][0] for name in learnt]
    said = f"by {min(gains):.0f} to {max(gains):.0f} points, after "
    often = [ends[name]["iteration"] for name in learnt]
    page = " ".join(PAGES["docs/compare.md"].split())
    assert f"{said}{min(often):.0f} to {max(often):.0f} iterations" in page
    assert all(ends[f"shapes-{name}"]["gain"][2] > 0 for name in ("ddpo", "find"))
    fall = ends["shapes-rwr"]
    assert fall["gain"][2] < 0 and f"to {100 * fall['mean']:.1f} %, at the rate" in page


def _pairs(pairs: dict[str, Any]) -> list[tuple[tuple[str, str], float]]:
    """Return each pair of a comparison once, with p after Holm's correction."""
    names, found = pairs["names"], []
    for i, one in enumerate(names):
        for j in range(i):
            found.append(((one, names[j]), pairs["p_holm"][i][j]))
    return found


def test_the_checks_of_the_base_model_are_as_measured() -> None:
    """The table of docs/shapes.md, and the card's sentence, are those of the result file."""
    found = json.loads((ROOT / "assets/results/base-checks.json").read_text(encoding="utf-8"))
    page = PAGES["docs/shapes.md"]
    settings = ("base", "base_best_guidance", "base_best_of_8")
    for name, label in (("hard", "harder tier, test list"), ("out of distribution",) * 2):
        ends = [f"{100 * found['lists'][name][key]['mean']:.1f} %" for key in settings]
        assert f"| {label} | {' | '.join(ends)} |" in page
    tasks = script_module("checks_docs").TASKS
    rates = {key: dict[str, float]() for key in settings}
    for rows in found["lists"].values():
        for key in settings:
            rates[key] |= {task: one["mean"] for task, one in rows[key]["tasks"].items()}
    for task, label in tasks.items():
        ends = [f"{100 * rates[key][task]:.0f} %" for key in settings]
        assert f"| {label} | {' | '.join(ends)} |" in page
    looks = found["looks"]
    said = f"Of {looks['images']:,} images of the base model {looks['right']:,} are right, and "
    said += f"{looks['right_but_for_flaws']} would be but for a flaw"
    assert said in " ".join(page.split()) and looks["blank"] == 0


def test_the_arm_in_which_the_clip_acts_is_as_measured() -> None:
    """The table of cells by hand: scores of the seeds, and what was clipped in the end."""
    found = json.loads((ROOT / "assets/results/clip-updates.json").read_text(encoding="utf-8"))
    page, scores, clipped = PAGES["docs/factorial.md"], dict[str, str](), dict[str, list[float]]()
    for cell in found["cells"]:
        runs = [run for run in found["runs"] if run["cell"] == cell["name"]]
        key = " | ".join(cell["levels"].values())
        scores[key] = ", ".join(f"{100 * run['score']:.1f}" for run in runs) + " %"
        clipped[key] = [100 * run["last_quarter"]["clip_frac"] for run in runs]
    # "the same run to the bit"
    one, other = (found["cells"][k]["name"] for k in (0, 1))
    ends = {(run["cell"], run["seed"]): run for run in found["runs"]}
    for seed in range(3):
        for key in ("outcomes", "last_quarter", "score"):
            assert ends[one, seed][key] == ends[other, seed][key]
    assert f"| 1 | either | {scores['1 | 0.02']} | 0 % |" in page
    assert f"| 4 | 0.02 | {scores['4 | 0.02']} | 0 % |" in page
    low, high = min(clipped["4 | 1e-4"]), max(clipped["4 | 1e-4"])
    assert f"| 4 | 1e-4 | {scores['4 | 1e-4']} | {low:.0f} to {high:.0f} % |" in page
    assert max(clipped["4 | 0.02"]) == 0
    assert len(ends) == 12 and sum(run["score"] < 0.6 for run in ends.values()) == 1
    base = json.loads((ROOT / "assets/results/factorial-shapes-base.json").read_text("utf-8"))
    assert f"base model has {100 * base['strict']:.1f} %" in " ".join(page.split())
    assert base["setting"]["count"] == len(found["tags"]) and base["setting"]["seed"] == 260004
    assert min(effect["p_holm"] for effect in found["effects"]) > 0.05


def test_no_method_of_the_control_reaches_guidance() -> None:
    """Fifteen methods on the noisy-captions control, and what costs no training there."""
    results = ROOT / "assets/results"
    configs = json.loads((results / "compare-shapes.json").read_text(encoding="utf-8"))["configs"]
    found = {}
    for name in ("base", "guided", "best-of-8"):
        file = results / f"compare-shapes-{name}.json"
        found[name] = json.loads(file.read_text(encoding="utf-8"))
        setting = found[name]["setting"]
        assert (setting["seed"], setting["count"], setting["images"]) == (260025, 129, 4)
        assert found[name]["target"] == "assets/shapes-sd3-noisy"
    ends = [one["summary"]["nfe"]["mean"] for one in configs]
    # the checker has changed since; what it changed is not what lies between them
    assert len(ends) == 15 and max(ends) < found["guided"]["strict"] - 0.1
    assert found["guided"]["strict"] < found["best-of-8"]["strict"]
    assert "All fifteen methods stay below guidance" in " ".join(PAGES["docs/compare.md"].split())


def test_the_checks_of_trained_runs_stand_beside_those_of_the_base_model() -> None:
    """Where there is a result file: the same prompts, noise and number of images, other runs of one
    config, each at the best of its evaluations. The table itself is held by test_tables.py."""
    results = ROOT / "assets/results"
    if not (results / "trained-checks.json").exists():
        assert "Trained models were not measured on these lists" in PAGES["docs/shapes.md"]
        return
    found = json.loads((results / "trained-checks.json").read_text(encoding="utf-8"))
    base = json.loads((results / "base-checks.json").read_text(encoding="utf-8"))
    assert found["config"] == "shapes-awm"
    for name, rows in base["lists"].items():
        for key in ("base", "base_best_guidance"):
            one, row = found["lists"][name][key], rows[key]
            about = ("prompts", "images", "guidance", "steps")
            for what in about:
                assert one[what] == row[what], what
            # the same weights and noise: at most rounding on another processor lies between
            assert abs(one["mean"] - row["mean"]) < 0.02, (name, key)
        assert found["lists"][name]["rl"]["images"] == len(found["runs"]) * rows["base"]["images"]
    assert len(found["runs"]) == 3
    # the best of eight of the base model stays ahead, of guidance after training, too
    best = [rows["base_best_of_8"]["mean"] for rows in base["lists"].values()]
    plain, after = (
        [found["lists"][name][key]["mean"] for name in base["lists"]]
        for key in ("rl", "rl_best_guidance")
    )
    assert best[0] > max(plain[0], after[0]) and best[1] > max(plain[1], after[1])
    low = [
        found["lists"][name]["rl_minus_base_best_guidance"]["interval"][0] for name in base["lists"]
    ]
    assert low[0] > 0 > low[1]
    # what would be right but for a flaw is no more frequent after training
    before, looks = base["looks"], found["looks"]
    right = sum(one["right"] for one in looks)
    flawed = sum(one["right_but_for_flaws"] for one in looks)
    assert flawed / right < before["right_but_for_flaws"] / before["right"] + 0.002


def test_the_smallest_cards_are_as_estimated() -> None:
    """Every config of the table fits under its profile, but for four of Wan on 24 GB, whose headers
    say so; two train less for it, on 24 GB."""
    found = json.loads((ROOT / "assets/results/profiles.json").read_text(encoding="utf-8"))
    large = [row for row in found["rows"] if not row["fits"]]
    assert {row["config"] for row in large} == {
        *("wan/branch_grpo", "wan/dance_grpo", "wan/branch_grpo_22", "wan/diffusion_nft_22")
    }
    for row in large:
        header = (ROOT / f"configs/{row['config']}.yaml").read_text(encoding="utf-8")
        assert row["profile"] == "24gb" and "24" in header.partition("name:")[0], row["config"]
    less = {row["config"]: row for row in found["rows"] if "less" in row}
    assert less.keys() == {"flux2/flow_grpo_fast", "wan/flow_grpo_fast_22"}
    assert all(row["profile"] == "24gb" for row in less.values())
