"""The JSON schema of a config, for editors: which sections, functions and arguments there are.

A shipped config names it in its first line (``# yaml-language-server: $schema=../schema.json``), so
that an editor completes keys and marks mistakes. The schema is made from the same annotations by
which `load_config` checks; what compares several keys with each other is checked there alone.
"""

from __future__ import annotations

import inspect
import math
import typing
from dataclasses import MISSING, fields
from typing import Any, get_args

from pydantic import TypeAdapter

from flowrl.config.axes import AXES
from flowrl.config.calls import FrameWay, fits, offers, reserved, settable_of
from flowrl.config.load import ORDER, REQUIRED
from flowrl.config.section import Section, Seed
from flowrl.config.sections import SECTIONS
from flowrl.config.values import Schema, plain, schema_of

ABOUT = {
    "name": "names the run and its folder: letters, digits, `-`, `_`, `.`",
    "seed": "of everything random in training; change it to repeat a run with other draws",
    "model": "the model, and which of its weights are trained",
    "plan": "where noise and forks go while sampling",
    "transition": "what a noise scale means: the Gaussian step",
    "rewards": "one or more rewards; the names appear in the metrics",
    "transform": "what is done to a reward's values before they are mixed",
    "aggregate": "how several rewards become one advantage; without it their weighted sum",
    "credit": "from rewards to one advantage per decision",
    "segment": "which decisions share one ratio",
    "select": "which decisions are trained, and how much each counts",
    "likelihood": "of what the log-prob is: noisy steps, noised images, initial noise ...",
    "loss": "from log-probs and advantages to a loss",
    "kl": "a penalty that keeps the policy near the base model",
    "old": "how slowly the policy that samples follows; without it the current weights sample",
    "slow": "how slowly a copy of the weights follows that only loss or `kl` look at",
    "fake": "a model that is trained along: it follows what a few-step policy generates",
    "surrogate": "a model that is trained along: it learns the reward as a model of images",
    "optimizer": "how gradients change the weights; without it AdamW",
    "sampler": "which prompts an iteration gets; without it each as often as the others",
    "parts": "features of your own that join the training loop: classes on `flowrl.Part`, by name",
}
"""What each call section and single value is; plain sections say it themselves."""

MIX = {
    "weight": {"type": "number", "default": 1.0, "description": "factor of the reward in the sum"},
    "beta": {"type": "number", "minimum": 0, "description": "factor of the penalty in the loss"},
    "frames": {"enum": [*get_args(FrameWay)], "description": "how an image reward judges a video"},
    "offload": {
        "type": "boolean",
        "default": False,
        "description": "its networks are on their device only while it scores",
    },
}


def config_schema() -> Schema:
    """Return the JSON schema (2020-12) of a config file."""
    known: Schema = {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$"},
        "seed": {**schema_of(Seed), "default": 0},
    }
    for axis in AXES:
        if axis != "transform":
            known[axis] = {"$ref": f"#/$defs/{axis}"}
    known |= {key: section_schema(section) for key, section in SECTIONS.items()}

    # sections that hold several calls, and those that may be left out by null
    calls = {"$ref": "#/$defs/rewards"}
    known["rewards"] = {"type": "object", "minProperties": 1, "additionalProperties": calls}
    own = {"$ref": "#/$defs/parts"}
    known["parts"] = {"type": "object", "additionalProperties": own}
    known["select"] = _one_or_several("select")
    optional = ("sampler", "aggregate", "segment", "select", "kl", "old", "slow")
    for key in (*optional, "fake", "surrogate", "optimizer"):
        known[key] = {"anyOf": [known[key], {"type": "null"}]}

    properties = {key: {"description": ABOUT.get(key, ""), **known[key]} for key in ORDER}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A config of flowrl",
        "type": "object",
        "additionalProperties": False,
        "required": REQUIRED,
        "properties": properties,
        "$defs": {axis: call_schema(axis) for axis in AXES},
    }


def section_schema(section: type[Section]) -> Schema:
    """Return the schema of a plain section, with what each key is for."""
    # of pydantic's own schema only the descriptions are taken: a value may be a text of a number
    said = TypeAdapter(section).json_schema()
    hints, inner = typing.get_type_hints(section, include_extras=True), section.inner()
    properties, required = {}, []
    for field in fields(section):
        about = " ".join(said["properties"][field.name].get("description", "").split())
        if field.default is MISSING and field.default_factory is MISSING:
            required.append(field.name)
        if field.name in inner:
            one = section_schema(inner[field.name])
            if hints[field.name] is not inner[field.name]:
                one = {"anyOf": [one, {"type": "null"}]}
            properties[field.name] = {"description": about, **one}
            continue
        properties[field.name] = {"description": about, **schema_of(hints[field.name])}
        if field.default is not MISSING:
            properties[field.name]["default"] = field.default
    schema: Schema = {
        "description": inspect.getdoc(section),
        "type": "object",
        "additionalProperties": False,
    }
    if required:
        schema["required"] = required
    return {**schema, "properties": properties}


def call_schema(axis: str) -> Schema:
    """Return the schema of a call section: the arguments that are known depend on `fn`.

    A dotted `fn` is of a plugin, or of a function that no bare name finds: its arguments stay open.
    """
    known = functions(axis)
    # `fn` is a known name, with its first line as help, or any dotted path
    names = [{"const": name, "description": _head(it)} for name, it in known.items()]
    dotted = {"type": "string", "pattern": r"\."}
    either = [{"oneOf": names}, dotted] if names else [dotted]
    fn: Schema = {"description": "the function", "anyOf": either}
    cases = []
    for name, function in known.items():
        # if fn is this name, then these are its arguments
        case: Schema = {"properties": {"fn": {"const": name}}, "required": ["fn"]}
        cases.append({"if": case, "then": _arguments(axis, function)})
    default = AXES[axis].default
    if default:
        fn["default"] = default
        # without fn the default's arguments are known
        without: Schema = {"not": {"required": ["fn"]}}
        cases.append({"if": without, "then": _arguments(axis, known[default])})
    # a KL needs its weight; a reward's has a default
    mix = AXES[axis].mix
    required = [] if default else ["fn"]
    if mix == "beta":
        required.append("beta")
    schema: Schema = {"type": "object", "required": required, "properties": {"fn": fn}}
    if cases:
        schema["allOf"] = cases
    return schema


def functions(axis: str) -> dict[str, Any]:
    """Return {name: function} of what a bare `fn` can name on an axis, helpers left out."""
    found = {}
    for path, function in sorted(offers(AXES[axis], "schema").items()):
        if fits(AXES[axis], function):
            found[path.rpartition(".")[2]] = function
    return found


def _arguments(axis: str, function: Any) -> Schema:
    """Return the schema of a call of one function."""
    properties: Schema = {"fn": True}
    needed = []
    for name, parameter in settable_of(axis, function.__name__, function).items():
        properties[name] = {**schema_of(parameter.annotation), **_default(parameter.default)}
        if parameter.default is inspect.Parameter.empty:
            needed.append(name)
    for key in reserved(axis)[1:]:
        properties[key] = MIX[key] if key in MIX else _one_or_several("transform")
    schema: Schema = {"additionalProperties": False}
    if needed:
        schema["required"] = needed
    return {**schema, "properties": properties}


def _default(value: Any) -> Schema:
    """Return the default where JSON can hold it."""
    try:
        written = plain(value)
    except TypeError:
        return {}
    if isinstance(written, float) and not math.isfinite(written):
        return {}
    return {"default": written}


def _one_or_several(axis: str) -> Schema:
    one = {"$ref": f"#/$defs/{axis}"}
    return {"anyOf": [one, {"type": "array", "items": one}]}


def _head(function: Any) -> str:
    """Return the first sentence of a function's description."""
    text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".")
