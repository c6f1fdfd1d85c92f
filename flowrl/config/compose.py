"""A config of any method on any model, put together from two files.

The method's sections are those of its home config, mostly one that was published on another model.
The model's own are those of a file of ``configs/models``: what is loaded and tuned, the size of
images, how they are evaluated, and what fits into memory. Each value keeps a mark of where it is
from, which the comments of the two files say: see `marks_of`.

Prompts and rewards are the method's where they can judge what the model makes, else the model's.
Nothing here reads a folder: `flowrl.runs.composed` chooses the two files.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from flowrl.config.overrides import dotted, parse_yaml
from flowrl.core.errors import ConfigError

PAIR = "published for this pair"
MODEL = "published for this model"  # with other methods
OTHER = "published for another model"
OURS = "ours"
ASKED = "as asked"
SET = "set here"
DEFAULT = "flowrl's default"

SCORES = ("score", "best_by")  # keys of eval that name rewards
OF_METHOD = ("weights", "tuned")  # keys of eval that are the method's
MEMORY = ("micro_batch", "rollout_batch")  # keys of train that are the model's matter
# what the included shapes model needs, and no other
OF_SHAPES = (
    *("train.iterations", "train.balance", "train.warmup", "train.decay", "train.decay_to"),
    *("train.start", "train.guidance", "likelihood.reads"),
)
ESTIMATES = ("candidate_pairs", "candidate_norm")  # credits that compare unfinished images
ASCENTS = ("reward_ascent", "relative_ascent")  # losses that follow the reward's own gradient
METHOD = (
    *("plan", "transition", "aggregate", "credit", "segment", "select", "likelihood", "loss", "kl"),
    *("old", "slow", "fake", "surrogate", "optimizer", "parts", "train", "scout"),
)
"""Sections that are the method's."""
ONLY_MODELS = ("model", "image", "checkpoint", "samples")  # sections that are always the model's


@dataclass(frozen=True)
class Piece:
    """One of the two files: its sections, and the comment on each of its values."""

    name: str  # of the config: "shapes/awm", "models/NAME"
    raw: dict[str, Any]
    notes: dict[str, str] = field(default_factory=dict)  # by dotted key
    alike: bool = True  # of a model's file: the weights are those that it is about


@dataclass(frozen=True)
class Judged:
    """How a home config and a model go together."""

    alike: bool  # the home's prompts and rewards can judge what the model makes
    shapes: bool  # the home is of the included model, whose sizes are no other's


class Composition(dict[str, Any]):
    """The sections of a composed config, with the mark of each value, by dotted key."""

    def __init__(self, sections: Mapping[str, Any], marks: Mapping[str, str], source: str) -> None:
        """Take sections and marks as they are; `source` names it in messages."""
        super().__init__(sections)
        self.marks, self.source = dict(marks), source

    @property
    def command(self) -> str:
        """Return the words of the command line that name it."""
        config, _, model = self.source.partition(" on ")
        return f"{config} --model {model}"

    def text(self, sections: Mapping[str, Any] | None = None) -> str:
        """Write it as YAML, with the marks as comments; or other sections, such as a checked
        config's: a value that is not the composition's own is marked "set here" or, where the
        composition is silent, "flowrl's default"."""
        if sections is None:
            sections = self
        own = dict(leaves(self))
        marks = {}
        for key, value in leaves(sections):
            if key not in own:
                marks[key] = DEFAULT
            elif own[key] == value:
                marks[key] = self.marks[key]
            else:
                marks[key] = SET
        return "".join(f"{line}\n" for line in _lines(sections, marks, "", ""))


@functools.cache
def read_piece(text: str, name: str) -> Piece:
    """Read a file's sections and the comments on their values. Raises ConfigError."""
    raw = parse_yaml(text, name)
    if not isinstance(raw, dict):
        raise ConfigError(f"{name}: expected sections like 'model:' and 'plan:'")
    lines = text.splitlines()
    root = yaml.compose(text, yaml.SafeLoader)
    assert root is not None  # the text has sections
    return Piece(name, raw, dict(_notes(root, lines, "", [])))


def leaves(value: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value that is no mapping, by its dotted key; a list is one value."""
    for name, inside in value.items():
        whole = dotted(key, name)
        if isinstance(inside, Mapping) and inside:
            yield from leaves(inside, whole)
        else:
            yield whole, inside


def compose(home: Piece, model: Piece, judged: Judged, name: str, model_name: str) -> Composition:
    """Put a method's home config and a model's file together.

    Args:
        home: a whole config. model: a file of ``configs/models``.
        name: of the runs. model_name: what was asked for, for messages.
    Raises ConfigError for a method that is made of rewards which cannot judge what the model makes.
    """
    at_home, of_model = home.raw, model.raw
    of_class = MODEL if model.alike else f"{OTHER} ({model.name})"
    made: dict[str, Any] = {"name": name, "seed": at_home.get("seed", 0)}
    origin: dict[str, Piece] = {}

    def take(key: str, piece: Piece, value: Any) -> None:
        value = copy.deepcopy(value)  # files are read once
        for leaf, _ in leaves({key: value}):
            origin[leaf] = piece
        if key in made:
            value = {**made[key], **value}
        made[key] = value

    # what is the model's alone, and what is the method's alone
    for key in ONLY_MODELS:
        take(key, model, dict(of_model[key]))
    for key in METHOD:
        if key in at_home:
            take(key, home, at_home[key])
    judge = home if judged.alike else model
    _check_rewards(home, judged, model_name)
    for key in ("prompts", "rewards"):
        take(key, judge, judge.raw[key])
    if not judged.shapes and "monitors" in at_home:
        take("monitors", home, at_home["monitors"])
    _evaluate(take, home, model, judge)
    _fit(made, origin, home, model, judged)
    marks = {}
    for leaf, _ in leaves(made):
        piece = origin.get(leaf)
        if piece is None or is_ours(piece.notes.get(leaf, ""), leaf.rpartition(".")[2]):
            marks[leaf] = OURS
        elif piece is not home:
            marks[leaf] = of_class
        elif judged.shapes:
            marks[leaf] = OURS
        else:
            marks[leaf] = f"{OTHER} ({home.name})"
    marks |= {"model.fn": ASKED, "model.path": ASKED}
    return Composition(made, marks, f"{home.name} on {model_name}")


def published_pair(own: Piece, model_name: str, where: str = PAIR) -> Composition:
    """Return the config of a method and a model as it is; `where` marks its published values."""
    marks = {}
    for leaf, _ in leaves(own.raw):
        marks[leaf] = where
        if is_ours(own.notes.get(leaf, ""), leaf.rpartition(".")[2]):
            marks[leaf] = OURS
    return Composition(copy.deepcopy(own.raw), marks, f"{own.name} on {model_name}")


def _evaluate(take: Any, home: Piece, model: Piece, judge: Piece) -> None:
    """Take the model's section eval, with what of it is the method's: which weights are judged,
    which steps are the tuned model's, and the score where the rewards are the method's."""
    numbers = {**model.raw["eval"]}
    for key in SCORES:
        numbers.pop(key, None)
    take("eval", model, numbers)
    for piece, keys in ((judge, SCORES), (home, OF_METHOD)):
        there = piece.raw.get("eval", {})
        take("eval", piece, {key: there[key] for key in keys if key in there})


def _fit(
    made: dict[str, Any],
    origin: dict[str, Piece],
    home: Piece,
    model: Piece,
    judged: Judged,
) -> None:
    """Fit a method's numbers to the model: guidance, grid, learning rate, rows of the network."""

    def change(section: str, key: str, piece: Piece, value: Any) -> None:
        made[section][key] = value
        origin[f"{section}.{key}"] = piece

    # a method that trains without guidance does so on every model that can do without
    guided = float(home.raw["model"].get("guidance", 1.0)) > 1
    if not guided and not judged.shapes:
        for key, value in model.raw.get("unguided", {}).items():
            change("model", key, home, value)
    # numbers of the plan that belong to the model's sigma grid, where the plan has them; a segment
    # counts the steps of the plan as it is
    for key, value in model.raw.get("plan", {}).items():
        if key in made["plan"] and "segment" not in made:
            change("plan", key, model, value)
    for one in model.raw.get("instead", ()):
        section, given = one["section"], made.get(one["section"], {})
        if one["when"].items() <= given.items():
            made[section] = {key: given[key] for key in one["keep"] if key in given}
            for key, value in one["take"].items():
                change(section, key, model, value)
    # a learning rate is that of LoRA or of all weights
    tuning = home.raw["model"].get("tune", "lora")
    if judged.shapes or tuning != made["model"].get("tune", "lora"):
        for key, value in model.raw["optimizer"].items():
            change("optimizer", key, model, value)
    if judged.shapes:
        for key in OF_SHAPES:
            section, _, name = key.partition(".")
            made[section].pop(name, None)
        change("train", "iterations", model, model.raw["train"]["iterations"])
    for key in MEMORY:
        change("train", key, model, model.raw["train"][key])


def _check_rewards(home: Piece, judged: Judged, model_name: str) -> None:
    """Raise ConfigError where the method's own sections name rewards that the model cannot have."""
    if judged.alike:
        return
    raw, reason = home.raw, ""
    if raw.get("loss", {}).get("fn") in ASCENTS:
        reason = "loss follows the gradient of the method's own rewards"
    elif raw.get("credit", {}).get("fn") in ESTIMATES and not raw["plan"].get("finish"):
        reason = "credit compares unfinished images by the method's own rewards"
    names = set(raw["rewards"])
    for key in ("aggregate", "credit", "surrogate", "scout"):
        found = sorted(names & set(_texts(raw.get(key))))
        if found:
            reason = f"{key} names the method's own rewards {', '.join(found)}"
    if reason:
        raise ConfigError(
            f"{home.name} on {model_name}: {reason}, which cannot judge what this model makes; "
            "write a config with rewards of your own"
        )


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield str(key)
            yield from _texts(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from _texts(inside)


# --------------------------------------------------------------------------------- marks


def is_ours(note: str, key: str) -> bool:
    """Say whether a value's comment says that it is ours. No comment says the same.

    The clauses of a comment are parted by ";": "code; last_order ours: the code's 2 overshoots",
    "steps: code; the rest ours". A clause that names the key speaks for it, one that says "rest"
    for all that no other names, and else the first.
    """
    clauses = [clause.strip() for clause in re.split(r";|(?<!\d)\. ", note) if clause.strip()]
    if not clauses:
        return True
    named: dict[str, str] = {}
    rest = ""
    for clause in clauses:
        found = re.match(r"([a-z_]+(?:, [a-z_]+)*)(?:: | (?=ours))(.*)", clause)
        if found and not clause.startswith(("ours", "code", "paper", "example", "rest", "the ")):
            named |= dict.fromkeys(found[1].split(", "), found[2])
        elif re.match(r"(the )?rest ours", clause):
            rest = "ours"
    says = named.get(key) or rest or clauses[0]
    return says.startswith("ours")


def _notes(
    node: yaml.Node, lines: list[str], key: str, around: list[str]
) -> Iterator[tuple[str, str]]:
    """Yield the comment on each value: that of its own line, of the line where its mapping ends,
    or of its section's first line, or above that."""
    assert isinstance(node, yaml.MappingNode)
    for name, value in node.value:
        whole = dotted(key, name.value)
        begins, ends = name.start_mark.line, value.end_mark.line
        own = [_comment(lines[begins])]
        behind = _comment(lines[min(ends, len(lines) - 1)])
        if isinstance(value, yaml.MappingNode) and value.value:
            if value.flow_style:
                own.append(behind)
            inner = [*own, _above(lines, begins), *around]
            yield from _notes(value, lines, whole, inner)
            continue
        if isinstance(value, yaml.SequenceNode):
            own.append(behind)
        yield whole, next((note for note in (*own, *around) if note), "")


def _comment(line: str) -> str:
    """Return the comment at the end of a line."""
    if line.lstrip().startswith("#"):
        return ""
    return line.partition(" # ")[2].strip()


def _above(lines: list[str], begins: int) -> str:
    """Return the comment that stands in the line above."""
    line = lines[begins - 1].strip() if begins else ""
    return line.removeprefix("# ") if line.startswith("# ") else ""


# --------------------------------------------------------------------------------- writing


def _lines(
    sections: Mapping[str, Any], marks: Mapping[str, str], key: str, indent: str
) -> Iterator[str]:
    """Yield the lines of YAML: a mapping with one mark in one line where it fits."""
    for name, value in sections.items():
        whole = dotted(key, name)
        mapping = isinstance(value, Mapping) and bool(value)
        if mapping:
            inside = [mark for leaf, mark in marks.items() if leaf.startswith(f"{whole}.")]
        else:
            inside = [marks[whole]]
        found = list(dict.fromkeys(inside))
        line = f"{indent}{name}: {_flow(value)}"
        if len(found) == 1 and (not mapping or len(line) + len(found[0]) < 97):
            yield f"{line} # {found[0]}"
        elif mapping:
            yield f"{indent}{name}:"
            yield from _lines(value, marks, whole, f"{indent}  ")


def _flow(value: Any) -> str:
    """Write a value in one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False
    )
    return text.strip().removesuffix("...").strip()
