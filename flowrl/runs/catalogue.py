"""The methods that ship with flowrl, read from configs/methods.yaml: what each is, how faithful,
and what its configs cost."""

from __future__ import annotations

import functools
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from flowrl.core.errors import ConfigError, near
from flowrl.core.shipped_files import CATALOGUE, config_file, list_configs, resource
from flowrl.core.tables import text_table
from flowrl.core.version import __version__

Status = Literal["exact", "reconstruction"]
MEANING: dict[Status, str] = {
    "exact": "formulas from the paper and its code",
    "reconstruction": "partly ours: no code is public, or not all formulas are",
}
Level = Literal["seeds", "once", "dry run"]
LEVELS: dict[Level, str] = {
    "seeds": "trained with several seeds; a result file has each",
    "once": "trained with one seed",
    "dry run": "loaded and its plan rehearsed by the tests; never trained as it is",
}
AXES = (
    "plan",
    "transition",
    "rewards",
    "aggregate",
    "credit",
    "segment",
    "select",
    "likelihood",
    "loss",
    "kl",
)
_FIRST = 3  # folders of configs that come first: those with most; then the others by name


# of a config's axes; the others hardly differ
SHOWN = ("plan", "transition", "credit", "segment", "select", "loss", "kl")
COST = (
    "calls per image: network calls of an iteration, sampling and 3 (with a KL 4) per trained "
    "state, over the images that are scored; guidance doubles them, which is counted only of "
    "train.guidance and train.reference_guidance"
)
MORE = (
    "verified: of the config that was tried most; `flowrl methods NAME` has each config with its "
    "axes"
)
_PAGE = 100  # columns of notes where there is no terminal


class _Record(BaseModel):
    """What the file holds has these keys, with these types, and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Paper(_Record):
    """Where a method was published."""

    title: str
    arxiv: Annotated[str, Field(pattern=r"^\d{4}\.\d{5}$")]
    year: int


class Verified(_Record):
    """How far a config was tried, by a committed result file."""

    level: Level = "dry run"
    seeds: int = 0  # that were trained to the end
    version: str = ""  # of flowrl then; "" where the file does not say
    results: str = ""  # a file of assets/results

    @property
    def words(self) -> str:
        """Say it in a table: "3 seeds (0.1.0)"; of this version without the bracket."""
        if self.level == "dry run":
            return self.level
        what = "once"
        if self.level == "seeds":
            what = f"{self.seeds} seeds"
        if self.version in ("", __version__):
            return what
        return f"{what} ({self.version})"


class PublishedMethod(_Record):
    """One method; configs/methods.yaml says what the fields are."""

    slug: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    name: str
    paper: Paper | None = None  # None: a combination of other methods
    status: Status
    parts: dict[str, Status] = {}  # of it that have another status: configs, functions, steps
    summary: str
    variants: Annotated[tuple[str, ...], Field(strict=False)] = ()
    page: str = ""
    verified: dict[str, Verified] = {}  # of its configs that are not at "dry run"

    @property
    def page_name(self) -> str:
        """Return the name of its page in docs/methods."""
        return self.page or self.slug

    @property
    def configs(self) -> list[str]:
        """Return the names of its configs, the smallest model first: all that are named after it
        or a variant of it, but for those that another method names with their folder."""
        others = [name for method in load_methods() if method != self for name in method.variants]
        tails = (self.slug, *self.variants)
        mine = {n for n in list_configs() if n in tails or n.rpartition("/")[2] in tails}
        return sorted(mine.difference(n for n in others if "/" in n), key=self._place)

    def _place(self, name: str) -> tuple[int, bool, str]:
        number = _first_places().get(name.partition("/")[0], _FIRST)
        return number, not name.endswith(f"/{self.slug}"), name


@functools.cache
def _first_places() -> dict[str, int]:
    places = Counter(name.partition("/")[0] for name in list_configs())
    return {place: number for number, (place, _) in enumerate(places.most_common(_FIRST))}


@functools.cache
def load_methods() -> tuple[PublishedMethod, ...]:
    """Read the shipped catalogue. Raises ConfigError as `parse_methods` does."""
    file = resource(f"configs/{CATALOGUE}.yaml")
    return parse_methods(file.read_text(encoding="utf-8"), str(file))


def find_methods(names: Sequence[str]) -> tuple[PublishedMethod, ...]:
    """Return the methods of these names, "awm" or "AWM"; all without one. Raises ConfigError with
    the nearest names for one that is not in the catalogue."""
    known = load_methods()
    by_name = {method.name.lower(): method for method in known}
    by_name |= {method.slug: method for method in known}
    for name in names:
        if name.lower() not in by_name:
            raise ConfigError(
                f"expected the name of a method, such as {known[0].slug}, got {name!r}"
                f"{near(name, by_name)}; `flowrl methods` lists all"
            )
    asked = {by_name[name.lower()].slug for name in names}
    return tuple(method for method in known if not asked or method.slug in asked)


def parse_methods(text: str, where: str) -> tuple[PublishedMethod, ...]:
    """Read a catalogue. Raises ConfigError that names every entry and key that is wrong."""
    try:
        raw = yaml.safe_load(text)
        found = TypeAdapter(list[PublishedMethod]).validate_python(raw)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: expected YAML, got {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    for key in ("slug", "name"):
        counts = Counter(getattr(method, key) for method in found)
        twice = [value for value, count in counts.items() if count > 1]
        if twice:
            raise ConfigError(f"{where}: expected a {key} of its own for each, got {twice} twice")
    return tuple(found)


def describe_method(method: PublishedMethod, *, cost: bool = False) -> dict[str, Any]:
    """Return all that is known of a method, its configs' axes included, as JSON would hold it.

    With `cost` also what an iteration of each config takes; that loads the config and rehearses
    its plan. Raises ConfigError for a config that cannot be trained.
    """
    public = method.model_dump(exclude={"variants", "page", "verified"})
    configs = []
    for name in method.configs:
        tried = method.verified.get(name, Verified()).model_dump()
        config = {"config": name, "axes": _axes(name), "verified": tried}
        if cost:
            config |= _cost(name)
        configs.append(config)
    return {**public, "meaning": MEANING[method.status], "configs": configs}


def tried(levels: Mapping[str, Verified], mark: str = "") -> str:
    """Say how far a method's configs were tried: "5 seeds: shapes/awm; else dry run". `mark` goes
    around names."""
    by_words: dict[str, list[str]] = {}
    for name, one in levels.items():
        by_words.setdefault(one.words, []).append(f"{mark}{name}{mark}")
    rest = by_words.pop("dry run", [])
    if not by_words and rest:
        return "dry run"
    parts = [f"{words}: {' '.join(names)}" for words, names in by_words.items()]
    if rest:
        parts.append("else dry run")
    return "; ".join(parts)


def status_words(status: str, parts: Mapping[str, str], mark: str = "") -> str:
    """Say a method's status and the parts that have another: "exact; reconstruction: shapes/vgpo".
    `mark` goes around names."""
    by_status: dict[str, list[str]] = {}
    for part, other in parts.items():
        name = part
        if " " not in part:
            name = f"{mark}{part}{mark}"
        by_status.setdefault(other, []).append(name)
    return "; ".join([status, *(f"{other}: {', '.join(of)}" for other, of in by_status.items())])


def _axes(name: str) -> dict[str, list[str]]:
    """Return the functions that a config names, by axis, read without loading it."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    raw = yaml.load(config_file(name).read_text(encoding="utf-8"), loader)  # noqa: S506
    return {axis: _functions(raw[axis]) for axis in AXES if raw.get(axis)}


def _functions(section: Any) -> list[str]:
    if isinstance(section, dict):
        if isinstance(section.get("fn"), str):
            return [section["fn"]]
        section = section.values()
    return [call["fn"] for call in section]


def _cost(name: str) -> dict[str, Any]:
    from flowrl.config.load import load_config
    from flowrl.training.rehearsal import check_plan

    # counted by the rehearsal of a run: no model is loaded
    forecast = check_plan(load_config(name))
    work = forecast.work
    return {
        "images": work.images,
        "decisions": forecast.decisions,
        "states": forecast.states,
        "updates": work.updates,
        "sampling_calls": work.nfe,
        "calls": forecast.calls,
        "calls_per_image": round(forecast.calls / work.images, 3),
        "guided": work.guided,
        "guided_alone": sorted(work.twice),
    }


def methods_table(rows: Sequence[dict[str, Any]], *, width: int | None = None) -> str:
    """Write descriptions as a table of `width` columns: a short row per method, then what the
    columns mean."""
    costly = _is_costly(rows)
    cells = [["name", "method", "paper", "status", "verified", *["calls per image"] * costly]]
    for row in rows:
        paper = "combination"
        if row["paper"]:
            paper = row["paper"]["arxiv"]
        cells.append([row["slug"], row["name"], paper, row["status"], _most(row["configs"])])
        if costly:
            cells[-1].append(_calls(row["configs"]))
    words = [*MEANING.items(), *LEVELS.items()]
    notes = [*(f"{word}: {meaning}" for word, meaning in words), MORE, *[COST] * costly]
    return f"{text_table(cells, left=len(cells[0]), width=width)}\n\n{_noted(notes, width)}"


def methods_in_full(rows: Sequence[dict[str, Any]], *, width: int | None = None) -> str:
    """Write all that is known of each method: its summary, paper and status, and a table of its
    configs with the functions that they name."""
    costly = _is_costly(rows)
    parts = []
    for row in rows:
        cells = [["config", "verified", "axes", *["calls per image"] * costly]]
        for config in row["configs"]:
            cells.append([config["config"], _most([config]), _axes_shown(config)])
            if costly:
                cells[-1].append(_calls([config]))
        head = [f"{row['slug']}: {row['name']}", row["summary"]]
        if row["paper"]:
            paper = row["paper"]
            head.append(f"paper: {paper['title']}, arXiv {paper['arxiv']}, {paper['year']}")
        head.append(f"status: {status_words(row['status'], row['parts'])} ({row['meaning']})")
        table = text_table(cells, left=len(cells[0]), width=width)
        parts.append(f"{_noted(head, width)}\n\n{table}")
    return "\n\n\n".join([*parts, *[_noted([COST], width)] * costly])


def _is_costly(rows: Iterable[dict[str, Any]]) -> bool:
    return any("calls" in config for row in rows for config in row["configs"])


def _noted(lines: Iterable[str], width: int | None) -> str:
    return "\n".join(textwrap.fill(line, width or _PAGE) for line in lines)


def _most(configs: Iterable[dict[str, Any]]) -> str:
    """Say how far the config was tried that was tried most."""
    levels = [*LEVELS]
    found = [Verified(**config["verified"]) for config in configs]
    best = max(found, key=lambda one: (-levels.index(one.level), one.seeds), default=Verified())
    return best.words


def _calls(configs: Iterable[dict[str, Any]]) -> str:
    """Write the network calls per image of configs, the least and the most."""
    found = [config["calls_per_image"] for config in configs]
    if not found:
        return ""
    ends = dict.fromkeys(f"{value:.1f}" for value in (min(found), max(found)))
    return " to ".join(ends)


def _axes_shown(config: dict[str, Any]) -> str:
    return ", ".join(name for axis in SHOWN for name in config["axes"].get(axis, []))
