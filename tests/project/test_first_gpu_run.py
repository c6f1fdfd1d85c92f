"""docs/first-gpu-run.md, walked: every command of the page runs here, in its order, on a CPU.

What needs no weights runs as it stands, for all three sizes; what trains and judges, on a tiny
network of the same class, with a tiny CLIP as PickScore.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from clipkit import add_architecture, save_transformers, tiny_open_clip
from docskit import PAGES, ROOT, blocks
from scriptkit import script_module
from starlette.testclient import TestClient

from flowrl.cli.main import main
from flowrl.config.load import load_config
from flowrl.core.files import read_json
from flowrl.cost.architecture import facts_of
from flowrl.runs.view import app

pytestmark = pytest.mark.integration
NAME = "docs/first-gpu-run.md"
PAGE = PAGES[NAME]
SIZES = ("24gb", "48gb", "80gb")
# what does not run here: it installs, logs in and downloads
OUTSIDE = ("nvidia-smi", "pip", "hf")
TIGHT = "1.001gb"  # a card on which the tiny network fits only with all that a profile sets


def lines() -> list[list[str]]:
    """Return the words of every command of the page, in its order."""
    found = []
    for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            found += [words] if words and words[0] not in OUTSIDE else []
    return found


def weightless(words: list[str]) -> bool:
    """Say whether a command reads no weights."""
    return words[1] == "estimate" or bool({"--dry-run", "--rehearse"} & {*words})


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Change what the page says, and leave what is there already."""
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(config.get(key), dict)
        config[key] = merged(config[key], value) if both else value
    return config


@pytest.fixture
def begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """Follow the page up to its config: two lists of prompts, and mine.yaml."""
    monkeypatch.chdir(tmp_path)
    for key, count in (("train", 6), ("test", 4)):
        texts = "".join(f"a {key} of {n} red squares\n" for n in range(count))
        Path(f"my-{key}.txt").write_text(texts)
    (words,) = [words for words in lines() if ">" in words]
    assert words[-2:] == [">", "mine.yaml"] and main(words[1:-2]) == 0
    (changes,) = map(yaml.safe_load, blocks(PAGE, "yaml"))
    mine = merged(yaml.safe_load(capsys.readouterr().out), changes)
    Path("mine.yaml").write_text(yaml.safe_dump(mine))
    assert load_config("mine.yaml").train.prompts == 16
    return mine


def test_the_page_has_these_commands() -> None:
    """Each step of the walk; nothing but flowrl, and what installs it."""
    assert {words[0] for words in lines()} == {"flowrl"}
    shown = [words[1] for words in lines()]
    steps = ["configs", "estimate", "train", "doctor", "train", "view", "eval", "sample"]
    assert list(dict.fromkeys(shown)) == list(dict.fromkeys([*steps, "report", "export"]))
    profiles = [words[words.index("--profile") + 1] for words in lines() if "--profile" in words]
    assert set(profiles) == {"24gb"} and len(profiles) == 6
    # what is downloaded is what the config and its reward read
    config = load_config("sd3/flow_grpo_fast")
    reads = {config.model.kwargs["path"]}
    reads |= {config.rewards["pickscore"].kwargs[key] for key in ("path", "processor")}
    assert set(re.findall(r"^hf download (\S+)", PAGE, re.MULTILINE)) == reads


@pytest.mark.parametrize("size", SIZES)
def test_what_needs_no_weights(
    size: str, begun: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands, with the switch of each size: it fits, and nothing is missing. One rehearsal
    stands for all sizes."""
    for words in filter(weightless, lines()):
        if "--rehearse" in words and size != SIZES[0]:
            continue
        given = [word.replace("24gb", size) for word in words[1:]]
        given += ["eval.steps=2"] if "--rehearse" in words else []  # the rest is as it stands
        assert main(given) == 0, words
        said = capsys.readouterr()
        assert f"--profile {size} sets " in said.err and "which does not fit" not in said.err
        if words[1] == "estimate":
            assert said.out.startswith(f"fits a {size.removesuffix('gb')} GB card: yes, ")
            assert "time       of 1,000 iterations" in said.out
        if "--rehearse" in words:
            assert "rehearsed in " in said.out


@pytest.fixture
def small(begun: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Make mine.yaml small: a tiny network of the same class, few and small images."""
    assert main(["tiny", "sd3.5", "model"]) == 0
    clip = tiny_open_clip(add_architecture(tmp_path, "first-run"))
    clip = f"{save_transformers(clip, tmp_path / 'clip')}"
    changes = {
        "model": {"path": "model"},
        "image": {"height": 64, "width": 64},
        "plan": {"steps": 4, "size": 1, "high": 3},
        "rewards": {"pickscore": {"path": clip, "processor": clip}},
        "train": {"iterations": 2, "prompts": 2, "group": 4, "updates": 1},
        "eval": {"steps": 2},
        "samples": {"prompts": 2},
    }
    small = merged(begun, changes)
    Path("mine.yaml").write_text(yaml.safe_dump(small))
    return small


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Let `flowrl view` show its pages once, and end."""
    seen: list[Path] = []

    def serve(runs: Path, *, box: Path, **_: Any) -> None:
        address = "http://127.0.0.1:8322"
        with TestClient(app.make_app(runs, box), base_url=address) as client:
            assert client.get("/").status_code == 200
        seen.append(runs)

    monkeypatch.setattr(app, "serve_view", serve)
    yield seen


def test_what_trains_and_judges(
    small: dict[str, Any], watched: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """On a card on which the profile sets all that it can. Each command leaves what the page says:
    a run that goes on, an image, a report, and LoRA files."""
    for words in lines():
        if ">" in words or weightless(words):
            continue
        given = [word.replace("24gb", TIGHT) for word in words[1:]]
        if "--resume" in given:  # as the page says
            file = Path("runs/mine/config.yaml")
            file.write_text(file.read_text().replace("iterations: 2", "iterations: 3"))
        code = main(given)
        said = capsys.readouterr()
        # the doctor may find something in random weights, and says so
        assert code == 0 or (words[1] == "doctor" and code == 1), (words, said.err)
        if TIGHT in given:
            assert "model.runtime.checkpointing=true model.runtime.offload=true" in said.err
    tried, done = (load_config(f"runs/{name}/config.yaml") for name in ("try", "mine"))
    assert (tried.train.prompts, done.train.prompts) == (2, 2)
    assert done.model.kwargs["runtime"] == {"checkpointing": True, "offload": True}
    assert read_json(Path("runs/mine/summary.json"), dict[str, Any])["iterations"] == 3
    assert len(Path("runs/mine/timing.jsonl").read_text().splitlines()) == 3
    assert watched == [Path("runs")]
    for name in ("after.png", "runs/mine/report.html", "mine-lora/README.md"):
        assert Path(name).is_file(), name
    for folder in ("mine-lora", "mine-comfy"):
        assert list(Path(folder).glob("*.safetensors")), folder


def test_the_python_of_the_page(small: dict[str, Any]) -> None:
    (code,) = blocks(PAGE, "python")
    exec(compile(code.replace("24gb", TIGHT), NAME, "exec"), {})
    assert list(Path("python-lora").glob("*.safetensors"))
    runtime = load_config("runs/python/config.yaml").model.kwargs["runtime"]
    assert runtime == {"checkpointing": True, "offload": True}


def test_the_tables_are_of_the_page(tmp_path: Path) -> None:
    """Its own config among them, on every size, with the numbers that the page's yaml has; each
    fits. A row is counted again."""
    file = ROOT / "assets/results/first-gpu-run.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    (changes,) = map(yaml.safe_load, blocks(PAGE, "yaml"))
    assert {f"{row['gigabytes']}gb" for row in rows} == set(SIZES)
    for row in rows:
        config = load_config(row["config"])
        assert facts_of(config) and row["fits"]
        assert row["batch"][0] == changes["train"]["prompts"]
        assert row["batch"][1] == config.train.group
    assert sum(row["config"] == "sd3/flow_grpo_fast" for row in rows) == 3
    script = script_module("results/first_gpu_run")
    again = json.loads(json.dumps(script.row("sd3/flow_grpo_fast", 24, tmp_path)))
    assert again == rows[0]
