"""What is kept under a name belongs to a content: models, rewards, images and measures that change
under their names."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from runkit import rows
from safetensors.torch import load_file, save_file
from serving import served
from toykit import redness, toy, write_toy

from flowrl.cli.main import main
from flowrl.config.load import Config, load_config
from flowrl.core.errors import DataError, RunError
from flowrl.core.shipped_files import resource
from flowrl.runs.suite import run_suite
from rewards.remote.http import make_app
from rewards.remote.read_request import RequestLimits
from rewards.remote.request_queue import RequestQueue

RED = "rewards={red: {fn: toykit.redness}}"


def judged(target: object, prompts: Path, out: Path, *more: str) -> int:
    """Run a suite of a plugin's reward from the command line -> the exit code."""
    argv = ["eval", str(target), "--suite", "aesthetic", "--prompts", str(prompts)]
    return main([*argv, "--out", str(out), "--plugin", "toykit", "--set", RED, *more])


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


# ---------------------------------------------------------------------- another model by the name


def test_a_run_of_the_same_name_with_another_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command after a training with another rate: no score of before, no image gone."""
    config, run, out = write_toy(tmp_path / "toy"), tmp_path / "run", tmp_path / "out"
    test = tmp_path / "toy" / "test.jsonl"
    train = ["train", str(config), "--run", str(run), "--plugin", "toykit", "--quiet"]
    assert main([*train, "optimizer.lr=0.01"]) == 0
    assert judged(run, test, out) == 0
    before, score = contents(out), json.loads((out / "summary.json").read_text())["red"]
    # as it is the folder is taken again
    assert judged(run, test, out) == 0 and contents(out) == before
    shutil.rmtree(run)
    assert main([*train, "optimizer.lr=0.3"]) == 0
    capsys.readouterr()
    assert judged(run, test, out) == 2
    told = capsys.readouterr()
    assert "holds images of another model" in told.err and "checkpoint" in told.err
    assert "--out" in told.err and told.out == "" and contents(out) == before
    # another folder has the new score; the old one is still good to compare with
    assert judged(run, test, tmp_path / "new", "--against", str(out)) == 0
    report = json.loads((tmp_path / "new" / "summary.json").read_text())
    assert report["red"] != score
    assert report["against"]["difference"] == pytest.approx(report["red"] - score, abs=1e-6)


def test_a_model_folder_whose_weights_were_exchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One tensor of the embedded model changes, sizes and times stay."""
    model, out, test = tmp_path / "model", tmp_path / "out", tmp_path / "test.txt"
    shutil.copytree(resource("assets/shapes-sd3"), model)
    test.write_text("a red circle\n")
    more = ["--steps", "1", "--images", "1"]
    assert judged(model, test, out, *more) == 0
    before = contents(out)
    (file,) = (model / "transformer").glob("*.safetensors")
    tensors, about = load_file(file), file.stat()
    last = sorted(tensors)[-1]
    tensors[last] = tensors[last] + 0.1
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert file.stat().st_size == about.st_size
    capsys.readouterr()
    assert judged(model, test, out, *more) == 2
    told = capsys.readouterr().err
    assert "another model" in told and f"transformer/{file.name}" in told
    assert contents(out) == before
    # settings of the model are its content, too; where it is computed is none
    offload = ["--set", "model.runtime={offload: true}"]
    assert judged(resource("assets/shapes-sd3"), test, tmp_path / "b", *more) == 0
    assert judged(resource("assets/shapes-sd3"), test, tmp_path / "b", *more, *offload) == 0
    other = ["--set", "model.dtype=bfloat16"]
    assert judged(resource("assets/shapes-sd3"), test, tmp_path / "b", *more, *other) == 2
    assert "settings.dtype" in capsys.readouterr().err


def test_a_model_that_is_handed_over(tmp_path: Path) -> None:
    """From Python, without a name for its weights: their values tell."""
    config, out = toy(tmp_path / "toy"), tmp_path / "out"
    model = config.call("model")()
    run_suite(model, config, "toy", out, target="mine")
    next(iter(model.trainable().values())).data.add_(0.1)
    with pytest.raises(RunError, match=r"another model: mine is not what.*trained\.tensors"):
        run_suite(model, config, "toy", out, target="mine")


# ------------------------------------------------------------------------------- another reward


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Config]:
    """A function that writes a plugin's reward with a body, and loads a config with it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(body: str) -> Config:
        (tmp_path / "mine_rules.py").write_text(f"def value():\n    return {body}\n")
        (tmp_path / "mine.py").write_text(
            "def fixed(batch, *, path: str = ''):\n"
            "    from mine_rules import value\n"
            "    return [float(value())] * len(batch.images)\n"
        )
        for name in ("mine", "mine_rules"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        call = f"rewards={{mine: {{fn: mine.fixed, path: '{tmp_path / 'weights.bin'}'}}}}"
        return load_config(write_toy(tmp_path / "toy"), [call], ("toykit", "mine"))

    (tmp_path / "weights.bin").write_bytes(b"0")
    return load


def scored(config: Config, out: Path, **more: Any) -> dict[str, Any]:
    return run_suite(config.call("model")(), config, "toy", out, target="the toy", **more)


def test_a_reward_whose_source_or_weights_changed(
    tmp_path: Path, own: Callable[[str], Config]
) -> None:
    """Its module's helper, then a file that an argument names: the images stay, the scores are made
    anew with a word, and a folder of the earlier ones is not compared with."""
    out, base = tmp_path / "out", tmp_path / "base"
    assert scored(own("0.25"), out)["mine"] == 0.25
    shutil.copytree(out, base)
    images = {name: raw for name, raw in contents(out).items() if name.endswith(".png")}
    with pytest.warns(UserWarning, match=r"changed since.*mine\.source\.mine_rules.*scored anew"):
        assert scored(own("0.75"), out)["mine"] == 0.75
    after = contents(out)
    assert {name: after[name] for name in images} == images
    assert json.loads(after["summary-earlier.json"])["mine"] == 0.25
    values = [line["scores"]["mine"] for line in rows(out / "scores.jsonl")]
    assert values == [0.25] * 12 + [0.75] * 12  # nothing is lost
    with pytest.raises(RunError, match=r"--against .*base.*rewards that have changed since"):
        scored(own("0.75"), out, against=base)
    # weights; and nothing at all
    (tmp_path / "weights.bin").write_bytes(b"1")
    with pytest.warns(UserWarning, match=r"mine\.files.*weights\.bin"):
        scored(own("0.75"), out)
    count = len(rows(out / "scores.jsonl"))
    scored(own("0.75"), out)
    assert len(rows(out / "scores.jsonl")) == count == 36


def test_a_hosted_reward_that_changed_at_its_address(tmp_path: Path) -> None:
    """The config and the client are the same: what the server tells of its reward is another."""
    queue = RequestQueue({"red": redness}, max_wait_s=0)
    out, port = tmp_path / "out", 0

    def hosted(mode: str) -> Any:
        told = {"red": {"fn": "shapes", "mode": mode}}
        return served(make_app(queue, RequestLimits(), b"", told), port)

    def config(url: str) -> Config:
        own = [f"rewards={{red: {{fn: remote, urls: ['{url}']}}}}"]
        return load_config(write_toy(tmp_path / "toy"), own, ("toykit",))

    with hosted("strict") as url:
        scored(config(url), out)
        port = int(url.rpartition(":")[2])
        count = len(rows(out / "scores.jsonl"))
        scored(config(url), out)
        assert len(rows(out / "scores.jsonl")) == count
    changed = r"changed since.*red\.told\.mode: strict and graded; they are scored anew"
    with hosted("graded"), pytest.warns(UserWarning, match=changed):
        scored(config(url), out)
    assert len(rows(out / "scores.jsonl")) == 2 * count
    queue.close()


def test_images_that_prompts_and_rewards_name(tmp_path: Path, own: Callable[[str], Config]) -> None:
    """A source or reference that a record names is drawn from or judged by: another file under its
    name is another setting. A folder of references that a reward names is its content."""
    config, out = own("0.25"), tmp_path / "out"
    test = Path(config.prompts.test)
    lines = [json.loads(row) for row in test.read_text().splitlines()]
    test.write_text("".join(json.dumps({**row, "reference": ["a.png"]}) + "\n" for row in lines))
    Image.new("RGB", (4, 4)).save(test.parent / "a.png")
    scored(config, out)
    Image.new("RGB", (4, 4), (9, 9, 9)).save(test.parent / "a.png")
    with pytest.raises(RunError, match=r"another setting: prompt_files: \w+ and \w+"):
        scored(config, out)
    (tmp_path / "weights.bin").unlink()
    (tmp_path / "weights.bin").mkdir()  # a folder now, with an image
    Image.new("RGB", (4, 4)).save(tmp_path / "weights.bin" / "b.png")
    scored(config, tmp_path / "two")
    Image.new("RGB", (4, 4), (9, 9, 9)).save(tmp_path / "weights.bin" / "b.png")
    with pytest.warns(UserWarning, match=r"mine\.files\..*b\.png"):
        scored(config, tmp_path / "two")


def test_an_image_that_was_exchanged_is_scored_again(tmp_path: Path) -> None:
    config, out = toy(tmp_path / "toy"), tmp_path / "out"
    first = scored(config, out)
    image = out / "00002" / "samples" / "0001.png"
    Image.new("RGB", (16, 16), (255, 0, 0)).save(image)
    with pytest.warns(UserWarning, match=r"1 images are not those.*00002/samples/0001\.png"):
        assert scored(config, out)["red"] > first["red"]
    newest = rows(out / "scores.jsonl")[-1]
    assert (newest["prompt"], newest["image"], newest["scores"]["red"]) == (2, 1, 1.0)


# ----------------------------------------------------------------------------- damaged files


def altered(line: dict[str, Any], **parts: Any) -> str:
    return json.dumps({**line, **parts})


DAMAGE: dict[str, Callable[[dict[str, Any]], str | bytes]] = {
    "another score": lambda line: altered(line, scores={**line["scores"], "red": 0.5}),
    "a text": lambda line: altered(line, scores={"red": "good", "strict": 1.0}),
    "a list": lambda line: altered(line, scores=[1.0]),
    "400 digits": lambda line: altered(line, scores={"red": 10**400, "strict": 1.0}),
    "5,000 digits": lambda line: '{"prompt": ' + "9" * 5000 + "}",
    "infinite": lambda line: altered(line, scores={"red": float("inf"), "strict": 1.0}),
    "1e400": lambda line: json.dumps(line).replace('"image": 1', '"image": 1e400'),
    "a place that is a text": lambda line: altered(line, prompt="first"),
    "a number": lambda line: "17",
    "no JSON": lambda line: "{not json",
    "bytes": lambda line: b"\xff\xfe\x00",
    "nested": lambda line: "[" * 100_000 + "]" * 100_000,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path, dict[str, Any]]:
    """Return a config, the folder of a suite of it, and its report."""
    folder = tmp_path_factory.mktemp("whole")
    config = toy(folder / "toy")
    return config, folder / "out", scored(config, folder / "out")


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_line_of_scores_is_named(
    whole: tuple[Config, Path, dict[str, Any]], tmp_path: Path, kind: str
) -> None:
    """One message with file and line; without the line its image alone is scored again."""
    config, out = whole[0], shutil.copytree(whole[1], tmp_path / "out")
    file = out / "scores.jsonl"
    lines = file.read_bytes().splitlines()
    made = DAMAGE[kind](json.loads(lines[1]))
    bad = made if isinstance(made, bytes) else made.encode()
    file.write_bytes(b"\n".join([lines[0], bad, *lines[2:], b""]))
    with pytest.raises(DataError, match=r"scores\.jsonl, line 2: expected the scores.*delete"):
        scored(config, out)
    file.write_bytes(b"\n".join([lines[0], *lines[2:], b""]))
    assert scored(config, out) == whole[2]


@pytest.mark.parametrize(
    "bad", ["[]", "17", "[" * 100_000, "\xff", '{"a": ', '{"best_of": "3"}', '{"best_of": 1e400}']
)
def test_a_damaged_setting_is_named(
    whole: tuple[Config, Path, dict[str, Any]], tmp_path: Path, bad: str
) -> None:
    config, out = whole[0], shutil.copytree(whole[1], tmp_path / "out")
    (out / "setting.json").write_bytes(bad.encode("latin-1"))
    with pytest.raises(RunError, match=r"out/setting\.json"):
        scored(config, out)
    with pytest.raises(RunError, match=r"out/setting\.json"):
        scored(config, tmp_path / "new", against=out)
