"""Find a diffusers pipeline (folder or Hugging Face id), check its parts and load it; a failure is
one ModelError.

A tensor that is not in the files is an error, and so is one that no part takes; the libraries would
only warn, and go on with random weights, with none, or with another network. Of a network that
several processes share, each reads its own share (`hollow_network`, `fill`): none ever holds a
whole one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import diffusers
import torch
import transformers
from accelerate import init_empty_weights
from diffusers.models.modeling_utils import no_init_weights
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError
from torch import Tensor

from flowrl.core.errors import ConfigError, ModelError, RunError
from flowrl.core.files import read_json
from flowrl.core.processes import shared_as
from flowrl.core.shards import read_into
from flowrl.core.shipped_files import find_resource, resource
from flowrl.models.files.single import convert, converted, what_it_is
from flowrl.models.files.weights import (
    VARIANTS,
    check_complete,
    check_plain,
    stored_tensors,
    weight_files,
)

CLIP_TOKENIZER = ("CLIPTokenizer", "CLIPTokenizerFast")  # accepted classes
T5_TOKENIZER = ("T5TokenizerFast", "T5Tokenizer")
QWEN_TOKENIZER = ("Qwen2Tokenizer", "Qwen2TokenizerFast")

BASE = ".base_layer."  # under which peft keeps a layer that has an adapter
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHIPPED = ("assets/", "configs/")  # what starts so is no id
_TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("spiece.model",))


class PipelinePart(NamedTuple):
    """What a pipeline may hold under one name."""

    classes: tuple[str, ...]  # accepted class names
    optional: bool = False  # may be null in model_index.json; then None is handed to the pipeline


class Loaded(NamedTuple):
    """A pipeline, and what is needed to load and to recognise its text encoders."""

    pipeline: Any
    folder: Path
    encoders: tuple[str, ...]  # names of the text encoders that it is made for
    # load them into another, otherwise empty, pipeline of the class
    read_encoders: Callable[[], Any]


def load_pipeline(
    pipeline_class: Any,
    path: str,
    parts: dict[str, PipelinePart],
    *,
    dtype: torch.dtype,
    dtypes: dict[str, torch.dtype],
    leave_out: tuple[str, ...] = (),
    network: str = "transformer",
    quantization: Any = None,
    with_encoders: bool = True,
    hollow: bool = False,
    also_from: tuple[str, ...] = (),
) -> Loaded:
    """Load ``path`` as ``pipeline_class`` on the CPU, from safetensors only and without remote
    code.

    ``dtypes`` overrides ``dtype`` for the parts that it names; the optional parts in ``leave_out``
    are not loaded; ``network`` is the part that is trained, and ``quantization`` diffusers'
    settings to quantise it by (bitsandbytes does so on the accelerator); folders of the classes in
    ``also_from`` are read, too. Without ``with_encoders`` the text encoders are checked, not
    loaded; ``hollow`` networks have no weights yet, see `hollow_network`. Raise ModelError if the
    folder or id cannot be found, is another kind of pipeline, lacks files, or holds weights that
    are corrupt or incomplete.
    """
    source = locate(path, pipeline_class)
    accepted = (pipeline_class.__name__, *also_from)
    folder = source if isinstance(source, Path) else _download(pipeline_class, source, accepted)
    index = _read_index(folder, accepted)
    wanted = {name: entry for name, entry in index.items() if name not in leave_out}
    absent = [*dict.fromkeys([*_absent_parts(folder, wanted, parts), *leave_out])]
    stored: dict[str, set[str]] = {}
    for name in parts:
        if name not in absent:
            stored[name] = _check_part(folder / name, index[name][1], index[name][0])
    encoders = tuple(name for name in stored if name.startswith("text_encoder"))
    # text encoders, VAE and image encoder are read one by one, the rest by the pipeline
    seers = [name for name in ("vae", "image_encoder") if name in stored]
    kinds = {name: (index[name][0], index[name][1]) for name in (*encoders, *seers)}
    if quantization is not None:  # of the networks that are there
        mapping = quantization.quant_mapping
        quantization.quant_mapping = {name: mapping[name] for name in mapping if name in stored}
    networks = [name for name in dtypes if name in stored and name not in kinds]
    variants = [weight_files(folder / name).variant for name in networks]
    variant = next(filter(None, variants), None)
    kept = {"default": dtype, **dtypes}
    read = partial(_read, pipeline_class, folder, kinds, dtype=kept, variant=variant)
    pipeline = read(
        absent + [*encoders] * (not with_encoders),
        quantization=quantization,
        hollow={name: index[name][1] for name in networks if hollow},
    )
    for name in networks:
        made = getattr(pipeline, name)
        _check_network(folder / name, made, stored[name], quantized=quantization is not None)
    return Loaded(pipeline, folder, encoders, partial(read, [*absent, *networks, *seers]))


def _read(
    pipeline_class: Any,
    folder: Path,
    kinds: dict[str, tuple[str, str]],
    absent: list[str],
    *,
    dtype: dict[str, torch.dtype],
    variant: str | None,
    quantization: Any = None,
    hollow: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Let diffusers read a checked folder without the parts in ``absent``, and without the weights
    of those in ``hollow``. Raise ModelError, also for a tensor that is missing in the parts
    ``kinds``."""
    try:
        wanted = {name: kind for name, kind in kinds.items() if name not in absent}
        # a network may draw weights, although its own are read afterwards
        with without_bars(), torch.random.fork_rng(devices=[]):
            parts = read_parts(folder, wanted, dtype)
            for name, kind in hollow.items():
                parts[name] = hollow_network(folder / name, kind, dtype[name])
            return pipeline_class.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                quantization_config=quantization,
                variant=variant,
                # a null part of diffusers' signature counts as missing unless passed by name
                **dict.fromkeys(absent),
                **parts,
            )
    except ModelError:
        raise
    except Exception as error:  # the libraries raise every kind
        raise ModelError(
            f"{folder}: {pipeline_class.__name__} could not be loaded: {first_line(error)}"
        ) from error


def locate(path: str, pipeline_class: Any = None) -> Path | str:
    """Return the folder that ``path`` names, or ``path`` itself if it reads as a Hugging Face id
    (owner/name). A single safetensors file is the folder that it was converted into, or is now if
    there is a ``pipeline_class``. Raise ModelError for what is neither."""
    try:
        # an id is asked about often: no search for similar names then
        folder = find_resource(path)
        if folder is None and _HUB_ID.fullmatch(path) and not path.startswith(_SHIPPED):
            return path
        folder = folder or resource(path)
    except ConfigError as error:
        raise ModelError(
            f"no model at {path!r}: expected a folder with a model_index.json or a Hugging Face id "
            "such as"
            f" 'owner/name'. {error}"
        ) from error
    if folder.is_dir():
        return folder
    if pipeline_class is not None:
        with without_bars():
            return convert(folder, pipeline_class)
    known = converted(folder)
    if known is None:
        raise ModelError(
            f"{folder}: a single file, which is converted when the model is first loaded: run "
            "`flowrl doctor` with it, or train"
        )
    return known


def _download(pipeline_class: Any, repo: str, accepted: tuple[str, ...]) -> Path:
    """Fetch a pipeline from the Hugging Face hub (or its cache), reading its index before its
    gigabytes."""
    try:
        # a small file says what it is: a wrong model costs no download
        index = hf_hub_download(repo, "model_index.json")
        _read_index(Path(index).parent, accepted)
        found = Path(pipeline_class.download(repo, use_safetensors=True))
        if not any(found.rglob("*.safetensors")):  # a repository with a variant alone
            found = Path(pipeline_class.download(repo, use_safetensors=True, variant=VARIANTS[0]))
        return found
    except ModelError:
        raise
    except (
        Exception
    ) as error:  # offline, gated, misspelt, rate-limited: one message with the ways out
        raise ModelError(
            f"{repo!r} is no folder here and could not be fetched from the Hugging Face hub: "
            f"{first_line(error)}."
            " Check the spelling and the network (HF_HUB_OFFLINE must not be 1), log in with `hf "
            "auth login` if the"
            " model is gated, or give the path of a folder"
        ) from error


def _read_index(folder: Path, expected: tuple[str, ...]) -> dict[str, Any]:
    file = folder / "model_index.json"
    if not file.is_file():
        raise ModelError(
            f"{folder}: expected a diffusers pipeline, but there is no model_index.json in it"
            f"{what_it_is(folder)}"
        )
    index = _read_json(file)
    # the class says whether this adapter knows what the network expects
    found = index.get("_class_name") if isinstance(index, dict) else None
    if found not in expected:
        wanted = " or ".join(map(repr, expected))
        raise ModelError(
            f"{file}: expected _class_name {wanted}, got {found!r}; this model needs another "
            "adapter: leave model.fn out, or take fn: pipeline, which asks any pipeline's own call"
        )
    # a part's name is that of its folder
    strange = [name for name in index if not re.fullmatch(r"\w+", name)]
    if strange:
        raise ModelError(f"{file}: expected names of letters, digits and _, got {strange[0]!r}")
    # a list of texts names the library and the class of a part; everything else is a setting
    broken = [name for name, entry in index.items() if names_part(entry) and len(entry) != 2]
    if broken:
        raise ModelError(
            f"{file}: expected {broken[0]} to be [library, class], got {index[broken[0]]!r}"
        )
    check_libraries(index, str(file))
    return dict(index)


def names_part(entry: Any) -> bool:
    """Tell whether an entry of an index is a part, as [library, class] or [null, null], and no
    setting, such as a list of numbers."""
    words = (str, type(None))
    return isinstance(entry, list) and bool(entry) and all(isinstance(one, words) for one in entry)


def _read_json(file: Path) -> Any:
    """Read a file of settings. Raise ModelError that names it."""
    try:
        return read_json(file, constants=True)
    except (OSError, RunError) as error:
        raise ModelError(f"{file}: not valid JSON: {error}; copy the file again") from error


def _absent_parts(folder: Path, index: dict[str, Any], parts: dict[str, PipelinePart]) -> list[str]:
    """Check the class of every part in the index; return the optional parts that are null there."""
    absent = []
    for name, part in parts.items():
        # a part that is null in the index is [null, null], null, or not there at all
        found = index.get(name)
        if isinstance(found, list):
            found = found[1]
        if found is None and part.optional:
            absent.append(name)
        elif found not in part.classes:
            wanted = " or ".join(part.classes)
            raise ModelError(
                f"{folder / 'model_index.json'}: expected {name} to be {wanted}, got {found!r}"
            )
    return absent


def _has(folder: Path, files: Iterable[str]) -> bool:
    return all((folder / file).is_file() for file in files)


def check_libraries(index: Mapping[str, Any], where: str) -> None:
    """Raise ModelError for a part of another library: its code would be the model's."""
    for name, entry in index.items():
        if names_part(entry) and entry[0] is not None and library(entry[0]) is None:
            raise ModelError(
                f"{where}: {name} comes from {entry[0]!r}; flowrl runs only code of diffusers and "
                "transformers, never code that a model brings along"
            )


def library(name: str) -> Any:
    """Return what an index calls a library: diffusers, transformers, or the folder of diffusers
    that has a pipeline with classes of its own, such as kolors. None: it is none of these."""
    if name == "diffusers":
        return diffusers
    if name == "transformers":
        return transformers
    if not re.fullmatch(r"[a-z]\w*", name):
        return None
    found = getattr(diffusers.pipelines, name, None)
    if getattr(found, "__name__", "") == f"{diffusers.pipelines.__name__}.{name}":
        return found
    return None


def part_class(home: str, kind: str) -> Any:
    """Return the class of a part by its library and name, None of one that is not there. Folders
    name transformers' classes as diffusers' and the other way, so both are looked through."""
    for place in (library(home), diffusers, transformers):
        found = getattr(place, kind, None)
        if found is not None:
            return found
    return None


def _check_part(folder: Path, kind: str, home: str = "transformers") -> set[str]:
    """Check that the files of one part, a ``kind`` of the library ``home``, are there and readable;
    return the names of its stored tensors."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: missing, although model_index.json names a {kind} there")
    if kind.endswith(("ImageProcessor", "ImageProcessorFast", "FeatureExtractor")):
        names = ("preprocessor_config.json", "processor_config.json")
        found = [folder / name for name in names if (folder / name).is_file()]
        if not found:
            raise ModelError(f"{folder}: no {names[0]} in it")
        _read_json(found[0])
        return set()
    if kind == "ByT5Tokenizer":
        return set()  # it reads bytes, and has no vocabulary
    if "Tokenizer" in kind or "Processor" in kind:
        # transformers makes up a vocabulary of three tokens when the files are gone, and goes on.
        known: tuple[tuple[str, ...], ...] = _TOKENIZER_FILES
        # a pipeline's own tokenizer says which files it reads
        own = getattr(part_class(home, kind), "vocab_files_names", {})
        if own and home not in ("diffusers", "transformers"):
            known = (tuple(own.values()),)
        if not any(_has(folder, files) for files in known):
            wanted = ", or ".join(map(" with ".join, known))
            raise ModelError(f"{folder}: no tokenizer files; expected {wanted}")
        for file in sorted(folder.glob("*.json")):
            _read_json(file)
        return set()
    config = folder / ("scheduler_config.json" if "Scheduler" in kind else "config.json")
    if not config.is_file():
        raise ModelError(f"{folder}: no {config.name} in it")
    settings = _read_json(config)
    if "Scheduler" in kind:
        return set()
    check_plain(folder, settings)
    return stored_tensors(weight_files(folder).files)


def _check_network(folder: Path, network: Any, stored: set[str], *, quantized: bool) -> None:
    """Raise ModelError unless a network takes every tensor of its files, and lacks none."""
    names = _names(network, quantized=quantized)
    more = stored - names - {*network.state_dict()}
    ignored = network._keys_to_ignore_on_load_unexpected or ()
    check_complete(folder, names - stored, more, ignored)


def _names(network: torch.nn.Module, *, quantized: bool) -> set[str]:
    """Return the names of the tensors that a network needs from its files."""
    if quantized:  # scales and the like are in its state, yet in no file
        return {name for name, _ in network.named_parameters()}
    return set(network.state_dict())


def first_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep the libraries from drawing bars while files are read; downloads show theirs."""
    logs = (diffusers.utils.logging, transformers.utils.logging)
    shown = [log for log in logs if log.is_progress_bar_enabled()]
    for log in shown:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in shown:
            log.enable_progress_bar()


def read_parts(
    folder: Path, kinds: Mapping[str, tuple[str, str]], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Any]:
    """Read text and image encoders and VAE of a pipeline on the CPU -> {name: module}.

    `kinds` {name: library and class of it}; `dtypes` as a pipeline takes them, with a
    "default". Raises ModelError that names file and tensor if one is missing, or is there and not
    taken; what the libraries raise else.
    """
    parts = {}
    for name, (home, kind) in kinds.items():
        parts[name], info = part_class(home, kind).from_pretrained(
            folder / name,
            dtype=dtypes.get(name, dtypes["default"]),
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            variant=weight_files(folder / name).variant,
        )
        check_complete(folder / name, info["missing_keys"], info["unexpected_keys"])
    return parts


def hollow_network(folder: Path, kind: str, dtype: torch.dtype) -> Any:
    """Make a network of diffusers from its settings, its parameters on the meta device in the
    dtypes that diffusers would read them in. What it computes by itself, such as frequencies, is
    there."""
    network_class = getattr(diffusers, kind)
    with no_init_weights(), init_empty_weights():
        network = network_class.from_config(network_class.load_config(folder))
    kept = network_class._keep_in_fp32_modules or ()
    stored = network.state_dict()
    for module_name, module in network.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            whole_name = f"{module_name}.{name}".lstrip(".")
            if whole_name not in stored or not tensor.is_floating_point():
                continue
            wide = any(part in whole_name.split(".") for part in kept)
            tensor.data = tensor.data.to(torch.float32 if wide else dtype)
    return network


def fill(
    network: Any,
    folders: Mapping[str, Path],
    first: Iterable[tuple[str, Tensor]],
    *,
    device: torch.device,
) -> None:
    """Give a hollow network, which may be shared out by now, its weights on the device. Each
    process reads its share of a tensor, one tensor after the other.

    ``folders`` {prefix of parameters: folder of a part}; ``first`` has the parameters that are in
    no file, whole. Raise ModelError for a file that cannot be read.
    """
    # what was computed outlives the move
    computed = {name: buffer for name, buffer in network.named_buffers() if not buffer.is_meta}
    network.to_empty(device=device)
    for name, buffer in network.named_buffers():
        if name in computed:
            buffer.copy_(computed[name])
    # what is in no file
    there = network.state_dict()
    for name, start in first:
        tensor = there.pop(name)
        tensor.copy_(shared_as(start, tensor))
    # the weights
    for prefix, folder in folders.items():
        wanted = {}
        for name, tensor in there.items():
            if name.startswith(prefix):
                wanted[name.removeprefix(prefix).replace(BASE, ".")] = tensor
        try:
            read_into(wanted, weight_files(folder).files)
        except (OSError, SafetensorError, ValueError) as error:
            raise ModelError(f"{folder}: cannot be read: {error}; copy the files again") from error
