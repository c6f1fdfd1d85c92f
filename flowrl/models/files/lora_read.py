"""Read the LoRA files of diffusers, peft, kohya's sd-scripts, ComfyUI and OneTrainer.

A layout is three things: a prefix, a layer's name (with dots, or ``_`` in their place) in
diffusers' or the reference code, and an ending that says which matrix a tensor is. Every tensor of
a file has to find its layer, or the file is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flowrl.core.devices import check_wide, kinds_of
from flowrl.core.errors import ModelError
from flowrl.core.files import is_finite_number, read_text
from flowrl.models.files.lora_names import Place, places_of

LORA_FILE = "pytorch_lora_weights.safetensors"  # the name that diffusers looks for
SECOND_LORA_FILE = "pytorch_lora_weights_2.safetensors"  # of Wan 2.2's second expert
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"

BASE = ".base_layer"  # under which peft keeps a layer that has an adapter
LAYERS = (nn.Linear, nn.Conv2d, nn.Conv3d)
# what may stand before a layer's name, with dots or `_`
_PREFIX = re.compile(
    r"(base_model\.model|model\.diffusion_model|diffusion_model|transformer|unet)\."
    r"|(lora_unet|lora_transformer|lycoris)_"
)
_ENDING = re.compile(
    r"(?P<stem>.+?)[._](?:"
    r"lora_(?P<ab>[AB])(?:\.[\w-]+)??(?:\.weight)?"
    r"|lora_(?P<du>down|up)(?:\.weight)?"
    r"|lora(?:_linear_layer)?\.(?P<old>down|up)\.weight"
    r"|(?:lora\.)?(?P<alpha>alpha))"
)
_MATRIX = {"A": "down", "B": "up", "down": "down", "up": "up"}
_DORA = "DoRA, whose update has no fixed scale"
# starts of peft's that take a part out of the base model's weights and train it
_MOVES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# what a part of a key's name says that is no LoRA of weights -> what it is
_OTHERS = {
    r"dora_scale|lora_magnitude_vector": _DORA,
    r"hada_[wt]": "LoHa, a product of four matrices",
    r"lokr_[wt]": "LoKr, a Kronecker product",
    r"oft_|boft_": "OFT, a rotation of weights",
    r"lora_mid": "LoCon with a third matrix",
    r"vera_lambda|lora_embedding_|lora_E$": "an adapter of another kind than LoRA",
    r"(lora_[AB](\.[\w-]+)?|lora_(up|down)|lora\.(up|down))\.bias$|\.(diff_b|b_norm)$": (
        "a change of a bias, which flowrl has no adapter for"
    ),
    r"\.(diff|w_norm|set_weight)$": "a change of a whole weight",
    r"^(base_model\.model\.)?(text_encoder|text_model|conditioner|text_encoders|lora_te|lora_prior_"
    r"te|te\d?[._]|clip_)": (
        "LoRA of a text encoder; flowrl trains the network alone: take a file without it, or let "
        "diffusers fuse it into the model's folder first"
    ),
}


class Update(NamedTuple):
    """What a file adds to the weight of one layer: ``scale * up @ down``."""

    down: Tensor  # [r, in], float32
    up: Tensor  # [out, r]
    scale: float
    key: str  # of the file


class Loras(NamedTuple):
    """A file's updates by the name of the layer in the network."""

    updates: dict[str, Update]
    stated: bool  # the file, or what lies beside it, states alpha


def looks_like_lora(names: Iterable[str]) -> bool:
    """Say whether a file's tensors are called as those of a LoRA, or of one of its kin."""
    kin = [pattern for pattern, said in _OTHERS.items() if not said.startswith("LoRA of a text")]
    kinds = re.compile(f"{'|'.join(kin)}|[._]lora_|[._]lora\\.(up|down)")
    return any(kinds.search(name) for name in names)


def files_of(path: Path) -> list[Path]:
    """Return the LoRA files of a folder as diffusers, peft or `flowrl export` write it, the second
    that of Wan 2.2's other expert; [] where there are none."""
    for names in ((LORA_FILE, SECOND_LORA_FILE), (PEFT_FILE,)):
        found = [path / name for name in names if (path / name).is_file()]
        if found:
            return found
    single = [*path.glob("*.safetensors")]
    return single if len(single) == 1 else []


def read_lora(path: Path, networks: Mapping[str, nn.Module], alpha: float | None = None) -> Loras:
    """Read a file, or a folder of `files_of`, for networks by their prefix ({"": network}; of Wan
    2.2 two) -> the updates by prefix and layer.

    Alpha is that of the layer, of the file's metadata, of the configuration of peft beside it, or
    what the caller knows; else the rank, so that the product stands as it is.
    Raises ModelError for a file that cannot be read, is another kind of adapter, has a tensor that
    fits no layer, moves nothing, or holds what is no number.
    """
    files = files_of(path) if path.is_dir() else [path]
    pairs = [*zip(files, networks.items(), strict=False)]
    if len(networks) > 1 and len(files) != len(networks):
        raise ModelError(
            f"{path}: the model has two networks, for high and for low noise; expected a folder "
            f"with a LoRA for each: {LORA_FILE} and {SECOND_LORA_FILE}, as `flowrl export` writes"
        )
    updates, stated = dict[str, Update](), True
    for file, (prefix, network) in pairs:
        tensors, about = _opened(file)
        check_wide(kinds_of(tensors), file)
        scales = _Scales(file, about, alpha)
        for name, update in _updates(file, tensors, network, scales).items():
            updates[prefix + name] = update
        scales.check_used()
        stated = stated and scales.stated
    if not any(map(_moves, updates.values())):
        raise ModelError(f"{path}: all of its updates are zero: it would change nothing")
    return Loras(updates, stated)


def trimmed(update: Update) -> Update:
    """Leave out the ranks that add nothing: a row of `down`, or a column of `up`, of zeros."""
    kept = update.down.flatten(1).any(dim=1) & update.up.flatten(1).any(dim=0)
    return update._replace(down=update.down[kept], up=update.up[:, kept])


def _moves(update: Update) -> bool:
    return update.scale != 0 and len(trimmed(update).down) > 0


def _opened(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file's tensors and its metadata."""
    try:
        with safe_open(file, framework="pt") as stored:
            names = stored.keys()
            return {name: stored.get_tensor(name) for name in names}, stored.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: no safetensors file: {error}") from error


# ------------------------------------------------------------------------------------- the matrices


def _updates(
    file: Path, tensors: Mapping[str, Tensor], network: nn.Module, scales: _Scales
) -> dict[str, Update]:
    """Pair the matrices of a file, and find the layer of each pair."""
    # what each tensor is
    _check_kinds(file, tensors)
    pairs: dict[str, dict[str, Tensor]] = {}
    strange = []
    for name, tensor in tensors.items():
        found = _ENDING.fullmatch(name)
        if found is None:
            strange.append(name)
            continue
        role = found["alpha"] or _MATRIX[found["ab"] or found["du"] or found["old"]]
        held = pairs.setdefault(found["stem"], {})
        if role in held:
            raise ModelError(f"{file}: {name}: there are two tensors of this kind for one layer")
        held[role] = tensor
    # the layer that each pair belongs to
    book = _Book(network)
    places = {stem: book.find(stem) for stem in pairs}
    strange += [stem for stem, place in places.items() if place is None]
    if strange:
        raise ModelError(
            f"{file}: {len(strange)} of its {len(tensors)} keys fit no layer of this "
            f"{type(network).__name__} (first: {min(strange)}); expected a LoRA of the same kind "
            "of model, in the layout of diffusers, peft, kohya, ComfyUI or OneTrainer"
        )
    # what it adds
    updates: dict[str, Update] = {}
    for stem, place in places.items():
        assert place is not None
        for layer, update in _of_pair(file, stem, pairs[stem], place, book, scales):
            if layer in updates:
                raise ModelError(
                    f"{file}: {stem} and {updates[layer].key} both change the layer {layer}"
                )
            updates[layer] = update
    return updates


def _check_kinds(file: Path, names: Collection[str]) -> None:
    """Refuse by name what is no LoRA of the network's weights."""
    for name in names:
        for pattern, what in _OTHERS.items():
            if re.search(pattern, name):
                raise ModelError(f"{file}: {name} is {what}; expected LoRA of the network's layers")


def _of_pair(
    file: Path,
    stem: str,
    held: Mapping[str, Tensor],
    place: Place,
    book: _Book,
    scales: _Scales,
) -> Iterator[tuple[str, Update]]:
    """Yield the layers of a pair of matrices, and what it adds to each: of several that are held
    as one, each its rows."""
    # there are two, of numbers, that fit each other
    where = f"{file}: {stem}"
    if not {"down", "up"} <= held.keys():
        has = " and ".join(sorted(held))
        raise ModelError(f"{where}: expected a matrix down (A) and a matrix up (B), got {has} only")
    down, up = held["down"], held["up"]
    if down.dim() < 2 or up.dim() < 2 or not (down.numel() and up.numel()):
        raise ModelError(f"{where}: expected matrices, got {[*down.shape]} and {[*up.shape]}")
    down, up = down.float().flatten(1), up.float().flatten(1)
    if not bool(down.isfinite().all() and up.isfinite().all()):
        raise ModelError(f"{where}: expected finite numbers, got NaN or infinity")
    # and the layers
    rows = [book.shape(part) for part in place.parts]
    outputs, inputs = sum(out for out, _ in rows), rows[0][1]
    if tuple(down.shape) != (len(down), inputs) or tuple(up.shape) != (outputs, len(down)):
        raise ModelError(
            f"{where}: expected matrices [r, {inputs}] and [{outputs}, r] for "
            f"{', '.join(place.parts)}, got {[*down.shape]} and {[*up.shape]}: it was made for "
            "another model"
        )
    if place.swapped:
        up = torch.cat(up.chunk(2)[::-1])
    for part, mine in zip(place.parts, up.split([out for out, _ in rows]), strict=True):
        yield part, Update(down, mine, scales.of(part, held.get("alpha"), len(down), where), stem)


class _Book:
    """The layers of a network, by all names that files may have for them."""

    def __init__(self, network: nn.Module) -> None:
        config: Any = getattr(network, "config", {})
        self._shapes: dict[str, tuple[int, int]] = {}
        self._places: dict[str, Place | None] = {}
        for name, module in network.named_modules():
            if isinstance(module, LAYERS) and not re.search(r"\.lora_[AB]\.", name):
                self._shapes[name.replace(BASE, "")] = _shape(module)
        for name in self._shapes:
            for place in places_of(name, type(network).__name__, config):
                if all(part in self._shapes for part in place.parts):
                    self._note(place)

    def _note(self, place: Place) -> None:
        """Remember a place; a name that stands for two is none."""
        key = _plain(place.key)
        same = self._places.setdefault(key, place)
        if same is None or (same.parts, same.swapped) != (place.parts, place.swapped):
            self._places[key] = None

    def shape(self, layer: str) -> tuple[int, int]:
        """Return a layer's rows, and the numbers in one."""
        return self._shapes[layer]

    def find(self, stem: str) -> Place | None:
        """Return the place that a file's name means, with or without prefixes before it."""
        stem = stem.replace(".processor.", ".")
        found: dict[tuple[str, ...], Place] = {}
        while True:
            place = self._places.get(_plain(stem))
            if place is not None:
                found[place.parts] = place
            before = _PREFIX.match(stem)
            if before is None:
                return next(iter(found.values())) if len(found) == 1 else None
            stem = stem[before.end() :]


def _plain(name: str) -> str:
    return name.replace(".", "_")


def _shape(module: Any) -> tuple[int, int]:
    """Return the rows of a layer's weight, and the numbers in one."""
    if isinstance(module, nn.Linear):
        return int(module.out_features), int(module.in_features)
    return int(module.out_channels), math.prod(module.kernel_size) * int(
        module.in_channels // module.groups
    )


# ---------------------------------------------------------------------------------------- the scale


class _Scales:
    """What the products of a file are multiplied with: alpha / r."""

    def __init__(self, file: Path, about: Mapping[str, str], known: float | None) -> None:
        self.file, self.known, self.stated = file, known, True
        self.settings = _peft_settings(file, about)
        self._unused = {*self.settings.get("alpha_pattern", {})}

    def of(self, layer: str, own: Tensor | None, rank: int, where: str) -> float:
        """Return the scale of a layer. Raises ModelError for an alpha that is no number."""
        if own is not None:
            if own.numel() != 1 or not bool(own.isfinite().all()):
                raise ModelError(f"{where}.alpha: expected one finite number, got {own.tolist()}")
            return float(own) / rank
        if "lora_alpha" in self.settings:
            alpha = float(self.settings["lora_alpha"])
            for pattern, value in self.settings.get("alpha_pattern", {}).items():
                if _named(layer, pattern):
                    self._unused.discard(pattern)
                    alpha = float(value)
                    break
            if self.settings.get("use_rslora"):
                return alpha / math.sqrt(rank)
            return alpha / rank
        if self.known is not None:
            return self.known / rank
        self.stated = False
        return 1.0

    def check_used(self) -> None:
        """Refuse an alpha of a layer that is not there."""
        if self._unused:
            raise ModelError(
                f"{self.file}: alpha_pattern names {min(self._unused)!r}, which is no layer of it"
            )


def _named(layer: str, pattern: str) -> bool:
    """Say whether a pattern of peft's means a layer: its name, or the end of it."""
    name = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
    return layer == name or layer.endswith(f".{name}")


def _peft_settings(file: Path, about: Mapping[str, str]) -> dict[str, Any]:
    """Return peft's settings, by the file's metadata or the configuration beside it; {} without.
    Raises ModelError for settings that are damaged, or of another kind of adapter."""
    beside, where = file.with_name(PEFT_CONFIG), f"{file}: lora_adapter_metadata"
    try:
        if "lora_adapter_metadata" in about:
            found = {}
            for name, value in json.loads(about["lora_adapter_metadata"]).items():
                found[name.rpartition(".")[2]] = value
        elif file.name == PEFT_FILE and beside.is_file():
            where = str(beside)
            found = dict(json.loads(read_text(beside)))
        else:
            return {}
        numbers = [*(found.get("alpha_pattern") or {}).values()]
        if "lora_alpha" in found:
            numbers.append(found["lora_alpha"])
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{where}: not the settings of a LoRA: {error}") from error
    if found.get("use_dora"):
        raise ModelError(f"{where}: {_DORA}; expected LoRA")
    if found.get("peft_type", "LORA") != "LORA":
        raise ModelError(f"{where}: peft_type is {found['peft_type']!r}; expected LORA")
    start = str(found.get("init_lora_weights")).lower()
    if start.startswith(_MOVES_BASE):
        raise ModelError(
            f"{where}: init_lora_weights is {found['init_lora_weights']!r}, which moves the base "
            "model's weights, too, so that the matrices alone add something else; save the adapter "
            "as LoRA (peft: path_initial_model_for_weight_conversion)"
        )
    if not all(map(is_finite_number, numbers)):
        raise ModelError(f"{where}: expected numbers for alpha, got {numbers}")
    found["alpha_pattern"] = found.get("alpha_pattern") or {}
    return found
