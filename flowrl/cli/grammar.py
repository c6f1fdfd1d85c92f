"""What all commands have in common: overrides anywhere, lists of values, help, and names that are
nearly right."""

from __future__ import annotations

import os
import re
from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption

from flowrl.core.errors import near

SET = "--set"
PROMPT = "PROMPT"  # the metavar of arguments that may be any text
MANY = ("--seeds", "--lr-search", SET, "--try")
"""Repeatable options that take several values at once: ``--seeds 0 1 2``."""

_KEY = re.compile(r"([A-Za-z_][\w-]*)((?:\.[\w-]+)*)=", re.ASCII)


def is_override(text: str, *, among_texts: bool = True) -> bool:
    """Say whether a word that stands alone is ``key=value``, and no file of this name is there.
    Among texts, where it may be a prompt such as ``E=mc2``, its key has a dot or is a section of a
    config."""
    from flowrl.config.load import ORDER

    found = _KEY.match(text)
    if found is None or (among_texts and not (found[2] or found[1] in ORDER)):
        return False
    return not os.path.exists(text)


class Command(TyperCommand):
    """A command: overrides may stand anywhere, and flags have no type in its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write lists and bare overrides as repeated options, then parse."""
        try:
            return super().parse_args(ctx, self._spread(args))
        except Exception as error:
            _propose(error, [name for each in self.params for name in each.opts])
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; a flag shows no value that it does not take."""
        found = super().get_params(ctx)
        _untyped(found)
        return found

    def _spread(self, args: list[str]) -> list[str]:
        """Return ``--seeds 0 1 a.b=2`` as ``--seeds 0 --seeds 1 --set a.b=2``."""
        options: dict[str, TyperOption] = {}
        for each in self.params:
            if isinstance(each, TyperOption):
                options |= dict.fromkeys(each.opts, each)
        texts = any(each.metavar == PROMPT for each in self.params)
        spread, many, value = list[str](), "", False  # value: the option before waits for its own
        for place, text in enumerate(args):
            # after -- every word stands for itself
            if text == "--" and not value:
                return spread + args[place:]
            if value:
                spread.append(text)
                value = False
            elif text.startswith("-") and not _is_number(text):
                name, joined, _ = text.partition("=")
                known = options.get(name)
                many = name if name in MANY and known is not None and not joined else ""
                value = known is not None and not known.is_flag and not joined
                spread.append(text)
            elif SET in options and many != "--try" and is_override(text, among_texts=texts):
                spread += [SET, text]
            elif many and (many != SET or _KEY.match(text)):
                spread += [many, text]
            else:
                spread.append(text)
        return spread


class Commands(TyperGroup):
    """The commands by name; a wrong name is answered with those that are near."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; a flag shows no value that it does not take."""
        found = super().get_params(ctx)
        _untyped(found)
        return found

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command by its name."""
        try:
            return self._click_resolve_command(ctx, args)
        except Exception as error:
            hint = near(args[0], self.commands)
            if hint and isinstance(getattr(error, "message", None), str):
                error.message = f"{error.message.rstrip('.')}{hint}"  # type: ignore[attr-defined]
            raise


def _untyped(params: list[Any]) -> None:
    for each in params:
        if getattr(each, "is_flag", False) and each.metavar is None:
            each.metavar = ""


def _propose(error: Exception, known: list[str]) -> None:
    """Let an unknown option be answered with those that are near."""
    name = getattr(error, "option_name", None)
    if isinstance(name, str) and hasattr(error, "possibilities"):
        hint = near(name, [option for option in known if option.startswith("--")])
        error.possibilities = None
        error.message = f"No such option: {name}{hint}"  # type: ignore[attr-defined]


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-[0-9.]+(e-?\d+)?", text) is not None
