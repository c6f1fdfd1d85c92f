"""The rows of a file of performance_queue.py: read again, and compared with what is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from flowrl.core.errors import ConfigError
from flowrl.core.files import read_text

PLACE = ("gpus", "cuda", "torch", "diffusers", "commit")  # of an environment: what figures are of
Bytes = Annotated[int, Field(ge=0, lt=2**63)]
WAY_OUT = "move it away, or measure all rows anew in its place with --anew"


class Result(BaseModel, strict=True):
    """What every result says of where it was measured."""

    environment: dict[str, Any]


class Said(Result, strict=True):
    """What collectives.py found, in words."""

    said: str


class Seconds(BaseModel, strict=True):
    """Seconds of the phases that the table shows."""

    rollout: FiniteFloat
    train: FiniteFloat


class Memory(BaseModel, strict=True):
    """Bytes of a phase."""

    measured: Bytes | None
    estimate: Bytes | None


class Figures(Result, strict=True):
    """What the table shows of what performance.py measured."""

    seconds: Seconds
    images_per_s: FiniteFloat
    mfu: dict[str, FiniteFloat] | None
    memory: dict[str, Memory]


class Kept(BaseModel, strict=True):
    """A row of an earlier call."""

    row: str
    failed: str | None = None
    result: dict[str, Any] | None = None


class File(BaseModel, strict=True):
    """A file of an earlier call."""

    rows: list[Kept]


def earlier_rows(out: Path) -> list[dict[str, Any]]:
    """Return the rows of an earlier call. Raises ConfigError for a file of another kind."""
    if not out.exists():
        return []
    where = ""  # of the result that is looked at
    try:
        raw = json.loads(read_text(out))
        for number, one in enumerate(File.model_validate(raw).rows):
            where = f"rows.{number}.result."
            if one.result is not None:
                (Said if "said" in one.result else Figures).model_validate(one.result)
    except ValidationError as error:
        first = error.errors()[0]
        key = where + ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"--go-on: {out}: {key or 'all of it'}: expected a file that this command wrote: "
            f"{first['msg']}; {WAY_OUT}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--go-on: {out}: all of it: expected a file that this command wrote: {error}; "
            f"{WAY_OUT}"
        ) from error
    rows: list[dict[str, Any]] = raw["rows"]
    return rows


def difference(one: dict[str, Any], asked: dict[str, Any], here: dict[str, Any]) -> str:
    """Say why the figures of an earlier row are none of what is asked for here; "" if they are."""
    if "failed" in one or one.get("result") is None:
        return "it has failed"
    for name, value in asked.items():
        if one.get(name) != value:
            return f"its {name} were {one.get(name)}, now {value}"
    place = one["result"].get("environment") or {}
    for name in PLACE:
        if place.get(name) != here[name]:
            return f"its figures are of {name} {place.get(name)}, here is {here[name]}"
    return ""
