"""Every call of the docs is one that the code takes: bound to its signature, in every block of
Python, every `flowrl.name(...)` in the text, every example; and the examples run."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from docskit import PAGES, ROOT, blocks, made_small, prose, rows, spans

import flowrl
from flowrl.api.arguments import Sections, config_of
from flowrl.config.load import Config

EXAMPLES = sorted((ROOT / "docs/examples").iterdir())
CALLS = ("train", "Trainer", "evaluate", "compare", "tune", "estimate", "doctor")
SHARED = {"model", "prompts", "test_prompts", "rewards", "overrides", "plugins", "callbacks"}
SHARED |= {"profile", "track", "sections"}
OURS = "flowrl."  # how a call of ours begins in a text

# of TRL 0.14, trl/trainer/ddpo_config.py at 0a49bca, and what it has of TrainingArguments
DDPO = {
    "num_epochs", "sample_batch_size", "sample_num_batches_per_epoch", "train_batch_size",
    "train_gradient_accumulation_steps", "train_num_inner_epochs", "sample_num_steps",
    "sample_eta", "sample_guidance_scale", "train_cfg", "train_timestep_fraction",
    "train_learning_rate", "train_adam_beta1", "train_adam_beta2", "train_adam_weight_decay",
    "train_adam_epsilon", "train_use_8bit_adam", "train_max_grad_norm", "train_clip_range",
    "train_adv_clip_max", "per_prompt_stat_tracking", "per_prompt_stat_tracking_buffer_size",
    "per_prompt_stat_tracking_min_count", "async_reward_computation", "negative_prompts",
    "mixed_precision", "save_freq", "num_checkpoint_limit", "seed", "log_with", "resume_from",
}  # fmt: skip


def source_of(file: Path) -> str:
    """Return the Python of a script, or of all cells of a notebook."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def sources() -> Iterator[tuple[str, str]]:
    """Yield what the docs have of Python, with where it stands."""
    for name, page in PAGES.items():
        for code in blocks(page, "python"):
            yield name, code
        for span in spans(prose(page)):
            span = " ".join(span.split())
            if span.startswith(OURS) and "(" in span and name != "CHANGELOG.md":
                yield name, span
    for file in EXAMPLES:
        yield file.name, source_of(file)
    for file in sorted((ROOT / "flowrl").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for code in re.findall(r"``(flowrl\.\w+\([^`]*\)[^`]*)``", text):
            yield file.name, " ".join(code.split())


def calls(code: str) -> Iterator[tuple[Any, ast.Call]]:
    """Yield each call of flowrl, and of what it returned under the name of a run, with what is
    called."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        called = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute)
        if isinstance(owner, ast.Name) and owner.id == "flowrl":
            assert name in flowrl.__all__, f"flowrl.{name}"
            yield getattr(flowrl, name), node
        elif isinstance(owner, ast.Name) and owner.id in ("run", "opened"):
            if inspect.isfunction(getattr(flowrl.TrainedRun, name)):  # and no property
                yield getattr(flowrl.TrainedRun, name), node
        elif called and ast.unparse(owner).startswith(("flowrl.open(", "flowrl.train(")):
            yield getattr(flowrl.TrainedRun, name), node


def bind(function: Any, node: ast.Call) -> None:
    """Bind a call to a signature; keywords are arguments, or sections of a config."""
    given = [object() for _ in node.args]
    named = {keyword.arg: object() for keyword in node.keywords if keyword.arg}
    signature = inspect.signature(function)
    own = inspect.isfunction(function) and "self" in signature.parameters
    bound = signature.bind(*([object()] if own else []), *given, **named)
    for name in bound.arguments.get("sections", {}):
        assert name in Sections.__annotations__, f"{ast.unparse(node)}: {name}"


def test_every_call_binds() -> None:
    seen = []
    for where, code in sources():
        for function, node in calls(code):
            try:
                bind(function, node)
            except TypeError as error:
                raise AssertionError(f"{where}: {ast.unparse(node)}: {error}") from error
            seen.append(function)
    assert {flowrl.train, flowrl.Trainer, flowrl.doctor, flowrl.tune} <= {*seen}
    assert len(seen) > 25


@pytest.mark.parametrize(
    "wrong", ["flowrl.train(config, folder='a')", "flowrl.open()", "run.export(path='a', to='b')"]
)
def test_a_call_that_does_not_bind_is_seen(wrong: str) -> None:
    ((function, node),) = calls(wrong)
    with pytest.raises((TypeError, AssertionError)):
        bind(function, node)


def test_all_calls_take_the_same_arguments() -> None:
    page = PAGES["docs/python.md"]
    (line,) = (text for text in prose(page).splitlines() if "take the same arguments" in text)
    assert tuple(spans(line)) == CALLS
    told = {name for row in rows(page, "argument") for name in spans(row[0])}
    assert told == {"config", *SHARED} - {"sections"}
    for name in CALLS:
        parameters = inspect.signature(getattr(flowrl, name)).parameters
        assert {*parameters} >= SHARED, name
        assert next(iter(parameters)) == ("configs" if name == "compare" else "config")


def test_the_table_of_a_run_names_what_it_has() -> None:
    table = rows(PAGES["docs/python.md"], "of a run")
    cells = " ".join(row[0] for row in table)
    told = {span.partition("(")[0] for span in spans(cells)}
    public = {name for name in vars(flowrl.TrainedRun) if not name.startswith("_")} - {"after"}
    assert told == public | {"config", "folder"}


def test_the_package_is_typed() -> None:
    assert (ROOT / "flowrl/py.typed").is_file()


# -------------------------------------------------------------------------------------- from TRL


def settings() -> list[tuple[str, str]]:
    """Return each line of the table: what it was, what it is."""
    found = []
    for theirs, ours in rows(PAGES["docs/from-trl.md"], "of DDPOConfig"):
        found.append((theirs, spans(ours)[0]))
    return found


@pytest.mark.parametrize(("theirs", "ours"), settings())
def test_each_line_from_trl(theirs: str, ours: str) -> None:
    """The left side are names of TRL, the right side binds, loads and has that value."""
    assert {span.partition("=")[0] for span in spans(theirs)} <= DDPO
    (call,) = (node for node in ast.walk(ast.parse(f"f({ours})")) if isinstance(node, ast.Call))
    given = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords}
    inspect.signature(flowrl.train).bind("sd15/ddpo", **given)
    sections = {key: value for key, value in given.items() if key not in ("track", "resume")}
    model = sections.pop("model", None)
    if model is not None:
        sections["model"] = model
    config = config_of("sd15/ddpo", **sections)
    assert isinstance(config, Config)
    for section, values in sections.items():
        now = config.to_dict()[section]
        for key, value in values.items() if isinstance(values, dict) else ():
            assert now[key] == value, f"{section}.{key}"


def test_the_names_of_trl_are_all_there() -> None:
    told = [span.partition("=")[0] for theirs, _ in settings() for span in spans(theirs)]
    assert {*told} == DDPO and len(told) == len(DDPO) + 1  # one of them twice, on and off


# ---------------------------------------------------------------------------------------- examples


@pytest.mark.integration
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_an_example_runs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the embedded model, in a folder of its own; only made smaller."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    monkeypatch.setattr(flowrl, "train", made_small(flowrl.train))
    short = partialmethod(flowrl.TrainedRun.resume, train={"iterations": 2})
    monkeypatch.setattr(flowrl.TrainedRun, "resume", lambda run, train: short.__get__(run)())
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source_of(file), file.name, "exec"), names)
    run = names["run"]
    assert isinstance(run, flowrl.TrainedRun) and run.gain is not None
    assert list((run.folder / "exported").glob("README.md"))


def test_the_examples_are_two_scripts_and_a_notebook_without_outputs() -> None:
    assert [file.suffix for file in EXAMPLES] == [".ipynb", ".py", ".py"]
    cells = json.loads(EXAMPLES[0].read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in cells)
