"""Runs on one page that loads nothing from elsewhere: scores, curves, samples, config."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from flowrl.core.errors import DataError
from flowrl.runs.folder import RunPath
from flowrl.runs.report.page_data import story
from flowrl.runs.report.sample_images import BUDGET, samples

TEMPLATES = Path(__file__).with_name("templates")
SCRIPTS = ("elements.js", "charts.js", "samples.js", "story.js")


def html_report(*runs: RunPath) -> str:
    """Tell runs side by side on one self-contained page; nothing is loaded from elsewhere, and the
    browser is told to refuse it.

    Parts that a run lacks are left out. Raises DataError without runs, RunError if a folder is no
    run or a file in it is damaged.
    """
    if not runs:
        raise DataError("expected at least one run folder to report, got none")
    stories = []
    for run in runs:
        found = samples(run, budget=BUDGET // len(runs))
        stories.append({**story(run), "samples": found})
    _tell_apart(stories, runs)
    script = "\n".join(source(name) for name in SCRIPTS)
    # the template escapes every text; in the data nothing can end its element
    data = json.dumps(stories, allow_nan=False).replace("<", "\\u003c")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title = " · ".join(found["name"] for found in stories)
    page = template_environment().get_template("report.html")
    return page.render(
        title=title,
        stories=stories,
        data=data,
        script=script,
        digest=digest,
        css=source("page.css"),
    )


def template_environment() -> jinja2.Environment:
    """Return the environment of the pages' templates: it escapes every text."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )


def source(name: str) -> str:
    """Return a script or a style of the pages."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _tell_apart(stories: Sequence[dict[str, Any]], runs: Sequence[RunPath]) -> None:
    """Name runs by their whole path where two folders have one name."""
    names = [found["name"] for found in stories]
    for found, run in zip(stories, runs, strict=True):
        if names.count(found["name"]) > 1:
            found["name"] = str(run)
