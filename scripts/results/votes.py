"""What votes buy: train by the votes of a simulated person who errs, and write the table of
docs/results.md.

    python scripts/results/votes.py                # until all is there; Ctrl-C, and it goes on
    python scripts/results/votes.py --seeds 1      # beside another that trains other seeds

Each row trains three seeds through the reward `votes`, as people would be asked: the run puts pairs
of images into a folder and waits. The person looks at both files, prefers what the checker gives
more credit, says "equal" where it gives both the same, and in `WRONG` of the cases the opposite of
what it thinks; which ones is fixed by seed and pair. All rows are judged on the twelve prompts that
they train, since ZO-RankSGD learns the noise of given prompts, by the strict checker, which has no
say in the training. Beside them stands the base model with guidance. What is known is kept in
assets/results/votes.json.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import random
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import between, percent, points
from PIL import Image
from scipy import stats

from flowrl.api.calls import train as train_run
from flowrl.config.load import Config, load_config
from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.core.prompts import load_prompts
from flowrl.core.tables import markdown_table
from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.votes import VotePair, append_vote, opinions, questions, read_votes
from flowrl.runs.evaluate import evaluate
from flowrl.runs.folder import EVALS, read_rows
from flowrl.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "assets" / "results" / "votes.json"
PAGE = ROOT / "docs" / "results.md"
RUNS = ROOT / "runs" / "votes"
PROMPTS = "assets/shapes/few.jsonl"
SEEDS, WRONG, RISE = (0, 1, 2), 0.2, 0.1
GROUP, EVERY = 8, 4
ROWS = {
    "ZO-RankSGD": ("shapes/zo_rank_sgd", 20),
    "Diffusion-DPO, online": ("shapes/diffusion_dpo", 12),
}
"""Row -> its config and iterations."""

SETTINGS = (
    f"prompts={{train: {PROMPTS}, test: {PROMPTS}}}",
    "train.prompts=12",
    f"train.group={GROUP}",
    "train.threads=1",
    "train.ema=0",
    "train.warmup=2",
    f"eval={{steps: 10, images: 8, every: {EVERY}, score: strict, weights: current}}",
    "checkpoint.every=8",
    "samples.every=0",
)
GUIDED = ("model.guidance=3.5", "eval.steps=20")
Result = dict[str, Any]


# --------------------------------------------------------------------------------------- the person


class Person:
    """Votes on what waits in a folder."""

    def __init__(self, folder: Path, seed: int, wrong: float = WRONG) -> None:
        self.folder, self.seed, self.wrong = folder, seed, wrong
        self.records = {record["prompt"]: record for record in load_prompts(PROMPTS).records}

    def vote(self) -> int:
        """Vote on every pair that waits and has no vote -> how many."""
        said = opinions(read_votes(self.folder))
        given = 0
        for question in questions(self.folder):
            for pair in question.pairs:
                if pair not in said:
                    self._vote(pair)
                    said[pair] = []
                    given += 1
        return given

    def _vote(self, pair: VotePair) -> None:
        images = torch.stack([self._look(name) for name in (pair.first, pair.second)])
        first, second = check(images, [self.records[pair.prompt]] * 2).graded_angle.tolist()
        label = 0.5 if first == second else float(first > second)
        # an error is that of this person about this pair, whenever it is asked
        if random.Random(f"{self.seed} {pair}").random() < self.wrong:
            label = 1 - label
        names = {"image_0": pair.first, "image_1": pair.second, "label_0": label}
        append_vote(self.folder, {"prompt": pair.prompt, **names, "voter": "simulated"})

    def _look(self, name: str) -> torch.Tensor:
        with Image.open(self.folder / name) as file:
            levels = np.array(file.convert("RGB"), dtype=np.float32)
        return torch.from_numpy(levels).permute(2, 0, 1) / 255


@contextmanager
def voting(person: Person) -> Iterator[None]:
    """Let a person vote in a thread until the block is left."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            if not person.vote():
                over.wait(0.02)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# ----------------------------------------------------------------------------------------- training


def config_of(row: str, folder: Path) -> Config:
    """Return the config of a row, whose votes are in a folder."""
    name, iterations = ROWS[row]
    people = f"{{fn: votes, folder: {folder}, pairs: {GROUP}, look: 0.02}}"
    strict = "{fn: shapes, mode: strict, weight: 0}"
    rewards = f"rewards={{people: {people}, strict: {strict}}}"
    return load_config(name, [*SETTINGS, rewards, f"train.iterations={iterations}"])


def train(seeds: Sequence[int]) -> None:
    """Train what the file has not, all rows with one seed before the next."""
    where = environment()  # before the file itself changes the tree
    _base()
    for seed in seeds:
        for row in ROWS:
            if str(seed) not in _read()["rows"].get(row, {}):
                print(f"== {row}, seed {seed}", flush=True)
                kept = _run(row, seed)
                kept |= {"commit": where["commit"], "flowrl": where["flowrl"]}
                _keep({"rows": {row: {str(seed): kept}}})


def _run(row: str, seed: int) -> Result:
    """Train one run -> its curve over votes."""
    folder = RUNS / f"{ROWS[row][0].rpartition('/')[2]}-{seed}"
    votes = folder.with_name(f"{folder.name}-votes")
    config = config_of(row, votes).replace(seed=seed)
    with voting(Person(votes, seed)):
        train_run(config, folder, resume="auto", quiet=True)
    # a pair of equal images needs no vote, so votes are counted, not worked out
    counted = len(read_votes(votes))
    each = counted / config.train.iterations
    curve = []
    for found in read_rows(folder, EVALS):
        curve.append([round(each * found["iteration"]), round(found["strict"], 6)])
    shutil.rmtree(votes)
    return {"votes": counted, "curve": curve}


def _base() -> None:
    """Judge the base model, as it is and with guidance, once."""
    if "base" in _read():
        return
    scores = {}
    for key, changes in (("base", ()), ("guided", GUIDED)):
        config = load_config(config_of("Diffusion-DPO, online", RUNS / "none"), list(changes))
        scores[key] = round(evaluate(Trainer(config).model, config)["rewards"]["strict"], 6)
    _keep(scores)


def _keep(new: Result) -> None:
    """Put scores or runs into the file, which other seeds may be writing, too."""
    RUNS.mkdir(parents=True, exist_ok=True)
    with (RUNS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = _read()
        for row, runs in new.pop("rows", {}).items():
            result["rows"].setdefault(row, {}).update(runs)
        write_json(FILE, {**result, **new})


def _read() -> Result:
    if FILE.exists():
        return dict(json.loads(FILE.read_text(encoding="utf-8")))
    return {"kind": "flowrl votes", "wrong": WRONG, "prompts": PROMPTS, "rows": {}}


# ---------------------------------------------------------------------------------------- the table


def votes_to(curve: Sequence[Sequence[float]], start: float, rise: float = RISE) -> float | None:
    """Return the votes at which a run is `rise` above `start`: where its curve, straight between
    evaluations, first gets there; None where it never does."""
    before, low = 0.0, start
    for votes, score in curve:
        if score >= start + rise:
            if score == low:
                return float(votes)
            return before + (votes - before) * (start + rise - low) / (score - low)
        before, low = float(votes), score
    return None


def summary(result: Mapping[str, Any]) -> dict[str, Result]:
    """Work out every row: its gain with Student's interval over seeds, and the votes that it
    took."""
    found = {}
    for name, runs in result["rows"].items():
        gains = [run["curve"][-1][1] - result["base"] for run in runs.values()]
        half = float("nan")
        if len(gains) > 1:
            half = float(stats.t.ppf(0.975, len(gains) - 1) * stats.sem(gains))
        to = [votes_to(run["curve"], result["base"]) for run in runs.values()]
        votes = float(np.mean([run["votes"] for run in runs.values()]))
        found[name] = {"gain": float(np.mean(gains)), "half": half, "votes": votes, "to": to}
    return found


def table(result: Mapping[str, Any]) -> str:
    """Draw the rows, and the base model with guidance."""
    lines = [["method", "votes in all", "gain", "95 %", "votes to +10 points, by seed"]]
    for name, row in summary(result).items():
        low, high = row["gain"] - row["half"], row["gain"] + row["half"]
        span = f"{points(low)} to {points(high)}" if np.isfinite(row["half"]) else "–"
        to = ", ".join("never" if votes is None else f"{votes:,.0f}" for votes in row["to"])
        lines.append([name, f"{row['votes']:,.0f}", points(row["gain"]), span, to])
    gain = points(result["guided"] - result["base"])
    lines.append(["none: guidance 3.5, 20 steps", "0", gain, "–", "–"])
    said = f"The base model has {percent(result['base'])} of these images right."
    return f"{markdown_table(lines)}\n\n{said}"


def page(text: str) -> str:
    """Fill the table of docs/results.md; nothing where nothing was trained yet."""
    result = _read()
    return between(text, "votes: table", "votes: end", [table(result)] if result["rows"] else [])


def targets() -> list[tuple[Path, Any]]:
    """Return the page that this file fills."""
    return [(PAGE, page)]


def main() -> None:
    """Train what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, choices=SEEDS)
    train(parser.parse_args().seeds)


if __name__ == "__main__":
    main()
