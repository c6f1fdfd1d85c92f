"""Give damaged inputs to all that reads what others have written, and see what comes out.

    python scripts/research/fuzz.py        # 2,250 cases, writes assets/results/fuzz.json
    python scripts/research/fuzz.py --only images --cases 1000 --seed 7 --out FILE

Inputs are configs, prompt files, checkpoints, requests to the reward server, its answers, those of
judges, and images. Each is right at first; then bytes, values or chunks of it are changed,
dropped, moved or doubled. What may come out is one message that says what is wrong, or the input as
another reader reads it. A traceback, a message that says nothing, a hang and a wrong value are
faults: they are printed with their numbers, and the command fails. What was found is kept in
tests/project/test_fuzz.py.

All happens in this process, without a network. The same seed makes the same cases.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kits")]

import torch  # noqa: E402
from fuzzfiles import PROMPTS  # noqa: E402
from fuzzkit import Verdict, judge  # noqa: E402
from fuzztargets import targets  # noqa: E402

from flowrl.core.files import write_json  # noqa: E402
from flowrl.core.installation import environment  # noqa: E402

BAD = ("traceback", "mute", "hang", "wrong")
CASES = {"configs": 400, "checkpoints": 200, "requests": 300, "addresses": 150, "answers": 250}
CASES |= {"judges": 150, "judge texts": 150, "images": 400}
CASES |= {f"prompts{suffix}": 50 for suffix in PROMPTS}


def fuzz(name: str, count: int, seed: int, home: Path) -> dict[str, Any]:
    """Try `count` cases of a target -> its figures. Faults are printed."""
    target = targets(home)[name]()
    began = time.process_time()
    kinds: Counter[str] = Counter()
    slowest = 0.0
    # a case follows from seed, target and number, so one that was printed can be had again
    for number in range(count):
        rng = random.Random(f"{seed}/{name}/{number}")
        data = target.damage(rng.choice(target.good), rng)
        start = time.process_time()
        verdict: Verdict = judge(target, data, home)
        slowest = max(slowest, time.process_time() - start)
        kinds[verdict.kind] += 1
        # bad: a traceback, an empty message, a hang, or a wrong answer
        if verdict.bad:
            print(f"{name} {number}: {verdict.kind}: {verdict.text[-600:]}", flush=True)
    seconds = time.process_time() - began
    figures = {"cases": count, **kinds, "seconds": round(seconds, 1), "slowest": round(slowest, 2)}
    print(name, json.dumps(figures), flush=True)
    return figures


def main() -> None:
    """Try all kinds of bad input, and write what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[*CASES], choices=[*CASES], metavar="TARGET")
    parser.add_argument("--cases", type=int, help="of each target (default: 50 to 400)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "results" / "fuzz.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    about, found = environment(), {}
    with tempfile.TemporaryDirectory() as home:
        for name in args.only:
            found[name] = fuzz(name, args.cases or CASES[name], args.seed, Path(home))
    # the sums
    kinds = ("cases", "refused", "accepted", *BAD)
    sums = dict.fromkeys(kinds, 0)
    for row in found.values():
        sums = {kind: sums[kind] + row.get(kind, 0) for kind in kinds}
    bad = {kind: sums[kind] for kind in BAD if sums[kind]}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {**sums, "peak_mib": round(memory), "seed": args.seed, "targets": found}
    write_json(args.out, {**result, "machine": about})
    if bad:
        sys.exit(f"faults: {bad}")


if __name__ == "__main__":
    main()
