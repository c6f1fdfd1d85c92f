"""A comparison whose files are damaged or another run's: one message that names the file and says
how to go on, and never another number."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comparekit import no_training, plan, rehearse_few, tick

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.runs.compare import one_run
from flowrl.runs.compare.compare import (
    Comparison,
    run_comparison,
    sample_grid,
    saved_result,
    write_comparison,
)
from flowrl.runs.compare.one_run import spend
from flowrl.runs.compare.records import (
    BaseFile,
    BudgetsRecord,
    RunFile,
    Settings,
    add_run,
    check_judged,
    mistake,
    read_result,
    stored,
)
from flowrl.runs.compare.summary import summarize_result
from flowrl.runs.stop import StopSignal

pytestmark = pytest.mark.integration
GONE = object()
WRONG = (GONE, None, "x", -1.0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Return a finished comparison of one config with two seeds."""
    what = plan(tmp_path_factory.mktemp("whole"), "toy-a", seeds=(0, 1))
    with pytest.MonkeyPatch.context() as patch:
        tick(patch)
        run_comparison(what, quiet=True)
    return what


@pytest.fixture
def copied(whole: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """Return a copy of it, in which nothing is trained any more."""
    no_training(monkeypatch)
    rehearse_few(monkeypatch)
    for name in ("runs", "out"):
        shutil.copytree(whole.runs.parent / name, tmp_path / name)
    return whole._replace(runs=tmp_path / "runs", out=tmp_path / "out" / "result.json")


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in a JSON value, of lists only of the first item."""
    keys = list(value) if isinstance(value, dict) else range(min(1, len(value)))
    for key in keys:
        yield (*above, key)
        if isinstance(value[key], dict | list):
            yield from places(value[key], (*above, key))


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy with another value at a path, or without it."""
    found = copy.deepcopy(tree)
    node = found
    for key in path[:-1]:
        node = node[key]
    if value is GONE:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return found


RUN, BASE = "runs/toy-a/seed0", "runs/base"
FILES = {
    f"{RUN}/result.json": "puts it together again",
    f"{RUN}/claim.json": "delete .*/seed0 to make the run again",
    f"{BASE}/result.json": "judges the base model again",
    "out/result.json": "name another --out",
}
"""File -> what its message says to do."""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "\xff", "[" * 100_000])
def test_a_file_that_is_torn(copied: Comparison, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises((RunError, DataError), match=f"(?s){name}.*{FILES[name]}"):
        run_comparison(copied, quiet=True)


@pytest.mark.parametrize("name", FILES)
def test_a_value_of_another_kind(
    copied: Comparison, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value of a file in turn, with each wrong one: a message that names the file, or what is
    compared, or the same result as before."""
    file, before = tmp_path / name, read_result(copied.out)
    good, kept = json.loads(file.read_text()), copied.out.read_text()
    if name != f"{RUN}/claim.json":  # which run the folder holds is then as it was
        monkeypatch.setattr(one_run, "check_same_run", lambda *_: None)
    mine = copied.load(copied.configs[0], "seed=0")
    refused = 0
    for path in places(good):
        if path[0] in ("environment", "environments", "load", "pairs") or "summary" in path:
            continue  # said, not counted with; or worked out anew
        if {"config", "equal", "setting", "trajectory", "last_quarter"} & {*path}:
            continue  # compared with the config's own, or shown only
        for value in WRONG[isinstance(path[-1], int) :]:  # a list may be shorter
            copied.out.write_text(kept)
            file.write_text(json.dumps(changed(good, path, value)))
            try:
                found = again(copied, mine)
            except (RunError, DataError, ConfigError) as error:
                assert str(file.parent) in str(error), (path, value, error)
                refused += 1
                continue
            # what is taken is plausible, and of the kind that belongs there, or has no say
            assert _numbers(found) == _numbers(before) or _alike(good, path, value), (path, value)
    assert refused > 20


def again(what: Comparison, mine: Config) -> dict[str, Any]:
    """Read all files, as a comparison does that is run again; its checks of the model are left
    out."""
    result = read_result(what.out)
    entry = result["configs"][0]
    found = spend(mine, what.runs / "toy-a/seed0", what.budgets, stop=StopSignal(), quiet=True)
    check_judged(found, result["base"], what.runs / "toy-a/seed0")
    base = stored(what.runs / "base", "result.json", BaseFile, "it judges the base model again")
    assert base
    add_run(result, entry, found)
    return summarize_result(result)


def _numbers(result: dict[str, Any]) -> Any:
    """Return what a comparison says of its configs."""
    summaries = [entry["summary"] for entry in result["configs"]]
    return json.dumps([summaries, result["base"]["score"]], sort_keys=True)


def _alike(tree: Any, path: tuple[Any, ...], value: Any) -> bool:
    """Say whether a wrong value is of the right kind: a number for a number, a list for a list."""
    for key in path:
        tree = tree[key]
    if path[-1] == "failed":  # a text says that the run failed
        return value == "x"
    numbers = isinstance(tree, int | float) and isinstance(value, int | float)
    return numbers and value == value or (type(tree) is type(value) and not value)


def test_the_result_of_another_run(copied: Comparison, tmp_path: Path) -> None:
    """Copied from another seed or with another rate, it would count twice."""
    other = (tmp_path / "runs/toy-a/seed1/result.json").read_text()
    mine = tmp_path / RUN / "result.json"
    whole = mine.read_text()
    mine.write_text(other)
    with pytest.raises(ConfigError, match=r"seed0/result.json: expected the result of seed 0, got"):
        run_comparison(copied, quiet=True)
    mine.write_text(json.dumps({**json.loads(whole), "lr": 0.5}))
    with pytest.raises(ConfigError, match="expected the result of lr 0.01, got that of 0.5"):
        run_comparison(copied, quiet=True)
    # judged on fewer prompts
    found = json.loads(whole)
    found["at"]["nfe"]["outcomes"] = "01 11"
    mine.write_text(json.dumps(found))
    with pytest.raises(RunError, match=r"at\.nfe\.outcomes: expected 6 prompts.* got 2; delete it"):
        run_comparison(copied, quiet=True)
    # as the message says: without the file it is put together again, and nothing is trained
    mine.unlink()
    copied.out.unlink()
    run_comparison(copied, quiet=True)
    assert json.loads(mine.read_text())["curve"] == json.loads(whole)["curve"]


def test_files_that_are_missing_or_logs_that_are_damaged(
    copied: Comparison, tmp_path: Path
) -> None:
    folder = tmp_path / RUN
    (folder / "config.yaml").rename(folder / "kept.yaml")
    with pytest.raises(ConfigError, match="holds a result.json without the config.yaml"):
        run_comparison(copied, quiet=True)
    (folder / "kept.yaml").rename(folder / "config.yaml")
    (folder / "claim.json").rename(folder / "kept.json")
    with pytest.raises(RunError, match="claim.json: is missing; put it back, or delete"):
        run_comparison(copied, quiet=True)
    (folder / "kept.json").rename(folder / "claim.json")
    # the logs that a result is put together from
    (folder / "result.json").unlink()
    for name, key in (("metrics.jsonl", "total_nfe"), ("eval.jsonl", "interval")):
        kept = (folder / name).read_text()
        first, *rest = kept.splitlines()
        row = json.loads(first)
        for value in ("x", None, [["x"]]):
            text = "\n".join([json.dumps({**row, key: value}), *rest, ""])
            (folder / name).write_text(text)
            with pytest.raises(RunError, match=rf"{name}, (iteration|line) \d: .*{key}"):
                run_comparison(copied, quiet=True)
        (folder / name).write_text(kept)
    run_comparison(copied, quiet=True)


def test_the_grid_of_damaged_samples(copied: Comparison, tmp_path: Path) -> None:
    """The report is made without a base that is not its own, and names texts that are none."""
    result = saved_result(copied.out)
    assert sample_grid(result, copied.runs) is not None
    (tmp_path / BASE / "samples/prompts.json").write_text("{")
    with pytest.raises(RunError, match=r"prompts\.json: expected"):
        write_comparison(result, copied.out, tmp_path, copied.runs)
    (tmp_path / BASE / "result.json").write_text("{}")
    assert sample_grid(result, copied.runs) is None


def test_the_first_mistake_is_named() -> None:
    """By hand, of values within lists and objects."""
    assert mistake({"name": "a"}, RunFile) == "seed: expected this key, which is missing"
    budgets = {"nfe": 1.0, "seconds": 0, "points": 1, "clock": "wall", "counted": "calls"}
    assert mistake(budgets, BudgetsRecord) is None
    for value in (True, "1", 1.5, None):
        said = mistake({**budgets, "points": value}, BudgetsRecord)
        assert said is not None and said.startswith("points: expected a valid integer, got ")
    assert "greater than 0" in str(mistake({**budgets, "nfe": 0}, BudgetsRecord))
    assert "finite number" in str(mistake({**budgets, "seconds": float("nan")}, BudgetsRecord))
    settings = {"score": "red", "equal": {}, "search": {"factors": [1.0, "2"]}}
    assert str(mistake(settings, Settings)).startswith("search.factors[1]: expected a valid number")
    assert str(mistake([], Settings)).startswith("the file: expected ")
