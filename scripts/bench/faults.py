"""Put one fault at a time into a copy of the code, and see whether the tests notice it.

    python scripts/bench/faults.py                    # all of scripts/bench/faults.yaml
    python scripts/bench/faults.py --only ratio ema   # those whose claim holds one of the words

Writes assets/results/faults.json: for each claim the fault, whether a test failed, which one and
after how many seconds. A fault that no test notices, or that cannot be put in because the code has
changed, makes the command fail. With `--only` the rows of the other claims stay as they were.

Libraries are imported once: each fault is tried in a fork of this process, which imports the
spoiled copy. So a fault takes as long as its tests do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl.core.files import write_json

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_suffix(".yaml")
LIBRARIES = ("hypothesis.strategies", "peft", "safetensors.torch", "scipy.stats", "torch", "typer")
PIPELINES = ["Flux", "Flux2", "Flux2Klein", "FluxKontext", "QwenImage", "StableDiffusion"]
PIPELINES += ["StableDiffusion3", "StableDiffusionXL", "Wan", "WanImageToVideo", "ZImage"]
"""Of diffusers, which imports them when they are first named; with them come transformers."""
COPIED = ("flowrl", "rewards", "configs", "assets", "scripts", "tests", "pyproject.toml")


def spoil(folder: Path, fault: dict[str, str]) -> None:
    """Put a fault into a copy of the repository. Exits if its place is not there exactly once."""
    file = folder / fault["file"]
    text = file.read_text(encoding="utf-8")
    found = text.count(fault["old"])
    if found != 1:
        place = f"{fault['old']!r} in {fault['file']}"
        sys.exit(f"{fault['claim']}: expected {place} once, found it {found} times")
    file.write_text(text.replace(fault["old"], fault["new"]), encoding="utf-8")


def run_tests(folder: Path, paths: str, log: Path) -> None:
    """Run pytest on the copy until the first failure, in a process of its own."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("flowrl", "rewards"):
            del sys.modules[name]
    own = (str(ROOT), str(Path(__file__).parent))
    sys.path[:] = [str(folder), *(path for path in sys.path if path not in own)]
    os.environ["PYTHONPATH"] = str(folder)
    os.chdir(folder)
    with log.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    options = ["-x", "-q", "--no-header", "--tb=no", "-rfE", "-p", "no:xdist"]
    sys.exit(int(pytest.main([*options, *shlex.split(paths)])))


def test(folder: Path, paths: str) -> dict[str, Any]:
    """Fork a process for the tests -> whether one failed, its name and the seconds."""
    log = folder.parent / "log"
    began = time.perf_counter()
    process = get_context("fork").Process(target=run_tests, args=(folder, paths, log))
    process.start()
    process.join()
    said = log.read_text(encoding="utf-8")
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return {
        "caught": process.exitcode == 1,
        "by": named[1] if named else None,
        "exit": process.exitcode,
        "seconds": round(time.perf_counter() - began, 1),
    }


def copy(folder: Path) -> None:
    """Copy what the tests need."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            # resume files of the assets' training are large, and no test reads them
            left_out = ("__pycache__", "training") if name == "assets" else ("__pycache__",)
            ignored = shutil.ignore_patterns(*left_out)
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)


def names(claim: str, words: Sequence[str]) -> bool:
    """Say whether a claim has one of some words."""
    return any(word in claim for word in words)


def main() -> None:
    """Run all faults, write the result file and say which were missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="words of the claims to try")
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "results" / "faults.json")
    args = parser.parse_args()
    # the wanted faults, and what earlier calls found of the others
    faults = yaml.safe_load(FAULTS.read_text(encoding="utf-8"))
    wanted = [fault for fault in faults if not args.only or names(fault["claim"], args.only)]
    known = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    found = {row["claim"]: row for row in known.get("results", [])}
    # imported here once; the tests' processes are forked from this one and share them
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in LIBRARIES:
        import_module(name)
    for name in PIPELINES:
        getattr(import_module("diffusers"), f"{name}Pipeline")
    # a fault goes into a copy, so that the code here stays as it is
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "flowrl"
        folder.mkdir()
        copy(folder)
        for fault in wanted:
            spoil(folder, fault)
            row = {**fault, **test(folder, fault["tests"])}
            shutil.copy(ROOT / fault["file"], folder / fault["file"])
            verdict = "caught" if row["caught"] else "MISSED"
            print(f"{verdict}  {row['claim']}  ({row['by']}, {row['seconds']} s)", flush=True)
            found[row["claim"]] = row
            write(args.out, [found[f["claim"]] for f in faults if f["claim"] in found])
    # a fault that no test noticed is a gap in the tests
    missed = [f["claim"] for f in wanted if not found[f["claim"]]["caught"]]
    sys.exit(f"missed: {missed}" if missed else 0)


def write(out: Path, results: list[dict[str, Any]]) -> None:
    """Write what is known, after every fault, so that a run that was cut off is not lost."""
    missed = [row["claim"] for row in results if not row["caught"]]
    write_json(out, {"faults": len(results), "missed": missed, "results": results})


if __name__ == "__main__":
    main()
