"""Compare group techniques with GRPO that lacks them alone, seed by seed at equal network
evaluations.

    python scripts/research/techniques.py --ground toy --seeds 8
    python scripts/research/techniques.py --ground shapes --seeds 5 --nfe 80000
    python scripts/research/techniques.py --seeds 8 --again tree salt

Each technique changes the config of its control as technique_list.py says and trains until it has
spent as many network evaluations, images that were drawn in vain included; then the held-out
prompts are judged with the same noise for all. A technique and its control are a pair for each
seed. The result file has every run, the mean difference with its 95 % interval (Student's t over
seeds), and a verdict: helps or hurts where p is below 0.05 after Holm's correction for all
techniques of the file, else no difference seen.

What there is already is not run again: runs are files of their own under --runs, and those of the
result file count as well where the list still asks for the config that they had. --again runs the
named ones anew all the same, after a change of the code or of a ground's numbers. On shapes each
run is a process of its own; on the toy all are one, unless --processes says otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from scipy.stats import t as student

sys.path.insert(0, str(Path(__file__).parent))

from technique_list import CONTROLS, TECHNIQUES  # noqa: E402
from technique_table import rows  # noqa: E402
from technique_toy import toy  # noqa: E402

from flowrl.config.load import Config, load_config  # noqa: E402
from flowrl.core.files import write_json  # noqa: E402
from flowrl.core.installation import environment  # noqa: E402
from flowrl.core.tables import text_table  # noqa: E402
from flowrl.runs.compare.summary import holm  # noqa: E402
from flowrl.runs.evaluate import evaluate  # noqa: E402
from flowrl.training.trainer import Trainer  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
GROUNDS: dict[str, dict[str, Any]] = {
    "toy": {
        **{"nfe": 20_000, "low": 1e-3, "high": 3e-3, "steps": 3, "tau": 100.0, "sharp": 10.0},
        **{"twice": 16, "pairs": 32, "images": 64},
    },
    # validation prompts; 64 places are more than a short run can spend
    "shapes": {
        **{"nfe": 80_000, "low": 1e-4, "high": 3e-4, "steps": 2, "tau": 40.0, "sharp": 100.0},
        **{"twice": 32, "pairs": 64, "images": 128},
    },
}
# `shapes/uni_grpo` without its penalty: the recipe of its kind that is known to gain there
SHAPES = (
    "kl=null",
    "rewards.shapes=null",
    "rewards.strict.weight=0.5",
    "rewards.soft={fn: shapes, mode: graded_angle, weight: 0.5}",
    "credit={fn: group_norm}",
    "train.prompts=16",
    "train.updates=2",
    "train.threads=1",
    "train.iterations=1000",
    "eval.batch=136",
)


def main() -> None:
    """Run what is missing, write the result file, print a table."""
    args = parser().parse_args()
    ground = GROUNDS[args.ground]
    nfe = args.nfe or ground["nfe"]
    # one run alone, as `alone` asks a process of its own
    if args.one:
        name, seed = args.one
        write_json(args.out, run(args.ground, name, int(seed), nfe))
        return
    chosen = args.techniques or list(TECHNIQUES)
    folder = args.runs / f"{args.ground}-{nfe}"
    out = args.out or ROOT / "assets" / "results" / f"techniques-{args.ground}.json"
    unpack(out, folder, args.ground, nfe)
    for name in args.again:
        for file in folder.glob(f"{name}-*.json"):
            file.unlink()
    # seeds outside: after a stop there are whole pairs of the first seeds
    for seed in range(args.seeds):
        for name in arms(chosen):
            file = folder / f"{name}-{seed}.json"
            if is_of(file, name):
                continue
            print(f"{args.ground}, seed {seed}: {name}", flush=True)
            if args.processes or args.ground == "shapes":
                alone(args.ground, name, seed, nfe, file)
            else:
                write_json(file, run(args.ground, name, seed, nfe))
    # all runs that are there, in one file
    result = collected(folder, args.ground, nfe, chosen, args.seeds)
    write_json(out, result)
    print(text_table(rows(result), left=2))
    print(f"written: {out}")


def parser() -> argparse.ArgumentParser:
    """Describe the command."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--ground", choices=[*GROUNDS], default="toy")
    add("--seeds", type=int, default=5)
    add("--techniques", nargs="*", choices=[*TECHNIQUES], metavar="NAME")
    add("--nfe", type=int, help="network evaluations of a run")
    add("--runs", type=Path, default=ROOT / "runs" / "techniques")
    add("--out", type=Path, help="the result file")
    known = [*CONTROLS, *TECHNIQUES]
    add("--again", nargs="*", default=[], choices=known, metavar="NAME", help="run these anew")
    add("--processes", action="store_true", help="a process for each run, also on the toy")
    add("--one", nargs=2, metavar=("NAME", "SEED"), help="one run, into --out")
    return made


def is_of(file: Path, name: str) -> bool:
    """Say whether a file holds a run of what this name stands for now."""
    if not file.exists():
        return False
    return bool(json.loads(file.read_text(encoding="utf-8")).get("changes") == changes_of(name))


def arms(chosen: Sequence[str]) -> list[str]:
    """List the runs of a seed: each technique, and before it the control that it is held to."""
    pairs = ((TECHNIQUES[name].control, name) for name in chosen)
    return list(dict.fromkeys(itertools.chain.from_iterable(pairs)))


def changes_of(name: str) -> list[str]:
    """List all that a technique or a control changes in the ground's config, each key once."""
    if name in CONTROLS:
        return [*CONTROLS[name].changes]
    # on top of all that its control changes; what both set is the technique's
    return last_of_each([*changes_of(TECHNIQUES[name].control), *TECHNIQUES[name].changes])


def last_of_each(changes: Sequence[str]) -> list[str]:
    """Leave out changes of a key that a later one changes."""
    return list({change.partition("=")[0]: change for change in changes}.values())


def config_of(ground: str, name: str, seed: int, folder: Path) -> Config:
    """Return the config of a run: of a technique, or of a control."""
    changes = changes_of(name)
    for key, value in GROUNDS[ground].items():
        changes = [change.replace("{" + key + "}", str(value)) for change in changes]
    if ground == "toy":
        return toy(folder, [f"seed={seed}", f"model.seed={seed}", *changes])
    # a tree with as many steps and as much noise as the plan that it is compared with
    tree = ("steps: 4, noise_scale: 0.5", "steps: 6, noise_scale: 0.8")
    changes = [change.replace(*tree) for change in changes]
    return load_config("shapes/uni_grpo", [*SHAPES, f"seed={seed}", *changes])


def run(ground: str, name: str, seed: int, nfe: float) -> dict[str, Any]:
    """Train until the evaluations are spent, and judge -> what to keep of it."""
    with tempfile.TemporaryDirectory() as home:
        config = config_of(ground, name, seed, Path(home))
        trainer, spent, refilled = Trainer(config), 0.0, 0.0
        # equal network evaluations, not iterations: techniques that draw again pay for it
        while spent < nfe:
            metrics = trainer.step()
            spent += metrics["nfe"]
            refilled += metrics.get("refilled", 0.0)
        judged = evaluate(trainer.model, config, trainer=trainer)
    return {
        "name": name,
        "seed": seed,
        "score": judged[judged["score"]],
        "nfe": spent,
        "iterations": trainer.iteration,
        "refilled": refilled,
        "commit": environment()["commit"],
        "changes": changes_of(name),
    }


def alone(ground: str, name: str, seed: int, nfe: float, file: Path) -> None:
    """Do one run in a process of its own. Raises CalledProcessError if it fails."""
    file.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, __file__, "--ground", ground, "--nfe", str(int(nfe))]
    subprocess.run([*words, "--one", name, str(seed), "--out", str(file)], check=True)


def unpack(file: Path, folder: Path, ground: str, nfe: float) -> None:
    """Write the runs of an earlier result file as files of their own, where a run of this name is
    missing, and would still have the same config and budget."""
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if (before.get("ground"), before.get("nfe")) != (ground, nfe):
        return
    known = before.get("controls", {}) | before["techniques"]
    for name, one in known.items():
        there = name in CONTROLS or name in TECHNIQUES
        if not there or {*last_of_each(one["changes"])} != {*changes_of(name)}:
            continue
        for made in before["runs"][name]:
            own = folder / f"{name}-{made['seed']}.json"
            if not is_of(own, name):
                # in older files all runs are of the file's commit
                kept = {"commit": before["environment"]["commit"]} | made
                write_json(own, kept | {"changes": changes_of(name)})


def collected(
    folder: Path, ground: str, nfe: float, chosen: Sequence[str], seeds: int
) -> dict[str, Any]:
    """Put all runs of a ground together."""
    # runs of each technique and of the controls that they are held to
    found: dict[str, list[dict[str, Any]]] = {}
    for name in arms(chosen):
        files = [folder / f"{name}-{seed}.json" for seed in range(seeds)]
        found[name] = [json.loads(file.read_text()) for file in files]
        for made in found[name]:
            del made["changes"]  # once per name is enough
    # paired by seed, since both arms of a seed share noise and prompts
    techniques = {}
    for name in chosen:
        control = TECHNIQUES[name].control
        scores = [list(map(itemgetter("score"), found[arm])) for arm in (name, control)]
        about = {"name": TECHNIQUES[name].name, "changes": changes_of(name), "control": control}
        techniques[name] = {**about, **paired(*scores)}
    # one correction for all that the file claims
    for name, p in zip(techniques, holm([one["p"] for one in techniques.values()]), strict=True):
        techniques[name] |= {"p_holm": p, "verdict": verdict(techniques[name]["mean"], p)}
    controls = {}
    for name in found:
        if name in CONTROLS:
            controls[name] = {"name": CONTROLS[name].name, "changes": changes_of(name)}
    return {
        "ground": ground,
        "nfe": nfe,
        "seeds": seeds,
        "controls": controls,
        "techniques": techniques,
        "runs": found,
        "environment": environment(),
    }


def paired(scores: Sequence[float], control: Sequence[float]) -> dict[str, Any]:
    """Compare two rows of scores seed by seed -> mean difference, interval and p; equal rows have
    p = 1."""
    differences = [one - other for one, other in zip(scores, control, strict=True)]
    count, mean = len(differences), statistics.mean(differences)
    error = statistics.stdev(differences) / math.sqrt(count) if count > 1 else math.inf
    half = float(student.ppf(0.975, count - 1)) * error if count > 1 else math.inf
    p = 1.0 if mean == 0 else 0.0
    if 0 < error < math.inf:
        p = float(2 * student.sf(abs(mean) / error, count - 1))
    return {
        "score": statistics.mean(scores),
        "control_score": statistics.mean(control),
        "differences": differences,
        "mean": mean,
        "interval": [mean - half, mean + half],
        "p": p if count > 1 else math.nan,
    }


def verdict(mean: float, p: float) -> str:
    """Say what a difference shows."""
    if not p < 0.05:
        return "no difference seen"
    return "helps" if mean > 0 else "hurts"


if __name__ == "__main__":
    main()
