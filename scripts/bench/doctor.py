"""Examine every config that can run here, and a run with each fault of tests/kits/doctorfaults.py.

    python scripts/bench/doctor.py            # writes assets/results/doctor.json, half an hour
    python scripts/bench/doctor.py --only NAME

Every section is looked at, also where the tests look at some only: `also` are the findings that
follow from a fault, after the one that names it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "assets" / "results" / "doctor.json"
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kits")]

from doctorfaults import FAULTS, Fault  # noqa: E402
from doctorkit import prompts_with, sound  # noqa: E402

from flowrl.config.load import load_config  # noqa: E402
from flowrl.core.errors import FlowRLError  # noqa: E402
from flowrl.core.files import write_json  # noqa: E402
from flowrl.core.installation import environment  # noqa: E402
from flowrl.core.prompts import load_prompts  # noqa: E402
from flowrl.core.shipped_files import list_configs  # noqa: E402
from flowrl.doctor.examine import examine  # noqa: E402


def configs() -> Iterator[dict[str, Any]]:
    """Examine the shipped configs whose model is here."""
    for name in list_configs():
        if not name.startswith("shapes/") or not _lists_are_here(name):
            continue
        began = time.process_time()
        found = examine(load_config(name)).findings
        if [finding.id for finding in found] == ["start/fails"]:
            continue  # it needs teachers or weights that are the user's own
        yield {
            "config": name,
            "findings": [finding.id for finding in found],
            "cpu_seconds": round(time.process_time() - began, 1),
        }


def _lists_are_here(name: str) -> bool:
    """Say whether a config's prompts are shipped: pairs of images are the user's own."""
    try:
        load_prompts(load_config(name).prompts.train)
    except FlowRLError:
        return False
    return True


def examined_configs() -> list[dict[str, Any]]:
    """Examine the configs in a process of their own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = []
    for row in configs():
        print(row, flush=True)
        found.append(row)
    return found


def faults(folder: Path, only: str) -> Iterator[dict[str, Any]]:
    """Examine the run of doctorkit with one fault after the other."""
    model: Any = sound().call("model")()
    # faults of the list, and two of the prompts, which need files
    every = dict(FAULTS)
    for change, finding in (("copies", "prompts/duplicates"), ("length", "prompts/cut")):
        every[f"prompts: {change}"] = Fault(finding, (), (prompts_with(folder, change),))
    for name, fault in every.items():
        if only not in name:
            continue
        # each fault alone: its patch is taken back at the end
        with pytest.MonkeyPatch.context() as monkeypatch:
            if fault.patch is not None:
                fault.patch(monkeypatch, model)
            found = examine(sound(*fault.overrides), model=model).findings
        ids = [finding.id for finding in found]
        # it counts as named if the doctor says it first
        yield {
            "fault": name,
            "expected": fault.finding,
            "named": ids[:1] == [fault.finding],
            "first": found[0].found.replace(f"{ROOT}/", "") if found else "",
            "also": [name for name in ids if name != fault.finding],
        }


def main() -> int:
    """Write the result file -> 1 if a fault was not named first, or a config not silent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults with this in their name; writes nothing")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        # the configs beside the faults: they share nothing
        pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
        later = None if only else pool.submit(examined_configs)
        broken = []
        for row in faults(Path(folder), only):
            print(row["named"], row["fault"], row["expected"], row["also"], flush=True)
            broken.append(row)
        shipped = later.result() if later is not None else []
    result = {
        "environment": environment(),
        "named": sum(row["named"] for row in broken),
        "faults": len(broken),
        "silent": sum(not row["findings"] for row in shipped),
        "configs": len(shipped),
        "results": broken,
        "shipped": shipped,
    }
    if not only:
        write_json(RESULT, result)
    good = result["named"] == len(broken) and result["silent"] == len(shipped)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
