"""A model in a single file, as ComfyUI and Civitai have them, and other things that are no folder
of a pipeline: converted once where diffusers can, else what to do."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from flowrl.core.devices import check_wide, stored_kinds
from flowrl.core.errors import ModelError
from flowrl.core.files import replacing
from flowrl.models.files.lora_read import looks_like_lora

INDEX = "model_index.json"
PACKED = (".gguf",)
PICKLES = (".ckpt", ".pt", ".pth", ".bin", ".pkl")
ACCELERATE = ("optimizer.bin", "random_states_0.pkl", "scaler.pt", "sampler.bin")
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


def cache_folder() -> Path:
    """Return where converted models are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "flowrl" / "models"


def converted(file: Path) -> Path | None:
    """Return the folder that a single file was converted into; None before that. Raises ModelError
    for a file that no folder can be made of."""
    _check_single(file)
    folder = cache_folder() / _digest(file, *_stamp(file))
    return folder if (folder / INDEX).is_file() else None


def convert(file: Path, pipeline_class: Any) -> Path:
    """Convert a single file to the folder of a pipeline, once: the folder is kept in the cache by
    what is in the file. Raises ModelError where diffusers cannot."""
    found = converted(file)
    if found is not None:
        return found
    name, read = pipeline_class.__name__, getattr(pipeline_class, "from_single_file", None)
    if read is None:
        raise ModelError(
            f"{file}: diffusers converts no single file to a {name}. Copy the folder of the "
            "released model, and put the network of the file into it: "
            "NETWORK.from_single_file(FILE).save_pretrained(FOLDER/transformer), where diffusers "
            "has it for that network"
        )
    # a checker that SD 1.x may have is not used
    known = inspect.signature(pipeline_class.__init__).parameters
    given: dict[str, Any] = {}
    if "safety_checker" in known:
        given["safety_checker"] = None
    folder = cache_folder() / _digest(file, *_stamp(file))
    try:
        pipeline = read(str(file), torch_dtype=_dtype(file), **given)
        with replacing(folder) as draft:
            pipeline.save_pretrained(draft, safe_serialization=True)
    except Exception as error:  # the libraries raise every kind
        if (folder / INDEX).is_file():  # another process of the run was faster
            return folder
        first = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{file}: could not be converted to a {name}: {type(error).__name__}: {first}. A file "
            "with the network alone needs the rest: copy the folder of the released model, and put "
            "the network into it by NETWORK.from_single_file(FILE).save_pretrained(FOLDER/part). "
            "diffusers fetches settings and tokenizers of the released model from the hub once"
        ) from error
    return folder


def what_it_is(folder: Path) -> str:
    """Say what a folder without a model_index.json seems to be, and what to do; "" if unknown."""
    names = {file.name for file in folder.glob("*")}
    if "adapter_config.json" in names or "pytorch_lora_weights.safetensors" in names:
        return (
            "; it holds a LoRA: give that to train.start, and the folder of its base model to "
            "model.path"
        )
    if names & {*ACCELERATE}:
        return (
            "; it is a checkpoint of accelerate: let the program that wrote it load it, and save "
            "the pipeline with save_pretrained"
        )
    if any(name.endswith(PACKED) for name in names):
        return "; GGUF files are packed for inference and cannot be trained: take safetensors"
    if "config.json" in names:
        return "; it seems to be one part of a pipeline: name the folder above it"
    single = [name for name in names if name.endswith(".safetensors")]
    if len(single) == 1:
        return f"; if {single[0]} holds a whole model, name that file"
    return ""


def _check_single(file: Path) -> None:
    """Raise ModelError for a file that is no model in safetensors."""
    if file.suffix in PACKED:
        raise ModelError(
            f"{file}: GGUF files are packed for inference and cannot be trained; take the model's "
            "safetensors of 16 or 32 bits"
        )
    if file.suffix in PICKLES:
        raise ModelError(
            f"{file}: flowrl never unpickles weights; take the model's .safetensors file, or load "
            "it once with diffusers and save it with save_pretrained"
        )
    if file.suffix != ".safetensors":
        raise ModelError(f"{file}: expected the folder of a diffusers pipeline, got a file")
    try:
        kinds = stored_kinds(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: no safetensors file: {error}; copy it again") from error
    if looks_like_lora(kinds):
        raise ModelError(
            f"{file}: a LoRA and no whole model: give it to train.start, and the folder of its "
            "base model to model.path"
        )
    check_wide(kinds, file)


def _stamp(file: Path) -> tuple[int, int]:
    about = file.stat()
    return about.st_size, about.st_mtime_ns


@functools.lru_cache
def _digest(file: Path, size: int, changed: int) -> str:
    """Return the SHA-256 of a file's content; read again where size or time differ."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _dtype(file: Path) -> torch.dtype:
    """Return the dtype that most tensors of a file have, so that nothing is rounded."""
    kinds = Counter(stored_kinds(file).values())
    if kinds["F32"] or not kinds:
        return torch.float32
    return DTYPES.get(kinds.most_common(1)[0][0], torch.float32)
