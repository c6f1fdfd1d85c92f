"""The table of docs/pipelines.md: every class of diffusers' automatic mappings and its neighbours,
and what holds of it, or why it is refused. It is made of assets/results/pipelines.json, which
scripts/results/pipelines.py measures; nothing of it is written by hand."""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import diffusers
from diffusers.pipelines import auto_pipeline
from docskit import ROOT
from pipelineruns import ratio_gap, slope_gap, trained
from tinypipelines import SIDE, TINY, small, tiny_pipeline

from flowrl.core.errors import FlowRLError
from flowrl.models.by_call.options import FLOWS, PipelineCallOptions, check_class
from flowrl.models.options import checked_options, fn_of
from flowrl.models.pipeline import from_pipeline
from flowrl.models.unet import COGVIDEO, SCHEDULERS

FILE = ROOT / "assets/results/pipelines.json"
MAPPINGS = {
    "Text to image": "AUTO_TEXT2IMAGE_PIPELINES_MAPPING",
    "Image to image": "AUTO_IMAGE2IMAGE_PIPELINES_MAPPING",
    "Text to video": "AUTO_TEXT2VIDEO_PIPELINES_MAPPING",
    "Image to video": "AUTO_IMAGE2VIDEO_PIPELINES_MAPPING",
}
IMAGES, EDITS, VIDEOS, MOVED = MAPPINGS
# classes without a tiny pipeline that people ask about
NAMED = ("LTX2Pipeline", "KolorsImg2ImgPipeline", "SanaSprintPipeline", "DreamLitePipeline")
SHARED = {
    "one": "one row",
    "prompt": "rows of a prompt and level",
    "prompts": "rows of a level",
    "sigmas": "any rows",
}
UNSERVED = ("refused", "not tried")
OWN_CALL = "its own call"
Row = dict[str, Any]


def classes() -> dict[str, list[str]]:
    """Return the names of all classes by mapping, with the tiny ones that are in none."""
    found = {}
    for title, name in MAPPINGS.items():
        mapping = getattr(auto_pipeline, name)
        found[title] = {kind.__name__ for kind in mapping.values()}
    known = set().union(*found.values())
    for name in {*TINY, *NAMED} - known:
        found[_title(name)].add(name)
    return {title: sorted(names) for title, names in found.items()}


def _title(name: str) -> str:
    """Return the part of the table that a class of no mapping belongs to."""
    options = TINY[name].options if name in TINY else {}
    if options.get("frames", 1) > 1 or name == "LTX2Pipeline":
        return MOVED if options.get("sources") else VIDEOS
    return EDITS if options.get("sources") or "Img2Img" in name else IMAGES


def row(name: str) -> Row:
    """Measure a class: how it is served, what may share a call, and what there is to say."""
    served = f"adapter `{fn_of(name)}`" if fn_of(name) else ""
    if name not in TINY:
        with small():
            reason = why_not(name)
        if reason or not served:
            kind = "refused" if reason else "not tried"
            return {"served": kind, "shares": "", "says": reason or "the fence will tell"}
    try:
        options = {"tune": "lora", **TINY[name].options, "adapter": False}
        with small():
            model: Any = from_pipeline(tiny_pipeline(name), **options)
            fence = model.pass_fence(4, SIDE, SIDE)
    except FlowRLError as error:
        return {"served": "refused", "shares": "", "says": plain(str(error), name)}
    gradient = next(check.says for check in fence.checks if check.name == "gradient")
    number = "by the number of the step; " if fence.indexed else ""
    says = f"{number}gradient {gradient}"
    return {"served": served or OWN_CALL, "shares": SHARED[fence.rows], "says": says}


def measured(name: str) -> Row:
    """Measure a class, and train it if it is served."""
    found = row(name)
    if found["served"] not in UNSERVED:
        with small(), tempfile.TemporaryDirectory() as folder:
            run = trained(name, Path(folder))
            run["slope"], run["ratio"] = slope_gap(name), ratio_gap(name, Path(folder))
            found["run"] = {key: rounded(value) for key, value in run.items()}
    return found


def rounded(value: Any) -> Any:
    """Return a figure with two digits."""
    return float(f"{value:.1e}") if isinstance(value, float) else value


def why_not(name: str) -> str:
    """Say why a class cannot be asked, by its signatures; empty: nothing speaks against it."""
    kind: Any = getattr(diffusers, name)
    if getattr(kind, "_backends", None):
        return f"diffusers has it with {' and '.join(kind._backends)} alone"
    try:
        check_class(kind, name, checked_options(PipelineCallOptions, path="a"))
    except FlowRLError as error:
        return plain(str(error), name)
    scheduler = inspect.signature(kind.__init__).parameters["scheduler"].annotation
    solver = getattr(scheduler, "__name__", str(scheduler)).strip("'")
    known = (*FLOWS, *SCHEDULERS, *COGVIDEO, "KarrasDiffusionSchedulers", "SchedulerMixin")
    if not any(one in str(scheduler) for one in known):
        return f"{solver.split('.')[-1]} is no scheduler of flow matching, noise or v"
    return ""


def plain(said: str, name: str) -> str:
    """Return the first sentence of a message, without the class and what it lists."""
    said = re.sub(rf"^(the )?{name}( in memory)?: ", "", said)
    said = re.sub(rf"^{name}:? ", "", said)
    return re.split(r", so it cannot|, so its output|[;.] ", said)[0]


def record() -> dict[str, Row]:
    """Return what was measured, by class."""
    found: dict[str, Row] = json.loads(FILE.read_text(encoding="utf-8"))["classes"]
    return found


def whole(found: Row | None) -> bool:
    """Say whether a class has all that is measured of it."""
    if found is None:
        return False
    return found["served"] in UNSERVED or "ratio" in found.get("run", {})


def served(rows: dict[str, Row], title: str) -> list[str]:
    """Return the classes of a part of the table that are served."""
    return [name for name in classes()[title] if rows[name]["served"] not in UNSERVED]


def table(rows: dict[str, Row]) -> str:
    """Return all of it in Markdown, with a count of each part."""
    known = [name for name, found in rows.items() if found["served"] not in UNSERVED]
    trained_on = [name for name in known if "run" in rows[name]]
    lines = [
        f"AWM was trained on {len(trained_on)} of the {len(known)} classes that are served.",
        "",
    ]
    for title, names in classes().items():
        lines += [f"### {title}: {len(served(rows, title))} of {len(names)} classes", ""]
        lines += ["| served by | share a call | classes |", "|---|---|---|"]
        for (how, shares), alike in _alike(rows, names).items():
            lines.append(f"| {how} | {shares} | {', '.join(alike)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _alike(rows: dict[str, Row], names: list[str]) -> dict[tuple[str, str], list[str]]:
    """Group classes by how they are served, or why they are not; those served come first."""
    groups: dict[tuple[str, str], list[str]] = {}

    def order(name: str) -> tuple[bool, bool, str, str]:
        found = rows[name]
        own = found["served"] == OWN_CALL
        return found["served"] in UNSERVED, own, found["shares"], name

    for name in sorted(names, key=order):
        found, shown = rows[name], name.removesuffix("Pipeline")
        how, _, adapter = found["served"].partition(" ")
        if how == "adapter":
            how, shown = "its adapter", f"{shown} ({adapter})"
        elif found["served"] == OWN_CALL:
            how = OWN_CALL
        else:
            how = f"{found['served']}: {found['says'].partition(' (tried')[0]}"
        groups.setdefault((how, found["shares"]), []).append(shown)
    return groups
