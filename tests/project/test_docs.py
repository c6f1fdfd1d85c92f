"""What the documentation promises exists: links, files, commands, keys, defaults, metrics.

Tables that are made from code or result files are held by tests/project/test_tables.py.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from docskit import (
    FLOWRL,
    PAGES,
    ROOT,
    blocks,
    commands,
    documented,
    names,
    offered,
    options,
    parse,
    prose,
    rows,
    section,
    slug,
    spans,
    tables,
)

import flowrl
from flowrl.config.load import load_config
from flowrl.config.sections import SECTIONS
from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import list_configs
from flowrl.evaluation.suites.shapes import checker, detect
from flowrl.evaluation.suites.shapes.prompts import TASKS, all_records, split_records

README, CONFIG = PAGES["README.md"], PAGES["docs/config.md"]
TOPS = "assets|configs|docs|flowrl|rewards|scripts|tests"
MADE_UP = ("CONTRIBUTING.md", "CHANGELOG.md")  # names files and keys that are made up, or gone

KERNELS = {"euler_maruyama", "coefficient_preserving"}  # what the transitions are made of

# ---------------------------------------------------------------------------------- links and files


@pytest.mark.parametrize("name", sorted(PAGES))
def test_links_anchors_and_files_exist(name: str) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(PAGES[name])):
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if re.match(r"[a-z]+:", target):
            continue
        text = file.read_text(encoding="utf-8") if anchor and file.is_file() else ""
        anchors = [slug(heading) for heading in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)]
        if not file.exists() or (anchor and anchor not in anchors):
            broken.append(target)
    paths = [
        span for span in spans(prose(PAGES[name])) if re.fullmatch(rf"({TOPS})/[\w./-]*", span)
    ]
    if name not in MADE_UP:
        broken += [path for path in paths if not (ROOT / path).exists()]
    assert broken == []


def test_the_readme_links_every_page() -> None:
    linked = re.findall(r"\]\(([^)#\s]+\.md)\)", README)
    assert {*linked} == {*PAGES} - {"README.md"}


@pytest.mark.parametrize("name", sorted(PAGES))
def test_prose_has_at_most_100_columns(name: str) -> None:
    lines = prose(PAGES[name]).splitlines()
    long = [line for line in lines if len(line) > 100 and not line.startswith(("|", "!["))]
    assert long == []


# ----------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("name", sorted(PAGES))
def test_commands_parse_and_their_configs_bind(name: str) -> None:
    for words in commands(PAGES[name]):
        if words[:2] == ["bash", "scripts/quickstart.sh"]:
            words = ["flowrl", "train", "shapes/flow_grpo", *words[2:]]
        if words[0] in ("accelerate", "torchrun"):
            start = words.index("-m")
            launcher = [word for word in words[:start] if word.endswith(".yaml")]
            assert all((ROOT / word).exists() for word in launcher), words
            words = words[start + 1 :]
        if words[0] == "flowrl":
            given = parse(words)
            if given.get("config") in list_configs():
                load_config(given["config"], given.get("overrides") or [])
        elif words[0] in ("bash", "python"):
            source = (ROOT / words[1]).read_text(encoding="utf-8")
            assert [w for w in words[2:] if w.startswith("--") and f'"{w}"' not in source] == []
        else:
            assert words[:2] in (["pip", "install"], ["vllm", "serve"]), words


@pytest.mark.parametrize("name", sorted(PAGES))
def test_commands_in_the_text_exist(name: str) -> None:
    for span in spans(prose(PAGES[name])):
        words = span.split()
        if words[0] == "flowrl" and len(words) > 1 and not words[1].startswith("-"):
            assert words[1] in FLOWRL.commands, span
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert given <= options(words[1]), span
        if words[0] in ("python", "bash") and len(words) > 1 and words[1] != "-m":
            assert (ROOT / words[1]).is_file(), span


def test_every_command_is_in_the_readme() -> None:
    shown = {words[1] for words in commands(README) if words[0] == "flowrl"}
    assert {word for word in shown if not word.startswith("-")} == set(FLOWRL.commands)


@pytest.mark.integration
def test_errors_are_as_shown() -> None:
    for override, message in rows(CONFIG, "override"):
        (text,), (expected,) = spans(override), spans(message)
        with pytest.raises(ConfigError) as error:
            load_config("shapes/flow_grpo", [text])
        assert expected in str(error.value)


# -------------------------------------------------------------------------------------- Python code


@pytest.mark.parametrize("name", sorted(PAGES))
def test_python_and_yaml_blocks_are_valid(name: str) -> None:
    for code in blocks(PAGES[name], "python"):
        for node in ast.walk(ast.parse(code, name)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []
    for code in blocks(PAGES[name], "yaml"):
        yaml.safe_load(code)


@pytest.mark.integration
def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the embedded model, from a folder of its own; only made smaller."""
    small = [
        *("train.iterations=1", "train.prompts=2", "train.group=2", "plan.branch=2"),
        *("plan.steps=2", "plan.high=1", "eval.steps=1", "eval.images=1", "eval.every=0"),
        "samples.prompts=1",
    ]
    load = flowrl.load_config
    monkeypatch.setattr(flowrl, "load_config", lambda name, more: load(name, [*more, *small]))
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(README, "python")
    assert len(code.splitlines()) <= 10
    exec(compile(code, "README.md", "exec"), {})
    before, after, reward = re.findall(r"\d\.\d+", capsys.readouterr().out)
    assert all(0 <= float(number) <= 2 for number in (before, after, reward))
    assert (tmp_path / "runs/notebook/summary.json").exists()


# ------------------------------------------------------------------------------- keys and functions


def test_dotted_keys_in_the_text_exist() -> None:
    keys = {f"{name}.{f.name}" for name, kind in SECTIONS.items() for f in fields(kind)}
    keys |= {f"{a}.{arg}" for a, fs in offered().items() for one in fs.values() for arg in one}
    keys |= {f"{axis}.fn" for axis in offered()} | {"kl.beta"}
    pattern = re.compile(rf"({'|'.join([*SECTIONS, *offered()])})\.(?!jsonl|png|py\b)\w+")
    wrong = section(CONFIG, "Errors")  # its overrides are wrong on purpose
    for name, page in PAGES.items():
        text = prose(page.replace(wrong, "")) if name != "CHANGELOG.md" else ""
        found = {match[0] for span in spans(text) if (match := pattern.match(span))}
        assert sorted(found - keys) == [], name


@pytest.mark.parametrize("name", offered()["rewards"])
def test_arguments_of_the_rewards(name: str) -> None:
    known = offered()["rewards"][name]
    table = rows(section(PAGES["docs/rewards.md"], f"`{name}`"), "argument") if known else []
    assert {spans(row[0])[0]: documented(row[1]) for row in table} == known
    assert [spans(row[0])[0] for row in table] == list(known)


def test_the_axes_in_the_readme() -> None:
    axes = {
        "plan": ("plan", "transition"),
        "reward": ("rewards", "aggregate"),
        "credit": ("credit", "segment", "select"),
        "likelihood": ("likelihood",),
        "loss": ("loss", "kl"),
    }
    for axis, _, functions in rows(README, "axis"):
        wanted = {name for part in axes.pop(axis) for name in offered()[part]}
        assert set(spans(functions)) == wanted - KERNELS, axis
    assert axes == {}


# ---------------------------------------------------------------------------- methods and benchmark

METHOD_PAGES = sorted(name for name in PAGES if name.startswith("docs/methods/"))


KNOBS = ("plan", "credit", "segment", "select", "loss")  # sections whose keys a page must all have


def calls(config: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the calls of a section, or the section itself: none, one, or several."""
    there: Any = config.get(key) or []
    if key == "rewards":
        return [call for call in there.values() if call["weight"] != 0]
    return there if isinstance(there, list) else [there]


def columns(page: str, *first: str) -> list[tuple[dict[str, Any], list[tuple[str, str]]]]:
    """Return (resolved config, its (first cell, own cell) of each row) for every column of a shapes
    config in the tables whose first column is named so."""
    found = []
    for head, *table in [table for name in first for table in tables(PAGES[page], name)]:
        for i, cell in enumerate(head):
            if match := re.fullmatch(r"`(shapes/\w+)`", cell):
                config = load_config(match[1]).to_dict()
                found.append((config, [(row[0], row[i]) for row in table]))
    return found


@pytest.mark.parametrize("name", METHOD_PAGES)
def test_the_knobs_of_a_method_page_are_its_configs(name: str) -> None:
    """A value in code is the config's; an empty cell says that the config has no such key; all
    arguments that make the method are there."""
    for config, cells in columns(name, "key", "knob"):
        keys = [(spans(first)[0], cell) for first, cell in cells]
        assert [key for key, cell in keys if not holds(config, key, cell)] == [], config["name"]
    for config, cells in columns(name, "key"):
        known = {spans(first)[0] for first, _ in cells} | {f"{part}.fn" for part in KNOBS}
        mine = {f"{part}.{arg}" for part in KNOBS for call in calls(config, part) for arg in call}
        assert sorted(mine - known) == [], config["name"]


@pytest.mark.parametrize("name", METHOD_PAGES)
def test_the_axes_of_a_method_page_are_its_configs(name: str) -> None:
    """A column names every function of its config; arguments in code, as `a: 1, b: 2`, are those of
    a config of the page."""
    found = columns(name, "axis")
    known = offered().keys() - {"model", "optimizer", "transform"}
    page = [config for config, _ in columns(name, "axis", "key")]
    used = [call for config in page for key in known for call in calls(config, key)]
    for config, cells in found:
        named = " ".join(cell for _, cell in cells)
        mine = {call["fn"] for key in known for call in calls(config, key)} - {"weighted_sum"}
        missing = [fn for fn in mine if not re.search(rf"\b{fn}\b", named)]
        assert missing == [] or name.endswith("adv_grpo.md"), config["name"]
        for span in [span for _, cell in cells for span in spans(cell)]:
            for key, value in arguments(span).items():
                assert any(call.get(key) == value for call in used), (config["name"], span)


def arguments(span: str) -> dict[str, Any]:
    """Read `a: 1, b: 2` as arguments; a whole call or anything else has none."""
    plain = re.match(r"\w+: (?!\{)", span)
    return yaml.safe_load(f"{{{span}}}") if plain else {}


def holds(config: dict[str, Any], key: str, cell: str) -> bool:
    """Say whether a cell is what a config has under a dotted key."""
    head, _, tail = key.partition(".")
    values = [call[tail] for call in calls(config, head) if tail in call]
    if not cell:
        return values == []
    return not spans(cell) or yaml.safe_load(spans(cell)[0]) in values


def test_counts_of_prompts() -> None:
    page = PAGES["docs/shapes.md"]
    train, test = split_records()
    assert names(page, "task") == list(TASKS)
    for row in rows(page, "task"):
        (task,) = spans(row[0])
        mine = [r for r in test if r["tag"] == task]
        counts = [sum(r["tag"] == task for r in train), len(mine), sum(r["held_out"] for r in mine)]
        assert [int(cell) for cell in row[2:]] == counts, task
        assert row[1] in {r["prompt"] for r in all_records()[task]}, task


def test_constants_of_the_checker() -> None:
    for row in rows(PAGES["docs/shapes.md"], "constant"):
        (name,), (value,) = spans(row[0]), spans(row[1])
        assert yaml.safe_load(value) == getattr(detect, name, getattr(checker, name, None)), name


# ----------------------------------------------------------------------------------- a run's folder


class Run(NamedTuple):
    """A tiny run on a linear model."""

    folder: Path
    summary: dict[str, Any]

    def keys(self, name: str) -> set[str]:
        """Return the keys that the lines of a log have."""
        lines = (self.folder / name).read_text(encoding="utf-8").splitlines()
        return {key for line in lines for key in json.loads(line)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train two iterations with a KL and everything on, on one seen and one held-out prompt."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    lines = (ROOT / "assets/shapes/test.jsonl").read_text(encoding="utf-8").splitlines()
    seen = next(line for line in lines if not json.loads(line)["held_out"])
    held_out = next(line for line in lines if json.loads(line)["held_out"])
    prompts = tmp_path_factory.mktemp("prompts") / "two.jsonl"
    prompts.write_text(f"{seen}\n{held_out}\n", encoding="utf-8")
    overrides = (
        "model={fn: flowrl.models.toy.LinearFlow}",
        "plan={fn: full, steps: 3, noise_scale: 0.5}",
        "transition={fn: flow_sde}",
        "kl={fn: transition_kl, beta: 0.1}",
        f"prompts={{train: {prompts}, test: {prompts}}}",
        "train={iterations: 2, prompts: 2, group: 2, updates: 2}",
        "eval={steps: 2, images: 2, score: strict, every: 1}",
        "samples={every: 1, prompts: 2}",
        "checkpoint={every: 1}",
    )
    return Run(folder, flowrl.train(load_config("shapes/flow_grpo", overrides), folder, quiet=True))


@pytest.mark.integration
def test_files_and_logs_of_a_run_are_as_documented(run: Run) -> None:
    page = PAGES["docs/run-folder.md"]
    # files
    files = [f.relative_to(run.folder).as_posix() for f in run.folder.rglob("*") if f.is_file()]
    short = {re.sub(r"^tensorboard/.*", "tensorboard/", file) for file in files}
    assert set(names(page, "file")) == {re.sub(r"\d{6}", "<iteration>", file) for file in short}
    # metrics
    logged = {re.sub(r"/step\d+$", "/step<k>", key) for key in run.keys("metrics.jsonl")}
    general = {re.sub(r"/(shapes|strict)", "/<name>", key) for key in logged} - {"iteration"}
    assert {spans(row[0])[0] for row in rows(page, "metric")} == general
    assert set(names(PAGES["docs/methods/flow_grpo.md"], "metric")) <= general
    # seconds
    assert set(names(page, "timing key")) == run.keys("timing.jsonl")
    # evaluations
    expected = {"strict" if key == "<score>" else key for key in names(page, "evaluation key")}
    assert run.keys("eval.jsonl") == expected == set(run.summary["before"])
    # summary and environment
    assert set(names(page, "summary key")) == set(run.summary)
    assert run.summary == json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
    environment = json.loads((run.folder / "environment.json").read_text(encoding="utf-8"))
    assert set(names(page, "environment key")) == set(environment)
