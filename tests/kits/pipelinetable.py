"""The table of docs/pipelines.md: every class of diffusers' automatic mappings, and what holds of
it, or why it is refused. Nothing of it is written by hand."""

from __future__ import annotations

import inspect
import re
from typing import Any

import diffusers
from diffusers.pipelines import auto_pipeline
from tinypipelines import TINY, tiny_pipeline

from flowrl.core.errors import FlowRLError
from flowrl.models.by_call.options import FLOWS, PipelineCallOptions, check_class
from flowrl.models.facts import fn_of
from flowrl.models.options import checked_options
from flowrl.models.pipeline import from_pipeline
from flowrl.models.unet import COGVIDEO, SCHEDULERS

MAPPINGS = {
    "Text to image": "AUTO_TEXT2IMAGE_PIPELINES_MAPPING",
    "Image to image": "AUTO_IMAGE2IMAGE_PIPELINES_MAPPING",
    "Text to video": "AUTO_TEXT2VIDEO_PIPELINES_MAPPING",
    "Image to video": "AUTO_IMAGE2VIDEO_PIPELINES_MAPPING",
}
BESIDE = "Neighbours"
SHARED = {
    "one": "one row",
    "prompt": "rows of a prompt and level",
    "prompts": "rows of a level",
    "sigmas": "any rows",
}


def classes() -> dict[str, list[str]]:
    """Return the names of all classes by mapping, then the tiny ones that are in none."""
    found: dict[str, list[str]] = {}
    for title, name in MAPPINGS.items():
        mapping = getattr(auto_pipeline, name)
        found[title] = sorted({kind.__name__ for kind in mapping.values()})
    known = {name for names in found.values() for name in names}
    found[BESIDE] = sorted(TINY.keys() - known)
    return found


def row(name: str) -> tuple[str, str, str]:
    """Return a class's line: how it is served, what may share a call, and what there is to say."""
    served = f"adapter `{fn_of(name)}`" if fn_of(name) else ""
    if name not in TINY:
        reason = why_not(getattr(diffusers, name))
        if served:
            return served, "", ""
        return ("refused", "", reason) if reason else ("not tried", "", "the fence will tell")
    try:
        options = {"tune": "lora", **TINY[name].options, "adapter": False}
        model: Any = from_pipeline(tiny_pipeline(name), **options)
        fence = model.pass_fence(4, *TINY[name].size)
    except FlowRLError as error:
        return "refused", "", plain(str(error), name)
    gradient = next(check.says for check in fence.checks if check.name == "gradient")
    number = "by the number of the step; " if fence.indexed else ""
    return served or "its own call", SHARED[fence.rows], f"{number}gradient {gradient}"


def why_not(kind: Any) -> str:
    """Say why a class cannot be asked, by its signatures; empty: nothing speaks against it."""
    try:
        check_class(kind, kind.__name__, checked_options(PipelineCallOptions, path="a"))
    except FlowRLError as error:
        return plain(str(error), kind.__name__)
    parts = inspect.signature(kind.__init__).parameters
    if "controlnet" in parts or "Control" in kind.__name__:
        return "is led by a control image"
    if "scheduler" not in parts:
        return "a pipeline of pipelines"
    if "strength" in inspect.signature(kind.__call__).parameters:
        return "starts from a noised image, not from noise"
    scheduler = parts["scheduler"].annotation
    solver = getattr(scheduler, "__name__", str(scheduler)).strip("'")
    known = (*FLOWS, *SCHEDULERS, *COGVIDEO, "KarrasDiffusionSchedulers")
    if not any(one in str(scheduler) for one in known):
        return f"{solver.split('.')[-1]} is no scheduler of flow matching, noise or v"
    return ""


def plain(said: str, name: str) -> str:
    """Return the first sentence of a message, without the class and what it lists."""
    said = re.sub(rf"^(the )?{name}( in memory)?: ", "", said).removeprefix(f"{name}: ")
    return re.split(r", so it cannot|, so its output|[;.] ", said)[0]


def table() -> str:
    """Return all of it in Markdown, with a count of each part."""
    lines = []
    for title, names in classes().items():
        rows = {name: row(name) for name in names}
        served = [name for name, found in rows.items() if found[0] not in ("refused", "not tried")]
        lines += [f"### {title}: {len(served)} of {len(names)} classes", ""]
        lines += ["| class | served by | share a call | |", "|---|---|---|---|"]
        for name, found in rows.items():
            short = name.removesuffix("Pipeline")
            lines.append(f"| {short} | {' | '.join(found)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
