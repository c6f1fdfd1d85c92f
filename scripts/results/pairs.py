"""Put every method on every model that has an adapter, and say what came of each pair.

    python scripts/results/pairs.py               # bind each pair, and rehearse its plan
    python scripts/results/pairs.py --train 150   # and train so many on tiny weights; goes on

Writes assets/results/pairs.json; `tables.py` makes the matrix of docs/methods.md from it, and
tests/runs/test_rehearse.py fails while it says something else than the code.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import between, wrapped

from flowrl.config.compose import PAIR
from flowrl.config.load import load_config
from flowrl.core.errors import FlowRLError
from flowrl.core.files import write_text
from flowrl.core.installation import environment
from flowrl.core.shipped_files import list_models
from flowrl.core.tables import markdown_table
from flowrl.runs.catalogue import load_methods
from flowrl.runs.composed import composed
from flowrl.runs.rehearse import rehearse
from flowrl.runs.stop import Interrupted
from flowrl.training.rehearsal import check_plan

ROOT = Path(__file__).resolve().parents[2]
FILE, PAGE = ROOT / "assets" / "results" / "pairs.json", ROOT / "docs" / "methods.md"
PUBLISHED, COMPOSED, REFUSED = "published", "composed", "refused"
CELLS = {PUBLISHED: "P", COMPOSED: "c", REFUSED: "-"}
SEED = 50
ANY, BY_CALL = "dgpo", "pipeline"  # a method that goes on all models; what has no adapter
TRAINED = " trained"  # ends what is said of a pair that was
Outcomes = dict[str, dict[str, str]]


def bind(method: str, model: str) -> str:
    """Bind a pair and rehearse its plan -> "published: CONFIG", "composed: HOME" or "refused: "
    with the message."""
    try:
        made = composed(method, model)
        still = made.get("surrogate", {}).get("alone", 0)  # iterations that train it alone
        config = load_config(made, [f"train.iterations={still + 2}"], need_rewards=False)
        check_plan(config)
    except FlowRLError as error:
        return f"{REFUSED}: {error}"
    home = made.source.partition(" on ")[0]
    return f"{PUBLISHED if PAIR in made.marks.values() else COMPOSED}: {home}"


def models() -> list[str]:
    """Return the names of the files of configs/models whose model has an adapter."""
    return [name for name in list_models() if composed(ANY, name)["model"]["fn"] != BY_CALL]


def outcomes(model: str) -> dict[str, str]:
    """Bind every method on a model -> what came of each."""
    return {method.slug: bind(method.slug, model) for method in load_methods()}


def drawn(found: Outcomes, count: int) -> list[tuple[str, str]]:
    """Draw pairs (method, model) that are not refused, by a seed: each method and each model comes
    before one comes again."""
    chance, names = random.Random(SEED), sorted(found)
    chance.shuffle(names)
    methods = chance.sample([*found[names[0]]], len(found[names[0]]))
    pairs = []
    for turn in range(len(names)):
        for place, method in enumerate(methods):
            model = names[(place + turn) % len(names)]
            if not found[model][method].startswith(REFUSED):
                pairs.append((method, model))
    return pairs[:count]


def trained(method: str, model: str) -> dict[str, Any]:
    """Train one iteration of a pair on tiny random weights -> its row."""
    started = time.monotonic()
    try:
        done = rehearse(composed(method, model), ["eval.steps=2"], [], quiet=True)
        said = f"{done.pipeline}{TRAINED}"
    except Interrupted:
        raise
    except Exception as error:  # whatever it is, the file says it
        said = f"{type(error).__name__}: {error}"
    return {
        "method": method,
        "model": model,
        "said": said,
        "seconds": round(time.monotonic() - started, 1),
        "commit": environment()["commit"],
    }


def read() -> Outcomes:
    """Return the outcomes of the file: model -> method -> what came of the pair."""
    found: Outcomes = json.loads(FILE.read_text(encoding="utf-8"))["pairs"]
    return found


def write(found: Outcomes, rows: list[dict[str, Any]]) -> None:
    """Write the file, a line for each model and for each pair that was trained."""
    lines = [f"{json.dumps(model)}: {json.dumps(one)}" for model, one in found.items()]
    trained = map(json.dumps, rows)
    parts = {
        "pairs": "{\n" + ",\n".join(lines) + "\n}",
        "seed": f"{SEED}",
        "trained": "[\n" + ",\n".join(trained) + "\n]",
        "environment": json.dumps(environment()),
    }
    sections = [f'"{name}": {text}' for name, text in parts.items()]
    write_text(FILE, "{\n" + ",\n".join(sections) + "\n}\n")


def main() -> None:
    """Bind all pairs; train some of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=int, default=0, metavar="PAIRS")
    count = parser.parse_args().train
    found = {model: outcomes(model) for model in models()}
    rows = json.loads(FILE.read_text(encoding="utf-8"))["trained"] if FILE.exists() else []
    rows = [row for row in rows if not found[row["model"]][row["method"]].startswith(REFUSED)]
    write(found, rows)
    if not count:
        return
    # a pair that was trained is not trained again
    done = {(row["method"], row["model"]): row for row in rows if row["said"].endswith(TRAINED)}
    pairs = drawn(found, count)
    for pair in pairs:
        if pair not in done:
            done[pair] = trained(*pair)
        # what was drawn while there were fewer methods was drawn by the seed, too
        write(found, [*done.values()])


# ------------------------------------------------------------------------------------ the matrix


def matrix(text: str) -> str:
    """Put a row for each method between the marks, a column for each model, and why not; methods
    that are composed with every model share a sentence."""
    found = read()
    table = [["method", *(f"`{model}`" for model in found)]]
    everywhere = []
    for method in load_methods():
        kinds = [found[model][method.slug].partition(": ")[0] for model in found]
        if set(kinds) == {COMPOSED}:
            everywhere.append(f"`{method.slug}`")
        else:
            table.append([f"`{method.slug}`", *(CELLS[kind] for kind in kinds)])
    cells = [said.partition(": ")[0] for one in found.values() for said in one.values()]
    summary = ", ".join(f"{cells.count(kind)} {kind}" for kind in CELLS)
    rows = json.loads(FILE.read_text(encoding="utf-8"))["trained"]
    well = sum(row["said"].endswith(TRAINED) for row in rows)
    tried = f"of {len(rows)} drawn by a seed {well} trained one iteration on tiny weights"
    told = [
        wrapped(f"Composed with each of these models: {', '.join(everywhere)}."),
        wrapped(f"{len(cells)} pairs: {summary}; {tried}. Why not:"),
    ]
    parts = [markdown_table(table), *told, why_not(found)]
    return between(text, "pairs: table", "pairs: end", parts)


def why_not(found: Outcomes) -> str:
    """List why methods are refused, equal reasons together. The matrix says on which models; of a
    method that has several reasons they stand here."""
    reasons: dict[str, dict[str, list[str]]] = {}  # method -> reason -> models
    for method in load_methods():
        for model, one in found.items():
            kind, _, why = one[method.slug].partition(": ")
            if kind == REFUSED:
                # without the names of the config and of the model: the matrix has them
                why = re.sub(r"^\w+/\w+( on \w+)?: ", "", why)
                why = re.sub(r"\bmodel \w+ (makes|knows)\b", r"the model \1", why)
                reasons.setdefault(method.slug, {}).setdefault(why, []).append(model)
    together: dict[str, list[str]] = {}
    for slug, each in reasons.items():
        for why, names in each.items():
            where = f" ({', '.join(names)})" if len(each) > 1 else ""
            together.setdefault(why, []).append(f"`{slug}`{where}")
    lines = [f"- {', '.join(methods)}: {why}" for why, methods in together.items()]
    return "\n".join(wrapped(line, "  ") for line in lines)


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return what fills the matrix of docs/methods.md."""
    return [(PAGE, matrix)]


if __name__ == "__main__":
    main()
