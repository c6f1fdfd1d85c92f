"""Prompts as conditioning: encoded once, one at a time, and kept on the host, and in a folder if
there is one; and the images that they start from.

`TextCache` is that folder: one safetensors file per prompt, named by all that the numbers depend
on.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import transformers
from PIL.Image import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torchvision.transforms.functional import to_pil_image
from transformers import ProcessorMixin

from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.files import replacing, sha256_of
from flowrl.core.identity import SUFFIXES, facts_of_tensors, short_digest
from flowrl.core.pixels import to_bytes
from flowrl.core.types import Cond, Source
from flowrl.core.version import __version__

# one prompt of SD3.5 with T5 takes 2.7 MB in bfloat16, one of FLUX with 512 tokens 4.2 MB
CACHE_BYTES = 4 * 2**30
NEGATIVE = "negative_"
SOURCE = "source"  # the name, among a model's conditioning, of latents of images to start from
MOST_T5_TOKENS = 512  # diffusers allows no more
MOST_TOKENS = 1024  # the same, of a language model

LAYOUT = 2  # of the files; another number makes all older ones unknown
Encode = Callable[[str], dict[str, Tensor]]
"""From one prompt to {name: [...]}, without a batch dimension."""


class Reader(NamedTuple):
    """A tokenizer, and how much of a prompt it hands on."""

    name: str  # CLIP, T5 or Qwen
    tokenizer: Any
    limit: int  # tokens, with those that mark start and end
    ends: int = 1  # tokens that mark the end


class Texts:
    """A cache of text embeddings that forgets the oldest beyond CACHE_BYTES.

    ``at_work`` brings the encoders to where they can encode; it is entered only for prompts that
    are neither known here nor in the folder ``store``. ``readers`` are asked for what they cut off
    a prompt.
    """

    def __init__(
        self,
        at_work: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        store: TextCache | None = None,
        readers: Sequence[Reader] = (),
    ) -> None:
        self._known: dict[str, dict[str, Tensor]] = {}
        self._at_work, self._store = at_work, store
        self._readers = readers  # emptied once a warning was given
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def cond(
        self,
        prompts: list[str],
        encode: Encode,
        *,
        device: torch.device,
        negative: str | None = None,
    ) -> Cond:
        """Return {name: [G, ...]} on the device, and the same for ``negative``, if any, as
        ``negative_<name>``. Raise DataError without prompts."""
        if not prompts:
            raise DataError("encode: expected at least one prompt, got none")
        asked = list(prompts)
        if negative is not None:
            asked.append(negative)
        texts = self._find(asked, encode)
        cond = _stack(list(map(texts.__getitem__, prompts)), device)
        if negative is not None:
            rows = _stack([texts[negative]] * len(prompts), device)
            cond |= {NEGATIVE + name: row for name, row in rows.items()}
        return cond

    def ahead(self, prompts: Sequence[str], encode: Encode) -> None:
        """Encode prompts that are not known, until CACHE_BYTES are full: those that follow would
        push out the first, which are wanted before them."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._known]
        with ExitStack() as stack:
            at_work = False
            for prompt in new:
                if self.bytes + self.bytes // max(len(self), 1) > CACHE_BYTES:
                    return
                if not at_work and (self._store is None or self._store.get(prompt) is None):
                    stack.enter_context(self._at_work())
                    at_work = True
                self._find([prompt], encode)

    def _find(self, prompts: list[str], encode: Encode) -> dict[str, dict[str, Tensor]]:
        # what is known here, or in the folder
        found: dict[str, dict[str, Tensor]] = {}
        new, missing = [], []
        for prompt in dict.fromkeys(prompts):
            if prompt in self._known:
                found[prompt] = self._known[prompt]
                continue
            new.append(prompt)
            self._warn_if_cut(prompt)
            stored = None if self._store is None else self._store.get(prompt)
            if stored is None:
                missing.append(prompt)
            else:
                found[prompt] = stored
        if missing:
            # One prompt at a time: in a batch its last bits would depend on which others were not
            # yet cached, and a resumed run, whose cache starts empty, would not repeat an unbroken
            # one.
            with self._at_work(), torch.no_grad():
                for prompt in missing:
                    found[prompt] = {}
                    for name, row in encode(prompt).items():
                        found[prompt][name] = row.cpu()
                    if self._store is not None:
                        self._store.put(prompt, found[prompt])
        for prompt in new:
            self._keep(prompt, found[prompt])
        return found

    def _keep(self, prompt: str, text: dict[str, Tensor]) -> None:
        self._known[prompt] = text
        self.bytes += _bytes(text)
        while self.bytes > CACHE_BYTES and len(self._known) > 1:
            self.bytes -= _bytes(self._known.pop(next(iter(self._known))))

    def _warn_if_cut(self, prompt: str) -> None:
        # the end of the prompt that each text encoder does not read
        rests = {}
        for reader in self._readers:
            rests[reader] = cut_off(prompt, reader)
        if not any(rests.values()):
            return
        # said once per run: with no reader left, later calls see nothing
        self._readers = ()
        losses, short = set(), set()
        for reader, rest in rests.items():
            if not rest:
                losses.add(f"{reader.name} reads all of it")
                continue
            losses.add(f"{reader.name} reads {reader.limit} tokens, without {rest!r}")
            # some encoders can be given a longer limit, CLIP cannot
            if _can_read_more(reader):
                short.add(reader.name)
        warnings.warn(
            f"the prompt {prompt!r} is cut: {'; '.join(sorted(losses))}."
            + "".join(f" {name} reads more with a larger max_sequence_length." for name in short)
            + " Other prompts may be cut, too; this is said once",
            stacklevel=6,
        )


def _can_read_more(reader: Reader) -> bool:
    return reader.limit < {"CLIP": 0, "T5": MOST_T5_TOKENS}.get(reader.name, MOST_TOKENS)


def cut_off(prompt: str, reader: Reader) -> str:
    """Return the end of a prompt that the encoder does not see, as its tokens spell it; empty if it
    sees all."""
    ids = reader.tokenizer(prompt, truncation=False, verbose=False).input_ids
    if len(ids) <= reader.limit:
        return ""
    rest = ids[reader.limit - reader.ends : len(ids) - reader.ends]
    return str(reader.tokenizer.decode(rest)).strip()


def readers_of(tokenizers: Sequence[Any], *, t5_tokens: int | None) -> list[Reader]:
    """Return what reads prompts in a pipeline: CLIP up to its own limit, T5, or a language model in
    its place, up to ``t5_tokens``."""
    readers = []
    for tokenizer in tokenizers:
        # the processor of a language model that sees has one of its own
        if isinstance(tokenizer, ProcessorMixin):
            tokenizer = tokenizer.tokenizer
        if type(tokenizer).__name__.startswith("T5"):
            readers.append(Reader("T5", tokenizer, t5_tokens or MOST_T5_TOKENS))
        elif type(tokenizer).__name__.startswith("Qwen"):
            readers.append(Reader("Qwen", tokenizer, t5_tokens or MOST_TOKENS, ends=0))
        elif type(tokenizer).__name__.startswith("CLIP"):
            readers.append(Reader("CLIP", tokenizer, tokenizer.model_max_length))
    return readers


def halves(cond: Cond) -> tuple[Cond, Cond]:
    """Split conditioning into (negative, positive), both under the positive's names."""
    positive = {name: rows for name, rows in cond.items() if not name.startswith(NEGATIVE)}
    return {name: cond[NEGATIVE + name] for name in positive}, positive


def _stack(texts: list[dict[str, Tensor]], device: torch.device) -> Cond:
    out = {}
    for name in texts[0]:
        rows = []
        for text in texts:
            rows.append(text[name])
        out[name] = torch.stack(rows).to(device)
    return out


def _bytes(tensors: dict[str, Tensor]) -> int:
    total = 0
    for tensor in tensors.values():
        total += tensor.nbytes
    return total


class TextCache:
    """The embeddings that one pipeline's encoders make with one set of settings.

    A file's name is the sha256 of the prompt, the settings, the contents of the encoders' and
    tokenizers' files and the versions of flowrl and of the libraries. It is written under another
    name and renamed, so that any number of runs may share a folder; it carries a checksum of name
    and tensors, and one that is damaged or has another's name is encoded again, with a warning.
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
        libraries = [torch.__version__, diffusers.__version__, transformers.__version__]
        versions = [LAYOUT, __version__, *libraries]
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
            if _checksum(file.stem, tensors) == expected:
                return tensors
            reason = "its checksum does not fit this name"
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
                check = _checksum(file.stem, rows)
                save_file(rows, draft, metadata={"prompt": prompt, "sha256": check})
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
    try:
        files = [file for file in sorted(part.iterdir()) if file.suffix in SUFFIXES]
        return {file.name: sha256_of(file) for file in files}
    except OSError as error:
        raise ModelError(
            f"{error.filename or part} cannot be read: {error.strerror or error}"
        ) from error


def _checksum(key: str, tensors: dict[str, Tensor]) -> str:
    return short_digest(key, facts_of_tensors(tensors))


def stacked(prompts: Sequence[str], sources: Sequence[Source], most: int) -> Tensor:
    """Return the sources of prompts [G] as images [G,n,3,H,W], n each. Raise DataError for another
    number of them than 1 to ``most``, for prompts with more than others, or for images of two
    sizes."""
    counts = {len(source) for source in sources}
    if len(sources) != len(prompts) or not counts <= {*range(1, most + 1)}:
        wanted = "one source" if most == 1 else f"1 to {most} sources"
        raise DataError(
            f"encode: expected {wanted} for each of {len(prompts)} prompts, got "
            f"{[len(source) for source in sources]}"
        )
    sizes = {tuple(image.shape[-2:]) for source in sources for image in source}
    if len(counts) > 1 or len(sizes) > 1:
        raise DataError(
            "encode: prompts of one call must have as many sources as each other, all of one size; "
            f"got {sorted(counts)} sources of the sizes {sorted(sizes)}. Take a list for each"
        )
    return torch.stack([torch.stack(source) for source in sources])


def to_pil(source: Source) -> list[Image]:
    """Return images [3,H,W] in [0,1] as a pipeline takes them, of 8 bits."""
    return [to_pil_image(to_bytes(image.cpu())) for image in source]
