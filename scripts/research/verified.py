"""How far each shipped config was tried, as the committed result files say.

`python scripts/research/tables.py` writes it into configs/methods.yaml, a block `verified` under
each method that has a measured config; the README's table and `flowrl methods` show it. Read are

- comparisons (`kind: flowrl comparison`): each config's finished seeds;
- results of scripts/reproduce.py (`name`, `seeds`): the config that is named so;
- demonstrations (`kind: flowrl demonstration`): the run folders of their command, which are
  `<config's name>-seed<N>`.

Every other config is at "dry run": tests/config/test_method_configs.py rehearses it. Single trials
under overrides, as in awm-search.json, are no measurement of a shipped config. A comparison of a
config as it was, with other rewards than today's or a formula that was mended since, counts only
where there is no other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from flowrl.config.load import load_config
from flowrl.core.shipped_files import config_file, list_configs
from flowrl.runs.catalogue import PublishedMethod, Verified, load_methods

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "assets" / "results"
CATALOGUE = ROOT / "configs" / "methods.yaml"
BLOCK = re.compile(r"  verified:\n(?:    .*\n)+")
MENDED = {("shapes/pepg", "compare-own-rates.json")}  # its bound was differentiated otherwise


class Found(NamedTuple):
    """What one file says of one config."""

    seeds: frozenset[int]
    version: str  # of flowrl; "" where the file does not say
    file: str
    today: bool = True  # the config as it is today


def names() -> dict[str, str]:
    """Return the name that each shipped config gives itself -> the config."""
    found = {}
    for config in list_configs():
        text = config_file(config).read_text(encoding="utf-8")
        match = re.search(r"^name: *(\S+)", text, re.MULTILINE)
        assert match, f"{config}: expected a line with its name"
        found[match[1]] = config
    return found


def measured(content: Any, file: str, known: dict[str, str]) -> Iterator[tuple[str, Found]]:
    """Read a result file -> (config, what it says) of every shipped config with a finished run."""
    if not isinstance(content, dict):
        return
    # comparisons name the config's file
    if content.get("kind") == "flowrl comparison":
        for entry in content["configs"]:
            done = [run for run in entry["seeds"] if run["failed"] is None]
            versions = {_version(content["environments"][run["environment"]]) for run in done}
            seeds = frozenset(run["seed"] for run in done)
            if seeds and entry["file"] in known.values():
                today = _as_shipped(entry, file)
                yield entry["file"], Found(seeds, max(versions), file, today)
    # the others the run's name
    elif content.get("kind") == "flowrl demonstration":
        runs: dict[str, set[int]] = {}
        for name, seed in re.findall(r"([\w-]+)-seed(\d+)\b", content["command"]):
            runs.setdefault(name, set()).add(int(seed))
        for name, some in runs.items():
            if name in known:
                yield known[name], Found(frozenset(some), _version(content), file)
    elif content.get("name") in known and isinstance(content.get("seeds"), list):
        runs_of = content["seeds"]
        seeds = frozenset(run["seed"] for run in runs_of)
        version = max(_version(run.get("environment", {})) for run in runs_of)
        yield known[content["name"]], Found(seeds, version, file)


def _as_shipped(entry: dict[str, Any], file: str) -> bool:
    """Say whether a comparison measured what a config is today; arguments that came since keep
    their defaults."""
    if (entry["file"], file) in MENDED:
        return False
    there = entry.get("config", {}).get("rewards", {})
    if not there:
        return True
    today = load_config(entry["file"]).to_dict()
    # a run without the penalty measures what the penalty does
    if bool(entry["config"].get("kl")) != bool(today.get("kl")):
        return False
    here = today["rewards"]
    return all(call.items() <= here.get(name, {}).items() for name, call in there.items())


def _version(environment: dict[str, Any]) -> str:
    return str(environment.get("flowrl", ""))


@cache
def levels() -> dict[str, Verified]:
    """Return how far each shipped config was tried: as it is today, by the file with the most
    seeds."""
    known = names()
    best: dict[str, Found] = {}
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        for config, found in measured(content, path.name, known):
            if config not in best or _more(found, best[config]):
                best[config] = found
    return {config: _level(best.get(config)) for config in known.values()}


def _more(found: Found, other: Found) -> bool:
    return (found.today, len(found.seeds)) > (other.today, len(other.seeds))


def _level(found: Found | None) -> Verified:
    if found is None:
        return Verified()
    level = "seeds" if len(found.seeds) > 1 else "once"
    return Verified.model_validate(
        {
            "level": level,
            "seeds": len(found.seeds),
            "version": found.version,
            "results": found.file,
        }
    )


def of_method(method: PublishedMethod) -> dict[str, Verified]:
    """Return the levels of a method's configs."""
    return {config: levels()[config] for config in method.configs}


def catalogue(text: str) -> str:
    """Write the blocks `verified` of the catalogue anew: every config that is not at "dry run"."""
    methods = {method.slug: method for method in load_methods()}
    head, *entries = re.split(r"(?=^- slug: )", BLOCK.sub("", text), flags=re.MULTILINE)
    made = [head]
    for entry in entries:
        slug = re.match(r"- slug: (\S+)", entry)
        assert slug
        body = entry.rstrip("\n")
        made.append(body + "\n" + _block(of_method(methods[slug[1]])) + entry[len(body) + 1 :])
    return "".join(made)


def _block(found: dict[str, Verified]) -> str:
    lines = []
    for config, one in found.items():
        if one.level != "dry run":
            told = yaml.safe_dump(one.model_dump(exclude_defaults=True), default_flow_style=True)
            lines.append(f"    {config}: {' '.join(told.split())}\n")
    return f"  verified:\n{''.join(lines)}" if lines else ""


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """List the file that this fills."""
    return [(CATALOGUE, catalogue)]
