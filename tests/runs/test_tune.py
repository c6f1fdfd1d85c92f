"""Searches of settings: combinations, ranking, the command on the toy field."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from toykit import write_toy

from flowrl.cli.main import main
from flowrl.cli.tune import read_choices
from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, DataError
from flowrl.runs.compare.result_file import setting
from flowrl.runs.compare.tuning import combinations, folder_of, ranked, read_tuning
from flowrl.runs.compare.tuning_report import tuning_rows
from flowrl.training.rehearsal import check_plan

SIX = Path(__file__).resolve().parents[2] / "scripts/research/six"
CHOICES = {"a": ["1", "2", "3"], "b": ["x", "y"], "c": ["p", "q"]}


def test_all_combinations_or_some_of_them() -> None:
    # oracle: itertools.product, whose last key runs fastest too
    every = []
    for values in itertools.product(*CHOICES.values()):
        pairs = zip(CHOICES, values, strict=True)
        every.append(tuple(f"{key}={value}" for key, value in pairs))
    assert combinations(CHOICES) == every and combinations(CHOICES, 99) == every
    some = combinations(CHOICES, 5, draw=1)
    assert len(set(some)) == 5 and some == [c for c in every if c in some]
    assert some == combinations(CHOICES, 5, draw=1) != combinations(CHOICES, 5, draw=2)
    # each of the 12 is drawn equally often: 2000 draws of 5, so 833 each, std 22
    drawn = [c for seed in range(2000) for c in combinations(CHOICES, 5, draw=seed)]
    assert all(abs(drawn.count(c) - 2000 * 5 / 12) < 5 * 22 for c in every)


@pytest.mark.parametrize(
    ("texts", "choices"),
    [
        (["a=1,2", "b=x"], {"a": ["1", "2"], "b": ["x"]}),
        (
            ["plan={fn: full, steps: 6},{fn: fork}"],
            {"plan": ["{fn: full, steps: 6}", "{fn: fork}"]},
        ),
        (["splits=[0, 1],[0, 2]"], {"splits": ["[0, 1]", "[0, 2]"]}),
        (["a=1, 2,"], {"a": ["1", "2"]}),
    ],
)
def test_values_of_a_key(texts: list[str], choices: dict[str, list[str]]) -> None:
    assert read_choices(texts) == choices


def test_folders_differ_wherever_trials_do() -> None:
    assert folder_of(["optimizer.lr=1e-4", "loss.beta=0.1"]) == "optimizer.lr=1e-4_loss.beta=0.1"
    one, two = folder_of(["plan={fn: full}"]), folder_of(["plan={fn; full}"])
    assert one != two and "/" not in one and " " not in one
    long = [folder_of([f"{'x' * 80}={value}"]) for value in (1, 2)]
    assert long[0] != long[1] and max(map(len, long)) < 80


def _trial(change: str, *scores: float | None) -> dict[str, Any]:
    runs = []
    for seed, score in enumerate(scores):
        failed = "NaN" if score is None else None
        run = {"seed": seed, "score": score, "failed": failed, "iterations": 3 + seed}
        runs.append({**run, "tasks": None if score is None else {"all": score}})
    return {"changes": [change], "runs": runs}


def test_the_best_has_the_best_mean_and_no_failure() -> None:
    trials = [_trial("lr=1", 0.2, 0.4), _trial("lr=2", 0.9, None), _trial("lr=3", 0.3, 0.3)]
    trials += [_trial("lr=4", 0.9), _trial("lr=5")]
    result: dict[str, Any] = {"trials": trials, "seeds": [0, 1], "choices": {"lr": list("12345")}}
    result |= {"base": {"score": 0.25, "tasks": {"all": 0.25}}, "score": "strict"}
    # by hand: .3 and .3 are equal, the first counts; one failed, two have not run all seeds
    assert ranked(result)["best"] == 0
    assert [t["score"] for t in result["trials"]] == [pytest.approx(0.3), None, 0.3, None, None]
    rows = tuning_rows(result)
    assert rows[0] == ["", "lr", "strict %", "iterations", "all"]
    assert rows[1] == ["*", "1", "30.0", "3 to 4", "30.0"]
    assert [row[2] for row in rows[3:6]] == ["failed", "not run yet", "not run yet"]
    assert rows[-1] == ["", "base model", "25.0", "", "25.0"]
    # scores that are no shares are told as they are
    trials[0]["runs"][0]["score"] = trials[0]["runs"][0]["tasks"]["all"] = 22.0
    assert tuning_rows(ranked(result))[1][1:3] == ["1", "11.200"]


def _command(folder: Path, *more: str, rates: str = "0.01,0.2") -> list[str]:
    argv = ["tune", str(write_toy(folder)), "--plugin", "toykit", "--count", "calls", "--quiet"]
    argv += ["--try", f"optimizer.lr={rates}", "loss.clip_low=0.2,0.3", "--nfe", "150"]
    argv += ["--set", "eval.score=red", "--seeds", "0", "1", "--runs", str(folder / "runs")]
    return [*argv, "--out", str(folder / "out.json"), *more]


@pytest.mark.integration
def test_the_command_on_the_toy_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The toy's reward rises with the rate, as far as these rates go: so the larger rate wins."""
    assert main(_command(tmp_path)) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    scores = {tuple(t["changes"]): t["score"] for t in result["trials"]}
    assert len(scores) == 4 and all(len(t["runs"]) == 2 for t in result["trials"])
    low, high = [scores[f"optimizer.lr={lr}", "loss.clip_low=0.2"] for lr in ("0.01", "0.2")]
    assert high > low > result["base"]["score"]
    best = result["trials"][result["best"]]
    assert best["changes"][0] == "optimizer.lr=0.2" and best["score"] == max(scores.values())
    # the score is that of the runs' own evaluations
    files = sorted((tmp_path / "runs" / best["folder"]).glob("seed*/result.json"))
    own = [json.loads(file.read_text())["at"]["nfe"]["score"] for file in files]
    assert best["score"] == pytest.approx(sum(own) / 2) and len(own) == 2
    # the best as a config that can be trained, with the config's own seed
    config = load_config(tmp_path / "best.yaml", (), ("toykit",))
    assert config.lr == 0.2 and config.seed == 3
    assert (tmp_path / "out.png").stat().st_size > 5000
    assert "| \\* | 0.2 |" in (tmp_path / "out.md").read_text()
    # all is there: nothing is trained again; a rate more is added to it
    stamps = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("result.json")}
    assert len(stamps) == 9 and main(_command(tmp_path, rates="0.01,0.2,0.05")) == 0
    assert stamps == {file: file.stat().st_mtime_ns for file in stamps}
    again = read_tuning(tmp_path / "out.json")
    assert len(again["trials"]) == 6 and again["trials"][0] == result["trials"][0]
    # the table alone, from the file
    capsys.readouterr()
    assert main(["tune", "toy", "--report-only", "--out", str(tmp_path / "out.json")]) == 0
    assert "base model" in capsys.readouterr().out
    # another budget is another search
    assert main(_command(tmp_path, "--nfe", "300")) == 2
    assert "holds another search" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--try", "eval.images=2,4"], "changes what every trial is judged on: eval.images"),
        (["--try", "train.group=4,200"], "train.group=200: one iteration samples with 1600"),
        (["--try", "loss.clip_low=0.2,0.3,0.2"], "comes twice"),
        (["--try", "train.updates=1,1"], "values that differ"),
        (["--try", "credit.nothing=1,2"], "nothing"),
        (["--seeds", "0"], "seeds that differ"),
    ],
)
def test_what_is_refused_before_anything_runs(
    tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_command(tmp_path, *more)) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "runs").rglob("metrics.jsonl"))


def test_no_key_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--try KEY=VALUE"):
        combinations({})
    (tmp_path / "x.json").write_text(json.dumps({"kind": "flowrl comparison", "format": 1}))
    with pytest.raises(DataError, match="expected a flowrl tuning"):
        read_tuning(tmp_path / "x.json")
    (tmp_path / "y.json").write_text(yaml.safe_dump([]))
    with pytest.raises(DataError, match="expected a flowrl tuning"):
        read_tuning(tmp_path / "y.json")


@pytest.mark.parametrize("file", sorted(SIX.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_configs_of_the_six_methods_can_be_trained(file: Path) -> None:
    config = load_config(file)
    check_plan(config)
    arm, _, method = file.stem.partition("_")
    assert config.name == f"{method}_{arm}".replace("_", "-")
    # all are judged alike
    first = load_config(min(SIX.glob("*.yaml")))
    assert setting(config) == setting(first)
