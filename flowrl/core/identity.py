"""What a name stands for: facts of files, source code and tensors, by which what was computed
before is known to belong to what is there now.

Everything that keeps results under a name (images of a suite, scores beside them, measures, the
base model of a comparison, embeddings of prompts) keeps these facts beside them, and compares.
Facts are nested dictionaries of texts, so they can be written as JSON and say what has changed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import io
import json
import os
import site
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.files import sha256_of
from flowrl.core.shipped_files import find_resource

Facts = dict[str, Any]
"""{name: text or Facts}."""

WHOLE = 64 * 2**20  # bytes up to which a file's content is hashed as a whole
BLOCK, BLOCKS = 64 * 2**10, 64  # of larger files: so many blocks, evenly spread, and the time
MOST_FILES = 500  # of a folder that are told one by one
# what decides how a network computes; other files of a folder may change as they like
SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja", ".bin", ".pt", ".pth", ".ckpt")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".mp4")


def short_digest(*parts: Any) -> str:
    """Return 16 digits that stand for bytes and plain JSON values."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        digest.update(f"{len(raw)}:".encode() + raw)
    return digest.hexdigest()[:16]


def facts_of_file(file: Path) -> str:
    """Say what a file is: its size and a hash of its content; of one above 64 MB a hash of parts of
    it, and when it was written. Raises OSError."""
    about = file.stat()
    size = about.st_size
    if size <= WHOLE:
        return f"{size} bytes, sha256 {sha256_of(file)[:16]}"
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for place in range(BLOCKS):
            stream.seek((size - BLOCK) * place // (BLOCKS - 1))
            digest.update(stream.read(BLOCK))
    return f"{size} bytes, parts {digest.hexdigest()[:16]}, written {about.st_mtime_ns}"


def facts_of_path(path: Path) -> Facts:
    """Return what a file, or each file of these endings in and below a folder, is; of a folder with
    very many one digest of their names, sizes and times. Raises OSError."""
    if path.is_file():
        return {path.name: facts_of_file(path)}
    files = {}
    for file in sorted(path.rglob("*")):
        if file.suffix.lower() in (*SUFFIXES, *IMAGES) and file.is_file():
            files[file.relative_to(path).as_posix()] = file
    if len(files) > MOST_FILES:
        listed = []
        for name, file in files.items():
            about = file.stat()
            listed.append([name, about.st_size, about.st_mtime_ns])
        return {f"{len(files)} files": short_digest(listed)}
    return {name: facts_of_file(file) for name, file in files.items()}


def facts_of_name(name: str) -> Facts:
    """Return what a text names: the files of a file or folder here, also a shipped one, or the
    revision of a repository of the hub that was downloaded; {} where it names neither."""
    try:
        found = find_resource(os.path.expanduser(name))
        if found is not None and Path.cwd().is_relative_to(found):
            return {}  # not all that lies around the working folder
        if found is not None:
            return facts_of_path(found)
    except (ConfigError, OSError, ValueError):  # an empty text, a pipe, a letter that is none
        return {}
    owner, _, rest = name.partition("/")
    repository = rest.partition("/")[0]
    if not repository:
        return {}
    from huggingface_hub import constants

    kept = Path(constants.HF_HUB_CACHE) / f"models--{owner}--{repository}" / "refs" / "main"
    try:
        return {"revision": kept.read_text(encoding="utf-8").strip()}
    except (OSError, ValueError):
        return {}


def facts_of_values(values: Any) -> Facts:
    """Return the facts of every text in nested arguments that names files, by that text."""
    facts: Facts = {}
    if isinstance(values, str | Path):
        found = facts_of_name(str(values))
        if found:
            facts[str(values)] = found
    elif isinstance(values, Mapping):
        facts = facts_of_values(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            facts |= facts_of_values(value)
    return facts


def facts_of_source(function: Callable[..., Any], besides: tuple[str, ...] = ()) -> Facts:
    """Return a hash of the source of a function's module, and of those that it imports from its own
    package, from what is no installed package, and from the packages `besides` of flowrl; comments
    and docstrings do not count.

    The rest of flowrl has its version, an installed package its own. Nothing is imported for it.
    """
    while isinstance(function, functools.partial):
        function = function.func
    facts: Facts = {}
    left = [str(getattr(function, "__module__", ""))]
    own = left[0].partition(".")[0]
    while left:
        module = left.pop()
        if module in facts:
            continue
        file = _source_of(module, own, besides)
        if file is None:
            continue
        raw = file.read_bytes()
        facts[module] = short_digest(_code_of(raw))
        left += _imports(module, raw, is_package=file.name == "__init__.py")
    return facts


def _code_of(raw: bytes) -> bytes:
    """Return a source without its comments and docstrings, which compute nothing; as it is where it
    reads its own docstrings, or is no Python."""
    if b"__doc__" in raw:
        return raw
    try:
        tree, tokens = ast.parse(raw), [*tokenize.tokenize(io.BytesIO(raw).readline)]
    except (SyntaxError, ValueError, tokenize.TokenError):
        return raw
    lines: list[str | None] = [*io.TextIOWrapper(io.BytesIO(raw), tokens[0].string)]
    # docstrings that share their lines with no code
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            rows = range(first.lineno - 1, first.end_lineno or first.lineno)
            before = str(lines[rows[0]]).encode()[: first.col_offset]
            after = str(lines[rows[-1]]).encode()[first.end_col_offset :]
            if not before.strip() and not after.strip():
                for row in rows:
                    lines[row] = None
    # comments, and the lines that were nothing else
    for token in tokens:
        if token.type != tokenize.COMMENT:
            continue
        line = lines[token.start[0] - 1]
        if line is not None:
            lines[token.start[0] - 1] = line[: token.start[1]].rstrip() or None
    return "\n".join(line.rstrip("\n") for line in lines if line is not None).encode()


def _source_of(module: str, own: str, besides: tuple[str, ...]) -> Path | None:
    """Return the file of a module whose source counts; None for all others."""
    package, _, rest = module.partition(".")
    named = any(f"{module}.".startswith(f"{name}.") for name in besides)
    if not package or (package == "flowrl" and not named):
        return None
    # where its package lies; what a script defines has no package, but a file
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError, AttributeError):
        spec = None
    origin = getattr(sys.modules.get(package), "__file__", "")
    if spec is not None:
        origin = spec.origin
    if not origin or not origin.endswith(".py"):
        return None
    installed = any(Path(origin).is_relative_to(place) for place in _installed())
    if installed and package not in (own, "flowrl"):
        return None
    # from there the file, without the import that `find_spec` of a module would make
    place = Path(origin)
    if rest:
        place = place.parent.joinpath(*rest.split("."))
    found = (place, place.with_suffix(".py"), place / "__init__.py")
    return next((file for file in found if file.is_file()), None)


@functools.cache
def _installed() -> tuple[Path, ...]:
    """Return where Python and installed packages lie."""
    paths = sysconfig.get_paths()
    found = [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]]
    return tuple(map(Path, {*found, *site.getsitepackages()}))


def _imports(module: str, raw: bytes, *, is_package: bool) -> Iterator[str]:
    """Yield the whole names of what a source imports, of `from a import b` both a and a.b."""
    package = module if is_package else module.rpartition(".")[0]
    try:
        nodes = [*ast.walk(ast.parse(raw))]
    except (SyntaxError, ValueError):  # a file that nobody has imported yet
        nodes = []
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                if base:
                    above.append(base)
                base = ".".join(above)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def facts_of_tensors(tensors: Mapping[str, Tensor]) -> Facts:
    """Return one hash of named tensors, whatever their device: names, types, shapes, values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), [*tensor.shape]]).encode())
        values = tensor.detach().cpu().contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy().data)
    return {"tensors": digest.hexdigest()[:16]}


def flat(facts: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested facts under dotted names: {"model.transformer/config.json": "12 bytes, ..."};
    what holds nothing stands as it is."""
    found: dict[str, Any] = {}
    for key, value in facts.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def without_times(facts: Mapping[str, Any]) -> Facts:
    """Return facts without the times at which files were written: two machines have others."""
    found: Facts = {}
    for key, value in facts.items():
        if isinstance(value, Mapping):
            found[key] = without_times(value)
        elif isinstance(value, str):
            found[key] = value.partition(", written ")[0]
        else:
            found[key] = value
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Say in which names two nested facts or settings differ: "steps: 10 and 40". Values are
    shortened."""
    a, b = (flat(json.loads(json.dumps(dict(facts)))) for facts in (one, other))
    said = []
    for key in a | b:
        if a.get(key) != b.get(key) or (key in a) != (key in b):
            said.append(f"{key}: {_shown(a, key)} and {_shown(b, key)}")
    return said


def _shown(facts: Mapping[str, Any], key: str) -> str:
    value = facts.get(key, "nothing")
    if isinstance(value, str) and len(value) <= 100:
        return value
    return f"{value!r:.100}"
