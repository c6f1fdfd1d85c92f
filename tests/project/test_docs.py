"""What the documentation promises exists: links, files, commands, keys, defaults, metrics.

Tables that are made from code or result files are held by tests/project/test_tables.py.
"""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from docskit import (
    FLOWRL,
    PAGES,
    ROOT,
    blocks,
    commands,
    documented,
    made_small,
    names,
    offered,
    options,
    parse,
    prose,
    rows,
    section,
    slug,
    spans,
)

import flowrl
from flowrl.config.load import load_config
from flowrl.config.sections import SECTIONS
from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import list_configs
from flowrl.evaluation.suites.shapes.lists import benchmark_lists
from flowrl.evaluation.suites.shapes.prompts import TASKS, all_records
from flowrl.training.parts import shipped

README, CONFIG = PAGES["README.md"], PAGES["docs/config.md"]
TOPS = "assets|configs|docs|flowrl|rewards|scripts|tests"
MADE_UP = ("CONTRIBUTING.md", "CHANGELOG.md")  # names files and keys that are made up, or gone

KERNELS = {"euler_maruyama", "coefficient_preserving"}  # what the transitions are made of
every_page = pytest.mark.parametrize("name", sorted(PAGES))

# ---------------------------------------------------------------------------------- links and files


@every_page
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


def test_the_list_of_methods_names_the_configs_that_need_something_made_first() -> None:
    """Weights, pairs and runs that a config names and that are not shipped."""
    made = []
    for file in sorted((ROOT / "configs/shapes").glob("*.yaml")):
        text = re.sub(r"#.*", "", file.read_text(encoding="utf-8"))
        if re.search(r"[ :](data|runs|assets/shapes-student)/\w", text):
            made.append(file.stem)
    _, _, rest = PAGES["docs/methods.md"].partition("Nine configs of `shapes/` need something")
    assert rest and sorted(spans(rest)) == made
    assert len(made) == 9


def test_every_page_is_linked_from_the_readme_the_index_or_the_list_of_methods() -> None:
    linked = set()
    for name in ("README.md", "docs/README.md", "docs/methods.md"):
        for target in re.findall(r"\]\(([^)#\s]+\.md)\)", PAGES[name]):
            file = ((ROOT / name).parent / target).resolve()
            linked.add(file.relative_to(ROOT).as_posix())
    assert linked == {*PAGES}


@every_page
def test_prose_has_at_most_100_columns(name: str) -> None:
    lines = prose(PAGES[name]).splitlines()
    long = [line for line in lines if len(line) > 100 and not line.startswith(("|", "!["))]
    assert long == []


@every_page
def test_no_link_is_cut_by_a_line(name: str) -> None:
    """A target that goes on in the next line leads nowhere."""
    assert re.findall(r"\]\([^)\n]*\n", prose(PAGES[name])) == []


# ----------------------------------------------------------------------------------------- commands


@every_page
def test_commands_parse_and_their_configs_bind(name: str) -> None:
    for words in commands(PAGES[name]):
        if words[:2] == ["bash", "scripts/quickstart.sh"]:
            words = ["flowrl", "train", "shapes/flow_grpo", *words[2:]]
        if words[0] in ("accelerate", "torchrun"):
            start = words.index("-m")
            launcher = [word for word in words[:start] if word.endswith(".yaml")]
            assert all((ROOT / word).exists() for word in launcher), words
            words = words[start + 1 :]
            words = words[1:] if words[0] == "--" else words
        if words[0] == "flowrl":
            given = parse(words)
            if given.get("config") in list_configs():
                own = [*(given.get("overrides") or ()), *(given.get("changes") or ())]
                other = given.get("plugin") or given.get("suite")  # bring functions of their own
                load_config(given["config"], [] if other else own)
        elif words[0] in ("bash", "python"):
            source = (ROOT / words[1]).read_text(encoding="utf-8")
            assert [w for w in words[2:] if w.startswith("--") and f'"{w}"' not in source] == []
        else:
            assert words[:2] in (["pip", "install"], ["vllm", "serve"]), words


@every_page
def test_commands_in_the_text_exist(name: str) -> None:
    for span in spans(prose(PAGES[name])):
        words = span.split()
        if words[0] == "flowrl" and len(words) > 1 and not words[1].startswith("-"):
            assert words[1] in FLOWRL.commands, span
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert given <= options(words[1]), span
        if words[0] in ("python", "bash") and len(words) > 1 and words[1] != "-m":
            assert (ROOT / words[1]).is_file(), span


def test_every_command_is_in_the_index() -> None:
    shown = {words[1] for words in commands(PAGES["docs/README.md"]) if words[0] == "flowrl"}
    assert {word for word in shown if not word.startswith("-")} == set(FLOWRL.commands)


@pytest.mark.integration
def test_errors_are_as_shown() -> None:
    for override, message in rows(CONFIG, "override"):
        (text,), (expected,) = spans(override), spans(message)
        with pytest.raises(ConfigError) as error:
            load_config("shapes/flow_grpo", [text])
        assert expected in str(error.value)


# -------------------------------------------------------------------------------------- Python code


@every_page
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
    monkeypatch.setattr(flowrl, "train", made_small(flowrl.train))
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(README, "python")
    assert len(code.splitlines()) <= 15
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["run"].gain.sentence in capsys.readouterr().out
    assert (tmp_path / "exported/README.md").exists()


# ------------------------------------------------------------------------------- keys and functions


def test_dotted_keys_in_the_text_exist() -> None:
    keys = {f"{name}.{f.name}" for name, kind in SECTIONS.items() for f in fields(kind)}
    keys |= {f"{a}.{arg}" for a, fs in offered().items() for one in fs.values() for arg in one}
    keys |= {f"{axis}.fn" for axis in offered()} | {"kl.beta"}
    keys |= {when for part in shipped() for when in part.when}  # what brings a part in
    pattern = re.compile(
        rf"({'|'.join([*SECTIONS, *offered()])})\.(?!jsonl|png|py\b|safetensors)\w+"
    )
    wrong = section(CONFIG, "Errors")  # its overrides are wrong on purpose
    for name, page in PAGES.items():
        text = prose(page.replace(wrong, "")) if name != "CHANGELOG.md" else ""
        found = {match[0] for span in spans(text) if (match := pattern.match(span))}
        assert sorted(found - keys) == [], name


@pytest.mark.parametrize("name", offered()["rewards"])
def test_arguments_of_the_rewards(name: str) -> None:
    """In its table, or in the one of what several share, with the same default."""
    page, known = PAGES["docs/rewards.md"], offered()["rewards"][name]
    shared = {spans(row[0])[0]: documented(row[1]) for row in rows(page, "shared argument")}
    mine = section(page, f"`{name}`")
    table = rows(mine, "argument") if "| argument |" in mine else []
    said = {spans(row[0])[0]: documented(row[1]) for row in table}
    left_out = {key: shared[key] for key in known if key not in said}
    assert {**left_out, **said} == known
    assert list(said) == [key for key in known if key in said]


def test_the_functions_of_the_axes() -> None:
    """The README names some of each axis; config.md lists all (tests/project/test_tables.py)."""
    axes = {
        "plan": ("plan", "transition"),
        "reward": ("rewards", "aggregate"),
        "credit": ("credit", "segment", "select"),
        "likelihood": ("likelihood",),
        "loss": ("loss", "kl"),
    }
    some = {axis: set(spans(shown)) for axis, _, shown in rows(README, "axis")}
    assert set(axes) == set(some)
    for axis, parts in axes.items():
        wanted = {name for part in parts for name in offered()[part]} - KERNELS
        assert some[axis] and some[axis] <= wanted, axis


# -------------------------------------------------------------------------------- the benchmark


def test_counts_of_prompts() -> None:
    page = PAGES["docs/shapes.md"]
    lists = benchmark_lists()
    assert names(page, "task") == list(TASKS)
    for row in rows(page, "task"):
        (task,) = spans(row[0])
        mine = [r for r in lists.test if r["tag"] == task]
        counts = []
        for some in lists:
            counts.append(sum(r["tag"] == task for r in some))
        counts.append(sum(r["held_out"] for r in mine))
        assert [int(cell) for cell in row[2:]] == counts, task
        assert row[1] in {r["prompt"] for r in all_records()[task]}, task
