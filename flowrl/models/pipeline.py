"""Any pipeline of diffusers as a FlowModel: by its class's adapter, or by its own ``__call__``."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from huggingface_hub import hf_hub_download
from torch import nn

from flowrl.core.abilities import Ahead
from flowrl.core.devices import DTYPES
from flowrl.core.errors import ConfigError, ModelError, near
from flowrl.core.files import read_text
from flowrl.core.processes import sharded
from flowrl.core.types import FlowModel
from flowrl.models.by_call.fence import fence
from flowrl.models.by_call.model import EditingPipelineCall, PipelineCall
from flowrl.models.by_call.noise import EditingNoiseCall, NoiseCall
from flowrl.models.by_call.options import (
    PipelineCallOptions,
    check_class,
    check_scheduler,
    pipeline_class,
)
from flowrl.models.by_call.texts import KeyedTexts
from flowrl.models.files.loading import (
    Loaded,
    PipelinePart,
    check_libraries,
    first_line,
    library,
    locate,
    names_part,
    part_class,
)
from flowrl.models.options import adapters, fn_of, options_of, pick_tuning, warn_if_distilled
from flowrl.models.tuned_pipeline import TunedPipeline, given, load_for_tuning, loaded_from
from flowrl.models.tuning import lora_targets
from flowrl.models.unet import SPACINGS, ddim_scheduler
from flowrl.models.wan import LOW, Experts

NETWORKS = ("transformer", "unet", "prior")  # parts that are trained, the first that is there


@options_of(PipelineCallOptions)
def pipeline(options: PipelineCallOptions) -> PipelineCall:
    """Load any flow-matching pipeline of diffusers from a folder or a Hugging Face id, ready to
    sample and to train by its own ``__call__``.

    See `PipelineCallOptions` for what can be set. Raise ConfigError for a wrong option, ModelError
    for a pipeline that cannot be asked for a velocity, before its weights are read where its class
    or its settings say so.
    """
    index, where = read_index(options.path)
    kind = pipeline_class(index.get("_class_name"), where)
    check_class(kind, where, options)
    _check_runtime(options)
    parts, networks = _parts(index, where)
    blind = tuple(name for name in index if name == "safety_checker")  # it blacks out images
    settings = part_settings(options.path, "scheduler", "scheduler_config")
    noise = check_scheduler(index["scheduler"][1], settings, where)
    loaded = load_for_tuning(
        kind,
        options.path,
        parts,
        pick_tuning(options, ()),
        network=networks[0],
        also=tuple(networks[1:]),
        leave_out=blind,
    )
    return _tuned(loaded, options, networks, noise=noise)


def _ahead(path: str = "", **others: Any) -> Ahead:
    """Return what the settings of a pipeline say of its model; what cannot be read now is said when
    it is loaded."""
    known = Ahead(encodes_images=False)
    try:
        index, where = read_index(path)
        settings = part_settings(path, "scheduler", "scheduler_config")
        return known._replace(
            discrete_levels=check_scheduler(index["scheduler"][1], settings, where)
        )
    except (LookupError, ModelError):
        return known


pipeline.ahead = _ahead  # type: ignore[attr-defined]


def from_pipeline(pipe: Any, *, adapter: bool = True, **options: Any) -> FlowModel:
    """Make a FlowModel of a pipeline in memory, which stays as it is: the model has modules of its
    own over the same weights, and copies of those that are trained (``tune="full"``).

    A class with an adapter gets it, with its options; with ``adapter=False``, and any other class,
    is asked by its own ``__call__``, with those of `PipelineCallOptions`. ``device`` and
    ``dtype`` are the pipeline's. Raise ConfigError, ModelError; the pipeline is then as before.
    """
    if not isinstance(pipe, diffusers.DiffusionPipeline):
        raise ModelError(
            f"model: expected a pipeline of diffusers, got a {type(pipe).__name__}; one of your "
            "own has the methods of flowrl.FlowModel"
        )
    kind = type(pipe)
    _check_at_rest(pipe)
    networks = _networks_of(pipe)
    network = getattr(pipe, networks[0])
    if options.get("tune", "lora") != "none":
        _check_plain(pipe, networks)
    options = {"path": str(pipe.name_or_path or kind.__name__), **options}
    options.setdefault("device", str(network.device))
    options.setdefault("dtype", _dtype_name(network.dtype))
    make = adapters().get(kind.__name__) if adapter else None
    if make is not None:
        with given(pipe):
            model: FlowModel = make(**options)
        return model
    checked = pipeline.options(**options)  # type: ignore[attr-defined]
    where = f"the {kind.__name__} in memory"
    check_class(kind, where, checked)
    _check_runtime(checked)
    if getattr(pipe, "scheduler", None) is None:
        raise ModelError(f"{where}: has no scheduler; a pipeline of pipelines needs an adapter")
    noise = check_scheduler(type(pipe.scheduler).__name__, pipe.scheduler.config, where)
    tuning = pick_tuning(checked, ())
    loaded = loaded_from(pipe, kind, {}, tuning, networks=networks)
    return _tuned(loaded, checked, networks, noise=noise)


def own_call(model: Any, height: int, width: int, *, sources: int = 0) -> PipelineCall:
    """Return the pipeline of an adapter's model asked by its own ``__call__``, over the same
    weights and with the model's options under the pipeline's names; prompts start from up to
    ``sources`` images. Raise ConfigError, ModelError."""
    pipe = model.pipeline()
    facts = model.facts
    given = {name: getattr(model.options, name) for name in model.options.__dataclass_fields__}
    call = facts.arguments(given, height, width)
    if facts.negative_by_embeds and given["negative_prompt"]:
        raise ModelError(f"{type(pipe).__name__} knows no negative prompt but the empty one")
    options = PipelineCallOptions(
        given["path"],
        tune=model.options.tune,
        layers=given["layers"],
        dtype=given["dtype"],
        device=given["device"],
        runtime=given["runtime"],
        decode_batch=given["decode_batch"],
        negative_prompt=call.pop("negative_prompt", None),
        frames=call.pop("num_frames", 1),
        sources=sources,
        call=call,
    )
    check_class(type(pipe), type(pipe).__name__, options)
    tuned = copy.copy(model._tuned)
    tuned.texts = KeyedTexts(tuned.encoders_at_work)
    kind: type[PipelineCall] = PipelineCall
    if sources:
        kind = EditingPipelineCall
    if getattr(model, "discrete_levels", False):
        kind = NoiseCall
    made = kind(tuned, options, fence)
    made.networks = {name: getattr(pipe, name) for name in _networks_of(pipe)}
    return made


def _tuned(
    loaded: Loaded, options: PipelineCallOptions, networks: list[str], *, noise: bool
) -> PipelineCall:
    """Tune a loaded pipeline's network, and wrap it; one that predicts ``noise`` gets DDIM."""
    pipe = loaded.pipeline
    if noise:
        # DDIM lands on its own timesteps under two ways to space them
        own = pipe.scheduler.config.get("timestep_spacing", SPACINGS[0])
        spacing = None if own in SPACINGS else SPACINGS[0]
        pipe.scheduler = ddim_scheduler(pipe.scheduler, options.path, spacing)
    joined: nn.Module | None = None
    if networks[0] == "transformer" and LOW in networks:
        joined = Experts(pipe.transformer, pipe.transformer_2)
    network = getattr(pipe, networks[0])
    tuning = pick_tuning(options, ())
    if options.tune == "lora" and not hasattr(network, "add_adapter"):
        raise ModelError(
            f"model.tune: diffusers {diffusers.__version__} puts no LoRA on a "
            f"{type(network).__name__}; set model.tune to full"
        )
    if options.tune == "lora" and not tuning.targets:
        tuning = tuning._replace(targets=lora_targets(network))
        print(
            f"{type(pipe).__name__}: LoRA on {', '.join(tuning.targets)} (model.lora.targets)",
            file=sys.stderr,
        )
    if options.tiles:
        tiling = getattr(getattr(pipe, "vae", None), "enable_tiling", None)
        if tiling is None:
            raise ModelError(f"model.tiles: a {type(pipe).__name__} does not decode in tiles")
        tiling()
    if options.tune != "none":
        warn_if_distilled(options.path)
    tuned = TunedPipeline(loaded, tuning, network=networks[0], joined=joined, texts=KeyedTexts)
    kinds = (EditingNoiseCall, NoiseCall) if noise else (EditingPipelineCall, PipelineCall)
    model = kinds[not options.sources](tuned, options, fence)
    model.networks = {name: getattr(pipe, name) for name in networks}
    return model


def read_index(path: str) -> tuple[Mapping[str, Any], str]:
    """Return a pipeline's model_index.json, and where it is, in words. Raise ModelError."""
    source = locate(path)
    try:
        file = _file_of(source, "model_index.json")
        index = json.loads(read_text(file))
    except Exception as error:  # offline, gated, misspelt, no such file
        raise ModelError(
            f"{path}: its model_index.json cannot be read: {first_line(error)}. Expected a folder "
            "of a diffusers pipeline, or the id of one"
        ) from error
    if not isinstance(index, dict):
        raise ModelError(f"{file}: expected the parts of a pipeline, got {type(index).__name__}")
    return index, str(file)


def _file_of(source: Path | str, name: str, part: str = "") -> Path:
    """Return a file of a pipeline, or of a part of it; one of an id is fetched."""
    if isinstance(source, str):
        return Path(hf_hub_download(source, name, subfolder=part))
    return source / part / name


def class_of(path: str) -> str:
    """Return the name of a pipeline's class. Raise ModelError."""
    return str(read_index(path)[0].get("_class_name"))


def fn_for(path: Any) -> str:
    """Return the name of what loads a path: its class's adapter, else `pipeline`, which is said in
    a line. Raise ModelError."""
    if not isinstance(path, str):
        raise ConfigError(f"model.path: expected a folder or a Hugging Face id, got {path!r}")
    name = class_of(path)
    if own := fn_of(name):
        return own
    print(
        f"model: {path} is a {name}, which has no adapter: its own call is asked (fn: pipeline)",
        file=sys.stderr,
    )
    return "pipeline"


def part_settings(path: str, part: str, file: str) -> Mapping[str, Any]:
    """Return what a JSON file of a part says, {} where it is not here yet."""
    source = locate(path)
    try:
        return dict(json.loads(read_text(_file_of(source, f"{file}.json", part))))
    except Exception:  # said when the parts are read
        return {}


def _parts(index: Mapping[str, Any], where: str) -> tuple[dict[str, PipelinePart], list[str]]:
    """Return what a pipeline is made of, and which of its parts are networks that are trained.
    Raise ModelError for one that flowrl has no part for."""
    check_libraries(index, where)
    parts: dict[str, PipelinePart] = {}
    networks = []
    for name, entry in index.items():
        if not names_part(entry) or len(entry) != 2:
            continue
        home, kind = entry
        if kind is None:
            parts[name] = PipelinePart((), optional=True)
        elif library(home) is not None and _has_files(home, kind):
            parts[name] = PipelinePart((kind,))
            if home == "diffusers" and _is_network(name, kind):
                networks.append(name)
    if "scheduler" not in parts:
        raise ModelError(f"{where}: names no scheduler; a pipeline of pipelines needs an adapter")
    return parts, _sorted_networks(networks, where)


def _sorted_networks(names: list[str], where: str) -> list[str]:
    first = next((name for name in NETWORKS if name in names), None)
    if first is None:
        raise ModelError(
            f"{where}: expected a network named {' or '.join(NETWORKS)}, got "
            f"{', '.join(names) or 'none'}"
        )
    return [first, *(name for name in names if name != first)]


def _networks_of(pipe: Any) -> list[str]:
    """Return the names of a pipeline's networks, the one that is trained first."""
    names = []
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and _is_network(name, type(part).__name__):
            names.append(name)
    return _sorted_networks(names, f"the {type(pipe).__name__} in memory")


def _is_network(name: str, kind: str) -> bool:
    other = name.startswith(("text_encoder", "vae", "image_encoder", "connectors", "vocoder"))
    return not other and any(word in kind for word in ("Transformer", "UNet", "DiT"))


def _has_files(home: str, kind: str) -> bool:
    """Tell whether a part is a module, a tokenizer, a processor or a scheduler."""
    found = part_class(home, kind)
    module = isinstance(found, type) and issubclass(found, nn.Module)
    words = ("Tokenizer", "Processor", "Scheduler", "FeatureExtractor")
    return module or any(word in kind for word in words)


def _check_runtime(options: PipelineCallOptions) -> None:
    runtime = options.how
    if runtime.cuda_graphs:
        raise ConfigError("runtime.cuda_graphs: not with a pipeline without adapter; leave it out")
    if runtime.context_parallel > 1:
        raise ConfigError(
            "runtime.context_parallel: not with a pipeline without adapter; leave it out"
        )
    if sharded():
        raise ConfigError(
            "model: a pipeline without adapter was not proven with FSDP; take "
            "configs/accelerate/gpus.yaml"
        )


def _check_at_rest(pipe: Any) -> None:
    """Raise ModelError for a pipeline whose parts move by themselves, or are in several places."""
    hooked = getattr(pipe, "_all_hooks", None) or getattr(pipe, "hf_device_map", None)
    places = set()
    for name, part in pipe.components.items():
        if not isinstance(part, nn.Module):
            continue
        if hasattr(part, "_orig_mod"):
            raise ModelError(
                f"model: the pipeline's {name} is compiled; put the plain module in its place "
                f"(pipe.{name} = pipe.{name}._orig_mod), and set runtime.compile"
            )
        for module in part.modules():
            hooked = hooked or hasattr(module, "_hf_hook")
            # diffusers' own: offload in groups, caches of blocks, casts of layers
            own = getattr(getattr(module, "_diffusers_hook", None), "hooks", None)
            if own:
                raise ModelError(
                    f"model: the pipeline's {name} has hooks of diffusers ({', '.join(own)}), "
                    "which move its weights, or give it a memory of earlier calls; load it without"
                    " them, and set runtime.offload for less memory"
                )
        places |= {parameter.device for parameter in part.parameters()}
    if hooked:
        raise ModelError(
            "model: the pipeline offloads its parts, or maps them to devices; flowrl moves them "
            "itself: call pipe.remove_all_hooks() or reset_device_map(), and set runtime.offload"
        )
    if len(places) > 1 or torch.device("meta") in places:
        raise ModelError(
            "model: expected all parts of the pipeline on one device, got "
            f"{', '.join(sorted(map(str, places)))}; move it with pipe.to(device)"
        )


def _check_plain(pipe: Any, networks: list[str]) -> None:
    """Raise ModelError for a network that would be trained, and has adapters already."""
    for name in networks:
        there = getattr(getattr(pipe, name), "peft_config", None)
        if there:
            raise ModelError(
                f"model: the pipeline's {name} has adapters already ({', '.join(there)}); merge "
                "them by pipe.fuse_lora() and pipe.unload_lora_weights(), or give train.start "
                "their file"
            )


def _dtype_name(dtype: torch.dtype) -> str:
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ModelError(
        f"model: expected float32, bfloat16 or float16{near(str(dtype), DTYPES)}, got {dtype}"
    )
