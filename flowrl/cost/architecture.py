"""A pipeline's parts and their settings, and networks built from these without a weight.

Settings come from the JSON files of the model's folder (or of its copy in the Hugging Face cache),
or from those of released models in assets/architectures: facts of each repository's own files, less
what a class has by default. tests/cost/test_estimate.py checks the parameters that they give
against the published numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn

from flowrl.config.load import Config
from flowrl.core.devices import named_device
from flowrl.core.errors import FlowRLError, ModelError
from flowrl.core.files import read_json
from flowrl.core.prompt_files import ENDINGS
from flowrl.core.prompts import load_prompts
from flowrl.core.shipped_files import find_resource, resource
from flowrl.evaluation.sources import source_paths
from flowrl.models import options as stated
from flowrl.models.files.loading import locate, part_class
from flowrl.models.files.single import converted
from flowrl.models.files.weights import check_plain
from flowrl.models.options import Facts, PipelineOptions, TextShape, checked_options, pick_tuning
from flowrl.models.pipeline import NETWORKS
from flowrl.models.tuning import Tuning, lora_targets

RELEASED = "assets/architectures"  # OWNER/NAME.json: {path of a JSON file there: what it holds}
INDEX = "model_index.json"
SECOND = "transformer_2"  # another expert of the same shape
SCHEDULER = "scheduler"
UNREAD = ("safety_checker",)  # parts that no model of ours loads


class WeightlessPart(NamedTuple):
    """One part of a pipeline, without weights."""

    library: str  # diffusers or transformers
    kind: str  # name of the class
    settings: dict[str, Any]  # its config.json


class Architecture(NamedTuple):
    """What is known of a pipeline before its weights are read."""

    origin: str  # the folder, or the name of the released model; for messages
    parts: dict[str, WeightlessPart]
    # False: another model of the same kind, whose latents and embeddings have the same sizes
    known: bool
    network: str = "transformer"  # the part that is trained

    @property
    def settings(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the settings of each part."""
        return {name: part.settings for name, part in self.parts.items()}

    def part(self, name: str) -> WeightlessPart:
        """Return one part. Raises ModelError that lists what there is."""
        if name not in self.parts:
            where = f"{self.origin}/model_index.json"
            raise ModelError(
                f"{where}: expected a part named {name!r}, got {', '.join(self.parts)}"
            )
        return self.parts[name]

    @property
    def others(self) -> list[str]:
        """Return the names of the parts with weights beside the networks."""
        beside = (self.network, SECOND, SCHEDULER)
        return [name for name in self.parts if name not in beside]


def facts_of(config: Config) -> Facts | None:
    """Return what the adapter of a config's model states; None for a model of another kind."""
    return stated.facts_of(config.model.function)


def known_facts(config: Config) -> Facts:
    """Return what the adapter states. Raises ModelError where there is none."""
    found = facts_of(config)
    if found is None:
        raise ModelError(f"model.fn: {config.model.fn} states nothing of its models' sizes")
    return found


def architecture_of(config: Config) -> Architecture:
    """Return the architecture of a config's model, which an adapter must be for. Raises
    ModelError."""
    path, facts = str(config.model.kwargs["path"]), known_facts(config)
    folder, known = find_folder(path), True
    if folder is not None:
        origin, parts = str(folder), _folder_parts(folder)
    else:
        origin, known = f"the released {path}", path in released()
        if not known and not facts.typical:
            raise ModelError(f"model.path: {path} is not on this machine, so its sizes are unknown")
        parts = released_parts(path if known else facts.typical)
    left_out = facts.left_out(config.model.kwargs)
    parts = {name: part for name, part in parts.items() if name not in left_out}
    found = Architecture(origin, parts, known, facts.network)
    got = found.part(facts.network).kind
    if got != facts.kind:
        raise ModelError(
            f"{origin}/{INDEX}: expected {facts.network} to be {facts.kind}, got {got}"
        )
    return found


def called_architecture(config: Config) -> Architecture | None:
    """Return the architecture of a pipeline that is asked by its own call, from its folder or of
    a released one; None where neither is here, or for a model of another kind. Raises
    ModelError."""
    path = config.model.kwargs.get("path")
    if not isinstance(path, str) or "call" not in config.model.kwargs:
        return None
    folder = find_folder(path)
    if folder is not None:
        origin, parts = str(folder), _folder_parts(folder)
    elif path in released():
        origin, parts = f"the released {path}", released_parts(path)
    else:
        return None
    for name in NETWORKS:
        if name in parts:
            return Architecture(origin, parts, True, name)
    return None


@functools.cache
def released() -> tuple[str, ...]:
    """Return the ids of the repositories whose architecture is shipped."""
    home = resource(RELEASED)
    return tuple(
        sorted(f.relative_to(home).with_suffix("").as_posix() for f in home.glob("*/*.json"))
    )


@functools.cache
def released_parts(path: str) -> dict[str, WeightlessPart]:
    """Return the parts of a repository whose architecture is shipped."""
    files = _read(resource(f"{RELEASED}/{path}.json"))
    return _read_parts(files.__getitem__)


def experts_of(architecture: Architecture) -> int:
    """Return how many networks of one shape are trained: two experts are alike."""
    return 2 if SECOND in architecture.parts else 1


def find_folder(path: str) -> Path | None:
    """Return the folder of a pipeline, or of its copy in the Hugging Face cache; None for an id
    that is not there, and for a single file that was not converted yet."""
    single = find_resource(path)
    if single is not None and single.is_file() and converted(single) is None:
        return None
    source = locate(path)
    if isinstance(source, Path):
        return source
    index = try_to_load_from_cache(source, "model_index.json")
    if not isinstance(index, str):
        return None
    found = Path(index).parent
    for name in NETWORKS:
        if (found / name / "config.json").exists():
            return found
    return None


def tuning_of(config: Config) -> Tuning:
    """Return a model's checked options of tuning; its device is this machine's. Raises
    ConfigError."""
    kwargs = config.model.kwargs
    names = ("path", "tune", "lora", "layers", "dtype", "seed", "runtime")
    # the run may be meant for another machine
    named_device(str(kwargs.get("device", "auto")), "model")
    options = checked_options(
        PipelineOptions, **{name: kwargs[name] for name in names}, device="auto"
    )
    facts = facts_of(config)
    if facts is None and (called := called_architecture(config)) is not None:
        return pick_tuning(options, lora_targets(build(called, called.network)))
    return pick_tuning(options, known_facts(config).targets)


def latent_shape(config: Config, architecture: Architecture) -> tuple[int, ...]:
    """Return [C, h, w], of videos [C, t, h, w], of one latent, as the adapter will have it. Raises
    ModelError for a size that it will refuse."""
    frames = int(config.model.kwargs.get("frames") or 1)
    size = (config.image.height, config.image.width)
    return known_facts(config).latent_shape(architecture.settings, *size, frames=frames)


def source_shape(config: Config, latent: tuple[int, ...]) -> tuple[int, int] | None:
    """Return rows and columns of the latents of what a prompt of an editing model starts from: as
    many images as the first prompt has; None for other models."""
    facts, size = known_facts(config), (config.image.height, config.image.width)
    if facts.sources == "never":
        return None
    count = references(config.prompts.train)
    return facts.source_shape(latent, config.model.kwargs, size, count)


def references(path: str) -> int:
    """Return how many images the first prompt of a list starts from; 0 where no file is there."""
    if Path(path).suffix not in ENDINGS:
        return 0
    try:
        return len(source_paths(load_prompts(path), 0))
    except FlowRLError:  # whoever trains hears of it
        return 0


def text_shape(config: Config, architecture: Architecture) -> TextShape:
    """Return the sizes of one prompt's embeddings."""
    return known_facts(config).text_shape(architecture.settings, config.model.kwargs)


def build(architecture: Architecture, name: str, device: str = "meta") -> nn.Module:
    """Make one part with random weights, without memory for them on "meta". Raises ModelError."""
    part = architecture.part(name)
    # from the settings alone: both libraries draw random weights
    try:
        with torch.device(device):
            kind = part_class(part.library, part.kind)
            if hasattr(kind, "load_config"):  # of diffusers
                made: nn.Module = kind.from_config(part.settings)
                return made
            encoder: nn.Module = kind(kind.config_class.from_dict(part.settings))
            return encoder
    # the libraries raise every kind of error over a config that is not theirs
    except Exception as error:
        where = f"{architecture.origin}/{name}"
        raise ModelError(
            f"{where}: no {part.kind} can be made of its config.json: {error}"
        ) from error


def count(network: nn.Module) -> int:
    """Return the number of a network's parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def _read_parts(read: Callable[[str], Any]) -> dict[str, WeightlessPart]:
    """Make of the JSON files of a pipeline, by their path, the parts that are run."""
    index = read(INDEX)
    parts = {}
    for name, pair in index.items():
        if not isinstance(pair, list) or len(pair) != 2 or not pair[0] or name in UNREAD:
            continue
        library, kind = pair
        file = "scheduler_config.json" if name == SCHEDULER else "config.json"
        if name == SCHEDULER or _is_module(library, kind):
            parts[name] = WeightlessPart(library, kind, read(f"{name}/{file}"))
    return parts


def _folder_parts(folder: Path) -> dict[str, WeightlessPart]:
    """Read the parts of a folder. Raises ModelError, also for weights that were quantised."""
    parts = _read_parts(lambda name: _read(folder / name))
    for name, part in parts.items():
        check_plain(folder / name, part.settings)
    return parts


def _is_module(library: str, kind: str) -> bool:
    """Tell whether a class has weights: others are tokenizers, processors and schedulers."""
    found = part_class(library, str(kind))
    return isinstance(found, type) and issubclass(found, nn.Module)


def _read(file: Path) -> dict[str, Any]:
    try:
        # -Infinity is what diffusers writes of a scheduler's lambda_min_clipped
        found: dict[str, Any] = read_json(file, dict[str, Any], error=ValueError, constants=True)
        return found
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{file}: expected the JSON file of a diffusers pipeline: {error}"
        ) from error
