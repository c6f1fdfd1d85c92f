"""A pipeline's own ``encode_prompt``, asked once for each prompt: what it returned is remembered,
on disk too, and put together again for a batch of prompts.

A pipeline's encoders return what they like: tensors whose rows are prompts in some dimension,
tensors that all prompts share, lists with an entry for each prompt, all nested. Which it is, is
found by asking for one prompt alone and for the same prompt twice.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from PIL.Image import Image
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.models.prompt_encoding import Texts

FORM = "form"  # the tensor that holds how the others belong together
LIVE_BYTES = 2**30  # embeddings that wait on the device for the next call
# what pipelines read prompts by; the last writes tokens that a network starts from
READERS = ("encode_prompt", "encode_prompt_multiple_images", "generate_prior_tokens")
IN_PLACE = ("batch_size", "device", "generator")  # arguments that no embedding depends on


class Unequal(Exception):
    """Prompts whose embeddings cannot be one batch: they have other lengths."""


class Entry(NamedTuple):
    """What the encoders made of one prompt."""

    form: Any  # nested, as `_flat` makes it
    tensors: dict[str, Tensor]


class KeyedTexts(Texts):
    """Embeddings by a key that holds the prompt beside other arguments."""

    def _warn_if_cut(self, prompt: str) -> None:
        for name, text in json.loads(prompt)[0].items():
            if not name.startswith("negative"):
                if isinstance(text, list):
                    text = text[0]
                super()._warn_if_cut(text)
                return


class RememberedTexts:
    """Stands in the place of a pipeline's ``encode_prompt``, or another of `READERS`."""

    def __init__(
        self,
        encode: Callable[..., Any],
        signature: inspect.Signature,
        texts: Texts,
        *,
        name: str,
        reads_on: torch.device,
    ) -> None:
        """``encode`` asks the pipeline's own, of that signature, whose encoders are on
        ``reads_on``; ``texts`` keeps what it makes."""
        self._encode, self._signature = encode, signature
        self._texts, self._reads_on = texts, reads_on
        self._named = [] if name == READERS[0] else [name]
        self._live: dict[tuple[str, str], Entry] = {}
        self._ways: dict[str, Any] = {}  # forms that tell where prompts are, by other arguments
        self.device = reads_on  # where the pipeline wants them
        self.asked = 0  # prompts that were encoded

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Return what ``encode_prompt`` returns. Raise Unequal, ModelError."""
        given = self._signature.bind(*args, **named).arguments
        given |= given.pop("kwargs", {})
        texts, rest = _split(given)
        lists = {name: one for name, one in texts.items() if isinstance(one, list)}
        count = max(map(len, lists.values()), default=1)
        entries = []
        for row in range(count):
            of_row = dict(texts)
            for name, one in lists.items():
                of_row[name] = one[row : row + 1]
            entries.append(self._find(of_row, rest))
        return _together(entries)

    def _find(self, texts: dict[str, Any], rest: dict[str, Any]) -> Entry:
        key = json.dumps([texts, _told(rest), *self._named], sort_keys=True)
        place = (key, str(self.device))
        found = self._live.get(place)
        if found is None:
            stored = self._texts.cond(
                [key], lambda _: self._read(texts, rest), device=torch.device("cpu")
            )
            tensors = {name: rows[0].to(self.device) for name, rows in stored.items()}
            form = json.loads(bytes(stored[FORM][0].tolist()).decode())
            tensors.pop(FORM)
            found = Entry(form, tensors)
            self._live[place] = found
            self._forget()
        return found

    def _forget(self) -> None:
        """Let the oldest embeddings on the device go where there are too many."""
        sizes = {}
        for place, entry in self._live.items():
            sizes[place] = sum(t.numel() * t.element_size() for t in entry.tensors.values())
        total = sum(sizes.values())
        for place, size in sizes.items():
            if total <= LIVE_BYTES or len(self._live) == 1:
                return
            total -= size
            del self._live[place]

    def _read(self, texts: dict[str, Any], rest: dict[str, Any]) -> dict[str, Tensor]:
        """Encode one prompt -> its tensors, and their form."""
        self.asked += 1
        rest = {**rest}
        if "device" in rest:
            rest["device"] = self._reads_on
        if isinstance(rest.get("batch_size"), int):
            rest["batch_size"] = 1
        one = self._encode(**texts, **rest)
        way = json.dumps(_told(rest), sort_keys=True)
        tensors: dict[str, Tensor] = {}
        if way not in self._ways:
            twice = {}
            for name, text in texts.items():
                if not isinstance(text, list):
                    text = [text]
                twice[name] = text * 2
            if isinstance(rest.get("batch_size"), int):
                rest["batch_size"] = 2
            try:
                two = self._encode(**twice, **rest)
            except Exception:  # of a pipeline that reads one prompt at a time; so does flowrl then
                two = one
            self._ways[way] = _kinds(one, two)
        form = _flat(one, tensors, self._ways[way])
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        spelled = json.dumps(form).encode()
        return tensors | {FORM: torch.tensor([*spelled], dtype=torch.uint8)}


def _split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tell texts, which differ from prompt to prompt, from the other arguments."""
    texts: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in given.items():
        listed = isinstance(value, list) and value and all(isinstance(v, str) for v in value)
        text = isinstance(value, str) and "prompt" in name and name != "system_prompt"
        (texts if listed or text else rest)[name] = value
    return texts, rest


def _told(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as JSON holds them, images and tensors by what is in them."""
    return {name: _spelled(value) for name, value in rest.items() if name not in IN_PLACE}


def _spelled(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_spelled(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _spelled(one) for key, one in value.items()}
    if isinstance(value, Image):
        return [value.size, hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), [*value.shape], hashlib.sha256(data).hexdigest()]
    if isinstance(value, torch.dtype):
        return str(value)
    raise ModelError(
        f"pipeline: encode_prompt was given a {type(value).__name__}, which no file "
        "of embeddings can name"
    )


def _kinds(one: Any, two: Any) -> Any:
    """Compare what came of a prompt and of the same prompt twice -> nested, for each tensor the
    dimension that grew (None: shared), for each list whether it grew."""
    if isinstance(one, Tensor):
        grown = []
        for dim, (short, long) in enumerate(zip(one.shape, two.shape, strict=True)):
            if short != long:
                grown.append(dim)
        return next(iter(grown), None)
    if isinstance(one, list | tuple):
        grew = len(one) != len(two)
        return [grew, [_kinds(a, b) for a, b in zip(one, two, strict=False)]]
    if isinstance(one, dict):
        return [False, [_kinds(one[key], two[key]) for key in one]]
    return None


def _flat(found: Any, tensors: dict[str, Tensor], kinds: Any) -> Any:
    """Put the tensors of a nested result into ``tensors`` -> the form that they had."""
    if isinstance(found, Tensor):
        name = str(len(tensors))
        tensors[name] = found
        return ["tensor", name, kinds]
    if found is None or isinstance(found, bool | int | float | str):
        return ["plain", found]
    if isinstance(found, list | tuple):
        grew, inner = kinds
        nodes = []
        for place, one in enumerate(found):
            nodes.append(_flat(one, tensors, inner[min(place, len(inner) - 1)]))
        return ["tuple" if isinstance(found, tuple) else "list", grew, nodes]
    if isinstance(found, dict):
        pairs = zip(found.values(), kinds[1], strict=True)
        nodes = [_flat(one, tensors, kind) for one, kind in pairs]
        return ["dict", [*found], nodes]
    raise ModelError(f"pipeline: encode_prompt returned a {type(found).__name__}; expected tensors")


def _together(entries: Sequence[Entry]) -> Any:
    """Put the embeddings of prompts together as one call would have returned them. Raise Unequal
    where they do not fit."""
    forms, tensors = zip(*entries, strict=True)
    return _joined(forms, tensors)


def _joined(forms: Sequence[Any], tensors: Sequence[Mapping[str, Tensor]]) -> Any:
    kind = forms[0][0]
    if any(form[0] != kind for form in forms):
        raise Unequal  # such as a mask that only some prompts have
    if kind == "plain":
        return forms[0][1]
    if kind == "tensor":
        rows = [own[form[1]] for form, own in zip(forms, tensors, strict=True)]
        return _rows(rows, forms[0][2])
    if kind == "dict":
        made = {}
        for place, name in enumerate(forms[0][1]):
            made[name] = _joined([form[2][place] for form in forms], tensors)
        return made
    nodes: list[Any] = []
    lengths = {len(form[2]) for form in forms}
    if len(lengths) > 1:
        raise Unequal
    for place in range(lengths.pop()):
        own = [form[2][place] for form in forms]
        if forms[0][1]:  # a list with an entry for each prompt
            nodes += [_joined([f], [t]) for f, t in zip(own, tensors, strict=True)]
        else:
            nodes.append(_joined(own, tensors))
    if kind == "tuple":
        return tuple(nodes)
    return nodes


def _rows(rows: Sequence[Tensor], dim: int | None) -> Tensor:
    """Join the rows of prompts in dimension ``dim``; several for each are blocks, negative ones
    first, say, which come together."""
    if len({row.shape for row in rows}) > 1:
        raise Unequal
    if len(rows) == 1 or dim is None:
        return rows[0]
    if rows[0].shape[dim] > 1:
        return torch.stack([*rows], dim + 1).flatten(dim, dim + 1)
    return torch.cat([*rows], dim)
