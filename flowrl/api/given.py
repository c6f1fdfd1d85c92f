"""What a call was given in place of names: lists of prompts, and the tenth of one that is held out;
models, as an id or a folder, a pipeline in memory, a FlowModel."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.config.calls import PYTHON, as_handed
from flowrl.config.load import Config, load_config
from flowrl.config.overrides import override_texts
from flowrl.config.values import show
from flowrl.core.devices import check_wide, kinds_of
from flowrl.core.errors import ConfigError, FlowRLError, ModelError
from flowrl.core.files import without
from flowrl.core.prompts import PromptSet, given_prompts, load_prompts
from flowrl.core.shipped_files import find_resource
from flowrl.core.types import FlowModel
from flowrl.models.files.loading import locate
from flowrl.models.options import facts_of, fn_of
from flowrl.models.pipeline import class_of, from_pipeline

SHARE = 10  # of so many different prompts one is held out
FEW = 6  # of so many at least two are


def prompts_of(given: Any, what: str) -> str:
    """Return the name under which a list of prompts is found: a path or a name as it is. Raises
    ConfigError for what is no list, DataError for what is no prompt."""
    if isinstance(given, str | os.PathLike):
        name = os.fspath(given)
        if not name.strip():
            raise ConfigError(f"{what}: expected a path or a name, got an empty text")
        if re.search(r"\s", name) and find_resource(name) is None:  # no list has such a name
            raise ConfigError(
                f"{what}: there is no file {name!r}; a text to draw is given in a list, "
                f"{what}=[{name!r}]"
            )
        return name
    return _listed(given, what).path


def both_lists(given: Any) -> tuple[tuple[str, str], str]:
    """Hold out a tenth of a list -> (the names of the list to train on and of that to judge by,
    what is to be said of it).

    Which prompts are held out follows from their texts alone, so that a call that goes on holds out
    the same; equal texts stay together.
    """
    is_name = isinstance(given, str | os.PathLike)
    whole = load_prompts(prompts_of(given, "prompts")) if is_name else _listed(given, "prompts")
    texts = dict.fromkeys(map(_plain, whole.texts))
    if len(texts) < 2:
        raise ConfigError(
            "prompts: expected at least two different prompts, one to train on and one to judge "
            "by, got one; or give test_prompts"
        )
    count = max(1, len(texts) // SHARE)
    if len(texts) >= FEW:  # one prompt alone would not say what is chance
        count = max(2, count)
    held = set(sorted(texts, key=_digest)[:count])
    trained, held_out = list[dict[str, Any]](), list[dict[str, Any]]()
    folder = Path(whole.path).parent
    for record in whole.records:
        own = record
        if is_name:
            own = _with_absolute_files(record, folder)
        if _plain(record["prompt"]) in held:
            held_out.append(own)
        else:
            trained.append(own)
    train, test = given_prompts(trained, "train"), given_prompts(held_out, "test")
    said = (
        f"no test_prompts were given: {len(test)} of {len(whole)} prompts are held out to judge by "
        f"(first: {test.texts[0]!r})"
    )
    return (train.path, test.path), said


def _listed(given: Any, what: str) -> PromptSet:
    """Read a list of texts or records in memory, with files that they name seen from the working
    folder."""
    iterable = isinstance(given, Iterable) and not isinstance(given, bytes | Mapping)
    if not iterable:
        raise ConfigError(
            f"{what}: expected a path or the name of a list, a list of texts or of records with a "
            f"'prompt', or a datasets.Dataset, got {show(given)}"
        )
    records = []
    for item in given:
        if isinstance(item, Mapping):
            item = _with_absolute_files({**item}, Path())
        records.append(item)
    return given_prompts(records, what)


def _with_absolute_files(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a record whose files are named by absolute paths: it is kept in another folder."""
    return {key: _absolute(value, folder) for key, value in record.items()}


def _absolute(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_absolute(one, folder) for one in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    named = isinstance(value, str) and 0 < len(value) < 1000 and Path(value).suffix
    if named and (folder / value).is_file():
        return str((folder / value).resolve())
    return value


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


ModelLike = str | os.PathLike[str] | Mapping[str, Any] | FlowModel | Any
ANY = "pipeline"  # the adapter of a class that has none of its own
KEPT = ("tune", "seed", "runtime")  # options that mean the same for every adapter


class GivenModel:
    """A FlowModel of the program; each call gives it as it was when it was handed over."""

    def __init__(self, model: FlowModel) -> None:
        self.model, self.frames = model, int(getattr(model, "frames", 1))
        self.path = ""
        self._start: dict[str, Tensor] = {}
        for name, value in model.trainable().items():
            self._start[name] = value.detach().to("cpu", copy=True)

    def __call__(self) -> FlowModel:
        """Return the model with the weights that it came with."""
        with torch.no_grad():
            for name, value in self.model.trainable().items():
                value.copy_(self._start[name])
        return self.model


class GivenPipeline:
    """A loaded pipeline of diffusers, which stays as it is; each call makes a model of it."""

    def __init__(self, pipe: Any, path: str, made: Callable[..., Any]) -> None:
        """``made`` loads a folder of its class, and states the same of it."""
        self.pipe, self.path, self.facts = pipe, path, facts_of(made)

    def __call__(self, path: str, **options: Any) -> FlowModel:
        """Make a model with options of the config; its weights are those of the pipeline."""
        return from_pipeline(self.pipe, **options)


def with_model(config: Config, model: Any) -> Config:
    """Return the config with another model. Raises ConfigError for what is none, ModelError for a
    pipeline that cannot be trained."""
    if isinstance(model, str | os.PathLike):
        return _with_path(config, os.fspath(model))
    if is_pipeline(model):
        return _with_pipeline(config, model)
    if isinstance(model, FlowModel):
        return replace(config, model=as_handed("model", GivenModel(model)))
    raise ConfigError(
        "model: expected a folder or a hub id, a loaded pipeline of diffusers, or a FlowModel "
        f"(flowrl/core/types.py), got {show(model)}"
    )


def is_pipeline(model: Any) -> bool:
    """Say whether an object is a loaded pipeline of diffusers."""
    diffusers = sys.modules.get("diffusers")
    return diffusers is not None and isinstance(model, diffusers.DiffusionPipeline)


def _with_path(config: Config, path: str) -> Config:
    """Return the config with the weights of a folder or an id, and the adapter of their class."""
    if not path.strip():
        raise ConfigError("model: expected a folder or a hub id, got an empty text")
    with suppress(ModelError):  # who loads it says what is wrong with it
        return _adapted(config, _adapter(class_of(path)), {"path": path})
    return config.replace(model={"path": path})


def _with_pipeline(config: Config, pipe: Any) -> Config:
    """Return the config with a pipeline in memory.

    What is written into the run is its folder or its id, where the weights are those of there, so
    that the run can be opened without the program; else that the program has them.
    """
    network, path = _network(pipe), str(pipe.name_or_path or "")
    if getattr(network, "hf_quantizer", None) is None:  # nobody knows of scales then
        kinds = kinds_of(network.state_dict())
        check_wide(kinds, f"model: the {type(network).__name__} of the pipeline")
    dtype = next(network.parameters()).dtype
    own = {"path": PYTHON, "device": str(pipe.device), "dtype": str(dtype).removeprefix("torch.")}
    if path and _is_as_stored(pipe, path):
        own["path"] = path
    # what was asked for by name stands above what the pipeline is
    asked = [name.removeprefix("model.") for name in _overridden(config)]
    made = _adapted(config, _adapter(type(pipe).__name__), without(own, *asked))
    call = replace(made.model, function=GivenPipeline(pipe, path, made.model.function))
    return replace(made, model=call)


def _overridden(config: Config) -> list[str]:
    return [text.partition("=")[0].strip() for text in config.overrides]


def _adapter(kind: str) -> str:
    return fn_of(kind) or ANY


def _adapted(config: Config, adapter: str, own: Mapping[str, Any]) -> Config:
    """Return the config with options of its model under an adapter: all of them where it is the
    one that it has, else those that mean the same for each."""
    if config.model.fn == adapter:
        return config.replace(model=dict(own))
    options = {key: config.model.kwargs[key] for key in KEPT if key in config.model.kwargs}
    lora = config.model.kwargs.get("lora")
    if lora is not None:  # its layers have other names
        options["lora"] = {key: lora[key] for key in ("rank", "alpha") if key in lora}
    call = {"fn": adapter, **options, **own}
    return load_config(config, override_texts({"model": call}))


def _network(pipe: Any) -> Any:
    for name in ("transformer", "unet", "prior"):
        if pipe.components.get(name) is not None:
            return pipe.components[name]
    raise ConfigError(
        f"model: expected a pipeline with a transformer or a unet, got a {type(pipe).__name__} of "
        f"{', '.join(pipe.components)}"
    )


def _is_as_stored(pipe: Any, path: str) -> bool:
    """Tell whether the networks of a pipeline hold what the files of its folder hold: the first
    numbers of each tensor."""
    try:
        folder = locate(path)
    except FlowRLError:
        return False
    if isinstance(folder, str):
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(folder, local_files_only=True))
        except Exception:  # it is not here, or only in part
            return False
    for name in ("transformer", "transformer_2", "unet"):
        network = pipe.components.get(name)
        if network is not None and not _holds(network, folder / name):
            return False
    return True


def _holds(network: Any, folder: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    values, seen = network.state_dict(), set[str]()
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - no mapping
                    seen.add(name)
                    part = stored.get_slice(name)
                    first = part[:1] if part.get_shape() else stored.get_tensor(name)
                    if name not in values or not _alike(values[name], first):
                        return False
    except (OSError, SafetensorError):
        return False
    return seen == set(values)


def _alike(value: Tensor, first: Tensor) -> bool:
    own = value
    if value.dim() > 0:
        own = value[:1]
    return own.shape == first.shape and torch.equal(own.cpu(), first.to(own.dtype))
