"""Learn a rubric from preference pairs with a judge, for the reward `rubric`.

    python scripts/assets/learn_rubric.py --pairs data/shapes_pairs/pairs.jsonl --rules rules.txt \\
        --url http://localhost:8080 --model judge --out rubric.json

Pairs are a list as `flowrl pairs` writes it; rules are candidates, one a line. With `--rounds`
above 1 the judge proposes further ones where the best still err. AutoRubric-T2I (2605.17602); its
own prompts, strength and rounds are not public.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flowrl.core.errors import DataError, FlowRLError
from flowrl.core.prompts import load_prompts
from flowrl.evaluation.preference_pairs import PreferencePair, check_pairs, load_pairs, read_pair
from rewards._judge.ask import Judge
from rewards.rubric.learn import ByJudge, Preferences, best_of, learn
from rewards.rubric.reward import WHO, Checks, save_rubric


def main() -> int:
    """Learn, write the rubric, and say what each round came to."""
    given = arguments()
    try:
        run(given)
    except FlowRLError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", required=True)
    parser.add_argument("--rules", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--url", default="http://localhost:8080")
    parser.add_argument("--model", default="judge")
    parser.add_argument("--api-key-env")
    parser.add_argument("--cache", help="folder of answers, so that a second try asks nothing")
    parser.add_argument("--size", type=int, default=512, help="sides of the images in pixels")
    parser.add_argument("--most", type=int, default=256, help="pairs, the first of the list")
    parser.add_argument("--keep", type=int, default=20)
    parser.add_argument("--strength", type=float, default=1.0, help="C: smaller keeps fewer rules")
    parser.add_argument("--rounds", type=int, default=1)
    return parser.parse_args()


def run(given: argparse.Namespace) -> None:
    """Do what the command line says. Raises errors of flowrl's own."""
    judge = Judge(
        WHO,
        url=given.url,
        model=given.model,
        api_key_env=given.api_key_env,
        timeout=120.0,
        retries=5,
        backoff=1.0,
        workers=16,
        max_failed=0.1,
        encoding="png",
        cache=given.cache,
        extra=None,
    )
    # does the server have the model? asked before anything else is read
    judge.probe()
    # the rules to begin with, one a line, and pairs
    rules = read_rules(given.rules)
    preferences = read_pairs(given.pairs, given.size, given.most)
    rounds = learn(
        preferences,
        rules,
        Checks(judge),
        strength=given.strength,
        keep=given.keep,
        rounds=given.rounds,
        propose=ByJudge(judge),
    )
    # each round's figures; the file gets the rules of the most accurate one
    for number, one in enumerate(rounds, 1):
        print(
            f"round {number}: {len(one.rules)} of {one.asked} rules kept, "
            f"{one.accuracy:.1%} of pairs right, {one.unscored} without an answer"
        )
    best = best_of(rounds)
    made = {"pairs": len(preferences.prompts), "judge": given.model, "strength": given.strength}
    save_rubric(given.out, best.rules, {**made, "accuracy": best.accuracy})
    print(f"wrote {given.out}")


def read_rules(path: Path) -> list[str]:
    """Read rules, one a line. Raises DataError for a file that cannot be read or holds none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--rules {path}: expected a text with a rule a line: {error}") from error
    rules = [line.strip() for line in lines if line.strip()]
    if not rules:
        raise DataError(f"--rules {path}: expected a text with a rule a line, and it has none")
    return rules


def read_pairs(path: str, size: int, most: int) -> Preferences:
    """Read the first pairs of a list, without ties. Raises DataError."""
    # ties say nothing of what is better, so they are left out
    prompts = load_prompts(path)
    check_pairs(prompts)
    folder, words = Path(prompts.path).parent, []
    pairs: list[PreferencePair] = []
    for record, where in zip(prompts.records, prompts.places, strict=True):
        pair = read_pair(record, where, folder)
        if pair.preferred is not None and len(pairs) < most:
            pairs.append(pair)
            words.append(record["prompt"])
    if not pairs:
        raise DataError(f"{path}: expected a pair or more, of which one image is preferred")
    # images [P, 2, 3, H, W]: turn pairs around so that the better one comes first
    images = load_pairs(pairs, size, size).unflatten(0, (len(pairs), 2)).float() / 255
    for row, pair in enumerate(pairs):
        if pair.label == 0:
            images[row] = images[row].flip(0)
    return Preferences(images[:, 0], images[:, 1], words)


if __name__ == "__main__":
    sys.exit(main())
