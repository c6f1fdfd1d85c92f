"""Every method on equal terms: the table, the claims of papers and the figures, by hand; and what
the docs say of gains."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comparisonkit import config, result
from docskit import PAGES, ROOT
from scriptkit import module_of, script_module

from flowrl.core.shipped_files import list_configs
from flowrl.runs.catalogue import load_methods


def module(name: str) -> Any:
    return module_of("results", name)


def entry(name: str, outcomes: list[str], accuracy: list[float], **plan: Any) -> dict[str, Any]:
    """Return a config of which every seed has these right images, and this curve, on which 12
    evaluations go by in an iteration."""
    made = config(f"shapes-{name}", [0.6] * len(outcomes))
    made |= {"file": f"shapes/{name}", "lr": 2e-4, "search": {"own_lr": 1e-4}}
    made["config"] = {"plan": {"fn": "ode", **plan}, "train": {"prompts": 2, "group": 3}}
    for run, some in zip(made["seeds"], outcomes, strict=True):
        run |= {"environment": 0}
        run["at"]["nfe"] = {**run["at"]["nfe"], "outcomes": some, "nfe": 120.0, "iteration": 10}
        steps = [20_000.0 * (i + 1) for i in range(len(accuracy))]
        # each seed a little above the one before it: lines of one slope
        shifted = [value + 0.01 * run["seed"] for value in accuracy]
        run["trajectory"] = {"nfe": steps, "accuracy": shifted, "diversity": [0.4, 0.3, 0.2]}
    return made


def made_up(*entries: dict[str, Any]) -> dict[str, Any]:
    """Return a file of these configs: two tasks of two images, of four the base model has one."""
    found = result(config("a", [0.5]))
    found["base"] |= {"tags": ["even", "odd_one"], "scenes": ["0", "1"], "outcomes": "10 00"}
    found["environments"] = [{"flowrl": "0.2.0"}]
    found["alternatives"] = {"best of 2": {"nfe_per_image": 20, "outcomes": "11 00"}}
    found["alternatives"]["guidance 3.5, 20 steps"] = {"nfe_per_image": 40, "outcomes": "11 10"}
    return {**found, "configs": list(entries)}


SLAS = entry("slas", ["11 11", "11 10", "11 01"], [0.5, 0.58, 0.6])
"""All right, then three of four twice: 83.3 %; its line rises by 5 points in 20,000."""


# --------------------------------------------------------------------------------------- the table


def test_the_table_of_all_methods_by_hand() -> None:
    """Runs at 100, 75 and 75 %, the base model at 25: gain 58.3; twice the rate; 0.05 in 20,000,
    .1 in 40,000; 120 evaluations in 10 iterations of 6 images; the last of three spreads is half
    of the first."""
    methods_table = module("methods_table")
    found = made_up(SLAS)
    (row,) = methods_table.rows(found)
    assert row["gain"] == pytest.approx(7 / 12) and row["right"] == pytest.approx(10 / 12)
    assert (row["config"], row["seeds"], row["failed"], row["below"]) == ("shapes/slas", 3, 0, 0)
    assert row["factor"] == 2 and row["looks"] == 1 and row["holm"] == row["p"]
    assert row["to"] == pytest.approx([20_000, 40_000]) and row["per_image"] == 2
    assert row["variety"] == pytest.approx(0.5) and row["flowrl"] == "0.2.0"
    cells = cells_of(methods_table.table([row]))
    assert cells[0] == "`shapes/slas`" and cells[1].startswith("+58.3")
    assert cells[4:] == ["83.3 %", "20k", "40k", "2.0", "50 %", "2 x", "0 of 3"]
    plain, best, guided = methods_table.untrained(found)
    assert [one["right"] for one in (plain, best, guided)] == [0.25, 0.5, 0.75]
    assert [one["nfe_per_image"] for one in (plain, best, guided)] == [10, 20, 40]
    said = " ".join(methods_table.line(row, found).split())
    assert said.startswith("`shapes/slas`: +58.3 points (")
    assert said.endswith(") on equal terms; +8.3 against guidance.")


def cells_of(table: str) -> list[str]:
    """Return the cells of a table's only row."""
    return [cell.strip() for cell in table.splitlines()[2].strip("|").split("|")]


def test_what_falls_moves_or_fails_is_said() -> None:
    """A curve that falls never rises by 5 points; where the noise moves training images say
    nothing; a run that failed may have reached anything: no star."""
    methods_table = module("methods_table")
    falling = entry("awm", ["11 11"] * 3, [0.6, 0.5, 0.4])
    falling["seeds"][2]["at"]["nfe"] = None
    falling["seeds"][2]["failed"] = "nan"
    moving = entry("mix_grpo", ["11 10"] * 3, [0.5, 0.6, 0.7], every=12, stride=1)
    still = entry("mix_grpo_flash", ["11 10"] * 3, [0.5, 0.6, 0.7], every=12, stride=0)
    rows = {row["config"]: row for row in methods_table.rows(made_up(falling, moving, still))}
    fell = cells_of(methods_table.table([{**rows["shapes/awm"], "holm": 0.001}]))
    assert fell[1] == "+75.0" and fell[5:7] == ["–", "–"] and fell[-1] == "1 of 3"
    moved = cells_of(methods_table.table([rows["shapes/mix_grpo"]]))
    assert moved[5:9] == ["moves", "moves", "2.0", "moves"]
    assert rows["shapes/mix_grpo_flash"]["to"] == pytest.approx([10_000, 20_000])
    # one that broke in every seed has no row, and is named
    for run in still["seeds"]:
        run["at"]["nfe"] = None
    found = made_up(falling, moving, still)
    assert methods_table.broken(found, methods_table.rows(found)) == (
        "Broke in every seed: `shapes/mix_grpo_flash`."
    )
    assert methods_table.broken(made_up(SLAS), methods_table.rows(made_up(SLAS))) == ""


def test_a_second_look_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--again` takes the runs out and counts; what is there is not asked for again."""
    methods = script_module("results/methods")
    file = tmp_path / "methods.json"
    file.write_text(json.dumps(made_up(SLAS)))
    monkeypatch.setattr(methods, "FILE", file)
    assert not methods._missing("shapes/slas") and methods._missing("shapes/awm")
    methods.again("shapes/slas")
    assert methods._missing("shapes/slas")
    assert json.loads(file.read_text())["looks"] == {"shapes/slas": 2}
    with pytest.raises(SystemExit, match="expected a config of methods.json"):
        methods.again("shapes/slas")


def test_the_table_asks_for_every_config_or_says_why_not() -> None:
    methods = module("methods")
    asked, beside = methods.wanted(), {**methods.ELSEWHERE, **methods.NEEDS}
    assert len(set(asked)) == len(asked) and set(asked).isdisjoint(beside)
    mine = {name for name in list_configs() if name.startswith("shapes/")}
    assert {*asked, *beside} == mine


def test_an_older_row_gives_way_to_one_on_equal_terms() -> None:
    """In both tables of docs/results.md; its line and its column are the new one's."""
    gains, methods_table = module("gains"), module("methods_table")
    equal = methods_table.by_config()
    older = PAGES["docs/results.md"].partition("## Measured one by one")[2]
    assert equal and not [name for name in equal if f"| `{name}` |" in older]
    left = [row for row in gains.rows() if row["config"] not in equal and row["on"]]
    assert all(f"| `{row['config']}` |" in older for row in left)
    for name, row in equal.items():
        start = f"`{name}`: {module('figures').points(row['gain'])} points ("
        assert gains.line(name, gains.rows()).startswith(start)
        (method,) = [one for one in load_methods() if name in one.configs]
        (said,) = re.findall(
            rf"^\| \[{re.escape(method.name)}\].*$", PAGES["docs/methods.md"], re.MULTILINE
        )
        assert methods_table.cell(row).replace("*", r"\*") in said


# --------------------------------------------------------------------------------------- the claims


def test_a_claim_is_a_contrast_of_two_rows() -> None:
    """Ten tasks of ten scenes: one config has all right, the other none. The claim that the first
    is better is seen, its reverse is contrary, and one that waits for a row says for which."""
    claims = module("claims")
    right, wrong = " ".join(["1"] * 100), " ".join(["0"] * 100)
    # a scene of each task that seeds disagree on: their spread is not nothing
    mixed = [f"{right[:-1]}{digit}" for digit in (0, 1, 1)]
    found = made_up(
        entry("tempflow_grpo", mixed, [0.5, 0.6, 0.7]),
        entry("flow_grpo_full", [wrong[:-1] + digit for digit in "010"], [0.5, 0.55, 0.6]),
    )
    tags = [f"task {i // 10}" for i in range(100)]
    found["base"] |= {"tags": tags, "scenes": [str(i) for i in range(100)], "outcomes": wrong}
    rows = {row["claim"]: row for row in claims.answers(found)}
    seen = rows["TempFlow-GRPO over Flow-GRPO"]
    assert seen["verdict"] == "seen" and seen["here"].startswith("+99.") and seen["p"] < 0.001
    waits = rows["SPO over Diffusion-DPO"]
    assert waits["verdict"] == "not measured yet" and math.isnan(waits["p"])
    assert "`shapes/spo` (a judge of noisy images first)" in waits["here"]
    measured = claims.contrast(
        claims.Contrast("reverse", "", "flow_grpo_full", "tempflow_grpo"), found
    )
    assert claims.verdict(measured, measured.p) == "contrary"
    assert claims.verdict(measured, 0.051) == "not seen"
    assert claims.verdict(measured._replace(failed=True), 0.0) == "cannot be tested here"
    # without a file no claim of gains is answered, and the counted ones are
    empty = [row["verdict"] for row in claims.answers({})]
    assert empty.count("not measured yet") == 8 and empty.count("seen") == 4


def test_how_much_faster_with_its_interval() -> None:
    """Slopes 4, 5 and 6 against 2, 2.5 and 3: twice as fast; the interval holds 1 where Welch's
    test finds nothing, and has no upper end where the slower one may stand still."""
    claims = module("claims")
    one, other = [4.0, 5.0, 6.0], [2.0, 2.5, 3.0]
    low, high = claims.fieller(one, other)
    names = ("shapes/a", "shapes/b")
    assert low < 2 < high and (low > 1) == (claims._faster(names, one, other, False).p < 0.05)
    assert claims.fieller(other, one) == pytest.approx((1 / high, 1 / low))
    assert claims.fieller(one, [1.0, 5.0, 0.1])[1] == math.inf
    fallen = claims._faster(names, one, [-1.0, 0.0, -2.0], False)
    assert fallen.text == "`shapes/b` did not rise"
    assert claims._faster(names, [1.0], other, False) is None


def test_costs_are_counted_and_not_written() -> None:
    """Of 25 steps DanceGRPO samples 24 and the shared first, and trains 14 of 24 draws; MixGRPO
    trains 4: the paper's -49 % in seconds are -48 % of the calls."""
    claims = module("claims")
    costs = {c.method: claims.saving(c) for c in claims.CLAIMS if isinstance(c, claims.Saving)}
    ends = [here.rpartition(": ")[2] for _, here, _ in costs.values()]
    assert ends[:3] == ["-48 %", "-70 %", "-76 %"]
    assert ends[3] == "4.5 times; 3.5 times beside DanceGRPO's own 16 steps"
    assert claims.calls("flux/branch_grpo_mix") == 16.25
    for said, here, _ in costs.values():
        assert re.match(r"\d+ s to \d+ s an iteration: ", said) and " calls an image: " in here


# -------------------------------------------------------------------------------------- the figures


def test_figures_show_the_intervals_of_the_tables() -> None:
    """In points: the bars of a gain are the table's; of the base model, those of its own table."""
    figures, methods_table = module("methods_figures"), module("methods_table")
    found = made_up(SLAS, entry("awm", ["11 10", "10 10", "11 11"], [0.5, 0.5, 0.5]))
    rows = methods_table.rows(found)
    numbers = figures.curve_numbers(found, rows)
    for row in rows:
        gain, low, high = numbers["gains"][row["config"].removeprefix("shapes/")]
        assert [gain, high - gain, gain - low] == pytest.approx(
            [100 * row["gain"], 100 * row["half"], 100 * row["half"]]
        )
    # three seeds on one line, a hundredth apart: rises of .02 each, but for the bend
    rises = numbers["curves"]["slas"]
    assert [x for x, _ in rises] == [20_000, 40_000, 60_000]
    assert rises[-1][1] - rises[0][1] == pytest.approx(10)
    chart = figures.chart_numbers(found, rows)
    assert {len(points) for points in chart["base"].values()} == {2}
    assert chart["base"]["base model, best of n"][-1][:2] == [20, 50.0]
    assert chart["trained"]["slas"][:2] == pytest.approx([10, 100 * 10 / 12])


def test_a_figure_with_other_numbers_is_stale(tmp_path: Path) -> None:
    """Its PNG holds what it shows; equal numbers give equal bytes; a changed one is found."""
    figures, pictures = module("methods_figures"), module("pictures")
    found = made_up(SLAS)
    numbers = figures.curve_numbers(found, module("methods_table").rows(found))
    one = pictures.Picture(tmp_path / "one.png", numbers, figures.draw_curves)
    assert not one.true()
    one.write()
    assert one.true() and one.path.stat().st_size < 100_000
    other = one._replace(path=tmp_path / "other.png")
    other.write()
    assert other.path.read_bytes() == one.path.read_bytes()
    moved = {**numbers, "gains": {"slas": [58.0, *numbers["gains"]["slas"][1:]]}}
    assert not one._replace(numbers=moved).true()
    assert pictures.near([0.1], [0.10001]) and not pictures.near([0.1], [0.1002])


# ------------------------------------------------------------------------ sentences about gains

SAID = re.compile(r"[+-]?\d+(?:\.\d+)? points\b")
MADE = re.compile(r"<!-- (\w+)[^>]*? -->.*?<!-- (?:end of \1|\1[^>]*?end)[^>]*? -->", re.DOTALL)
NO_GAINS = ("on shapes a spread is .3 to 3 points", '"Gains 2 to 5 points" has an interval')
"""Sentences with points that are no gain."""


def demonstrated(name: str, key: str) -> list[float]:
    """Return a gain of a result file and its interval in points."""
    found = kept(name)[key]
    return [100 * found["mean"], *(100 * end for end in found["interval"])]


def kept(name: str) -> Any:
    return json.loads((ROOT / f"assets/results/{name}.json").read_text(encoding="utf-8"))


def beside_the_judge() -> list[float]:
    """Return what the runs gained by the judge and by the checker, in points."""
    base, *runs = kept("judge")["targets"].values()
    gains = []
    for who in ("judge", "checker"):
        gains.append(100 * (sum(run[who] for run in runs) / len(runs) - base[who]))
    return gains


def color_pairs() -> list[float]:
    """Return the right share of held-out pairs of colours and of others, before and after."""
    found = kept("demonstration")
    shares = []
    for kind in ("held_out", "trained"):
        for key in ("base", "rl"):
            shares.append(100 * found[key]["combinations"][kind]["color_attr"])
    return shares


def between_the_settings() -> list[float]:
    """Return what the base model has with some guidance, and as the best of four."""
    found = kept("demonstration")["costs"]
    return [100 * found[name]["mean"] for name in ("guidance 3.5", "best of 4")]


def colors_kept() -> list[float]:
    """Return which share of the variety of colours the runs keep, with its interval."""
    found = kept("demonstration")["diversity_kept"]["rl"]["colors"]
    return [100 * found["mean"], *(100 * end for end in found["interval"])]


BOUND: dict[str, list[tuple[str, Callable[[], list[float]]]]] = {
    "README.md": [
        (
            r"is ([\d.]+) points \(([-\d.]+) to ([\d.]+)\) above the base model with its best",
            lambda: demonstrated("demonstration", "rl_minus_base_best_guidance"),
        ),
        (
            r"with its own best guidance and equal NFE it is ([\d.]+)\s+above",
            lambda: demonstrated("demonstration", "rl_best_guidance_minus_base_best_guidance")[:1],
        ),
        (
            r"guidance 3.5 has ([\d.]+) % at 20 NFE; the best of four, by the reward, ([\d.]+) %",
            between_the_settings,
        ),
        (
            r"held out of training rise from (\d+) to (\d+) % right, others from (\d+) to (\d+) %",
            color_pairs,
        ),
        (r"(\d+) % of the variety of colours is kept \((\d+) to (\d+) %\)", colors_kept),
    ],
    "docs/shapes.md": [
        (r"gains ([\d.]+) points where the checker sees ([\d.]+)", beside_the_judge),
        (
            r"gains ([\d.]+) points of right edits \(([\d.]+) to ([\d.]+);",
            lambda: demonstrated("edits", "strict"),
        ),
    ],
}
"""Page -> its sentences about gains that are written by hand, and the figures that they have."""


def by_hand(text: str) -> str:
    """Return what a page says outside of generated places and tables, in one line."""
    lines = MADE.sub("", text).splitlines()
    return " ".join(" ".join(line for line in lines if not line.startswith("|")).split())


def test_sentences_about_gains_are_those_of_the_result_files() -> None:
    """Every figure of points on a page is generated, or is bound here."""
    agrees, loose = module("figures").agrees, []
    for name, page in PAGES.items():
        text, spans = by_hand(page), list[range]()
        for pattern, values in BOUND.get(name, []):
            match = re.search(pattern, text)
            assert match, f"{name}: expected the sentence {pattern}"
            for said, value in zip(match.groups(), values(), strict=True):
                assert agrees(said, value), f"{name}: {said}, in the result file {value}"
            spans.append(range(*match.span()))
        for match in SAID.finditer(text):
            around = text[max(0, match.start() - 60) : match.end() + 60]
            known = any(match.start() in span for span in spans)
            if not known and not any(no in around for no in NO_GAINS):
                loose.append(f"{name}: {around}")
    assert loose == [], "bind it in BOUND, or let a script of scripts/results write it"


def test_what_is_found_as_a_sentence_about_a_gain() -> None:
    """What stands between the marks of one generated place is skipped, and nothing behind it."""
    text = "Gained 3.2 points.\n<!-- gain: x -->\n9.1 points\n<!-- gain: end -->\nBut 4 points.\n"
    assert SAID.findall(by_hand(f"{text}| 5 points |\n")) == ["3.2 points", "4 points"]
    assert SAID.findall(by_hand("<!-- a note -->\nIt is 4 points.\n")) == ["4 points"]
