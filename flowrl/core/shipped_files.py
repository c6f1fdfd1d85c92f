"""Find what is shipped: configs and assets, in the working folder, in a checkout or inside the
installed wheel; and our own package ``rewards``, whatever else has that name."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import os
import sys
from pathlib import Path, PurePosixPath
from types import ModuleType

from flowrl.core.errors import ConfigError, near

PACKAGE = Path(__file__).resolve().parent.parent
KINDS = ("configs", "assets")
CATALOGUE = "methods"  # configs/methods.yaml, which is no config
LAUNCHER = "accelerate/"  # of configs/: settings of the program that starts several processes
MODELS = "models/"  # of configs/: what a config of any method takes from a model
PARTS = (LAUNCHER, MODELS)  # of configs/: folders that hold no whole config

NAME = "rewards"
ALIAS = "flowrl_rewards"  # ours, where the user has a module of our name
PLACE = PACKAGE.parent / NAME
_MOST_NAMES = 5000  # files looked at for a suggestion; an asset folder can be large


def checkout() -> Path | None:
    """Return the root of the source checkout that this package runs from, or None when it is
    installed."""
    root = PACKAGE.parent
    # another wheel may have left a `configs` folder there
    if root.name in ("site-packages", "dist-packages"):
        return None
    return root if (root / "pyproject.toml").is_file() or (root / "configs").is_dir() else None


def _shipped_folders() -> list[Path]:
    """Return the folders that hold ``configs/`` and ``assets/``, the preferred one first."""
    source = checkout()
    if source is None:
        return [PACKAGE / "_data"]
    return [source, PACKAGE / "_data"]


def resource(path: str | os.PathLike[str]) -> Path:
    """Return an existing file or folder for `path` (``configs/..``, ``assets/..``, or any path of
    the user's).

    The order: as given (absolute, or relative to the working folder), then the checkout, then the
    wheel. Raises ConfigError with every place that was looked at and the nearest names there.
    """
    found = find_resource(path)
    if found is not None:
        return found
    # say where it was looked for, and what has a similar name
    text = os.fspath(path)
    looked = "\n".join(f"  {place}" for place in dict.fromkeys(_places(text)))
    hint = near(text, _names(), most=3, cutoff=0.6)
    raise ConfigError(f"cannot find {text!r}{hint}; looked for\n{looked}")


def find_resource(path: str | os.PathLike[str]) -> Path | None:
    """Return what `resource` returns, or None where nothing is found. Raises ConfigError for an
    empty text, a pipe or a device."""
    text = os.fspath(path)
    if not text.strip():
        raise ConfigError("expected the path of a file or folder, got an empty text")
    for place in _places(text):
        # unlike Path.exists this also says no to a name that the system finds too long
        if os.path.exists(place):
            if not (place.is_file() or place.is_dir()):
                raise ConfigError(f"{place}: expected a file or a folder, got a pipe or a device")
            return place
    return None


def list_configs() -> list[str]:
    """Return the names of all shipped configs, sorted, as `load_config` takes them:
    ``shapes/flow_grpo``."""
    return list(_configs_in(*_shipped_folders()))


@functools.cache
def _configs_in(*places: Path) -> tuple[str, ...]:
    """Look through the folders once: a table of all methods asks for the names again and again."""
    found: set[str] = set()
    for place in places:
        folder = place / "configs"
        for file in folder.rglob("*.yaml"):
            name = file.relative_to(folder).with_suffix("").as_posix()
            if name != CATALOGUE and not name.startswith(PARTS):
                found.add(name)
    return tuple(sorted(found))


def list_models() -> list[str]:
    """Return the names of the files of ``configs/models``, sorted."""
    found: set[str] = set()
    for root in _shipped_folders():
        found.update(file.stem for file in (root / "configs" / MODELS).glob("*.yaml"))
    return sorted(found)


def config_file(name: str) -> Path:
    """Return the file of a shipped config. Raises ConfigError with the nearest names."""
    shipped = name.removeprefix("configs/").removesuffix(".yaml")
    if not _is_config(shipped):
        hint = near(shipped, list_configs()) or "."
        raise ConfigError(
            f"{name!r} is no shipped config{hint} `flowrl configs` lists all; a file of your own "
            "must end in .yaml"
        )
    return resource(f"configs/{shipped}.yaml")


def _places(text: str) -> list[Path]:
    """Return where a path may be: an absolute one only there, a relative one in several places."""
    if Path(text).is_absolute():
        return [Path(text)]
    return [Path.cwd() / text, *(root / text for root in _shipped_folders())]


def _is_config(name: str) -> bool:
    """Say whether a config is shipped: what `name in list_configs()` says, without looking through
    all folders."""
    plain = PurePosixPath(name)
    if plain.is_absolute() or ".." in plain.parts or plain.as_posix() != name:
        return False
    there = any(os.path.isfile(root / "configs" / f"{name}.yaml") for root in _shipped_folders())
    return there and name != CATALOGUE and not name.startswith(PARTS)


def _names() -> list[str]:
    folders = [(root, root / kind) for root in _shipped_folders() for kind in KINDS]
    names: set[str] = set()
    left = _MOST_NAMES
    for root, folder in folders:
        for item in itertools.islice(folder.rglob("*"), left):
            names.add(item.relative_to(root).as_posix())
            left -= 1
    return sorted(names)


def import_rewards(module: str = "") -> ModuleType:
    """Import a module of our package, given by its name below it: "remote.server"; "" is the
    package.

    A ``rewards.py`` or ``rewards/`` of the user's, in the working folder or imported already, stays
    theirs: ours then goes by another name. Raises what the module raises.
    """
    package = NAME
    if not name_is_ours():
        package = ALIAS
        if ALIAS not in sys.modules:
            _load_by_place()
    if module:
        package += f".{module}"
    return importlib.import_module(package)


def name_is_ours() -> bool:
    """Say whether ``import rewards`` gives our package."""
    loaded = sys.modules.get(NAME)
    if loaded is not None:
        return _is_at_our_place(getattr(loaded, "__file__", None))
    try:
        spec = importlib.util.find_spec(NAME)
    except (ImportError, ValueError):
        return False
    return spec is not None and _is_at_our_place(spec.origin)


def _is_at_our_place(file: str | None) -> bool:
    return file is not None and Path(file).resolve() == PLACE / "__init__.py"


def _load_by_place() -> None:
    places = [str(PLACE)]
    file = PLACE / "__init__.py"
    spec = importlib.util.spec_from_file_location(ALIAS, file, submodule_search_locations=places)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot read {file}")
    package = importlib.util.module_from_spec(spec)
    sys.modules[ALIAS] = package
    spec.loader.exec_module(package)
