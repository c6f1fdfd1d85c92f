"""The README.md of an exported model: what was trained, how, on what, how well, and what nobody
knows. Its text is templates/model_card.md; here is what is filled in."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from flowrl.config.calls import PYTHON, Call
from flowrl.config.load import Config, load_config
from flowrl.core.errors import FlowRLError
from flowrl.core.files import is_finite_number, write_text
from flowrl.core.installation import environment
from flowrl.core.prompts import load_prompts
from flowrl.core.tables import fixed_digits
from flowrl.models.files.loading import locate
from flowrl.runs.catalogue import AXES, PublishedMethod, load_methods
from flowrl.runs.export.usage import (
    CardFacts,
    fenced,
    files_of,
    local,
    shown,
    task_of,
    template,
    usage,
)
from flowrl.runs.folder import (
    ENVIRONMENT,
    EVALS,
    GRID,
    SUMMARY,
    Evaluation,
    read_evals,
    read_object,
    read_rows,
)
from flowrl.runs.gain import gain_of, verdict_lines
from flowrl.runs.report.page import DASH, UNKNOWN, score_cell

CARD = "README.md"
CHOSEN = [axis for axis in AXES if axis != "rewards"]  # which have a table of their own
VERSIONS = ("flowrl", "python", "torch", "diffusers", "transformers", "peft")
Table = list[list[str]]


def write_card(facts: CardFacts, folder: Path) -> None:
    """Write README.md, and copy the run's grid of samples if there is one. Raise RunError if a log
    is damaged."""
    grid = ""
    if (facts.run / GRID).is_file():
        grid = GRID
        shutil.copyfile(facts.run / GRID, folder / GRID)
    write_text(folder / CARD, card(facts, grid=grid))


def card(facts: CardFacts, *, grid: str) -> str:
    """Return the text of the card, which shows the picture `grid` beside it, if there is one.
    Nothing in it names a place on a machine or in a network."""
    c = facts.config
    return template("model_card.md").render(
        front_matter=_front_matter(facts),
        name=plain(c.name),
        # the model
        pipeline=type(facts.pipeline).__name__,
        network=facts.network,
        numbers=f"{facts.numbers:,}",
        lora=facts.lora,
        base=facts.base,
        quantize=_quantized(c),
        grid=grid,
        files=files_of(facts),
        usage=usage(facts),
        # the run
        iteration=facts.iteration,
        seed=c.seed,
        training=_training(facts),
        prompts=_prompts(c),
        rewards=_rewards(c),
        results=_results(facts),
        versions=_versions(facts.run),
        config=fenced("yaml", yaml.safe_dump(shown(c.to_dict()), sort_keys=False, width=110)),
    )


def base_name(config: Config) -> str:
    """Return the hub id of a config's base model, "" if it is a folder, or was in memory."""
    path = str(config.model.kwargs.get("path", ""))
    if not path or path == PYTHON or isinstance(locate(path), Path):
        return ""
    return path


_MARKS = re.compile(r"([\\`*\[\]<>|#~!&$])")


def plain(text: str) -> str:
    """Return a text of a user's, such as a prompt's tag, as one line that Markdown shows as it is:
    no mark-up, no link, no end of a table's cell."""
    return _MARKS.sub(r"\\\1", " ".join(text.split())).replace("://", ":\\/\\/")


def _code(text: str) -> str:
    """Return a text of a user's as code in a line."""
    return "`" + " ".join(text.replace("`", "'").replace("|", "\\|").split()) + "`"


def _front_matter(facts: CardFacts) -> str:
    """Return what a hub reads of the model, as YAML."""
    found = _method(facts.config)
    kind = task_of(facts)
    about: dict[str, Any] = {"library_name": "diffusers", "pipeline_tag": kind}
    if facts.base:
        about |= {"base_model": facts.base, "base_model_relation": "adapter"}
        if facts.formats == ["merged"]:
            about["base_model_relation"] = "finetune"
    about |= {"license": "other", "license_name": "not-chosen-yet"}
    tags = ["flowrl", "diffusers", kind, "reinforcement-learning"]
    if facts.lora:
        tags.append("lora")
    if found:
        tags.append(found[0].slug.replace("_", "-"))
    return yaml.safe_dump({**about, "tags": tags}, sort_keys=False)


def _quantized(config: Config) -> str:
    """Return how the base model was quantised in training, "" if it was not."""
    how = (config.model.kwargs.get("runtime") or {}).get("quantize", "none")
    if how == "none":
        return ""
    return str(how)


# ------------------------------------------------------------------------------------- the training


def _training(facts: CardFacts) -> Table:
    c, lora = facts.config, facts.lora
    # method, base model and what was chosen on every axis
    rows = [*_described(c), ["base model", facts.base or f"a local folder, `{local(facts)}`"]]
    for axis in CHOSEN:
        texts = _calls(c, axis)
        if texts:
            rows.append([axis, ", ".join(texts)])
    # numbers
    if lora:
        targets = ", ".join(map(_code, lora["target_modules"]))
        rows.append(["LoRA", f"rank {lora['r']}, alpha {lora['lora_alpha']:g}, on {targets}"])
    per = f"{c.train.prompts} prompts x {c.train.group} images"
    size, (height, width) = f"{c.image.width} x {c.image.height} pixels", c.eval_size
    if (height, width) != (c.image.height, c.image.width):
        size = f"trained at {size}, judged at {width} x {height}"
    averaged = "the last ones (current)"
    if facts.weights == "ema":
        averaged = "moving average (ema)"
    return [
        *rows,
        ["iterations", f"{facts.iteration} of {c.train.iterations}, each of {per}"],
        ["learning rate, seed", f"{c.lr:g}, {c.seed}"],
        ["images", f"{size}, {c.eval.steps} steps when judged"],
        ["weights", averaged],
        ["time", _time(facts.run)],
    ]


def _method(config: Config) -> tuple[PublishedMethod, str] | None:
    """Return the method whose shipped config has this one's name, and that config."""
    for method in load_methods():
        for shipped in method.configs:
            if config.name == shipped.replace("/", "-").replace("_", "-"):
                return method, shipped
    return None


def _described(config: Config) -> Table:
    """Name method and paper, and say on which axes the run leaves the shipped config."""
    found = _method(config)
    if found is None:
        unknown = "not known: the config has none of the names of flowrl's; its parts are below"
        return [["method", unknown]]
    method, name = found
    shipped, said = load_config(name), f"{method.name}, flowrl's config `{name}`"
    other = [axis for axis in CHOSEN if getattr(shipped, axis) != getattr(config, axis)]
    if other:
        said += f", changed in {', '.join(other)}"
    rows = [["method", said]]
    if method.paper:
        paper = method.paper
        link = f"[{paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})"
        rows.append(["paper", f"{paper.title} ({paper.year}), {link}"])
    return rows


def _calls(config: Config, axis: str) -> list[str]:
    calls = getattr(config, axis)
    if not isinstance(calls, tuple):
        calls = [calls]
    return [_call(call) for call in calls if isinstance(call, Call)]


def _call(call: Call) -> str:
    """Set a function with its arguments as a cell of a table."""
    given = []
    for key, value in call.to_dict().items():
        if key not in ("fn", "weight") and value is not None:
            given.append(f"{key}: {_inline(value)}")
    if not given:
        return _code(call.fn)
    return f"{_code(call.fn)} ({', '.join(given)})"


def _inline(value: Any) -> str:
    text = yaml.safe_dump(shown(value), default_flow_style=True, width=math.inf).strip()
    text = " ".join(text.removesuffix("...").split())
    for mark in ("|", "<", "`", "]("):  # which would end the cell, or begin something else
        text = text.replace(mark, f"{mark[:-1]}\\{mark[-1]}")
    return text


def _prompts(config: Config) -> Table:
    files = {"training": config.prompts.train, "held out, for the results": config.prompts.test}
    return [[use, _code(shown(path)), _count(path)] for use, path in files.items()]


def _count(path: str) -> str:
    try:
        return str(len(load_prompts(path)))
    except FlowRLError:
        return "not known: the file was not at hand"


def _rewards(config: Config) -> Table:
    rows = []
    for name, call in config.rewards.items():
        mix = f"{call.mix:g}"
        if call.mix == 0:
            mix += " (only measured)"
        rows.append([_code(name), _call(call), mix])
    return rows


def _time(run: Path) -> str:
    """Say how long the training took, and on what."""
    summary, machine = read_object(run, SUMMARY), read_object(run, ENVIRONMENT)
    if not summary:
        return "not known: the run did not come to its end"
    gpus, seconds = machine.get("gpus"), summary.get("seconds")
    what, took = f"{machine.get('cpus', '?')} CPU cores", "for an unknown time"
    if gpus and isinstance(gpus, list):
        what = ", ".join(map(str, gpus))
    if is_finite_number(seconds):
        took = f"{seconds / 3600:.2f} hours"
    return plain(f"{took} on {what}, finished {summary.get('finished', 'at an unknown date')}")


def _versions(run: Path) -> Table:
    """Set the versions of the training and of the export side by side."""
    now, then = environment(), read_object(run, ENVIRONMENT)
    rows = []
    for name in VERSIONS:
        known = plain(str(then.get(name, "not known")))
        rows.append([name, known, plain(str(now.get(name)))])
    return rows


# -------------------------------------------------------------------------------------- the results


def _results(facts: CardFacts) -> dict[str, Any] | None:
    """Compare the evaluations before training and of these very weights; without one of these, of
    the run's own last ones. None without evaluations."""
    evals = read_evals(facts.run)
    if len(evals) < 2:
        return None
    # of these very weights
    before, after = evals[0], evals[-1]
    own: list[Evaluation] = []
    if facts.weights == facts.config.eval.weights:
        own = [row for row in evals if row.iteration == facts.iteration]
    if own:
        after = own[0]
    return {
        "score": _code(after.name),
        "iteration": after.iteration,
        "weights": facts.config.eval.weights,
        "others": not own,
        "rows": _result_rows(facts.run, before, after),
        "verdict": _verdict(facts.run, after.iteration),
    }


def _verdict(run: Path, iteration: int) -> list[str]:
    """Say what changed from before training to the evaluation of an iteration, and where no
    checkpoint is above the base model."""
    rows = [row for row in read_rows(run, EVALS) if row["iteration"] <= iteration]
    lines = verdict_lines(gain_of(rows), run)
    return [plain(f"{line[0].upper()}{line[1:]}.") for line in lines]


def _result_rows(run: Path, before: Evaluation, after: Evaluation) -> Table:
    """One row per task, one for all, one per reward."""
    rows = []
    for task in dict.fromkeys([*before.tasks, *after.tasks]):
        then, now = before.tasks.get(task, UNKNOWN), after.tasks.get(task, UNKNOWN)
        rows.append([plain(task), score_cell(then), score_cell(now)])
    whole = f"**all ({plain(after.name)})**"
    rows.append([whole, score_cell(before.total), score_cell(after.total)])
    first, last = _means(run, before.iteration), _means(run, after.iteration)
    for name in last:
        rows.append([f"reward {_code(name)}", _number(first.get(name)), _number(last[name])])
    return rows


def _means(run: Path, iteration: int) -> dict[str, float]:
    """Return the mean of each reward in the evaluation of an iteration."""
    found = next(row for row in read_rows(run, EVALS) if row["iteration"] == iteration)
    return dict(found.get("rewards", {}))


def _number(value: float | None) -> str:
    if value is None:
        return DASH
    return fixed_digits(value)
