"""From the signature of a function to its checked keyword arguments."""

from __future__ import annotations

import copy
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from flowrl.config.axes import name_of
from flowrl.config.mistakes import RENAMED, Collector, Mistakes, renamed
from flowrl.config.overrides import Source
from flowrl.config.values import convert, plain, schema_of
from flowrl.core.errors import unknown

Parameters = dict[str, inspect.Parameter]


def settable(function: Callable[..., Any], *, everything: bool) -> Parameters:
    """Return the parameters that a config may set, with evaluated annotations.

    They are those of types that YAML can hold, and keyword-only unless `everything` is set; a
    keyword like ``log_prob: Tensor | None`` is what the training loop hands over.
    """
    return dict(_settable(function, everything))


@lru_cache(maxsize=1024)  # the same few functions are asked about for every config
def _settable(function: Callable[..., Any], everything: bool) -> Parameters:
    kinds = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    if not everything:
        kinds.remove(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = vars(sys.modules[inspect.unwrap(function).__module__])
    out = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = _evaluated(parameter.annotation, names)
        if parameter.kind in kinds and _writable(hint):
            out[name] = parameter.replace(annotation=hint)
    return out


def arguments(
    given: Mapping[str, Any],
    known: Parameters,
    key: str,
    owner: str,
    source: Source,
    besides: Sequence[str] = (),
) -> dict[str, Any]:
    """Check the arguments of a section and fill in the defaults.

    A default that YAML cannot hold stays with the function. Raises Mistakes with a line for each
    unknown, wrong and missing argument; `besides` names further keys that may have been meant.
    """
    found, out, missing = Collector(), {}, []

    # names that the function does not have
    axis = name_of(key)
    strange = [name for name in given if name not in known]
    for name in strange:
        said = (
            renamed(f"{axis}.{name}") or f"{owner} {unknown(name, [*known, *besides], 'argument')}"
        )
        found.add(f"{source.at(f'{key}.{name}')}: {said}")
    meant = [RENAMED.get(f"{axis}.{name}", "").rpartition(".")[2] for name in strange]

    # values, and defaults where there is none
    for name, parameter in known.items():
        if name in given:
            with found.catch():
                out[name] = _value(given[name], parameter, f"{key}.{name}", source)
        elif parameter.default is not inspect.Parameter.empty:
            _fill_in(out, parameter)
        elif name not in meant:
            missing.append(name)

    if missing:
        needs = f"needs {' and '.join(missing)}; it takes {', '.join(known)}"
        found.add(f"{source.at(key)}: {owner} {needs}")
    found.close()
    return out


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, names, include_extras=True)["it"]
    except (NameError, AttributeError):
        return annotation  # only a type checker can see that name; the value stays unchecked


def _writable(hint: Any) -> bool:
    try:
        schema_of(hint)
    except TypeError:
        return False
    return True


def _value(value: Any, parameter: inspect.Parameter, key: str, source: Source) -> Any:
    try:
        return convert(value, parameter.annotation, key, source.at)
    except Mistakes:
        # A default may break its own annotation (`size: int = None`): what dump() writes must load.
        default = parameter.default
        written = list(default) if isinstance(default, tuple) else default
        if type(value) is type(written) and value == written:
            return copy.deepcopy(default)
        raise


def _fill_in(out: dict[str, Any], parameter: inspect.Parameter) -> None:
    try:
        plain(parameter.default)
    except TypeError:
        return
    try:
        out[parameter.name] = convert(parameter.default, parameter.annotation)
    except Mistakes:
        out[parameter.name] = copy.deepcopy(parameter.default)
