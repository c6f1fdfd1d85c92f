"""What the documentation promises exists: links, files, commands, overrides, keys, defaults, metrics, run files."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import flowrl
from flowrl.cli import _parser
from flowrl.config import SECTIONS, Config, load_config
from flowrl.errors import ConfigError
from flowrl.methods import METHODS
from flowrl.models.runtime import Runtime
from flowrl.resources import list_configs
from flowrl.shapes import checker, detect
from flowrl.shapes.prompts import TASKS, all_records, split_records

ROOT = Path(__file__).resolve().parent.parent
PAGES = {f.relative_to(ROOT).as_posix(): f.read_text(encoding="utf-8") for f in (ROOT / "docs").rglob("*.md")}
PAGES["README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
ALL = {**PAGES, **{n: (ROOT / n).read_text(encoding="utf-8") for n in ("CONTRIBUTING.md", "CHANGELOG.md")}}
README, CONFIG, FOLDER, SHAPES, REWARDS = (
    PAGES[n] for n in ("README.md", "docs/config.md", "docs/run-folder.md", "docs/shapes.md", "docs/rewards.md")
)
FLOW_GRPO = PAGES["docs/methods/flow_grpo.md"]
REQUIRED = "required"


# ------------------------------------------------------------------------------------------------ reading Markdown


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def prose(page: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def section(page: str, heading: str) -> str:
    """Return what stands under a heading, up to the next one of its level or above."""
    match = re.search(rf"^(#+) {re.escape(heading)}\n(.*)", page, re.MULTILINE | re.DOTALL)
    assert match, f"no heading {heading!r}"
    return re.split(rf"^#{{1,{len(match[1])}}} ", match[2], flags=re.MULTILINE)[0]


def tables(page: str, first: str) -> list[list[list[str]]]:
    """Return the tables whose first column is named `first`, as rows of cells, the head included."""
    found = []
    for text in re.findall(r"(?:^\|.*\|\n)+", prose(page) + "\n", re.MULTILINE):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines()]
        if rows[0][0] == first:
            assert {len(row) for row in rows} == {len(rows[0])}, f"ragged table {rows[0]}"
            found.append([rows[0], *rows[2:]])
    return found


def rows(page: str, first: str) -> list[list[str]]:
    """Return the rows below the heads of all tables whose first column is named `first`."""
    found = [row for table in tables(page, first) for row in table[1:]]
    assert found, f"no table with a column {first!r}"
    return found


def spans(text: str) -> list[str]:
    """Return the `code` in a text."""
    return re.findall(r"`([^`]+)`", text)


def names(page: str, first: str) -> list[str]:
    """Return the `code` in the first column of the tables named so."""
    return [name for row in rows(page, first) for name in spans(row[0])]


def slug(heading: str) -> str:
    """Turn a heading into the anchor that GitHub gives it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words of every line of every shell block."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


# ------------------------------------------------------------------------------------------- reading the source code


class Function(NamedTuple):
    """A function or class of flowrl that a config may name."""

    name: str
    required: tuple[str, ...]  # positional arguments of a function
    options: dict[str, Any]  # keyword-only arguments, and REQUIRED or their default


def functions(path: str) -> Iterator[Function]:
    """Yield the public functions and classes of a file, read without importing it."""
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
            if inits:
                yield _function(node.name, inits[0])
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield _function(node.name, node)


def _function(name: str, node: ast.FunctionDef) -> Function:
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    wanted = [(a, d) for a, d in pairs if "Tensor" not in ast.unparse(a.annotation or ast.Constant(""))]
    options = {a.arg: REQUIRED if d is None else _default(d) for a, d in wanted}
    return Function(name, tuple(a.arg for a in node.args.args if a.arg != "self"), options)


def _default(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "float":
        return float(ast.literal_eval(node.args[0]))
    try:
        return ast.literal_eval(node)
    except ValueError:  # a name: no function that a config can call has such a default
        return ast.unparse(node)


def offered() -> dict[str, dict[str, Function]]:
    """Return {axis: {name: function}}, what a bare `fn` can name, found by file and by what the loop hands over."""

    def pick(files: list[str], first: str) -> dict[str, Function]:
        every = (function for file in files for function in functions(file))
        return {f.name: f for f in every if " ".join(f.required).startswith(first)}

    def named(folder: str) -> dict[str, Function]:
        files = [f for f in sorted((ROOT / folder).glob("*.py")) if not f.name.startswith("_")]
        found = {f.stem: {g.name: g for g in functions(f.relative_to(ROOT).as_posix())}.get(f.stem) for f in files}
        return {name: function for name, function in found.items() if function}

    def folder(path: str, skip: str = "") -> list[str]:
        files = [f for f in sorted((ROOT / path).glob("*.py")) if f.stem != skip and not f.name.startswith("_")]
        return [f.relative_to(ROOT).as_posix() for f in files]

    models = named("flowrl/models").items()  # a config may also set their positional arguments
    return {
        "model": {n: f._replace(options=dict.fromkeys(f.required, REQUIRED) | f.options) for n, f in models},
        "plan": pick(folder("flowrl/samplers"), "iteration"),
        "transition": pick(["flowrl/transitions.py"], "x v sigma sigma_next level"),
        "rewards": named("rewards"),
        "transform": pick(["flowrl/credit/transforms.py"], "values batch"),
        "aggregate": {f.name: f for f in functions("flowrl/credit/aggregate.py") if f.name != "counting"},
        "credit": pick(folder("flowrl/credit"), "reward leaf tree"),
        "segment": pick(["flowrl/credit/segments.py"], "rollout"),
        "select": pick(["flowrl/credit/select.py"], "choice"),
        "likelihood": pick(["flowrl/likelihood.py"], "model batch transition"),
        "loss": pick(folder("flowrl/losses", skip="kl"), "log_prob old_log_prob weight"),
        "kl": pick(["flowrl/losses/kl.py"], "eval ref_eval"),
    }


OFFERED = offered()


def plain(value: Any) -> Any:
    """Return a default as YAML would give it."""
    return list(value) if isinstance(value, tuple) else value


def documented_default(cell: str) -> Any:
    """Read a cell of a default column: `required`, or one YAML value in code."""
    if cell == REQUIRED:
        return REQUIRED
    (code,) = spans(cell)
    return yaml.safe_load(code)


# ---------------------------------------------------------------------------------------------------- links and files


@pytest.mark.parametrize("name", sorted(ALL))
def test_relative_links_and_anchors(name: str) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(ALL[name])):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        text = file.read_text(encoding="utf-8") if anchor and file.is_file() else ""
        anchors = [slug(heading) for heading in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)]
        if not file.exists() or (anchor and anchor not in anchors):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("name", sorted(PAGES))
def test_files_that_are_named_exist(name: str) -> None:
    tops = "assets|configs|docs|flowrl|rewards|scripts|tests"
    found = [span for span in spans(prose(PAGES[name])) if re.fullmatch(rf"({tops})/[\w./-]*", span)]
    assert [path for path in found if not (ROOT / path).exists()] == []


def test_the_readme_links_every_page() -> None:
    linked = re.findall(r"\]\(([^)#\s]+\.md)\)", README)
    assert {*linked} == {*ALL} - {"README.md"}


# ------------------------------------------------------------------------------------------------------------ commands


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """Return the sub-commands of flowrl by name."""
    actions = [a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(actions[0].choices)


def parse(words: list[str]) -> argparse.Namespace:
    """Parse `flowrl ...` as the command does: overrides may stand anywhere. SystemExit if it is wrong."""
    args, rest = _parser().parse_known_args(words[1:])
    assert [text for text in rest if text.startswith("-") or "=" not in text] == [], words
    if rest:
        args.overrides += rest
    return args


@pytest.mark.parametrize("name", sorted(PAGES))
def test_commands_parse(name: str) -> None:
    for words in commands(PAGES[name]):
        if words[0] == "flowrl":
            parse(words)
        elif words[0] in ("bash", "python"):
            source = (ROOT / words[1]).read_text(encoding="utf-8")
            assert [w for w in words[2:] if w.startswith("--") and f'"{w}"' not in source] == [], words
        elif words[0] in ("accelerate", "torchrun"):
            script = next(i for i, word in enumerate(words) if word.endswith(".py"))
            assert words[script] == "scripts/train.py", words
            assert all((ROOT / word).exists() for word in words[1:script] if word.endswith(".yaml")), words
            parse(["flowrl", "train", *words[script + 1 :]])
        else:
            assert words[:2] in (["pip", "install"], ["vllm", "serve"]), words


@pytest.mark.parametrize("name", sorted(PAGES))
def test_commands_in_the_text_exist(name: str) -> None:
    for span in spans(prose(PAGES[name])):
        words = span.split()
        if words[0] == "flowrl" and len(words) > 1:
            assert words[1] in subcommands(), span
            text = subcommands()[words[1]].format_help()
            assert [w for w in words if w.startswith("--") and w not in text] == [], span
        if words[0] in ("python", "bash") and len(words) > 1:
            assert (ROOT / words[1]).is_file(), span


def test_every_command_is_in_the_readme() -> None:
    shown = {words[1] for words in commands(README) if words[0] == "flowrl"}
    assert shown == set(subcommands())


@pytest.mark.integration
@pytest.mark.parametrize("name", sorted(PAGES))
def test_commands_bind(name: str) -> None:
    for words in commands(PAGES[name]):
        if words[:2] == ["bash", "scripts/quickstart.sh"]:
            words = ["flowrl", "train", "shapes/flow_grpo", *words[2:]]
        if words[0] != "flowrl":
            continue
        args = parse(words)
        assert callable(args.command), words
        if getattr(args, "config", None) in list_configs():
            load_config(args.config, getattr(args, "overrides", None) or getattr(args, "set", []))


@pytest.mark.integration
def test_errors_are_as_shown() -> None:
    for override, message in rows(CONFIG, "override"):
        (text,), (expected,) = spans(override), spans(message)
        with pytest.raises(ConfigError) as error:
            load_config("shapes/flow_grpo", [text])
        assert expected in str(error.value)


# ---------------------------------------------------------------------------------------------------------- Python code


@pytest.mark.parametrize("name", sorted(PAGES))
def test_python_and_yaml_blocks_are_valid(name: str) -> None:
    for code in blocks(PAGES[name], "python"):
        for node in ast.walk(ast.parse(code, name)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []
    for code in blocks(PAGES[name], "yaml"):
        yaml.safe_load(code)


def test_the_python_of_the_readme() -> None:
    (code,) = blocks(README, "python")
    assert len(code.splitlines()) <= 10
    compile(code, "README.md", "exec")
    used = set(re.findall(r"\bflowrl\.(\w+)", code))
    assert used and used <= set(flowrl.__all__)


@pytest.mark.integration
def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the embedded model, from a folder of its own; only made smaller."""
    small = ["train.iterations=1", "train.prompts=2", "train.group=2", "plan.branch=2", "plan.steps=2", "plan.high=1"]
    small += ["eval.steps=1", "eval.images=1", "eval.every=0", "grid.prompts=1"]
    load = flowrl.load_config
    monkeypatch.setattr(flowrl, "load_config", lambda name, overrides: load(name, [*overrides, *small]))
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(README, "python")
    exec(compile(code, "README.md", "exec"), {})
    before, after, reward = re.findall(r"\d\.\d+", capsys.readouterr().out)
    assert all(0 <= float(number) <= 2 for number in (before, after, reward))
    assert (tmp_path / "runs/notebook/summary.json").exists()


# ------------------------------------------------------------------------------------------------------------- configs


def test_sections_of_a_config() -> None:
    table = {spans(row[0])[0]: row for row in rows(CONFIG, "section")}
    known = {f.name: f for f in fields(Config) if f.name not in ("source", "plugins")}
    assert list(table) == list(dict.fromkeys(table)) and set(table) == set(known)
    required = {name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING}
    assert {name for name, row in table.items() if row[2] == REQUIRED} == required
    assert documented_default(table["seed"][2]) == known["seed"].default


@pytest.mark.parametrize("key", SECTIONS)
def test_keys_of_the_plain_sections(key: str) -> None:
    table = rows(section(CONFIG, f"`{key}`"), "key")
    known = {f.name: REQUIRED if f.default is MISSING else plain(f.default) for f in fields(SECTIONS[key])}
    assert [spans(row[0])[0] for row in table] == list(known)
    assert {spans(row[0])[0]: documented_default(row[2]) for row in table} == known


@pytest.mark.parametrize("name", OFFERED["rewards"])
def test_arguments_of_the_rewards(name: str) -> None:
    known = {arg: plain(default) for arg, default in OFFERED["rewards"][name].options.items()}
    table = rows(section(REWARDS, f"`{name}`"), "argument") if known else []
    assert [spans(row[0])[0] for row in table] == list(known)
    assert {spans(row[0])[0]: documented_default(row[1]) for row in table} == known


@pytest.mark.parametrize("axis", [axis for axis in OFFERED if axis != "rewards"])
def test_functions_and_arguments_of_the_call_sections(axis: str) -> None:
    text = section(CONFIG, f"`{axis}`")
    assert [name for name in OFFERED[axis] if f"`{name}`" not in text and f"`{name}." not in text] == []
    known = {f"{f.name}.{arg}": plain(d) for f in OFFERED[axis].values() for arg, d in f.options.items()}
    table = rows(text, "argument") if known else []
    assert sorted(spans(row[0])[0] for row in table) == sorted(known)
    assert {spans(row[0])[0]: documented_default(row[2]) for row in table} == known


def test_lora_options() -> None:
    (lora,) = (n for n in ast.parse((ROOT / "flowrl/models/lora.py").read_text()).body if isinstance(n, ast.ClassDef))
    known = {ast.unparse(n.target): n.value for n in lora.body if isinstance(n, ast.AnnAssign) and n.value}
    table = {spans(row[0])[0]: row[2] for row in rows(CONFIG, "lora option")}
    assert list(table) == list(known)
    for name in set(table) - {"targets"}:
        assert documented_default(table[name]) == ast.literal_eval(known[name])


def test_runtime_options() -> None:
    table = {spans(row[0])[0]: documented_default(row[2]) for row in rows(CONFIG, "runtime option")}
    assert list(table) == list(Runtime._fields) and table == Runtime()._asdict()


def test_dotted_keys_in_the_text_exist() -> None:
    keys = {f"{s}.{f.name}" for s, kind in SECTIONS.items() for f in fields(kind)}
    keys |= {f"{a}.{arg}" for a, fs in OFFERED.items() for f in fs.values() for arg in f.options}
    keys |= {f"{axis}.fn" for axis in OFFERED} | {"kl.beta"}
    pattern = re.compile(rf"({'|'.join([*SECTIONS, *OFFERED])})\.(?!jsonl|png)\w+")
    for name, page in PAGES.items():
        text = prose(page.replace(section(CONFIG, "Errors"), ""))  # its overrides are wrong on purpose
        found = {match[0] for span in spans(text) if (match := pattern.match(span))}
        assert sorted(found - keys) == [], name


# ------------------------------------------------------------------------------------------------ methods and benchmark


def test_the_axes_in_the_readme() -> None:
    table = {row[0]: set(spans(row[2])) for row in rows(README, "axis")}
    expected = {
        "plan": {*OFFERED["plan"], *OFFERED["transition"]},
        "reward": {*OFFERED["rewards"], *OFFERED["aggregate"]},
        "credit": {*OFFERED["credit"], *OFFERED["segment"], *OFFERED["select"]},
        "likelihood": set(OFFERED["likelihood"]),
        "loss": {*OFFERED["loss"], *OFFERED["kl"]},
    }
    assert table == expected


def test_the_method_table_is_the_shipped_configs() -> None:
    table = rows(README, "method")
    assert sorted(name for row in table for name in spans(row[1])) == list_configs()
    for row, method in zip(table, METHODS, strict=True):
        assert re.fullmatch(rf"\[?{re.escape(method.name)}(\]\(.*\))?", row[0]) and row[3] == method.status
        assert (method.paper.arxiv if method.paper else "combination") in row[2]


@pytest.mark.integration
def test_the_knobs_of_flow_grpo_are_the_configs() -> None:
    resolved = load_config("shapes/flow_grpo").to_dict()
    for row in rows(FLOW_GRPO, "key"):
        (key,), (value,) = spans(row[0]), spans(row[1]) or [""]
        head, _, tail = key.partition(".")
        wanted = resolved[head][tail]
        if isinstance(wanted, list):  # too long for the table: a section of the page names them
            assert value == "" and [name for name in wanted if f"`{name}`" not in FLOW_GRPO] == []
        else:
            assert yaml.safe_load(value) == wanted, key


def test_counts_of_prompts() -> None:
    train, test = split_records()
    assert names(SHAPES, "task") == list(TASKS)
    for row in rows(SHAPES, "task"):
        (task,) = spans(row[0])
        mine = [r for r in test if r["tag"] == task]
        counts = [sum(r["tag"] == task for r in train), len(mine), sum(r["held_out"] for r in mine)]
        assert [int(cell) for cell in row[2:]] == counts, task
        assert row[1] in {r["prompt"] for r in all_records()[task]}, task


def test_constants_of_the_checker() -> None:
    for row in rows(SHAPES, "constant"):
        (name,), (value,) = spans(row[0]), spans(row[1])
        assert yaml.safe_load(value) == getattr(detect, name, getattr(checker, name, None)), name


# ------------------------------------------------------------------------------------------------------- a run's folder


class Run(NamedTuple):
    """A tiny run on a linear model."""

    folder: Path
    summary: dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train two iterations with a KL and everything on, on one seen and one held-out prompt."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    lines = (ROOT / "assets/shapes/test.jsonl").read_text(encoding="utf-8").splitlines()
    chosen = [next(line for line in lines if json.loads(line)["held_out"] is flag) for flag in (False, True)]
    prompts = tmp_path_factory.mktemp("prompts") / "two.jsonl"
    prompts.write_text("\n".join(chosen) + "\n", encoding="utf-8")
    options = (
        "model={fn: flowrl.models.toy.LinearFlow}",
        "plan={fn: full, steps: 3, level: 0.5}",
        "transition={fn: flow_sde}",
        "kl={fn: transition_kl, beta: 0.1}",
        f"prompts={{train: {prompts}, test: {prompts}}}",
        "train={iterations: 2, prompts: 2, group: 2, updates: 2}",
        "eval={steps: 2, images: 2, score: strict, every: 1}",
        "grid={every: 1, prompts: 2}",
        "checkpoint={every: 1}",
    )
    return Run(folder, flowrl.train(load_config("shapes/flow_grpo", options), folder, quiet=True))


def lines_of(run: Run, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.integration
def test_files_of_a_run(run: Run) -> None:
    files = {f.relative_to(run.folder).as_posix() for f in run.folder.rglob("*") if f.is_file()}
    kinds = {re.sub(r"\d{6}", "<iteration>", re.sub(r"^tensorboard/.*", "tensorboard/", f)) for f in files}
    assert sorted(names(FOLDER, "file")) == sorted(kinds)


@pytest.mark.integration
def test_metrics_of_a_run(run: Run) -> None:
    logged = {key for row in lines_of(run, "metrics.jsonl") for key in row} - {"iteration"}
    general = {re.sub(r"/step\d+$", "/step<k>", key) for key in logged}
    general = {re.sub(r"/(shapes|strict)", "/<name>", key) for key in general}
    assert sorted(spans(row[0])[0] for row in rows(FOLDER, "metric")) == sorted(general)
    assert set(names(FLOW_GRPO, "metric")) <= general


@pytest.mark.integration
def test_timing_of_a_run(run: Run) -> None:
    assert set(names(FOLDER, "timing key")) == {key for row in lines_of(run, "timing.jsonl") for key in row}


@pytest.mark.integration
def test_evaluations_of_a_run(run: Run) -> None:
    expected = {"strict" if name == "<score>" else name for name in names(FOLDER, "evaluation key")}
    for row in [*lines_of(run, "eval.jsonl"), run.summary["before"], run.summary["after"]]:
        assert set(row) == expected


@pytest.mark.integration
def test_summary_and_environment_of_a_run(run: Run) -> None:
    assert set(names(FOLDER, "summary key")) == set(run.summary)
    assert run.summary == json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
    environment = json.loads((run.folder / "environment.json").read_text(encoding="utf-8"))
    assert set(names(FOLDER, "environment key")) == set(environment)
