"""What judged and what made the images of an evaluation, by content: the facts that tie kept images
and scores to a model and to rewards that may change under their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowrl.config.calls import PYTHON, Call
from flowrl.config.load import Config
from flowrl.core.files import without
from flowrl.core.identity import (
    IMAGES,
    Facts,
    facts_of_file,
    facts_of_source,
    facts_of_values,
    short_digest,
)
from flowrl.core.prompts import PromptSet, load_prompts, prompts_hash

JUDGES = ("flowrl.evaluation",)  # rewards take their rules from here
FUNCTIONS = "functions"  # of the user's own, whose source is kept
MACHINE = ("runtime", "device", "decode_batch")  # arguments of a model: where and how it computes


def content_of(call: Call) -> Facts:
    """Return the facts of a call: the source of its function, and the files that its arguments
    name; what it writes itself, the arguments in its ``writes``, is not looked at."""
    writes = getattr(call.function, "writes", ())
    read = without(call.kwargs, *writes)
    source, files = facts_of_source(call.function, JUDGES), facts_of_values(read)
    return _known({"source": source, "files": files})


def _known(facts: Facts) -> Facts:
    """Leave out what holds nothing."""
    return {key: value for key, value in facts.items() if value}


def drawing_content(config: Config) -> Facts:
    """Return the facts of a config's model before training that its images depend on: its files,
    its settings but for where and how it is computed, and the source of one that is no part of
    flowrl."""
    said = config.model.to_dict()
    settings = without(said, *MACHINE)
    quantize = (said.get("runtime") or {}).get("quantize", "none")
    return {**content_of(config.model), "settings": {**settings, "quantize": quantize}}


def start_content(config: Config) -> Facts:
    """Return the facts of the files that a config's training begins with, where these are not the
    model's own."""
    return _known({"start": facts_of_values(config.train.start)})


def reward_contents(config: Config, made: Mapping[str, Any] | None = None) -> Facts:
    """Return the facts of each reward of a config, by its name; of one that is made and that other
    processes host also what they have ``told`` of it."""
    found: Facts = {}
    for name, call in config.rewards.items():
        told = getattr((made or {}).get(name), "told", None)
        found[name] = {**content_of(call), **_known({"told": told})}
    return found


def own_judge(config: Config) -> dict[str, str]:
    """Return a digest of the source of the headline reward, as "judge", where it is a user's own
    that the config names; {} for others: flowrl's has a version, a program's object no file."""
    call = config.rewards[config.headline]
    package = str(getattr(call.function, "__module__", "")).partition(".")[0]
    if call.path == PYTHON or package in ("flowrl", "rewards"):
        return {}
    return {"judge": short_digest(facts_of_source(call.function))}


def prompt_files(prompts: PromptSet, config: Config) -> str:
    """Return a digest of the images that prompts' records name, as sources or references: beside
    the list, or where a reward's ``root`` says; "" where they name none."""
    bases = [Path(prompts.path).parent]
    for call in config.rewards.values():
        root = call.kwargs.get("root")
        if isinstance(root, str):
            bases.append(Path(root).expanduser())
    found: Facts = {}
    for name in sorted({*_image_names(prompts.records)}):
        files = [base / name for base in bases if (base / name).is_file()]
        found |= {str(file): facts_of_file(file) for file in files}
    return short_digest([*found.values()]) if found else ""


def _image_names(value: Any) -> Iterator[str]:
    """Yield every text in records that ends as the file of an image does."""
    if isinstance(value, str) and value.lower().endswith(IMAGES) and "\0" not in value:
        yield value
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _image_names(each)


def judged_content(config: Config) -> Facts:
    """Return the facts of all that decides how a config's base model is judged: the model's files,
    the weights that it begins with, the headline reward and the held-out prompts."""
    prompts = load_prompts(config.prompts.test)
    return {
        "model": content_of(config.model),
        **start_content(config),
        "reward": content_of(config.rewards[config.headline]),
        "prompts": prompts_hash(prompts),
        "files of prompts": prompt_files(prompts, config),
    }


def trained_content(config: Config) -> Facts:
    """Return the facts of all that a config's training begins with: `judged_content`, all rewards,
    the training prompts, and the user's own functions."""
    prompts = prompts_hash(load_prompts(config.prompts.train))
    found = {"rewards": reward_contents(config), "trained on": prompts}
    return {**judged_content(config), **found, **own_functions(config)}


def own_functions(config: Config) -> Facts:
    """Return the source of each function of a method that is no part of flowrl, by its section;
    that of rewards is in `reward_contents`."""
    calls: list[Any] = []
    for section in vars(config).values():
        calls += section.values() if isinstance(section, Mapping) else [section]
    for call in config.rewards.values():
        calls += call.transform
    calls += config.select
    known = [config.model, *config.rewards.values()]
    found: Facts = {}
    for call in calls:
        if isinstance(call, Call) and call not in known:
            found |= _known({call.key: facts_of_source(call.function)})
    return _known({FUNCTIONS: found})
