"""Factorial experiments: designs, effects of a known truth, runs on the toy field."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from toykit import write_toy

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.runs.compare import factorial
from flowrl.runs.compare.design import Design, d_optimal, efficiency, load_design, model_matrix
from flowrl.runs.compare.effects import analysed, effect_rows
from flowrl.runs.compare.outcomes import packed, unpacked

TWO = {f"x{i}": {"low": ["a=1"], "high": ["a=2"]} for i in range(6)}
MIXED: dict[str, Any] = {"kind": {"p": [], "q": [], "r": []}, **dict(list(TWO.items())[:4])}


def _design(folder: Path, axes: dict[str, Any], **more: Any) -> Design:
    return _written(folder, {"axes": axes, **more})


def _written(folder: Path, design: dict[Any, Any]) -> Design:
    file = folder / "design.yaml"
    file.write_text(yaml.safe_dump({"base": "toy", **design}, sort_keys=False))
    return load_design(file)


def test_a_half_of_two_to_the_sixth_is_orthogonal(tmp_path: Path) -> None:
    # known: 2^(6-1) of resolution VI tells all main effects and two-way interactions as well per
    # run as the full product, so the efficiency is 1
    design = _design(tmp_path, TWO, interactions="all", cells=32)
    assert len(set(design.cells)) == 32 and design.efficiency == pytest.approx(1.0)
    assert _design(tmp_path, TWO, interactions="all", cells=32) == design  # seeded


def test_exchange_finds_the_best_of_all_choices() -> None:
    # oracle: every choice of 6 of the 12 cells of 3 x 2 x 2
    axes = {"k": {"p": [], "q": [], "r": []}, "x": TWO["x0"], "y": TWO["x1"]}
    cells = list(itertools.product(range(3), range(2), range(2)))
    matrix = model_matrix(cells, axes, [])
    chosen = d_optimal(matrix, 6, 0)
    assert chosen is not None
    every = (
        efficiency(matrix, some)
        for some in itertools.combinations(range(12), 6)
        if np.linalg.matrix_rank(matrix[list(some)]) == 5
    )
    assert efficiency(matrix, chosen) == pytest.approx(max(every))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cells": 8}, "at least 32 cells"),
        ({"interactions": [["x0", "y"]]}, "pairs of"),
        ({"exclude": [{"x0": "none"}]}, "no such axis or level"),
        ({"axes": {"x0": {"low": []}}}, "two levels"),
        ({"exclude": [{"x0": "low"}]}, "cannot be told apart"),
        ({"sets": []}, "base, axes and some of"),
        ({1: [], "sets": []}, r"got \['1', 'axes', 'base', 'sets'\]"),
        ({"base": ["toy"]}, r"base: expected a config's name or file, .* got \['toy'\]"),
        ({"exclude": {"x0": "low"}}, r"exclude: expected a list of \{axis: level\}"),
        ({"exclude": ["x0"]}, "exclude: expected a list of .* got 'x0'"),
        ({"exclude": 3}, "exclude: expected a list of .* got 3"),
        ({"exclude": [{}]}, "exclude: expected a list of .* one or more, got {}"),
        ({"exclude": [{"x0": "low"}, {"x0": "high"}]}, "leaves none of 64 cells"),
        ({"cells": "many"}, "cells: expected a whole number >= 1, got 'many'"),
        ({"cells": 40.5}, "cells: expected a whole number >= 1, got 40.5"),
        ({"cells": 0}, "cells: expected a whole number >= 1, got 0"),
        ({"seed": -1}, "seed: expected a whole number >= 0, got -1"),
        ({"seed": True}, "seed: expected a whole number >= 0, got True"),
        ({"interactions": 3}, "interactions: expected a list of pairs of .* got 3"),
        ({"interactions": "some"}, "interactions: expected a list of pairs of .* got 'some'"),
        ({"interactions": [3]}, "interactions: expected a list of pairs of .* got 3"),
        ({"interactions": [["x0", ["x1"]]]}, "interactions: expected a list of pairs of"),
        ({"set": 3}, "set: expected a list of overrides such as .* got 3"),
        ({"set": "seed=1"}, "set: expected a list of overrides such as .* got 'seed=1'"),
        ({"axes": {"x0": {"low": "a=1", "high": []}}}, "x0, low: expected a list of overrides"),
    ],
)
def test_designs_that_are_refused(tmp_path: Path, changes: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _written(tmp_path, {"axes": TWO, **changes})


def test_a_date_that_is_none_is_named(tmp_path: Path) -> None:
    """YAML's own ValueError."""
    (tmp_path / "design.yaml").write_text("base: 2024-13-45\naxes: {}\n")
    with pytest.raises(ConfigError, match="design.yaml: cannot be read as a design: month must"):
        load_design(tmp_path / "design.yaml")


def _measured(design: Design, spread: float, rng: np.random.Generator) -> dict[str, Any]:
    """Make the result of runs whose truth is additive, but for one interaction.

    Per prompt: 0.3, +0.10 for kind q, +0.04 for x0 high, +0.06 more where both, and noise.
    """
    tags, easy = ["a"] * 6 + ["b"] * 6, np.linspace(-0.05, 0.05, 12)
    cells, runs = [], []
    for number, cell in enumerate(design.cells):
        levels = design.named(cell)
        q, high = levels["kind"] == "q", levels["x0"] == "high"
        truth = 0.3 + easy + 0.10 * q + 0.04 * high + 0.06 * (q and high)
        cells.append({"name": str(number), "levels": levels})
        for seed in range(3):
            values = truth + rng.normal(0, spread) + rng.normal(0, spread, 12)
            run = {"cell": str(number), "seed": seed, "score": float(values.mean())}
            runs.append({**run, "failed": None, "outcomes": packed([[v] for v in values])})
    stated = {"axes": design.axes, "interactions": [list(pair) for pair in design.interactions]}
    return {"design": stated, "cells": cells, "runs": runs, "tags": tags}


def test_effects_of_a_known_truth(tmp_path: Path) -> None:
    pairs = [["kind", "x0"]]
    design = _design(tmp_path, MIXED, interactions=pairs, cells=32)
    # by hand: mean over the two levels of x0, and over the three kinds
    truth = {
        "kind: q - p": 0.10 + 0.06 / 2,
        "kind: r - p": 0.0,
        "x0: high - low": 0.04 + 0.06 / 3,
        "kind: q x x0: high": 0.06,
        "kind: r x x0: high": 0.0,
        **{f"x{i}: high - low": 0.0 for i in (1, 2, 3)},
    }
    # without noise the estimates are the truth (outcomes are kept to six digits)
    exact = analysed(_measured(design, 0.0, np.random.default_rng(0)))["effects"]
    assert {e["name"]: e["estimate"] for e in exact} == pytest.approx(truth, abs=1e-5)
    # with noise: of 20 experiments x 8 effects 95 % of the intervals hold it, and Holm's rarely
    # sees what is not there
    hits, alarms = [], 0
    for seed in range(20):
        found = analysed(_measured(design, 0.03, np.random.default_rng(seed)))
        assert found["fit"]["cells"] == 32 and found["fit"]["terms"] == 9
        for effect in found["effects"]:
            low, high = effect["interval"]
            hits.append(low <= truth[effect["name"]] <= high)
        zero = [e for e in found["effects"] if truth[e["name"]] == 0]
        alarms += any(e["p_holm"] < 0.05 for e in zero)
    assert 0.92 <= np.mean(hits) <= 0.99 and alarms <= 4  # 5 % of 20, and three stds
    assert "kind: q - p" in [row[0] for row in effect_rows(found)[1:3]]


def test_too_few_runs_have_no_effects(tmp_path: Path) -> None:
    design = _design(tmp_path, MIXED, cells=32)
    result = _measured(design, 0.0, np.random.default_rng(0))
    few = {**result, "runs": [run for run in result["runs"] if int(run["cell"]) < 4]}
    assert analysed(few)["effects"] == [] and analysed(few)["fit"] is None


@pytest.mark.parametrize(
    "outcomes",
    [
        [[0.0, 1.0], [1.0, 1.0]],
        [[0.25, 1.0], [0.5, 0.125]],
        [[0.5]],
        [[-0.0, 1.0], [0.0, -0.0]],
        [[-0.0, 0.5], [-0.25, 0.0]],
    ],
)
def test_outcomes_come_back(outcomes: list[list[float]]) -> None:
    assert unpacked(packed(outcomes)) == outcomes
    assert "-0 " not in f"{packed(outcomes)} ".replace(",", " ")  # one zero, one word


@pytest.mark.parametrize("nfe", ["0", "-1", "nan", "inf"])
def test_a_budget_that_no_run_uses_up_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nfe: str
) -> None:
    """Before anything is written: -1 would train without end, and NaN stay in the runs' claims."""
    axes = {"rate": {"small": ["optimizer.lr=0.01"], "large": ["optimizer.lr=0.2"]}}
    design = {"base": str(write_toy(tmp_path)), "axes": axes}
    (tmp_path / "design.yaml").write_text(yaml.safe_dump(design))
    command = ["compare", "--factorial", str(tmp_path / "design.yaml"), "--plugin", "toykit"]
    command += ["--nfe", nfe, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out.json")]
    assert main(command) == 2
    assert f"expected a finite --nfe above 0, got {nfe}" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists() and not (tmp_path / "out.json").exists()


@pytest.mark.integration
def test_the_command_on_the_toy_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Known truth: how many states go through the network at a time changes no gradient, so its
    effect is zero; the learning rate's effect is the difference of the cells' means."""
    axes = {
        "rate": {"small": ["optimizer.lr=0.01"], "large": ["optimizer.lr=0.2"]},
        "micro batch": {"2": ["train.micro_batch=2"], "8": ["train.micro_batch=8"]},
    }
    design = {"base": str(write_toy(tmp_path)), "axes": axes, "set": ["eval.score=red"]}
    design |= {"interactions": "all"}
    (tmp_path / "design.yaml").write_text(yaml.safe_dump(design, sort_keys=False))
    command = ["compare", "--factorial", str(tmp_path / "design.yaml"), "--plugin", "toykit"]
    command += [
        "--seeds",
        "0",
        "1",
        "--nfe",
        "150",
        "--count",
        "calls",
        "--runs",
        str(tmp_path / "runs"),
    ]
    command += ["--out", str(tmp_path / "out.json"), "--quiet"]
    assert main(command) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    effects = {e["name"]: e for e in result["effects"]}
    zero = [
        effects[name]["estimate"] for name in ("micro batch: 8 - 2", "rate: large x micro batch: 8")
    ]
    assert zero == pytest.approx([0, 0], abs=1e-5)
    scores: dict[str, list[float]] = {"small": [], "large": []}
    names = {cell["name"]: cell["levels"]["rate"] for cell in result["cells"]}
    for run in result["runs"]:
        scores[names[run["cell"]]].append(run["score"])
    difference = np.mean(scores["large"]) - np.mean(scores["small"])
    assert (
        effects["rate: large - small"]["estimate"] == pytest.approx(difference)
        and difference > 0.01
    )
    assert (tmp_path / "out-effects.png").stat().st_size > 5000
    # all is there: the same command trains nothing and says the same
    stamps = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("result.json")}
    assert len(stamps) == 8 and main(command) == 0
    assert stamps == {file: file.stat().st_mtime_ns for file in stamps}
    assert json.loads((tmp_path / "out.json").read_text()) == result
    assert factorial.read_factorial(tmp_path / "out.json")["effects"] == result["effects"]
    capsys.readouterr()


def test_the_command_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a result with one run: to a file, and alone to standard output."""
    about: dict[str, Any] = {"kind": factorial.KIND, "format": factorial.FORMAT, "nfe": 1}
    about |= {"cells": [{"name": "cell000", "levels": {"rate": "low"}}], "score": "red"}
    spent = {"iterations": 1, "nfe": 1.0, "seconds": 1.0}
    about["runs"] = [{"cell": "cell000", "seed": 0, "score": 0.5, "failed": None, **spent}]
    about |= {"tags": ["all"], "environments": []}
    about["design"] = {"axes": {"rate": {"low": [], "high": []}}, "interactions": []}
    about["design"] |= {"fraction": "whole", "efficiency": 1}
    (tmp_path / "out.json").write_text(json.dumps(about))
    command = ["compare", "--factorial", "design.yaml", "--report-only"]
    command += ["--out", str(tmp_path / "out.json"), "--json"]
    assert main([*command, str(tmp_path / "told.json")]) == 0
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["kind"] == factorial.KIND and "out.md" in capsys.readouterr().out
    assert main([*command, "-"]) == 0
    assert json.loads(capsys.readouterr().out) == told


def test_what_cells_cannot_take_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """All in one message, also values that are the usual ones."""
    more = ["--seconds", "90", "--clock", "wall", "--points", "3", "--lr-search", "1", "2"]
    assert main(["compare", "--factorial", "design.yaml", *more]) == 2
    assert "leave out --lr-search, --seconds, --clock, --points" in capsys.readouterr().err
