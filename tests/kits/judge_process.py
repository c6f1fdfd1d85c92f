"""A judge's server as a process of its own: ``python judge_process.py FILE`` writes its address to
FILE and answers until it is ended. What it says follows from the images and the question alone.

It checks rules about scenes of shapes with the benchmark's own checker.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from judge_server import Act, Seen, says, serving

from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.prompts import all_records

RIGHT = "It shows what the caption says."
GREY = "The background is light grey."
RED = "There is something red."
SIDES = "The left half is darker than the right half."
NEW = "Its objects are those of the caption."  # what it proposes itself
RULES = [GREY, RED, RIGHT, SIDES]


def yes(share: float) -> Act:
    """Say Yes with a probability, the rest No."""
    return says("Yes" if share > 0.5 else "No", {"Yes": math.log(share), "No": math.log1p(-share)})


def answers(seen: Seen) -> Act:
    """Answer a question about a rule, or two images, or propose rules."""
    text = seen.text
    if "Does it keep this rule?" in text:
        caption, rule = re.findall(r'caption: "(.*)"\nDoes it keep this rule\? (.*)\n', text)[0]
        return yes(kept(rule, caption, seen.images[0]))
    if "beginning with 'Rule:'" in text:
        return says(f"The first one is right.\nRule: {NEW}\n- Rule: {RED}")
    if "lines that begin with 'Keep:'" in text:
        return says("Quality: No specks.\nKeep: The background.\nFollow: It moved.\nkeep: Colours.")
    return about_two(seen)


def about_two(seen: Seen) -> Act:
    """Say how alike two images are, by their mean levels, in one form or the other."""
    a, b = (float(image.mean()) for image in seen.images)
    if "from 0 (not at all) to 5" in seen.text:
        digits = [1 + 4 * (k == round(a / 51)) for k in range(6)]
        total = sum(digits)
        return says("3", {str(k): math.log(weight / total) for k, weight in enumerate(digits)})
    share = 1 - abs(a - b) / 255
    if "artefacts" in seen.text:
        share = b / 255
    return yes(min(max(share, 0.01), 0.99))


def kept(rule: str, caption: str, image: np.ndarray) -> float:
    """Return P(yes), never 0 or 1."""
    levels = image.astype(np.float64)
    red = (levels[..., 0] > 150) & (levels[..., 1] < 90) & (levels[..., 2] < 90)
    half = image.shape[1] // 2
    holds = {
        GREY: levels[0, 0].min() > 180,
        RED: red.sum() > 8,
        SIDES: levels[:, :half].mean() < levels[:, half:].mean(),
    }
    if rule in (RIGHT, NEW):
        records = {r["prompt"]: r for rows in all_records().values() for r in rows}
        pixels = torch.from_numpy(levels / 255).permute(2, 0, 1).float()[None]
        found = check(pixels, [records[caption]])
        fine = found.strict if rule == RIGHT else found.count_ok
        return 0.95 if bool(fine[0]) else 0.05
    return 0.9 if holds[rule] else 0.1


@contextmanager
def judge_process(folder: Path) -> Iterator[str]:
    """Run the server in another process -> its address."""
    file, path = folder / "address", Path(__file__).resolve()
    root, errors = path.parents[2], (folder / "errors").open("w+")
    process = subprocess.Popen(
        [sys.executable, str(path), str(file)],
        env={"PYTHONPATH": f"{root}:{path.parent}", "PATH": "", "OMP_NUM_THREADS": "1"},
        stderr=errors,
    )
    try:
        end = time.monotonic() + 300
        while not file.exists():
            if process.poll() is not None or time.monotonic() > end:
                errors.seek(0)
                raise AssertionError(f"the judge did not start: {errors.read()[-2000:]}")
            time.sleep(0.05)
        yield file.read_text()
    finally:
        process.terminate()
        process.wait(30)
        errors.close()


def main(file: Path) -> None:
    """Serve until the process is ended."""
    with serving(answers) as server:
        models = {"object": "list", "data": [{"id": "judge"}]}
        server.models = Act(json.dumps(models).encode())
        part = file.with_suffix(".part")
        part.write_text(server.url)
        part.rename(file)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
