"""Every suite with prompts of the user's and every option, by the command line: the embedded model,
random networks of the real classes, a judge that answers yes."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from judge_server import Act, Seen, Server, says, serving
from runkit import rows
from weightkit import Weights

from flowrl.cli.main import main
from flowrl.evaluation.suites.catalogue import SUITES
from rewards import ocr as reading

pytestmark = pytest.mark.integration
MODEL = "assets/shapes-sd3"


def yes(seen: Seen) -> Act:
    """Say yes in the form that is asked for."""
    if "<score>" in seen.text:
        return says("<score>[1]</score>")
    return says("Yes", {"Yes": math.log(0.9), "No": math.log(0.0999)})


@pytest.fixture(scope="module")
def judge() -> Iterator[Server]:
    with serving(yes) as server:
        server.models = Act(json.dumps({"data": [{"id": "judge"}]}).encode())
        yield server


def table(*lines: tuple[str, ...]) -> str:
    """Write lines as CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


DPG = (
    *("item_id", "text", "keywords", "proposition_id", "dependency", "tuple"),
    "question_natural_language",
)
POINTS = {"Testpoints": ["Style"], "Testpoint Description": ["in ink"]}
ATOMS = {"prompt": "four cows", "atom_count": 2, "skills": ["count"], "vqa_list": [["Red?", "Yes"]]}
VASE = {"tag": "single_object", "include": [{"class": "vase", "count": 1}], "prompt": "a vase"}
CIRCLE = {
    "prompt": "a red circle",
    "tag": "single_object",
    "include": [{"class": "circle", "count": 1, "color": "red"}],
}
# suite -> the file and what is in it; all have one prompt
FILES = {
    "shapes": ("own.jsonl", json.dumps(CIRCLE)),
    "geneval": ("own.jsonl", json.dumps(VASE)),
    "ocr": ("own.txt", 'a sign that says "OPEN"'),
    "drawbench": ("Prompts.csv", table(("prompt", "category"), ("a red circle", "x"))),
    "partiprompts": ("own.tsv", "prompt\tcategory\na red circle\tx\n"),
    "pickscore": ("own.json", json.dumps(["a red circle"])),
    "hpdv2": ("anime.json", json.dumps(["a red circle"])),
    "aesthetic": ("own.txt", "a red circle"),
    "clip_score": ("own.jsonl", json.dumps({"prompt": "a red circle"})),
    "t2i-compbench": ("color_val.txt", "a red car and a green boat"),
    "dpg": (
        "dpg.csv",
        table(
            DPG,
            ("a1", "A boat, on a lake.", "boat", "1", "0", "entity", "A boat?"),
            ("a1", "A boat, on a lake.", "boat", "2", "1", "color", "Is it red?"),
        ),
    ),
    "unigenbench": (
        "test_en.csv",
        table(("index", "prompt_en", "sub_dims_en"), ("0", "a fox", json.dumps(POINTS))),
    ),
    "geneval2": ("data.jsonl", json.dumps(ATOMS)),
}


def settings(name: str, weights: Weights, judge: Server) -> list[str]:
    """Return the --set options that put small things in the place of a suite's public weights."""
    clip = {"path": str(weights.clip.folder)}
    known: dict[str, dict[str, Any]] = {
        "pickscore": weights.clip.parts,
        "hpsv2": weights.hps,
        "image_reward": weights.image_reward,
        "aesthetic": weights.aesthetic,
        "clip": clip,
        "clip_score": clip,
        "geneval": weights.geneval,
        "t2i_compbench": weights.t2i_compbench,
        **dict.fromkeys(("dpg", "unigenbench", "geneval2"), {"url": judge.url, "backoff": 0.01}),
    }
    given = []
    for reward in SUITES[name].rewards:
        for key, value in known.get(reward, {}).items():
            given += ["--set", f"rewards.{reward}.{key}={json.dumps(value)}"]
    return given


@pytest.fixture
def command(
    tmp_path: Path, weights: Weights, judge: Server, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], list[str]]:
    """Return a command of a suite with prompts in a file, whose name YAML would read as a list."""
    monkeypatch.setattr(reading, "_rapidocr", lambda *_: lambda _: "open flow")

    def given(kind: str, name: str) -> list[str]:
        file, text = FILES[name]
        folder = tmp_path / "[own, prompts]: x"
        folder.mkdir()
        (folder / file).write_text(text + "\n")
        argv = [kind, MODEL, "--suite", name, "--prompts", str(folder / file)]
        return [*argv, "--out", str(tmp_path / "out"), *settings(name, weights, judge)]

    return given


def test_every_suite_is_here() -> None:
    assert FILES.keys() == SUITES.keys()


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_with_prompts_and_every_option(
    name: str, tmp_path: Path, command: Callable[[str, str], list[str]]
) -> None:
    """A score for every reward of the one prompt, and the options in the setting."""
    argv = command("eval", name)
    argv += ["--images", "2", "--steps", "1", "--seed", "7", "--config", "shapes/flow_grpo"]
    assert main([*argv, "--json", str(tmp_path / "a.json")]) == 0
    report = json.loads((tmp_path / "a.json").read_text())
    said, lines = report["setting"], rows(tmp_path / "out" / "scores.jsonl")
    assert (said["steps"], said["seed"], said["images"], said["count"]) == (1, 7, 2, 1)
    assert said["prompts"].endswith(FILES[name][0]) and len(lines) == 2
    for line in lines:
        assert line["scores"].keys() == SUITES[name].rewards.keys()
        assert None not in line["scores"].values()
    assert report["score"] == next(iter(SUITES[name].rewards))


@pytest.mark.parametrize("name", ["dpg", "geneval2", "t2i-compbench", "pickscore", "ocr"])
def test_a_sweep_with_prompts(
    name: str, tmp_path: Path, command: Callable[[str, str], list[str]]
) -> None:
    """The benchmark's own format, where a part of its prompts is taken; of one, all of them."""
    count = [] if name == "ocr" else ["--count", "1"]
    argv = [*command("sweep", name), *count, "--images", "1", "--steps", "1,2"]
    assert main(argv) == 0
    result = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [row["steps"] for row in result["rows"]] == [1, 2]
    assert result["chosen"]["setting"]["count"] == 1
