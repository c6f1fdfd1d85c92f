"""What stops hacking: the table is worked out from the outcomes, the file keeps its protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats
from scriptkit import script_module

from flowrl.training.rehearsal import check_plan

HACKING = script_module("results/hacking")


def judged(outcomes: str, head: float) -> dict[str, Any]:
    """Return one run as the file keeps it: two prompts with two images each."""
    right = [word.count("1") / 2 for word in outcomes.split()]
    tasks = dict(zip(("even", "odd"), right, strict=True))
    rewards = {"head": head, "strict": sum(right) / 2}
    return {"iteration": 4, "rewards": rewards, "tasks": tasks, "outcomes": outcomes}


def made_up() -> dict[str, Any]:
    """Return a file with two rows: the proxy rose in both, the truth in one of them."""
    base = {**judged("11 00", 0.5), "tags": ["even", "odd"]}
    plain = {"0": judged("10 00", 0.9), "1": judged("00 00", 0.8), "2": {"failed": "NaN"}}
    held = {"0": judged("11 10", 0.6), "1": judged("11 11", 0.6), "2": judged("11 10", 0.7)}
    return {"configs": [], "judged": {"base": base, "nothing": plain, "kl": held}}


def test_the_rows_by_hand() -> None:
    """The base has half of the images right. Without a remedy 1/4 and 0 are, and one run broke:
    -37.5 points, the proxy +35. With it 3/4, 1 and 3/4: +33.3; the proxy +13.3."""
    first, last = HACKING.rows(made_up())
    assert (first["config"], last["config"]) == ("kl", "nothing")
    assert first["gain"] == pytest.approx(1 / 3) and last["gain"] == pytest.approx(-0.375)
    assert first["proxy"] == pytest.approx(2 / 15) and last["proxy"] == pytest.approx(0.35)
    assert (last["seeds"], last["failed"], last["below"], first["below"]) == (2, 1, 2, 0)
    # Student's interval over the seeds
    half = stats.t.ppf(0.975, 2) * np.std([0.1, 0.1, 0.2], ddof=1) / np.sqrt(3)
    assert first["proxy_half"] == pytest.approx(half)
    # Holm: the smaller of two counts twice
    small, large = sorted([first, last], key=lambda row: row["p"])
    assert small["holm"] == pytest.approx(min(1, 2 * small["p"])) and large["holm"] >= large["p"]
    lines = HACKING.table([first, last]).splitlines()
    assert [cell.strip() for cell in lines[-1].strip("|").split("|")][-1] == "3 of 3"
    assert "+33.3" in lines[2] and "-37.5" in lines[3]


def test_every_row_trains_on_the_head_and_never_on_the_checker() -> None:
    """The checker is watched with weight 0; whatever judges beside the head is another head."""
    for name in HACKING.ROWS:
        if name == HACKING.EARLY:
            continue  # it trains nothing
        config = HACKING.config_of(name).to_dict()
        rewards, aggregate = config["rewards"], config.get("aggregate") or {}
        counted = {row["fn"] for row in rewards.values() if row.get("weight", 1.0)}
        assert counted <= {"verdict_head", "win_rate", "adversarial"}, name
        assert rewards["strict"]["weight"] == 0 and config["eval"]["score"] == "strict"
        assert "strict" not in [*aggregate.get("doubted_by", ()), *aggregate.get("above", {})]
        assert {"head", "strict"} <= rewards.keys()


def test_rows_differ_in_their_remedy_alone() -> None:
    """Model, optimizer and batch are those of the row without a remedy; VGPO has its own plan, of
    which three images of a prompt share a noise. Every plan can be drawn."""
    plain = HACKING.config_of(HACKING.NOTHING).to_dict()
    for name in HACKING.ROWS:
        mine = HACKING.config_of(name).to_dict()
        check_plan(HACKING.config_of(name))
        own = ("plan",) if name == "vgpo" else ()
        if name == "vgpo":
            assert mine["train"].pop("group") == 24 and plain["train"]["group"] == 8
            mine["train"]["group"] = 8
        for section in ("model", "prompts", "image", "plan", "loss", "optimizer", "train", "eval"):
            assert section in own or mine[section] == plain[section], (name, section)


def test_the_file_keeps_its_protocol() -> None:
    """What the file has was judged with its budget, and each run spent it."""
    found = HACKING.read()
    if not found:
        pytest.skip("no row was trained yet")
    assert found["budgets"]["nfe"] == HACKING.NFE
    assert f"{HACKING.NFE:,} network evaluations" in HACKING.PAGE.read_text(encoding="utf-8")
    for name, runs in found["judged"].items():
        if name in ("base", HACKING.EARLY, HACKING.ROLLBACK):
            continue
        for seed, one in runs.items():
            run = HACKING._curve_of(found, name, int(seed))
            assert run["failed"] or run["nfe"] >= HACKING.NFE
            assert run["failed"] or one["iteration"] == run["iterations"]


def test_the_figure_shows_means_over_seeds() -> None:
    """Two seeds at 1,000 evaluations: a proxy of 40 and 60 %, a truth of 50 and 30 %. The run that
    goes back says where all begin, and is placed by its share of the budget."""
    figure = script_module("results/hacking_figure")

    def seen(head: float, strict: float, **where: float) -> dict[str, Any]:
        return {**where, "rewards": {"head": head, "strict": strict}}

    curves = [[seen(0.4, 0.5, nfe=1000.0)], [seen(0.6, 0.3, nfe=1000.0)], []]
    runs = [{"seed": seed, "curve": curve} for seed, curve in enumerate(curves)]
    begins = [seen(0.2, 0.8, iteration=0), seen(0.3, 0.7, iteration=2)]
    back = {"iteration": 4, "curve": begins}
    judged = {"nothing": dict.fromkeys("012"), "rollback": dict.fromkeys("012", back)}
    judged["kl"] = dict.fromkeys("01")  # one seed is missing: no row yet
    shown = figure.numbers(
        {"configs": [{"name": "hacking-nothing", "seeds": runs}], "judged": judged}
    )
    assert shown["base"] == [[0.0, 20.0, 80.0]]
    assert shown["rows"]["nothing"] == [pytest.approx([1000, 50, 40])]
    assert shown["rows"]["rollback"] == [pytest.approx([HACKING.NFE / 2, 30, 70])]
    assert [*shown["rows"]] == ["nothing", "rollback"]


def test_what_happens_without_a_remedy_is_said() -> None:
    """From half right to a quarter and none; the proxy rose in both runs that ended."""
    assert HACKING.unprotected(made_up()) == (
        "Without a remedy the share of right images went from 50.0 % to 25.0 %, 0.0 %, "
        "seed by seed; the proxy rose in 2 of 2."
    )


def test_the_best_remedy_that_never_asks_the_checker_is_named() -> None:
    """The row without a remedy, early stop and the rollback do not count."""
    rows = [{"config": name, "gain": gain} for name, gain in [("rollback", 0.1), ("kl", -0.275)]]
    assert HACKING.best_blind(rows) == (
        "Of the remedies that never ask the checker KL to the base model kept most of the truth: "
        "-27.5 points."
    )
