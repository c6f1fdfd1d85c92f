"""What a run keeps of what it was handed. Prompt lists of a program become files in its folder, so
that it can be resumed, judged and exported without the program. Plugins that a command has named
need not be named again, as long as their files are the same: their hashes lie in the user's own
folder and not in the run's, so that a run of somebody else brings no trust along."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError, FlowRLError
from flowrl.core.files import write_json, write_text
from flowrl.core.processes import world
from flowrl.core.prompts import GIVEN, load_prompts, prompts_hash
from flowrl.runs.folder import CONFIG

FOLDER = "prompts"
USES = ("train", "test")


def listed_in(config: Config, run: Path) -> Config:
    """Return the config with the files in which a run keeps the lists that a program handed over.

    Raises ConfigError where the run has kept another list.
    """
    files = {}
    for use, file in _given(config, run):
        files[use] = str(file)
        given = load_prompts(getattr(config.prompts, use))
        if file.exists() and prompts_hash(load_prompts(file)) != prompts_hash(given):
            raise ConfigError(
                f"prompts.{use}: {run} was trained with another list ({file}); hand over the same "
                "one, or name another folder"
            )
    return _with_lists(config, files)


def _with_lists(config: Config, files: dict[str, str]) -> Config:
    """Return the config with other files of prompts, by their use."""
    if not files:
        return config
    return replace(config, prompts=replace(config.prompts, **files))


@contextmanager
def lists_kept(config: Config, run: Path, *, resumed: bool) -> Iterator[Config]:
    """Write the lists that a program handed over into the run's folder, and give the config that
    names these files; what fails inside takes them away again.

    A run that is `resumed` has written them already; only the first process writes.
    """
    here = world()
    if not resumed:
        here.by_main(partial(_write, config, run))
    try:
        yield listed_in(config, run)
    except BaseException:
        if here.main and not resumed and not (run / CONFIG).exists():
            for _, file in _given(config, run):
                file.unlink(missing_ok=True)
            with suppress(OSError):
                (run / FOLDER).rmdir()
        raise


def _write(config: Config, run: Path) -> None:
    for use, file in _given(config, run):
        prompts = load_prompts(getattr(config.prompts, use))
        lines = [json.dumps(record, ensure_ascii=False) for record in prompts.records]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, "\n".join(lines) + "\n")


def keep_lists(config: Config, folder: Path) -> Config:
    """Write the lists that a program handed over into a folder of many runs -> the config that
    names these files. Raises ConfigError where the folder has other ones."""
    named = listed_in(config, folder)
    _write(config, folder)
    return named


def moved_along(config: Config, run: Path) -> Config:
    """Return a run's config with its own lists where the folder is now."""
    files = {}
    for use in USES:
        file = run / FOLDER / f"{use}.jsonl"
        named = Path(getattr(config.prompts, use))
        if file.is_file() and named.parts[-2:] == file.parts[-2:]:
            files[use] = str(file)
    return _with_lists(config, files)


def _given(config: Config, run: Path) -> Iterator[tuple[str, Path]]:
    """Yield each list that a program handed over, and the file of the run that it belongs in."""
    for use in USES:
        if getattr(config.prompts, use).startswith(GIVEN):
            yield use, run / FOLDER / f"{use}.jsonl"


def trust(run: Path, plugins: Sequence[str]) -> None:
    """Keep the content of plugins that the user named for a run. Where it cannot be kept, they are
    named again the next time."""
    known = _kept(run)
    for name in plugins:
        text = _content(name)
        if text:
            known[name] = text
    if known:
        with contextlib.suppress(OSError, FlowRLError):
            write_json(_file(run), {"run": f"{run.resolve()}", "plugins": known})


def trusted(run: Path, plugins: Sequence[str]) -> list[str]:
    """Return the plugins that are named now, which are trusted from now on, and those that were
    allowed for this run before. Raises ConfigError for one of these whose files have changed."""
    kept = _kept(run)
    for name in kept.keys() - set(plugins):
        if _content(name) != kept[name]:
            raise ConfigError(
                f"{run}: the plugin {name} is not what it was when it was allowed for this run; "
                f"look at what has changed, then allow it again: --plugin {name}"
            )
    if plugins and run.is_dir():
        trust(run, plugins)
    return [*plugins, *sorted(kept.keys() - set(plugins))]


def allowed_before(run: Path) -> list[str]:
    """Return the plugins that were allowed for a run before, whatever is in them now."""
    return sorted(_kept(run))


def _content(name: str) -> str:
    """Return the hash of a plugin's source files, by their names; "" where there are none."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        if spec is None:
            return ""
        files = set[Path]()
        if spec.origin:
            files.add(Path(spec.origin))
        for folder in spec.submodule_search_locations or ():
            files.update(Path(folder).rglob("*.py"))
        found = hashlib.sha256()
        for file in sorted(files):
            found.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
        if files:
            return found.hexdigest()
    return ""


def _file(run: Path) -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    key = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:32]
    return Path(home) / "flowrl" / "plugins" / f"{key}.json"


def _kept(run: Path) -> dict[str, str]:
    """Read what was allowed for a run; a file that is damaged allows nothing."""
    try:
        found = json.loads(_file(run).read_text(encoding="utf-8"))["plugins"]
        return {f"{name}": f"{text}" for name, text in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return {}
