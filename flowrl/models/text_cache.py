"""Embeddings of prompts in a folder: one safetensors file per prompt, named by all that the numbers
depend on."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.files import replacing

LAYOUT = 1  # of the files; another number makes all older ones unknown
# of files that decide what a part computes
SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")


class TextCache:
    """The embeddings that one pipeline's encoders make with one set of settings.

    A file's name is the sha256 of the prompt, the settings, the contents of the encoders' and
    tokenizers' files and the versions of diffusers and transformers. It is written under another
    name and renamed, so that any number of runs may share a folder; it carries a checksum, and one
    that is damaged is encoded again, with a warning.
    """

    def __init__(self, folder: Path, *, parts: Iterable[Path], settings: dict[str, Any]) -> None:
        """Hash the folders of a pipeline's ``parts``. Raise ConfigError if ``folder`` cannot be
        one, ModelError."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"runtime.cache: {folder} cannot be a folder: {error.strerror or error}"
            ) from error
        self.folder, self._warned = folder, False
        versions = [LAYOUT, diffusers.__version__, transformers.__version__]
        contents = {part.name: _contents(part) for part in parts}
        self._base = json.dumps([versions, settings, contents])

    def get(self, prompt: str) -> dict[str, Tensor] | None:
        """Return what was put for the prompt, {name: tensor} in its shapes, bit for bit; None if
        nothing, or nothing that is whole."""
        file = self._file(prompt)
        if not file.exists():
            return None
        try:
            with safe_open(file, framework="pt") as stored:
                names = list(stored.keys())
                # copies: what is read must not depend on the file once it is closed
                tensors = {name: stored.get_tensor(name).clone() for name in names}
                expected = (stored.metadata() or {}).get("sha256")
            if _checksum(tensors) == expected:
                return tensors
            reason = "its checksum does not fit"
        except Exception as error:  # SafetensorError and OSError alike
            reason = str(error)
        # a damaged file costs time, not the run
        warnings.warn(
            f"{file} is damaged ({reason}); the prompt {prompt!r} is encoded again", stacklevel=2
        )
        return None

    def put(self, prompt: str, tensors: dict[str, Tensor]) -> None:
        """Keep {name: tensor} for the prompt; warn, once, if the folder cannot be written."""
        file = self._file(prompt)
        rows = {name: tensor.contiguous() for name, tensor in tensors.items()}
        try:
            with replacing(file) as draft:
                save_file(rows, draft, metadata={"prompt": prompt, "sha256": _checksum(rows)})
        except Exception as error:
            if not self._warned:
                warnings.warn(
                    f"embeddings cannot be kept in {self.folder}: {error}; the run goes on",
                    stacklevel=2,
                )
            self._warned = True

    def _file(self, prompt: str) -> Path:
        key = hashlib.sha256(json.dumps([self._base, prompt]).encode()).hexdigest()
        return self.folder / key[:2] / f"{key}.safetensors"


def _contents(part: Path) -> dict[str, str]:
    """Return the sha256 of each file in a part's folder that decides what it computes. Raise
    ModelError."""
    files = [file for file in sorted(part.iterdir()) if file.suffix in SUFFIXES]
    try:
        return {file.name: _hash(file) for file in files}
    except OSError as error:
        raise ModelError(
            f"{error.filename or part} cannot be read: {error.strerror or error}"
        ) from error


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), [*tensor.shape]]).encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
