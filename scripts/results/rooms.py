"""Count the rooms of the source, their files, floors and arrows.

A room is what lies directly under flowrl/ (a folder, or a file that stands alone), and rewards/ as
a whole; flowrl/__init__.py and flowrl/__main__.py are doors and not counted. An arrow goes from
room to room where one imports the other, also inside a function. A room's floor is one above the
highest room that it uses. `python scripts/results/tables.py` writes the table of
docs/architecture.md, and that of the parts of the training loop.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from figures import between

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
DOORS = ("flowrl", "flowrl.__main__")


class Room(NamedTuple):
    """One room of the source."""

    name: str
    says: str  # the first line of its docstring
    files: int
    uses: frozenset[str]  # rooms that it imports
    floor: int  # 1 is the lowest


# ------------------------------------------------------------------------------ reading the source


def modules(root: Path) -> dict[str, Path]:
    """Return {dotted name: file} of flowrl and rewards."""
    files = [file for package in ("flowrl", "rewards") for file in (root / package).rglob("*.py")]
    names = [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
    return {n.removesuffix(".__init__"): f for n, f in zip(names, files, strict=True)}


def room_of(module: str) -> str:
    """Return "runs" for "flowrl.runs.log", "rewards" for every reward, "" for the doors."""
    parts = module.split(".")
    if parts[0] == "rewards":
        return "rewards"
    return "" if module in DOORS else parts[1]


def imports(text: str, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of this repository that a source imports, wherever the import stands."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # an imported name may be a module: from flowrl.training import checkpoint
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in known else node.module for name in inside]
            yield from (name for name in found if name in known)


def rooms(root: Path = ROOT) -> list[Room]:
    """Return all rooms, the lowest floor first. Raises CycleError if rooms import in a circle."""
    known = modules(root)
    uses: dict[str, set[str]] = {room_of(module): set() for module in known}
    files = dict.fromkeys(uses, 0)
    for module, file in known.items():
        own = room_of(module)
        files[own] += 1
        targets = {room_of(name) for name in imports(file.read_text(encoding="utf-8"), known)}
        uses[own] |= targets - {own, ""}
    # the doors use rooms, no room uses a door
    del uses[""]
    floors: dict[str, int] = {}
    for name in TopologicalSorter(uses).static_order():
        floors[name] = 1 + max((floors[other] for other in uses[name]), default=0)
    found = [Room(n, _says(root, n), files[n], frozenset(uses[n]), floors[n]) for n in uses]
    return sorted(found, key=lambda room: (room.floor, room.name))


def _says(root: Path, name: str) -> str:
    """Return the first line of a room's docstring; empty for a room that is one file."""
    file = root / ("rewards" if name == "rewards" else f"flowrl/{name}") / "__init__.py"
    source = file.read_text(encoding="utf-8") if file.exists() else ""
    return (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]


# ------------------------------------------------------------------------------------- the tables


def table(found: list[Room]) -> str:
    """Show what is in each room, and the sums."""
    lines = ["| floor | room | files | what is in it | imports |", "|---:|---|---:|---|---|"]
    for room in reversed(found):
        path = "rewards/" if room.name == "rewards" else f"flowrl/{room.name}/"
        used = ", ".join(r.name for r in found if r.name in room.uses) or "nothing"
        lines.append(f"| {room.floor} | `{path}` | {room.files} | {room.says} | {used} |")
    arrows = sum(len(room.uses) for room in found)
    files = sum(room.files for room in found)
    said = f"{len(found)} rooms, {files} files, {found[-1].floor} floors, {arrows} arrows."
    return "\n".join([*lines, "", said])


def parts_table() -> str:
    """Show the parts of the training loop that ship: name, what brings each in, what it does."""
    rows = []
    for folder in ("flowrl/training/parts", "flowrl/techniques"):
        for file in sorted((ROOT / folder).glob("*.py")):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                row = _part(node) if isinstance(node, ast.ClassDef) else None
                if row is not None:
                    rows.append(f"| {row[0]} | {row[1]} | {row[2]} | `{file.relative_to(ROOT)}` |")
    head = ["| part | asked for by | what it does | file |", "|---|---|---|---|"]
    return "\n".join([*head, *sorted(rows)])


def _part(node: ast.ClassDef) -> tuple[str, str, str] | None:
    """Return name, triggers and first sentence of a class that is a part; None for another."""
    known = {}
    for line in node.body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            known[line.targets[0].id] = ast.unparse(line.value)
    if "when" not in known or not any(ast.unparse(base) == "Part" for base in node.bases):
        return None
    when = re.findall(r"'([\w.<]+)'", known["when"])
    named = [each.removeprefix("config.").replace("needs.", "@needs ") for each in when]
    text = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    says = re.split(r"[.;] ", text)[0].removesuffix(".").replace("``", "`") + "."
    return ast.literal_eval(known["name"]), ", ".join(f"`{each}`" for each in named), says


def filled(text: str, found: list[Room]) -> str:
    """Put the tables between the marks of the page."""
    text = between(text, "rooms: table", "rooms: end", [table(found)])
    return between(text, "parts: table", "parts: end", [parts_table()])


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return what fills the page."""
    found = rooms()
    return [(PAGE, lambda text: filled(text, found))]
