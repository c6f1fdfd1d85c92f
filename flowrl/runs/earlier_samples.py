"""Samples that a run drew before its config was changed: of other prompts, from other noise or of
another size. Only those that were drawn alike stand side by side in a grid."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.core.errors import RunError
from flowrl.core.files import write_json
from flowrl.runs.folder import PROMPTS, SAMPLES, RunPath, read_object
from flowrl.runs.report.run_grid import sample_files

ASIDE = "samples-earlier"


def begin_samples(run: RunPath, about: Mapping[str, Any]) -> Path | None:
    """Say in the folder of the samples what they are; those that are something else are set aside
    first -> the folder where they are now, None where nothing was moved.

    `about` has the prompts, height and width, and the seed of the noise. Earlier versions wrote no
    seed, and a damaged file says nothing; then only the rest is compared.
    """
    folder, moved = Path(run) / SAMPLES, None
    if folder.is_dir() and sample_files(run):
        had = _known(folder)
        if any(key in had and had[key] != value for key, value in about.items()):
            moved = _free(Path(run))
            folder.rename(moved)
            folder.mkdir()
    write_json(folder / PROMPTS, dict(about))
    return moved


def _known(folder: Path) -> dict[str, Any]:
    """Read what the samples of a folder are; {} where that cannot be read."""
    try:
        return read_object(folder, PROMPTS)
    except RunError:
        return {}


def _free(run: Path) -> Path:
    """Return the first of samples-earlier, samples-earlier-2 and so on that is not there."""
    names = itertools.chain([ASIDE], (f"{ASIDE}-{n}" for n in itertools.count(2)))
    return next(run / name for name in names if not (run / name).exists())
