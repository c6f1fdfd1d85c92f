"""Stubs of what a user adds to flowrl, outside of the package: a file, a test that passes, and the
command that trains with it at once.

Each is whole and does something, so that it can be changed line by line with a test at hand. The
word ``NAME`` in a text stands for the name, ``CLASS`` for it in capitals.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path
from typing import NamedTuple

from flowrl.core.errors import ConfigError, unknown
from flowrl.core.files import write_text
from flowrl.core.shipped_files import config_file

BASE = "shapes/flow_grpo"  # the config that stubs run on


TEMPLATES = Path(__file__).with_name("templates")
STUBS = {
    "method": "loss={fn: NAME.NAME, most: 1.01}",
    "reward": "rewards={NAME: {fn: NAME.NAME}}",
    "config": "",
    "model": "model={fn: NAME.NAME}",
    "part": "parts.NAME={fn: NAME.CLASS, above: 0.9}",
}
"""Kind -> the override of a config, which then uses it; templates/ has its code and its test."""


class Written(NamedTuple):
    """The files of a stub, and the commands that use them from their folder."""

    files: list[Path]
    train: list[str]  # the words of the command that trains with it
    test: list[str]


def write_stub(kind: str, name: str, folder: Path, *, base: str = BASE) -> Written:
    """Write a stub of a kind into a folder; of a config a copy of `base`.

    Raises ConfigError for an unknown kind, for a name that Python or flowrl has taken, and where a
    file would be written over.
    """
    if kind not in STUBS:
        raise ConfigError(f"new: flowrl {unknown(kind, STUBS, 'stub')}")
    _check_name(name, folder)
    # the code, or a config; a reward that takes the place of all is also the headline
    texts, own = dict[str, str](), list[str]()
    config = base
    if (TEMPLATES / f"{kind}.txt").exists():
        texts[f"{name}.py"] = _template(kind, name, base)
    if kind in ("method", "config"):
        config = f"{name}.yaml"
        texts[config] = _config(kind, name, base)
    else:
        own.append(_named(STUBS[kind], name))
    if kind == "reward":
        own.append(f"eval.score={name}")
    texts[f"test_{name}.py"] = _template(f"test_{kind}", name, base)
    # nothing is written over
    for file in texts:
        if (folder / file).exists():
            raise ConfigError(f"new: {folder / file} is there already; choose another name")
    for file, text in texts.items():
        write_text(folder / file, text)
    train = ["flowrl", "train", config, *own]
    if f"{name}.py" in texts:
        train += ["--plugin", name]
    return Written([folder / file for file in texts], train, ["pytest", f"test_{name}.py"])


def _check_name(name: str, folder: Path) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"new: expected a name like my_reward, got {name!r}")
    found = importlib.util.find_spec(name)
    if found is not None and Path(found.origin or "").parent != folder.resolve():
        raise ConfigError(f"new: {name!r} is the name of an installed package; choose another")


def _template(file: str, name: str, base: str) -> str:
    text = (TEMPLATES / f"{file}.txt").read_text(encoding="utf-8")
    return _named(text, name).replace("BASE", base)


def _named(text: str, name: str) -> str:
    """Put the name in: "my_part", and "MyPart" for a class."""
    words = "".join(word.capitalize() for word in name.split("_"))
    return text.replace("NAME", name).replace("CLASS", words)


def _config(kind: str, name: str, base: str) -> str:
    """Return a copy of a config with its own name, and of a method with the stub's loss."""
    path = Path(base)
    if not base.endswith((".yaml", ".yml")):
        path = config_file(base)
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^name:.*$", f"name: {name.replace('_', '-')}", text, flags=re.MULTILINE)
    # the schema is found beside shipped configs alone
    text = re.sub(r"^# yaml-language-server:.*\n", "", text)
    if kind != "method":
        return text
    call = _named(STUBS[kind], name).partition("=")[2]
    changed, count = re.subn(
        r"^loss:.*\n(?:[ #].*\n)*", f"loss: {call}\n", text, flags=re.MULTILINE
    )
    if count != 1:
        raise ConfigError(f"new: expected a config with a loss section, got {path}")
    return changed
