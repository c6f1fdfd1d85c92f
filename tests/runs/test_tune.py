"""Searches of settings: the command on the toy field, going on, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toykit import write_toy

from flowrl.cli.main import main
from flowrl.config.load import load_config
from flowrl.core.errors import RunError
from flowrl.runs.compare import tuning
from flowrl.runs.compare.budgets import comparable
from flowrl.runs.compare.one_run import spend
from flowrl.runs.compare.tuning_file import read_tuning
from flowrl.runs.locks import lock
from flowrl.runs.stop import Interrupted

CLIPS = "loss.clip_low=0.2,0.3"


def _command(
    folder: Path, *more: str, tries: tuple[str, ...] = (), seeds: tuple[str, ...] = ("0", "1")
) -> list[str]:
    argv = ["tune", str(write_toy(folder)), "--plugin", "toykit", "--count", "calls", "--quiet"]
    argv += ["--try", *(tries or ("optimizer.lr=0.01,0.2", CLIPS)), "--nfe", "150"]
    argv += ["--set", "eval.score=red", "--seeds", *seeds, "--runs", str(folder / "runs")]
    return [*argv, "--out", str(folder / "out.json"), *more]


def _stamps(folder: Path) -> dict[Path, int]:
    files = (folder / "runs").rglob("result.json")
    return {file: file.stat().st_mtime_ns for file in files}


@pytest.mark.integration
def test_the_command_on_the_toy_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The toy's reward rises with the rate, as far as these rates go: so the larger rate wins."""
    assert main(_command(tmp_path)) == 0
    result = read_tuning(tmp_path / "out.json")
    scores = {tuple(t["changes"]): t["score"] for t in result["trials"]}
    assert len(scores) == 4 and all(len(t["runs"]) == 2 for t in result["trials"])
    low, high = [scores[f"optimizer.lr={lr}", "loss.clip_low=0.2"] for lr in ("0.01", "0.2")]
    assert high > low > result["base"]["score"]
    best = result["trials"][result["best"]]
    assert best["changes"][0] == "optimizer.lr=0.2" and best["score"] == max(scores.values())
    # the score is that of the runs' own evaluations
    folders = sorted((tmp_path / "runs" / best["folder"]).glob("seed*"))
    own = [json.loads((f / "result.json").read_text())["at"]["nfe"]["score"] for f in folders]
    assert best["score"] == pytest.approx(sum(own) / 2) and len(own) == 2
    # the best as a config that can be trained: the run's own, with the config's own seed
    config = load_config(tmp_path / "out-best.yaml", (), ("toykit",))
    trained = load_config(folders[0] / "config.yaml", (), ("toykit",))
    assert comparable(config) == {**comparable(trained), "seed": 3}
    assert (tmp_path / "out.png").stat().st_size > 5000
    assert "\\* | " in (tmp_path / "out.md").read_text()
    # all is there: nothing is trained again
    stamps = _stamps(tmp_path)
    assert len(stamps) == 9 and main(_command(tmp_path)) == 0 and stamps == _stamps(tmp_path)
    assert read_tuning(tmp_path / "out.json") == result
    # the table alone, from the file
    capsys.readouterr()
    assert main(["tune", "--report-only", "--out", str(tmp_path / "out.json")]) == 0
    assert "base" in capsys.readouterr().out
    assert main(["tune", "--report-only", "--out", str(tmp_path / "out.json"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == result
    # another budget is another search
    assert main(_command(tmp_path, "--nfe", "300")) == 2
    assert "holds another search" in capsys.readouterr().err
    # other settings of all trials too, before anything is trained
    more = ["--set", "loss.clip_high=0.3", "--out", str(tmp_path / "two.json")]
    assert main(_command(tmp_path, *more)) == 2
    assert "holds a run of another config" in capsys.readouterr().err
    assert stamps == _stamps(tmp_path)


@pytest.mark.integration
def test_values_and_seeds_are_added(tmp_path: Path) -> None:
    """In whichever order they come; what was there stays, and is not trained again."""
    first = _command(tmp_path, seeds=("0",), tries=("optimizer.lr=0.2", "train.updates=1,2"))
    assert main(first) == 0
    stamps = _stamps(tmp_path)
    tries = ("train.updates=2,1", "optimizer.lr=0.05")  # the keys the other way round
    assert main(_command(tmp_path, seeds=("0",), tries=tries)) == 0
    result = read_tuning(tmp_path / "out.json")
    assert result["choices"] == {"optimizer.lr": ["0.2", "0.05"], "train.updates": ["1", "2"]}
    assert [len(trial["runs"]) for trial in result["trials"]] == [1, 1, 1, 1]
    assert result["best"] is not None
    assert stamps == {file: file.stat().st_mtime_ns for file in stamps}
    # a seed more for two of them: the others wait for it, and there is no best
    assert main(_command(tmp_path, seeds=("1",), tries=tries)) == 0
    later = read_tuning(tmp_path / "out.json")
    assert (later["seeds"], later["best"]) == ([0, 1], None)
    assert [len(trial["runs"]) for trial in later["trials"]] == [1, 1, 2, 2]
    assert not (tmp_path / "out-best.yaml").exists()


@pytest.mark.integration
def test_a_stop_and_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was finished is in the file after a stop; a run that breaks cannot be the best."""
    calls = list[str]()

    def once(config: Any, folder: Path, *args: Any, **more: Any) -> Any:
        if len(calls) == 1:
            raise Interrupted("stopped")
        calls.append(folder.parent.name)
        return spend(config, folder, *args, **more)

    monkeypatch.setattr(tuning, "spend", once)
    tries = ("optimizer.lr=0.05,1e30",)
    assert main(_command(tmp_path, seeds=("0",), tries=tries)) == 130
    result = read_tuning(tmp_path / "out.json")
    assert [len(trial["runs"]) for trial in result["trials"]] == [1, 0] and result["best"] is None
    monkeypatch.undo()
    assert main(_command(tmp_path, seeds=("0",), tries=tries)) == 0
    result = read_tuning(tmp_path / "out.json")
    assert result["best"] == 0 and result["trials"][1]["score"] is None
    assert "Trial 2, seed 0, failed: " in (tmp_path / "out.md").read_text()
    assert (tmp_path / "out-best.yaml").exists()


@pytest.mark.integration
def test_all_trials_count_at_one_price(tmp_path: Path) -> None:
    """Measured once: equal work takes equally many iterations, whatever the clock says."""
    tries = ("optimizer.lr=0.01,0.0100001,0.0100002",)
    command = _command(tmp_path, "--count", "cost", "--nfe", "600", tries=tries, seeds=("0",))
    assert main(command) == 0
    found = read_tuning(tmp_path / "out.json")
    runs = {(trial["runs"][0]["iterations"], trial["runs"][0]["nfe"]) for trial in found["trials"]}
    assert len(found["trials"]) == 3 and len(runs) == 1
    assert len(list((tmp_path / "runs").rglob("prices.json"))) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--try", "eval.images=2,4"], "changes what every trial is judged on: eval.images"),
        (["--try", "train.group=4,8"], "train.group=8: one iteration takes 208 network"),
        (["--try", CLIPS], "loss.clip_low: comes twice"),
        (["--try", "train.updates=1,1"], "train.updates: expected values that differ, got 1, 1"),
        (["--try", "credit.nothing=1,2"], "has no argument 'nothing'"),
        (["--try", "seed=1,2"], "--seeds says which seeds"),
        (["--try", "optimizer={fn: adamw, lr: 0.1}"], "optimizer.lr lies in it"),
        (["--try", "train.iterations=4,5"], "is the same run as"),
        (["--try", "monitors.gradients.action=warn,stop"], "is the same run as"),
        (["--try", "loss.clip_high=0.2,"], "parted by commas"),
        (["--try=loss.clip_high=[0.2", "b=3"], "has no partner"),
        (["--trials", "-1"], "--trials: expected 0 or more"),
        (["--seeds", "0"], "--seeds: expected seeds that differ"),
        (["--nfe", "0"], "--nfe: expected more than 0"),
        (["--out", "x.md"], "ends in .json"),
        (["--try", "credit={fn: group_norm},{fn: sibling_norm}"], "gives every decision the"),
        (["--report-only"], "or --report-only without them"),
    ],
)
def test_what_is_refused_before_anything_runs(
    tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nfe = [] if "--nfe" in more else ["--nfe", "120"]
    assert main(_command(tmp_path, *nfe, *more)) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list((tmp_path / "runs").rglob("metrics.jsonl"))


def test_the_config_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out-best.yaml").write_bytes(write_toy(tmp_path).read_bytes())
    command = _command(tmp_path)
    command[1] = str(tmp_path / "out-best.yaml")
    assert main(command) == 2 and "would overwrite" in capsys.readouterr().err


def test_one_process_at_a_time(tmp_path: Path) -> None:
    config = write_toy(tmp_path)
    what = tuning.Tuning(
        str(config), {"optimizer.lr": ["0.1"]}, (0,), 200, tmp_path, tmp_path / "o.json"
    )._replace(plugins=("toykit",))
    with lock(tmp_path, mend=""), pytest.raises(RunError, match="works in it now"):
        tuning.run_tuning(what)
