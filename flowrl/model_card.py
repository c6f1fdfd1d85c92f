"""The README.md of an exported model: what was trained, how, on what, how well, and what nobody knows."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import yaml

from flowrl.config import Call, Config, load_config
from flowrl.curves import Evaluation, Score, read_evals, read_rows
from flowrl.errors import FlowRLError, RunError
from flowrl.log import environment
from flowrl.methods import AXES, METHODS, Method
from flowrl.model_usage import LORA_FILE, Facts, local, shown, usage
from flowrl.models.loading import locate
from flowrl.prompts import load_prompts

CARD, GRID = "README.md", "grid.png"
VERSIONS = ("flowrl", "python", "torch", "diffusers", "transformers", "peft")
READERS = {
    "lora": "LoRA for diffusers: `load_lora_weights`; rank and alpha are in its metadata",
    "peft": "LoRA for peft: `PeftModel.from_pretrained`",
    "kohya": "LoRA for ComfyUI and kohya's sd-scripts",
    "merged": "the whole pipeline, the training merged in: `from_pretrained`; add no LoRA to it",
}


def write_card(facts: Facts, folder: Path) -> None:
    """Write README.md, and copy the run's grid of samples if there is one. Raise RunError if a log is damaged."""
    grid = (facts.run / GRID).is_file()
    if grid:
        shutil.copyfile(facts.run / GRID, folder / GRID)
    (folder / CARD).write_text(card(facts, grid=grid), encoding="utf-8")


def card(facts: Facts, *, grid: bool) -> str:
    """Return the text of the card. Nothing in it names a place on a machine or in a network."""
    parts = [
        _front_matter(facts),
        f"# {facts.config.name}\n\n{_summary(facts)}",
        _grid(facts) if grid else "",
        f"## Files\n\n{_files(facts)}",
        f"## How to use it\n\n{usage(facts)}",
        f"## Training\n\n{_training(facts)}",
        f"## Data\n\n{_data(facts)}",
        f"## Rewards\n\n{_rewards(facts)}",
        f"## Results\n\n{_results(facts)}",
        f"## What is not known\n\n{_unknown(facts)}",
        f"## Licence\n\n{_licence(facts)}",
        f"## Versions\n\n{_versions(facts)}",
        _config(facts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def base_name(config: Config) -> str:
    """Return the hub id of a config's base model, "" if it is a folder."""
    path = str(config.model.kwargs.get("path", ""))
    return path if path and not isinstance(locate(path), Path) else ""


def _front_matter(facts: Facts) -> str:
    found = _method(facts.config)
    about: dict[str, Any] = {"library_name": "diffusers", "pipeline_tag": "text-to-image"}
    if facts.base:
        relation = "finetune" if facts.formats == ["merged"] else "adapter"
        about |= {"base_model": facts.base, "base_model_relation": relation}
    about |= {"license": "other", "license_name": "not-chosen-yet"}
    tags = ["flowrl", "diffusers", "text-to-image", "reinforcement-learning"]
    about["tags"] = [*tags, *(["lora"] if facts.lora else []), *([found[0].slug.replace("_", "-")] if found else [])]
    lines = yaml.safe_dump(about, sort_keys=False)
    hint = "" if facts.base else "# base_model: owner/name of the base model on the hub; here it was a local folder\n"
    return f"---\n{lines}{hint}# license: choose one; the base model's terms bind what is made from it\n---"


def _summary(facts: Facts) -> str:
    how = f"LoRA adapters of rank {facts.lora['r']}" if facts.lora else "weights"
    return (
        f"A {type(facts.pipeline).__name__} whose {facts.network} was fine-tuned by reinforcement learning on rewards "
        f"with flowrl: {facts.numbers:,} numbers ({how}), {facts.iteration} iterations."
    )


def _grid(facts: Facts) -> str:
    return (
        f"![The same prompts and noise over the training]({GRID})\n\nHeld-out prompts, the same noise in each row; "
        "columns are iterations of the run, 0 before training."
    )


def _files(facts: Facts) -> str:
    names = {
        "lora": f"`{LORA_FILE}`",
        "peft": "`adapter_config.json`, `adapter_model.safetensors`",
        "kohya": f"`{facts.kohya}`",
        "merged": "`model_index.json` and the folders",
    }
    return _table(["file", "what it is"], [[names[name], READERS[name]] for name in facts.formats])


def _training(facts: Facts) -> str:
    c, lora = facts.config, facts.lora
    rows = [*_described(c), ["base model", facts.base or f"a local folder, `{local(facts)}`"]]
    rows += [[axis, ", ".join(texts)] for axis in AXES if axis != "rewards" and (texts := _calls(c, axis))]
    if lora:
        targets = ", ".join(f"`{name}`" for name in lora["target_modules"])
        rows.append(["LoRA", f"rank {lora['r']}, alpha {lora['lora_alpha']:g}, on {targets}"])
    per = f"{c.train.prompts} prompts x {c.train.group} pictures"
    rows.append(["iterations", f"{facts.iteration} of {c.train.iterations}, each of {per}"])
    rows.append(["learning rate, seed", f"{c.train.lr:g}, {c.seed}"])
    rows.append(["pictures", f"{c.image.width} x {c.image.height} pixels, {c.eval.steps} steps when judged"])
    rows.append(["weights", "moving average (ema)" if facts.weights == "ema" else "the last ones (current)"])
    rows.append(["time", _time(facts.run)])
    return _table(["", ""], rows)


def _method(config: Config) -> tuple[Method, str] | None:
    """Return the method whose shipped config has this one's name, and that config."""
    for method in METHODS:
        for shipped in method.configs:
            if config.name == shipped.replace("/", "-").replace("_", "-"):
                return method, shipped
    return None


def _described(config: Config) -> list[list[str]]:
    """Name method and paper, and say on which axes the run leaves the shipped config."""
    found = _method(config)
    if found is None:
        return [["method", "not known: the config has none of the names of flowrl's; its parts are below"]]
    method, name = found
    shipped = load_config(name)
    other = [axis for axis in AXES if axis != "rewards" and getattr(shipped, axis) != getattr(config, axis)]
    changed = f", changed in {', '.join(other)}" if other else ""
    rows = [["method", f"{method.name}, flowrl's config `{name}`{changed}"]]
    if method.paper:
        paper = method.paper
        rows.append(["paper", f"{paper.title} ({paper.year}), [{paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})"])
    return rows


def _calls(config: Config, axis: str) -> list[str]:
    value = getattr(config, axis)
    return [_call(call) for call in (value if isinstance(value, tuple) else [value]) if isinstance(call, Call)]


def _call(call: Call) -> str:
    about = {key: value for key, value in call.to_dict().items() if key not in ("fn", "weight") and value is not None}
    given = ", ".join(f"{key}: {_inline(value)}" for key, value in about.items())
    return f"`{call.fn}`" + (f" ({given})" if given else "")


def _inline(value: Any) -> str:
    text = yaml.safe_dump(shown(value), default_flow_style=True, width=math.inf).strip()
    return text.removesuffix("...").strip().replace("|", "\\|")


def _data(facts: Facts) -> str:
    prompts = facts.config.prompts
    rows = [["training", *_prompts(prompts.train)], ["held out, for the results", *_prompts(prompts.test)]]
    text = "Prompts, and the model's own pictures of them. Files that a reward read are named with it below.\n\n"
    return text + _table(["used for", "file", "prompts"], rows)


def _prompts(path: str) -> list[str]:
    try:
        count = str(len(load_prompts(path)))
    except FlowRLError:
        count = "not known: the file was not at hand"
    return [f"`{shown(path)}`", count]


def _rewards(facts: Facts) -> str:
    rows = [
        [f"`{name}`", _call(call), f"{call.mix:g}" + ("" if call.mix else " (only measured)")]
        for name, call in facts.config.rewards.items()
    ]
    return _table(["reward", "function", "weight"], rows)


def _results(facts: Facts) -> str:
    """Compare the evaluations before training and of these very weights."""
    before, after, note = _evaluations(facts)
    if before is None or after is None:
        return note
    names = dict.fromkeys([*before.tasks, *after.tasks])
    rows = [[task, _score(before.tasks.get(task)), _score(after.tasks.get(task))] for task in names]
    rows.append([f"**all ({after.name})**", _score(before.total), _score(after.total)])
    means = [_means(facts.run, row.iteration) for row in (before, after)]
    rows += [[f"reward `{name}`", *(_number(side.get(name)) for side in means)] for name in means[1]]
    text = (
        f"Scores of `{after.name}` on held-out prompts; in brackets a 95 % interval, which holds the noise of sampling "
        "for these prompts and this one training run, nothing else."
    )
    return f"{note}{text}\n\n" + _table(["task", "before", f"after {after.iteration} iterations"], rows)


def _evaluations(facts: Facts) -> tuple[Evaluation | None, Evaluation | None, str]:
    rows = read_evals(facts.run)
    if len(rows) < 2:
        return None, None, "No evaluation of this model was made."
    same = facts.weights == facts.config.eval.weights
    mine = next((row for row in rows if row.iteration == facts.iteration and same), None)
    if mine is not None:
        return rows[0], mine, ""
    note = "These very weights were not evaluated. What follows is the run's own last evaluation, of "
    note += f"its {facts.config.eval.weights} weights after {rows[-1].iteration} iterations.\n\n"
    return rows[0], rows[-1], note


def _means(run: Path, iteration: int) -> dict[str, float]:
    found = next(row for row in read_rows(run, "eval.jsonl") if row["iteration"] == iteration)
    return dict(found.get("rewards", {}))


def _score(score: Score | None) -> str:
    if score is None or not math.isfinite(score.mean):
        return "-"
    known = math.isfinite(score.low) and math.isfinite(score.high)
    return _number(score.mean) + (f" [{score.low:.3f}, {score.high:.3f}]" if known else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _unknown(facts: Facts) -> str:
    lines = [
        "Whether people like the pictures better. Only the rewards above judged them, and a model can learn what a "
        "reward likes without what was meant by it.",
        "How it does with other prompts, sizes, numbers of steps, samplers and guidance than in the evaluations, and "
        "together with other LoRAs.",
        f"How much the result depends on chance: this is one run, seed {facts.config.seed}.",
        "What became of abilities that no reward measures, and of the base model's biases and safety: nothing of this "
        "was tested.",
    ]
    quantize = (facts.config.model.kwargs.get("runtime") or {}).get("quantize", "none")
    if quantize != "none":
        lines.append(f"What it matters that the base model was quantised ({quantize}) when trained, and is not here.")
    if not facts.base:
        lines.append("Which public model the base model is: the run had it in a local folder.")
    return "\n".join(f"- {line}" for line in lines)


def _licence(facts: Facts) -> str:
    base = f"`{facts.base}`" if facts.base else "the base model"
    return (
        f"Not chosen yet: fill in `license` at the top. The terms of {base} bind what is made from it; those of the "
        "reward models may do so, too."
    )


def _versions(facts: Facts) -> str:
    """Set the versions of the training and of the export side by side."""
    now, then = environment(), _read(facts.run / "environment.json")
    rows = [[name, str(then.get(name, "not known")), str(now.get(name))] for name in VERSIONS]
    return _table(["", "training", "export"], rows)


def _time(run: Path) -> str:
    """Say how long the training took, and on what."""
    summary, machine = _read(run / "summary.json"), _read(run / "environment.json")
    if not summary:
        return "not known: the run did not come to its end"
    gpus = machine.get("gpus") or []
    what = ", ".join(gpus) if gpus else f"{machine.get('cpus', '?')} CPU cores"
    return f"{summary['seconds'] / 3600:.2f} hours on {what}, finished {summary['finished']}"


def _read(file: Path) -> dict[str, Any]:
    """Read a file of the run, {} if there is none. Raise RunError if it is damaged."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{file}: cannot be read: {error}") from error


def _config(facts: Facts) -> str:
    text = yaml.safe_dump(shown(facts.config.to_dict()), sort_keys=False, width=110)
    return f"<details><summary>Configuration</summary>\n\n```yaml\n{text}```\n\n</details>"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
