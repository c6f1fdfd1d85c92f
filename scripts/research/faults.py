"""Put one fault at a time into a copy of the code, and see whether the tests notice it.

    python scripts/research/faults.py                    # all of scripts/research/faults.yaml
    python scripts/research/faults.py --only ratio ema   # those whose claim holds one of the words

Writes assets/results/faults.json: for each claim the fault, whether a test failed, which one and
after how many seconds. A fault that no test notices, or that cannot be put in because the code has
changed, makes the command fail.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from flowrl.core.files import write_json

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_suffix(".yaml")
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


def test(folder: Path, paths: str) -> dict[str, Any]:
    """Run pytest until the first failure -> whether one failed, its name and the seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-rfE"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    done = subprocess.run(
        [*command, *paths.split()], cwd=folder, env=environment, capture_output=True, text=True
    )
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return {
        "caught": done.returncode == 1,
        "by": named[1] if named else None,
        "exit": done.returncode,
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


def main() -> None:
    """Run all faults, write the result file and say which were missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="words of the claims to try")
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "results" / "faults.json")
    args = parser.parse_args()
    faults = yaml.safe_load(FAULTS.read_text(encoding="utf-8"))
    wanted = [f for f in faults if not args.only or any(word in f["claim"] for word in args.only)]
    results = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "flowrl"
        folder.mkdir()
        copy(folder)
        for fault in wanted:
            spoil(folder, fault)
            found = test(folder, fault["tests"])
            shutil.copy(ROOT / fault["file"], folder / fault["file"])
            results.append({**fault, **found})
            verdict = "caught" if found["caught"] else "MISSED"
            print(f"{verdict}  {fault['claim']}  ({found['by']}, {found['seconds']} s)", flush=True)
    missed = [row["claim"] for row in results if not row["caught"]]
    if not args.only:
        write_json(args.out, {"faults": len(results), "missed": missed, "results": results})
    sys.exit(f"missed: {missed}" if missed else 0)


if __name__ == "__main__":
    main()
