"""What docs/group-techniques.md says in sentences of the comparison on the toy is what its result
file holds."""

from __future__ import annotations

import json
import statistics
from typing import Any

from docskit import PAGES, ROOT
from scipy.stats import t as student

PAGE = " ".join(PAGES["docs/group-techniques.md"].split())
FILE = ROOT / "assets/results/techniques-toy.json"
FOUND: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
ROWS: dict[str, Any] = FOUND["techniques"]
# techniques that loosen the clip range, or have none
LOOSER = ("ce_gppo", "dcpo_bounds", "dhpo", "etr", "clip_higher", "opmd", "reg_grpo")
NONE = ("wide", "forward", "forward_wide", "tree", "best_worst", "one_draw", "one_draw_wide")


def mean(name: str, key: str = "score") -> float:
    """The mean over seeds of what each run of a technique or control has."""
    return statistics.mean(run[key] for run in FOUND["runs"][name])


def points(name: str) -> str:
    """A difference as the page writes it, without its sign."""
    return f"{100 * abs(ROWS[name]['mean']):.1f}"


def test_what_is_no_technique_stands_beside() -> None:
    """What some techniques bring along, by itself."""
    assert f"a range of 0.2 alone gains {points('wide')} points" in PAGE
    forward, both = points("forward"), points("forward_wide")
    assert f"need gains {forward} points by itself, and {both} with" in PAGE
    plain = [name for name in NONE if ROWS[name]["control"] == "plain"]
    assert {*NONE} - {*plain} == {"best_worst", "one_draw_wide"}
    assert ROWS["best_worst"]["control"] == "forward_wide"
    named = {name for name, row in ROWS.items() if row["name"].startswith("none: ")}
    assert named == {*NONE}


def test_every_row_has_the_control_with_what_it_brings_along() -> None:
    """Each row's scores are those of its control, and the rows that once had another one are held
    to the right one."""
    for name, row in ROWS.items():
        assert row["control_score"] == mean(row["control"])
        assert row["score"] == mean(name)
    assert {ROWS[name]["control"] for name in LOOSER} == {"wide"}
    held = {name: row["control"] for name, row in ROWS.items() if row["control"] != "plain"}
    assert held == dict.fromkeys(LOOSER, "wide") | {
        "unigrpo": "wide",
        "mc_grpo_wide": "wide",
        "cppo_wide": "wide",
        "d3s_wide": "wide",
        "one_draw_wide": "wide",
        "norm_guard": "forward_wide",
        "trpa": "forward_wide",
        "best_worst": "forward_wide",
        "simpo": "best_worst",
        "salt": "tree",
        "stratified": "tree",
        "balanced": "tree_half",
        "p3o": "pairs",
        "knapsack": "fours",
        "gdpo": "soft",
    }


def test_what_helps_and_what_hurts() -> None:
    """The five that the page counts, and the nine that stay below their control."""
    helping = {name for name, row in ROWS.items() if row["verdict"] == "helps"} - {*NONE}
    beside_wide = {"mc_grpo_wide", "cppo_wide"}
    assert helping == {"stratified", "mc_grpo", "d3s", "cppo", "balanced"} | beside_wide
    assert "**Five techniques help** beyond their control on this toy" in PAGE
    adds = f"MC-GRPO adds {points('mc_grpo_wide')} points there and CPPO {points('cppo_wide')};"
    assert f"{adds} of D3S's {points('d3s_wide')} the correction leaves nothing sure" in PAGE
    assert ROWS["d3s_wide"]["interval"][0] > 0 and ROWS["d3s_wide"]["p_holm"] > 0.05
    hurting = {name for name, row in ROWS.items() if row["verdict"] == "hurts"}
    assert hurting == {*LOOSER, "trpa", "unigrpo", "norm_guard"}
    # above the plain run, whose range holds it back
    assert len(LOOSER) == 7 and "All seven are above *plain*" in PAGE
    assert min(mean(name) for name in LOOSER) > mean("plain")
    # "At 1e-3 widening the range alone brings more than each of them does"
    narrow = ("mc_grpo", "d3s", "cppo")
    assert max(ROWS[name]["mean"] for name in narrow) < ROWS["wide"]["mean"]


def test_what_fewer_draws_bring_by_chance() -> None:
    """Paired over seeds, as the table's rows are, against one draw of each image."""

    def beyond(name: str, other: str) -> tuple[str, float]:
        one = {run["seed"]: run["score"] for run in FOUND["runs"][name]}
        two = {run["seed"]: run["score"] for run in FOUND["runs"][other]}
        gaps = [100 * (one[seed] - two[seed]) for seed in sorted(one)]
        half = student.ppf(0.975, len(gaps) - 1) * statistics.stdev(gaps) / len(gaps) ** 0.5
        middle = statistics.mean(gaps)
        return f"{middle:.1f} ({middle - half:.1f} to {middle + half:.1f})", middle - half

    found = {}
    for name in ("mc_grpo", "cppo", "d3s"):
        found[name] = beyond(name, "one_draw")
        found[f"{name}_wide"] = beyond(f"{name}_wide", "one_draw_wide")
    said = {name: words for name, (words, _) in found.items()}
    points_of = said["cppo"].replace(" (", " points (")
    assert f"Beyond that CPPO gains {points_of} and D3S {said['d3s']}, with the wide" in PAGE
    assert f"range {said['cppo_wide']} and {said['d3s_wide']}: no more than the saving" in PAGE
    assert f"MC-GRPO gains {said['mc_grpo']}, with the wide range {said['mc_grpo_wide']}" in PAGE
    assert [name for name, (_, low) in found.items() if low > 0] == ["mc_grpo_wide"]
    assert f"pays for {mean('one_draw', 'iterations'):.0f} iterations, too" in PAGE
    assert ROWS["one_draw"]["verdict"] == ROWS["one_draw_wide"]["verdict"] == "no difference seen"


def test_salt_is_the_tree_and_p3o_the_pair() -> None:
    """The runs of both are, score by score, those of their controls."""
    for name in ("salt", "p3o"):
        row, seeds = ROWS[name], FOUND["seeds"]
        assert row["differences"] == [0.0] * seeds
        assert row["p_holm"] == 1 and row["verdict"] == "no difference seen"
    assert "the difference is exactly 0" in PAGE
    # SALT changes nothing of its control, so it has to be the same run in all but its commit
    for tree, salt in zip(FOUND["runs"]["tree"], FOUND["runs"]["salt"], strict=True):
        assert {**tree, "name": "", "commit": ""} == {**salt, "name": "", "commit": ""}


def test_preferences_beside_the_likelihood_that_they_need() -> None:
    """TRPA is below it; most of what SimPO gains is that it learns from two images."""
    assert f"TRPA, which has both, is {points('trpa')} points below that" in PAGE
    above = 100 * (mean("simpo") - mean("forward_wide"))
    assert f"is {above:.1f} points above the plain run with the forward" in PAGE
    pair, all_of_them = (mean(name, "iterations") for name in ("best_worst", "forward_wide"))
    assert f"plain GRPO gains {points('best_worst')} of them" in PAGE
    assert f"pay for {pair:.0f} iterations where they paid for {all_of_them:.0f}" in PAGE
    assert ROWS["simpo"]["verdict"] == "no difference seen"


def test_penalties_cost_iterations() -> None:
    """The evaluations of the base model are paid out of the same budget."""
    names = ("unigrpo", "wide", "norm_guard", "forward_wide")
    one, of_one, other, of_other = (f"{mean(name, 'iterations'):.0f}" for name in names)
    assert f"{one} iterations for {of_one}, and {other} for {of_other}" in PAGE


def test_every_run_says_its_commit() -> None:
    """Runs of several versions of the code can stand in one file."""
    for runs in FOUND["runs"].values():
        assert len(runs) == FOUND["seeds"]
        assert all(run["commit"] for run in runs)
