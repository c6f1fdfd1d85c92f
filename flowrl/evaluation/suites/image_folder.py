"""The folder of a suite: images as GenEval lays them out, and what was said of each.

    OUT/setting.json                what was drawn, with what, and what judges it
    OUT/00000/metadata.jsonl        the first prompt's record
    OUT/00000/samples/0000.png      its first image
    OUT/scores.jsonl                a line per image: its file and what each reward gave
    OUT/summary.json                means with intervals

Whatever is there already is kept, so a suite that was stopped goes on. Names tie nothing: the
setting holds the content of model and rewards, and a line of scores digests of its image, of the
rewards that gave them, and of itself. Images of another model are an error, scores of other rewards
or of another image are made anew.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl.core.errors import DataError, RunError
from flowrl.core.files import (
    is_finite_number,
    read_json,
    refuse_pipe,
    sha256_of,
    write_json,
    write_text,
)
from flowrl.core.identity import differences, short_digest
from flowrl.core.prompts import PromptSet
from flowrl.evaluation.image_files import RECORD, find_images, read_image
from flowrl.evaluation.image_grids import save_png
from flowrl.evaluation.sources import SOURCE, source_paths

SETTING, SUMMARY, SCORES = "setting.json", "summary.json", "scores.jsonl"
EARLIER = "summary-earlier.json"  # of rewards that have changed since
MODEL, REWARDS = "model_content", "reward_contents"
"""Of a setting: what the model and the rewards of these names are."""
FREE = ("target", "batch", "best_of", "best_by", MODEL)
"""Of a setting: what two folders that are compared need not share."""
MOST_OF = 10_000  # images of which the best is judged


def image_path(out: Path, prompt: int, image: int) -> Path:
    """Return where an image of a prompt lies."""
    return out / f"{prompt:05}" / "samples" / f"{image:04}.png"


def prepare(out: Path, setting: Mapping[str, Any], prompts: PromptSet) -> None:
    """Make the folder with its setting and records, or check that it is one of this setting.

    Where rewards are others than those that gave its scores, by their content, the folder is judged
    anew, with a warning. Raises RunError naming what differs.
    """
    file = out / SETTING
    if os.path.lexists(file):
        known = read_setting(out)
        _check_same(out, known, setting)
        if known.get(REWARDS) != setting[REWARDS]:
            _judge_anew(out, known, setting)
        _tell_of_other_images(out)
        return
    if out.exists() and any(out.iterdir()):
        raise RunError(
            f"{out}: expected a folder of a suite or none, got one with files and no {SETTING}"
        )
    for place, record in enumerate(prompts.records):
        # what it starts from is found from here, too
        starts = [str(path.resolve()) for path in source_paths(prompts, place)]
        line = {**record, SOURCE: starts} if starts else record
        write_text(out / f"{place:05}" / RECORD, as_line(line))
    # last: a folder with a setting has all its records
    write_json(file, dict(setting))


def _check_same(out: Path, known: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
    """Raise RunError if a folder's images are of another setting or of another model."""
    mend = "Name another folder with --out, or delete this one"
    wrong = named_differences(known, setting, but=("batch", MODEL, REWARDS))
    if wrong:
        raise RunError(f"{out}: holds images of another setting: {'; '.join(wrong)}. {mend}")
    others = differences(_part(known, MODEL), setting[MODEL])
    if others:
        raise RunError(
            f"{out}: holds images of another model: {known.get('target')} is not what it was when "
            f"they were drawn, there and now: {_few(others)}. {mend}"
        )


def _judge_anew(out: Path, known: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
    """Take over the rewards of now; the scores of the earlier ones stay in their file, the summary
    beside it."""
    changed = differences(_part(known, REWARDS), setting[REWARDS])
    if (out / SUMMARY).is_file():
        os.replace(out / SUMMARY, out / EARLIER)
    write_json(out / SETTING, {**known, REWARDS: setting[REWARDS]})
    warnings.warn(
        f"{out}: its images were scored by rewards that have changed since, there and now: "
        f"{_few(changed)}; they are scored anew, and the earlier summary is {EARLIER}",
        stacklevel=4,
    )


def _tell_of_other_images(out: Path) -> None:
    """Warn of images that are not those which were scored under their names."""
    other = []
    for _, line in _every_line(out):
        image = image_path(out, line["prompt"], line["image"])
        if image.exists() and line["pixels"] != _digest_of(image):
            other.append(image)
    left = {*other} - {image_path(out, *place) for place in read_lines(out)}
    if left:
        warnings.warn(
            f"{out}: {len(left)} images are not those that were scored, {min(left)} the first; "
            "they are scored anew",
            stacklevel=4,
        )


def _part(setting: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object of a setting; {} where there is none."""
    found = setting.get(key)
    return found if isinstance(found, Mapping) else {}


def _few(said: Sequence[str], most: int = 3) -> str:
    """Join the first of several differences, and say how many more there are."""
    shown = [*said[:most]]
    if len(said) > most:
        shown.append(f"{len(said) - most} more")
    return "; ".join(shown)


def read_setting(out: Path) -> dict[str, Any]:
    """Return the setting of a suite's folder. Raises RunError if there is none, or a damaged
    one."""
    try:
        found = read_json(out / SETTING, constants=True)
    except (OSError, RunError) as error:
        raise RunError(
            f"{error}; expected a folder that `flowrl eval --suite` wrote, with {SETTING}"
        ) from error
    if not isinstance(found, dict):
        raise RunError(f"{out / SETTING}: expected an object, got {found!r:.100}")
    # what is counted with; all else is only compared
    best_of = found.get("best_of", 1)
    if type(best_of) is not int or not 1 <= best_of <= MOST_OF:
        raise RunError(
            f"{out / SETTING}: best_of: expected a whole number from 1 to {MOST_OF}, got "
            f"{best_of!r:.100}"
        )
    return found


def named_differences(
    one: Mapping[str, Any], other: Mapping[str, Any], but: Sequence[str] = FREE
) -> list[str]:
    """Say in which keys two settings differ: "steps: 10 and 40"."""
    a = {key: value for key, value in one.items() if key not in but}
    return differences(a, {key: value for key, value in other.items() if key not in but})


def unfinished(out: Path, prompts: int, images: int) -> list[int]:
    """Return the prompts that lack an image."""
    rows = []
    for prompt in range(prompts):
        there = [image_path(out, prompt, image).exists() for image in range(images)]
        if not all(there):
            rows.append(prompt)
    return rows


def save_images(out: Path, index: Sequence[int], images: Tensor, each: int) -> None:
    """Write images [n, 3, H, W], `each` of every prompt in `index` one after the other."""
    levels = (images.detach().float().cpu() * 255).round().to(torch.uint8)
    rows = levels.permute(0, 2, 3, 1).numpy()
    for place, (prompt, row) in enumerate(zip(index, rows, strict=True)):
        save_png(Image.fromarray(np.ascontiguousarray(row)), image_path(out, prompt, place % each))


def load_images(out: Path, prompt: int, images: int) -> Tensor:
    """Read the images of a prompt -> [images, 3, H, W] float32 in [0, 1].

    Raises DataError for one that is missing, broken or of another size than the first.
    """
    files = find_images([image_path(out, prompt, image) for image in range(images)])
    sizes = {file.size for file in files}
    if len(sizes) > 1:
        raise DataError(
            f"{files[0].path.parent}: expected images of one size, got "
            f"{' and '.join(f'{h} x {w}' for h, w in sorted(sizes))}"
        )
    return torch.stack([read_image(file)[0] for file in files]).float() / 255


def score_file(out: Path, rank: int) -> Path:
    """Return the file of lines of one process."""
    return out / (SCORES if rank == 0 else f"scores.{rank}.jsonl")


def judge_of(setting: Mapping[str, Any]) -> str:
    """Return a digest of what gave a folder's scores: rewards, their settings and content, on which
    prompts."""
    return short_digest([*map(setting.get, ("rewards", REWARDS, "prompts_hash"))])


def scored_line(out: Path, line: Mapping[str, Any], judge: str) -> dict[str, Any]:
    """Return a line of scores with digests of its image, of what judged it, and of itself."""
    pixels = _digest_of(out / line["file"])
    tied = json.loads(json.dumps({**line, "pixels": pixels, "judge": judge}))
    return {**tied, "check": short_digest(tied)}


def _digest_of(image: Path) -> str:
    """Return a digest of an image's file."""
    about = image.stat()
    return _digest(image, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=2**17)
def _digest(image: Path, size: int, changed: int) -> str:
    return sha256_of(image)[:16]


def read_lines(out: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Return {(prompt, image): line} of all processes' files: of images as they are now, by rewards
    as the setting has them.

    A last line that was cut off is left out: that image is scored again. Raises DataError naming
    file and line for any other that cannot be read or was altered.
    """
    found: dict[tuple[int, int], dict[str, Any]] = {}
    judge = ""
    for _, line in _every_line(out):
        judge = judge or judge_of(read_setting(out))
        image = image_path(out, line["prompt"], line["image"])
        if line["judge"] == judge and image.exists() and line["pixels"] == _digest_of(image):
            found[line["prompt"], line["image"]] = line
    return found


def _every_line(out: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield every line of a folder's scores, also those that count no longer, with its file."""
    for file in sorted(out.glob("scores*.jsonl")):
        for line in _lines(file):
            yield file, line


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file of scores. Raises DataError."""
    try:
        refuse_pipe(file)
        rows = file.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        line = _read_line(row)
        if line is not None:
            yield line
        elif number < len(rows):  # the last one has no line end: it was cut off
            raise DataError(
                f"{file}, line {number}: expected the scores of an image as `flowrl eval --suite` "
                f"wrote them, got {row[:100]!r}; delete the line, and the same command scores its "
                "image again"
            )


def _read_line(row: bytes) -> dict[str, Any] | None:
    """Read a line of scores; None for one that is torn, altered or something else."""
    try:
        line = json.loads(row)
        rest = {key: value for key, value in line.items() if key != "check"}
        whole = line["check"] == short_digest(rest)
        numbers = [value for value in line["scores"].values() if value is not None]
        places = (line["prompt"], line["image"])
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
    counted = all(type(place) is int and 0 <= place < 10**9 for place in places)
    return line if whole and counted and all(map(is_finite_number, numbers)) else None


def as_line(value: Mapping[str, Any]) -> str:
    """Return an object as one line of a JSONL file."""
    return json.dumps(dict(value)) + "\n"


def append_scores(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Add lines to a file of scores."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write("".join(map(as_line, lines)))


def mend(file: Path) -> None:
    """Take a last line away that was cut off."""
    if not file.exists():
        return
    known = file.read_bytes()
    whole = known.rfind(b"\n") + 1
    if whole < len(known):
        file.write_bytes(known[:whole])
