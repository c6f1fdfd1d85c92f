"""scripts/measured.py: what the docs say of the comparison is what its result file says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from scriptkit import script_module
from test_comparison import config, result

from flowrl.comparison import summarize
from flowrl.config import load_config
from flowrl.resources import list_configs

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_module("measured")


def test_pages_and_readme_hold_what_the_result_file_says(script: ModuleType) -> None:
    """The committed docs against the committed result file, or its absence."""
    found, places = script.load(), script.targets()
    for path, fill in places:
        text = path.read_text(encoding="utf-8")
        assert fill(text, found) == text, f"{path.name} is stale: run python scripts/measured.py"
    assert {"README.md", "dance_grpo.md", "dance_grpo.yaml"} <= {path.name for path, _ in places}


def test_the_table_of_the_engine_s_cost_is_its_result_file() -> None:
    module = script_module("bench_plans")
    results, text = json.loads(module.RESULT.read_text(encoding="utf-8")), module.PAGE.read_text(encoding="utf-8")
    assert module.filled(text, results) == text, "docs/compare.md is stale: run python scripts/bench_plans.py --table"
    wanted = {name for name in list_configs() if name.startswith("shapes/")} - {"shapes/adv_grpo"}
    assert results.keys() == wanted and all(f"| `{name}` |" in text for name in wanted)


def test_a_result_is_filled_in_once_and_replaced_by_the_next(script: ModuleType) -> None:
    """Mean and Student interval of the made-up scores are those of flowrl.comparison, tested there."""
    made = summarize(result(config("shapes-dance-grpo", [0.30, 0.32, 0.34]), config("shapes-vgpo", [0.2, 0.21, 0.22])))
    before = "x\n\n<!-- measured: dance_grpo -->\n`shapes/dance_grpo`: not compared yet.\n\ny\n"
    once = script.page(before, made)
    assert "→ 32.0 %" in once and "place 1 of 2" in once and once.endswith("\n\ny\n") and "not compared" not in once
    assert script.page(once, made) == once
    assert script.page(once, None) == before
    row = "| [DanceGRPO](p.md) | `shapes/dance_grpo` `sd3/dance_grpo` | paper | exact | |"
    assert script.readme(row, made).startswith(row[:-2] + " ") and "→ 32.0 %" in script.readme(row, made)
    assert script.readme(script.readme(row, made), made) == script.readme(row, made)
    other = "| [G2RPO](p.md) | `shapes/g2rpo` | paper | exact | |"
    assert script.readme(other, made) == other
    assert script.readme(script.readme(row, made), None) == row  # no number outlives its file
    by_hand = "| [Adv](p.md) | `shapes/adv_grpo` | paper | exact | 39 % to 63 % |"
    assert script.readme(by_hand, made) == by_hand


def test_the_table_of_the_page(script: ModuleType) -> None:
    made = summarize(result(config("shapes-vgpo", [0.2, 0.22]), config("shapes-g2rpo", [0.3, 0.34])))
    bare = f"a\n\n{script.TABLE}\n\n{script.TABLE_END}\n\nb\n"
    once = script.tables(bare, made)
    assert "| g2rpo |" in once and "\n- (a) after 100 network evaluations" in once and once.endswith("\n\nb\n")
    assert script.tables(once, made) == once and script.tables(once, None) == bare


def test_the_compared_configs_are_the_shipped_ones(script: ModuleType) -> None:
    """Every axis and number of training that the result file has, but for the rate that was searched."""
    for compared in (script.load() or {"configs": []})["configs"]:
        shipped = load_config(compared["file"]).to_dict()
        for section in ("plan", "transition", "credit", "segment", "select", "loss", "kl", "train"):
            there = compared["config"].get(section)
            if not isinstance(there, dict):
                assert section == "select" or there is None
                continue
            free = ("iterations", "threads", "lr") if section == "train" else ()
            wrong = {k: v for k, v in there.items() if k not in free and shipped[section].get(k) != v}
            assert wrong == {}, f"{compared['file']}: {section} {wrong}"
        search = compared["search"]
        assert search is None or search["own_lr"] == shipped["train"]["lr"]


CLAIMS = {  # row of docs/compare.md: the pairs that it speaks of, and at which budget
    "Flow-GRPO-Fast": [("flow-grpo-fast", "flow-grpo-full", "evaluations")],
    "MixGRPO beats": [("mix-grpo", "dance-grpo", "evaluations"), ("mix-grpo", "dance-grpo", "seconds")],
    "TempFlow-GRPO beats DanceGRPO": [("tempflow-grpo", "dance-grpo", "evaluations")],
    "TempFlow-GRPO beats Flow-GRPO": [("tempflow-grpo", "flow-grpo-full", "evaluations")],
    "MixGRPO-Flash": [("mix-grpo-flash", "mix-grpo", "evaluations")],
    "BranchGRPO": [("branch-grpo", "dance-grpo", "evaluations"), ("branch-grpo-mix", "branch-grpo", "evaluations")],
    "G2RPO": [("g2rpo", "mix-grpo", "evaluations"), ("g2rpo", "dance-grpo", "evaluations")],
    "CPS": [("flow-grpo-cps", "flow-grpo-full", "evaluations")],
    "TP-GRPO": [("tp-grpo", "flow-grpo-full", "evaluations")],
    "Chunk-GRPO": [("chunk-grpo", "flow-grpo-full", "evaluations"), ("chunk-grpo", "dance-grpo", "evaluations")],
    "VGPO": [("vgpo", "flow-grpo-full", "evaluations")],
    "Dynamic-TreeRPO": [
        ("dynamic-treerpo", "mix-grpo", "evaluations"),
        ("dynamic-treerpo", "dance-grpo", "evaluations"),
    ],
    "GRPO-Guard": [("grpo-guard", "flow-grpo-full", "evaluations")],
}


def test_the_reading_has_the_numbers_of_the_file(script: ModuleType) -> None:
    """Differences in points and p after Holm of every claim, in the order of its row."""
    made = script.load()
    text = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8").partition("\n| published |")[2]
    rows = [line.split(" | ") for line in text.partition("\n\n")[0].splitlines()[2:]]
    assert len(rows) == len(CLAIMS)
    for (claim, pairs), row in zip(CLAIMS.items(), rows, strict=True):
        assert row[0].startswith(f"| {claim}")
        differences, chances = [], []
        for one, other, budget in pairs:
            tested = made["pairs"][budget]
            i, j = (tested["names"].index(f"shapes-{name}") for name in (one, other))
            p = tested["p_holm"][i][j]
            differences.append(f"{100 * tested['difference'][i][j]:+.1f}".replace("-", "−"))
            chances.append(f"{p:.2f}" if p >= 0.005 else "<0.01")
        assert re.findall(r"[+−][\d.]+", row[2]) == differences, claim
        assert row[3].removesuffix(" |").split("; ") == chances, claim


def test_the_header_of_a_config(script: ModuleType) -> None:
    made = summarize(result(config("shapes-vgpo", [0.2, 0.22])))
    text = "# VGPO.\n#\n# paper      x\n# result     old,\n#            and more\n#\n# note\nname: shapes-vgpo\n"
    said = script.header(text, made, "vgpo")
    wanted = "strict accuracy 20.0 % -> 21.0 % after 100 network evaluations, mean of 2 seeds (docs/compare.md)"
    assert said == text.replace("old,\n#            and more", wanted) and script.header(said, made, "vgpo") == said
    assert script.header(text, made, "g2rpo") == text == script.header(text, None, "vgpo")


def test_runs_that_failed_and_single_seeds_are_said(script: ModuleType) -> None:
    made = summarize(result(config("shapes-vgpo", [0.2, 0.22], "NaN"), config("shapes-g2rpo", [0.3])))
    vgpo, g2rpo = (script.sentence(made, name) for name in ("vgpo", "g2rpo"))
    assert ", 1 more failed, place 2 of 2" in " ".join(vgpo.split())
    assert "over 1 seeds, place 1" in " ".join(g2rpo.split())
    row = script.readme("| [VGPO](p.md) | `shapes/vgpo` | paper | exact | |", made)
    assert row.endswith(", 1 more failed |") and script.readme(row, None).endswith("| exact | |")
    assert script.cell(made, made["configs"][0]) == "20.0 % → 30.0 %"
    made["budgets"]["clock"] = "processor"
    assert "processor seconds" in " ".join(script.sentence(made, "vgpo").split())
