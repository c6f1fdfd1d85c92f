"""Choose the two files that a config of a method and a model is composed of: the method's home
config, and what ``configs/models`` or the pipeline itself says of the model."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from flowrl.config.compose import (
    OTHER,
    PAIR,
    Composition,
    Judged,
    Piece,
    compose,
    published_pair,
    read_piece,
)
from flowrl.core.errors import ConfigError, near
from flowrl.core.shipped_files import (
    MODELS,
    config_file,
    find_resource,
    list_configs,
    list_models,
    resource,
)
from flowrl.runs.catalogue import find_methods, load_methods

ELSEWHERE = re.compile(r"^# published +on (\w+)", re.MULTILINE)
"""What the head of a config says whose values were published on a model that has no config."""
IN_PART = re.compile(r"^# unpublished", re.MULTILINE)
SHAPES = "shapes/"


def composed(method: str, model: str | os.PathLike[str], kind: str = "") -> Composition:
    """Return the sections of a method's config on a model, and where each value is from.

    Args:
        method: the name of a method or of a shipped config, or a YAML file.
        model: the name of a file in ``configs/models``, a hub id, or a folder.
        kind: of a pipeline in memory the name of its class; `model` is its path.
    Raises ConfigError for a name that is none, and for a method that cannot be on the model;
    ModelError for a folder or an id that cannot be read.
    """
    path = os.fspath(model)
    piece, known = _model(path, kind)
    name = known or re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).name).strip("-.") or "model"
    home, own = _home(method, piece)
    if own:
        return published_pair(home, path, own)
    tail = home.name.rpartition("/")[2].removesuffix(".yaml")
    shapes = home.name.startswith(SHAPES)
    made = _classes().get(home.raw["model"]["fn"], {"kind": "images"})["kind"]
    alike = not shapes and made == piece.raw["kind"]
    judged = Judged(alike=alike, shapes=shapes)
    run = f"{name}-{tail}".replace("_", "-").lower()
    return compose(home, piece, judged, run, path)


def is_method(name: object) -> bool:
    """Say whether a text is a method of configs/methods.yaml, and neither a config nor a file."""
    if not isinstance(name, str) or name in list_configs() or os.path.isfile(name):
        return False
    return name.lower() in {one.slug for one in load_methods()} | _titles()


def is_model_file(name: object) -> bool:
    """Say whether a text names a file of configs/models, and no folder of the user's."""
    return isinstance(name, str) and name in list_models() and not os.path.isdir(name)


def _titles() -> set[str]:
    return {one.name.lower() for one in load_methods()}


def _of_file(name: str) -> Piece:
    file = resource(f"configs/{MODELS}{name}.yaml")
    return read_piece(file.read_text(encoding="utf-8"), f"{MODELS}{name}")


def _model(path: str, kind: str) -> tuple[Piece, str]:
    """Return what is known of a model, and the name of its file, "" where it has none of its own.
    Raises ConfigError, ModelError."""
    if is_model_file(path):
        return _of_file(path), path
    pieces = [_of_file(name) for name in list_models()]
    for piece in pieces:
        if piece.raw["model"]["path"] == path:
            return piece, piece.name.removeprefix(MODELS)
    looks_like_path = "/" in path or find_resource(path or ".") is not None
    if not looks_like_path:
        raise ConfigError(
            f"--model: expected a name of configs/models ({', '.join(list_models())}), a hub id or "
            f"a folder, got {path!r}{near(path, list_models())}"
        )
    # what the class says: its adapter's file, with other weights, or its own facts
    from flowrl.models.by_call.facts import facts_of
    from flowrl.models.options import fn_of
    from flowrl.models.pipeline import class_of

    fn = fn_of(kind or class_of(path))
    for piece in pieces:
        if piece.raw["model"]["fn"] == fn:
            return _other_weights(piece, path), ""
    return read_piece(facts_of(path), path), ""


def _other_weights(piece: Piece, path: str) -> Piece:
    """Return a model's file for other weights of its class; no value was published for these."""
    raw = {**piece.raw, "model": {**piece.raw["model"], "path": path}}
    return Piece(piece.name, raw, piece.notes, alike=False)


def _home(method: str, model: Piece) -> tuple[Piece, str]:
    """Return a method's home config, and where its values were published if it is of this very
    model, else "". Raises ConfigError."""
    if not is_method(method):
        name = method.removeprefix("configs/")
        file = resource(name) if name.endswith((".yaml", ".yml")) else config_file(name)
        text = file.read_text(encoding="utf-8")
        piece = read_piece(text, name.removesuffix(".yaml"))
        return piece, _published(piece, model, text)
    (known,) = find_methods([method])
    classes = _classes()
    found: list[tuple[tuple[bool, ...], int, Piece, str]] = []
    for place, name in enumerate(known.configs):
        text = config_file(name).read_text(encoding="utf-8")
        piece = read_piece(text, name)
        own = _published(piece, model, text)
        fn = piece.raw["model"]["fn"]
        # the first are those of this model, of its adapter, of its kind; then the ones of the
        # method's own name, those that are published as a whole, and those that are guided alike
        makes, starts, guides = _differ(classes[fn], model.raw)
        rank = (
            name.startswith(SHAPES),
            own == "",
            fn != model.raw["model"]["fn"],
            makes,
            starts,
            name.rpartition("/")[2] != known.slug,
            IN_PART.search(text) is not None,
            guides,
        )
        found.append((rank, place, piece, own))
    best = min(found, key=lambda one: one[:2])
    return best[2], best[3]


def _classes() -> dict[str, dict[str, Any]]:
    """Return the file of configs/models for each adapter, the first where there are several."""
    files = [_of_file(name).raw for name in reversed(list_models())]
    return {file["model"]["fn"]: file for file in files}


def _differ(one: dict[str, Any], other: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Say in what two models differ: what is made, whether an image is given, and whether guidance
    is a difference of two calls, which a method may do without, or an input of the network."""
    videos, edits = ("videos", "moved images"), ("edits", "moved images")
    return (
        (one["kind"] in videos) != (other["kind"] in videos),
        (one["kind"] in edits) != (other["kind"] in edits),
        ("unguided" in one) != ("unguided" in other),
    )


def _published(config: Piece, model: Piece, text: str) -> str:
    """Return where a config's values were published: the mark for this pair if it is of the very
    weights of a model, or another model if its head says so; "" for other weights."""
    of_model, own = model.raw["model"], config.raw["model"]
    if own["fn"] != of_model["fn"] or own["path"] != of_model["path"]:
        return ""
    elsewhere = ELSEWHERE.search(text)
    return f"{OTHER} ({elsewhere[1]})" if elsewhere else PAIR
