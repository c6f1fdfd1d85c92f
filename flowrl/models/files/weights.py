"""The safetensors files of a part of a pipeline: which are read, and what is in them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from flowrl.core.devices import check_wide, stored_kinds
from flowrl.core.errors import ModelError
from flowrl.core.files import parse_json, read_json

STEMS = ("diffusion_pytorch_model", "model")  # of diffusers, of transformers
ENDING, INDEX = ".safetensors", ".safetensors.index"
_SINGLE = re.compile(rf"({'|'.join(STEMS)})\.(?P<variant>\w+)\.safetensors")
_INDEX = re.compile(rf"({'|'.join(STEMS)})\.safetensors\.index\.(?P<variant>\w+)\.json")
SEEN = 256  # bytes of each tensor that a fingerprint reads
VARIANTS = ("fp16", "bf16")  # of several, where there is no other file

# Tensors that public files have and the networks of today compute by themselves: places of tokens,
# frequencies, and the embedding that is tied to one which is read.
_HARMLESS = re.compile(r"(^|\.)(position_ids|inv_freq|embed_tokens\.weight)$")


class WeightFiles(NamedTuple):
    """The files of a part that are read."""

    files: list[Path]
    variant: str | None  # "fp16" of model.fp16.safetensors


def weight_files(folder: Path) -> WeightFiles:
    """Return the safetensors files that the libraries read of a part's folder: without a variant,
    or where there are none, those of the variant that is there. Raises ModelError."""
    for stem in STEMS:
        single, index = folder / f"{stem}{ENDING}", folder / f"{stem}{INDEX}.json"
        # where there are both, diffusers takes the shards and transformers the one file
        if index.is_file() and (stem == STEMS[0] or not single.is_file()):
            return WeightFiles(_shards(index), None)
        if single.is_file():
            return WeightFiles([single], None)
    found = _variants(folder)
    if not found:
        raise ModelError(no_weights(folder))
    name = next((name for name in VARIANTS if name in found), min(found))
    file = found[name]
    if file.suffix == ".json":
        return WeightFiles(_shards(file), name)
    return WeightFiles([file], name)


def _variants(folder: Path) -> dict[str, Path]:
    """Return the variants of a folder: one file, or the index of several."""
    found: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        match = _INDEX.fullmatch(file.name) or _SINGLE.fullmatch(file.name)
        if match:
            found.setdefault(match["variant"], file)
    return found


def _shards(index: Path) -> list[Path]:
    try:
        shape = dict[str, Any]
        names = sorted(set(read_json(index, shape, error=ValueError)["weight_map"].values()))
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: not an index of weights: {error}; copy it again") from error
    strange = [name for name in names if Path(str(name)).name != name]
    if strange:
        raise ModelError(f"{index}: expected names of files beside it, got {strange[0]!r}")
    return [index.with_name(name) for name in names]


def fingerprint(folders: Iterable[Path]) -> str:
    """Return a hash of the weights in some parts' files: each tensor's name, shape, dtype and first
    numbers, whatever the files are called and wherever they lie. Raises ModelError."""
    found: list[tuple[str, str, bytes]] = []
    for folder in folders:
        for file in weight_files(folder).files:
            found += _first_numbers(file)
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:16]


def _first_numbers(file: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield name, kind and first bytes of each tensor of a file. Raises ModelError."""
    try:
        with file.open("rb") as stored:
            length = int.from_bytes(stored.read(8), "little")
            header = parse_json(stored.read(length), str(file), error=ValueError)
            header.pop("__metadata__", None)
            for name, about in header.items():
                begin, end = about["data_offsets"]
                stored.seek(8 + length + begin)
                first = stored.read(min(SEEN, end - begin))
                yield name, f"{about['dtype']} {about['shape']}", first
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{file}: corrupt or truncated: {error}; copy the file again") from error


def no_weights(folder: Path) -> str:
    """Say what to do about a part without files that are read."""
    if any(folder.glob("*.gguf")):
        return (
            f"{folder}: GGUF files are packed for inference and cannot be trained; take the "
            "model's safetensors of 16 or 32 bits"
        )
    return (
        f"{folder}: no *.safetensors file; flowrl never unpickles weights. Load the model once "
        "with diffusers and save it with save_pretrained(folder, safe_serialization=True)"
    )


def stored_tensors(files: Iterable[Path]) -> set[str]:
    """Return the tensor names in safetensors files, reading the headers only. Raises ModelError,
    also for weights that were quantised."""
    names: set[str] = set()
    for file in files:
        try:
            # large models come in several files; no weight is read
            kinds = stored_kinds(file)
        except (OSError, SafetensorError) as error:  # torn, truncated or unreadable
            first = str(error).partition("\n")[0]
            raise ModelError(
                f"{file}: corrupt or truncated: {type(error).__name__}: {first}; copy the file "
                "again"
            ) from error
        check_wide(kinds, file)
        names |= kinds.keys()
    return names


def check_plain(folder: Path, settings: Any) -> None:
    """Raise ModelError where a part's settings, or those of its files that are there, hold weights
    that were quantised."""
    how = None
    if isinstance(settings, dict):
        how = settings.get("quantization_config")
    if how:  # the libraries would unpack them for inference
        if isinstance(how, dict):
            how = how.get("quant_method", how)
        raise ModelError(
            f"{folder / 'config.json'}: quantization_config says that the weights were quantised "
            f"({how}), which cannot be trained; take the model's files of 16 or 32 bits"
        )
    if any(folder.glob(f"*{ENDING}")):
        stored_tensors(filter(Path.is_file, weight_files(folder).files))


def check_complete(
    folder: Path, missing: Collection[str], more: Collection[str] = (), ignored: Iterable[str] = ()
) -> None:
    """Raise ModelError if tensors are missing in the files of a part, or if there are more than it
    takes. `ignored` are patterns of names that its class knows to be of no use."""
    unknown = {name for name in more if not _HARMLESS.search(name)}
    for pattern in ignored:
        unknown = {name for name in unknown if not re.search(pattern, name)}
    if not (missing or unknown):
        return
    files = weight_files(folder).files
    where = files[0] if len(files) == 1 else folder
    if missing:
        shown = ", ".join(sorted(missing)[:3])
        raise ModelError(
            f"{where}: {len(missing)} tensors are missing from its safetensors files, such as "
            f"{shown}; copy the file again, or save the part again with save_pretrained"
        )
    shown = ", ".join(sorted(unknown)[:3])
    raise ModelError(
        f"{where}: {len(unknown)} tensors in it are not taken by the network that "
        f"{folder / 'config.json'} describes, such as {shown}; the settings are those of another "
        "model, or were changed: copy config.json and weights again from one place"
    )
