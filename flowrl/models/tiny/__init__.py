"""Tiny pipelines of the real diffusers classes with random weights, to rehearse with on a CPU and
without a network: the same bytes for the same seed, with tokenizers of single letters.

They are settings: the head of ``assets/tiny.yaml`` says how they are written. An adapter of the
user's states its own in the same form (`Facts.tiny`).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import yaml

from flowrl.core.errors import ConfigError, unknown
from flowrl.core.files import read_text, replacing
from flowrl.core.shipped_files import resource
from flowrl.models.options import adapters

TABLE, INDEX = "assets/tiny.yaml", "model_index.json"
OWN = ("class", "like", "with", "drawn", "files", "set", "ask", "released")  # keys beside the parts
SCHEDULER = "FlowMatchEulerDiscreteScheduler"  # where an entry names none
SIDE = 64  # pixels
Settings = dict[str, Any]


class TinyPipeline(NamedTuple):
    """What to ask of the tiny pipeline of a class."""

    options: Settings  # of `flowrl.models.pipeline.from_pipeline`
    size: tuple[int, int]  # pixels


@functools.cache
def _table() -> dict[str, Settings]:
    found: dict[str, Settings] = yaml.safe_load(read_text(resource(TABLE)))
    return found


def tinies() -> dict[str, Settings]:
    """Return the entry of each tiny pipeline of the adapters, by its name: that of the adapter, or
    of a variant."""
    shipped, found = _table()["pipelines"], dict[str, Settings]()
    for make in adapters().values():
        for name, entry in make.facts.tiny.items():  # type: ignore[attr-defined]
            found[name] = entry or shipped[name]
    return found


def classes() -> dict[str, TinyPipeline]:
    """Return what to ask of each tiny pipeline by the class of diffusers that it is of."""
    found = {}
    for name in _table()["pipelines"]:
        if not _is_class(name):
            continue
        options: Settings = dict(_whole(name).get("ask", {}))
        guide, side = options.pop("guide", "guidance_scale"), options.pop("size", SIDE)
        options["call"] = ({guide: 3.0} if guide else {}) | options.get("call", {})
        found[name] = TinyPipeline(options, (side, side))
    return found


def class_at(path: str) -> str:
    """Return the class of a pipeline by its folder or id, "" of one without a tiny pipeline. Raise
    ModelError for one that is not here and not known."""
    from flowrl.models.pipeline import class_of

    for name, entry in _table()["pipelines"].items():
        if entry.get("released") == path:
            return str(name)
    name = class_of(path)
    return name if name in classes() else ""


def save_tiny(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Save the tiny pipeline of this name, one of `tinies` or of a class of diffusers, in a new or
    empty folder, as diffusers writes it -> the folder. Raises ConfigError for an unknown name and a
    folder that holds something."""
    if name not in tinies() and name not in classes():
        names = [*tinies(), *classes()]
        raise ConfigError(f"tiny: flowrl {unknown(name, names, 'tiny pipeline')}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"tiny: expected a new or empty folder, got {folder}")
    with replacing(folder) as draft:
        save(name, draft, seed=seed)
    return folder


def save(name: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Save one into a folder -> the folder; ``changes`` as `tiny_pipeline` takes them."""
    tiny_pipeline(name, seed=seed, **changes).save_pretrained(folder, safe_serialization=True)
    # diffusers takes a module of transformers for one of its own where their folders' names agree
    index = json.loads(read_text(folder / INDEX))
    for part in index.values():
        if isinstance(part, list) and isinstance(part[1], str) and hasattr(transformers, part[1]):
            part[0] = "transformers"
    written = {INDEX: index}
    for file, more in _whole(name, changes).get("files", {}).items():
        written[file] = written.get(file, json.loads(read_text(folder / file))) | more
    for file, said in written.items():
        (folder / file).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    return folder


def tiny_pipeline(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """Make one in memory, its weights drawn from a seed; those of a class that start as zeros are
    drawn, too, so that everything has an effect. ``changes`` are keys of its entry, or parts that
    are made already."""
    entry = _whole(name, changes)
    made: Settings = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = _pipeline_class(entry["class"])
        for part, spec in entry.items():
            if part not in OWN:
                made[part] = _made(spec, kind, part)
        pipe = kind(**made, **entry.get("with", {}))
        for part, patterns in entry.get("drawn", {}).items():
            for weight, parameter in getattr(pipe, part).named_parameters():
                for pattern, std in patterns.items():
                    if re.search(pattern, weight):
                        parameter.data.normal_(0, std)
    vars(pipe).update(entry.get("set", {}))
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
            if _is_class(name):
                _wake(part)
    return pipe


def _wake(part: torch.nn.Module) -> None:
    """Draw weights that are made of zeros."""
    stream = torch.Generator().manual_seed(1)
    for parameter in part.parameters():
        if not bool(parameter.any()):
            parameter.data.normal_(0, 0.05, generator=stream)


def _is_class(name: str) -> bool:
    return name.endswith("Pipeline")


def _pipeline_class(name: str) -> Any:
    from flowrl.models.by_call.options import pipeline_class

    return pipeline_class(name, "tiny")


def _whole(name: str, changes: Mapping[str, Any] | None = None) -> Settings:
    """Return an entry with all that it has from others."""
    shipped = _table()["pipelines"]
    own = shipped[name] if name in shipped else tinies()[name]
    found: Settings = {"class": name} if _is_class(name) else {}
    if "like" in own:
        found = {**_whole(own["like"]), **found}
        found.pop("released", None)
    for given in (own, changes or {}):
        for key, value in given.items():
            found[key] = _over(found.get(key), value)
    return found


def _over(before: Any, value: Any) -> Any:
    """Put settings over those before, unless they say what they are, or nothing."""
    named = not isinstance(value, Mapping) or "is" in value or not value
    if named or before is None:
        return value
    if isinstance(before, str):
        before = {"is": before}
    return before | value


def _made(spec: Any, kind: Any, part: str) -> Any:
    """Make a part of a pipeline of that class, by its entry."""
    if not isinstance(spec, str | Mapping):  # None, or made already
        return spec
    settings = _settled(spec)
    name = settings.pop("is", SCHEDULER if part == "scheduler" else "")
    make = _found(name) if name else kind._get_signature_types()[part][0]
    config = getattr(make, "config_class", None)  # of a network of transformers
    return make(**settings) if config is None else make(config(**settings))


def _settled(spec: Any) -> Settings:
    """Return the settings of a part with those of the entries that it is, or is like."""
    found: Settings = {"is": spec} if isinstance(spec, str) else dict(spec)
    shared = _table()["parts"]
    for key in ("like", "is"):
        other = found.get(key)
        if other in shared:
            before = _settled(shared[other])
            mine = {name: value for name, value in found.items() if name != "like"}
            if key == "is":
                mine["is"] = before["is"]
            found = before | mine
    return found


def _found(name: str) -> Any:
    """Return a function of ours, or a class of diffusers or transformers."""
    from flowrl.models.files.loading import part_class
    from flowrl.models.tiny import parts

    return getattr(parts, name, None) or part_class("diffusers", name)
