"""The command ``flowrl score``: its arguments, and what is printed and written."""

from __future__ import annotations

import argparse
from pathlib import Path

from flowrl.errors import ConfigError

ABOUT = "Score any pictures with rewards. With --selftest: find out whether the rewards can be trusted."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``flowrl score``, but for --plugin."""
    add = parser.add_argument
    add("images", nargs="*", metavar="IMAGE", help="PNG, JPEG or WebP files, or folders of them")
    add("--reward", action="append", default=[], metavar="NAME", help="as `fn` of a config; repeatable")
    add("--config", help="use all rewards of a config instead")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="argument of the reward, or config override")
    add("--prompt", metavar="TEXT", help="of all pictures")
    add("--prompts", metavar="FILE", help='a record per picture: by its key "file" or "image", or in order')
    add("--batch", type=int, default=32, help="pictures shown to a reward at once (default: %(default)s)")
    add("--split", action="store_true", help="show the pictures of a prompt in several batches to any reward")
    add("--json", type=Path, help="also write everything here")
    add("--csv", type=Path, help="also write the scores here")
    add("--sort", metavar="NAME", help="the best by this reward first")
    add("--grid", type=Path, metavar="PNG", help="draw the best and the worst pictures")
    add("--selftest", action="store_true", help="test the rewards, by default on rendered scenes")
    add("--count", type=int, help="self-test: pictures used at most (default: 64)")
    add("--tolerance", type=float, help="self-test: differences up to this share are rounding (default: 1e-4)")
    add("--skip", action="append", default=[], metavar="[NAME.]DAMAGE", help="self-test: blur, noise or prompt")


def run(args: argparse.Namespace) -> int:
    """Score pictures, or with --selftest test the rewards -> exit code."""
    from flowrl.loop import write_json
    from flowrl.pictures import find_pictures, pair
    from flowrl.prompts import check_records
    from flowrl.report import save_png
    from flowrl.scorecard import best_and_worst, scorecard, table
    from flowrl.scorecard import write_csv as save_csv
    from flowrl.scoring import bar, make_rewards, score_shots, shots_of

    if args.selftest:
        return _selftest(args)
    if not args.images or args.count is not None or args.tolerance is not None or args.skip:
        raise ConfigError("score: expected pictures or folders; --count, --tolerance and --skip belong to --selftest")
    pictures = find_pictures(args.images)
    words = pair(pictures, args.prompt, args.prompts)
    rewards, calls = make_rewards(args.reward, args.config, args.set, args.plugin)
    if args.sort is not None and args.sort not in rewards:
        raise ConfigError(f"--sort: expected one of the rewards {', '.join(rewards)}, got {args.sort!r}")
    check_records(words.prompts, rewards)
    noted: dict[str, dict[str, None]] = {}
    shots = shots_of(pictures, words.prompts, noted)
    with bar(len(shots) * len(rewards), "scoring") as progress:
        options = {"batch": args.batch, "split": args.split, "told": words.told}
        heard = score_shots(rewards, shots, **options, progress=progress)
    card = scorecard(shots, heard, words.told, args.sort)
    print(table(card))
    notes = {what: list(names) for what, names in noted.items()}
    for what, names in notes.items():
        print(f"{what}: {len(names)} of {len(shots)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})")
    if words.left:
        print(f"{words.prompts.path}: {words.left} records name pictures that were not given")
    if args.json:
        write_json(args.json, {"rewards": calls, **card, "notes": notes})
    if args.csv:
        save_csv(args.csv, card)
    if args.grid:
        save_png(best_and_worst(shots, heard, [args.sort] if args.sort else list(rewards)), args.grid)
    return 0


def _selftest(args: argparse.Namespace) -> int:
    from flowrl.loop import write_json
    from flowrl.pictures import find_pictures, pair
    from flowrl.scoring import bar, make_rewards, shots_of
    from flowrl.selftest import broken, kept, rendered, selftest, table

    if args.csv or args.grid or args.split or args.sort is not None:
        raise ConfigError("--selftest scores nothing of yours: leave out --csv, --grid, --split and --sort")
    if not args.images and (args.prompt is not None or args.prompts):
        raise ConfigError("--selftest on scenes of its own brings their prompts: leave out --prompt and --prompts")
    count, told = 64 if args.count is None else args.count, True
    if args.images:
        pictures = find_pictures(args.images)
        words = pair(pictures, args.prompt, args.prompts)
        shots, told = shots_of(pictures, words.prompts, {}), words.told
        shots = kept(shots[:: -(-len(shots) // max(1, count))])
    else:
        shots = rendered(count)
    rewards, calls = make_rewards(args.reward, args.config, args.set, args.plugin)
    strange = [text for text in args.skip if "." in text and text.partition(".")[0] not in rewards]
    if strange:
        raise ConfigError(f"--skip {strange[0]}: expected a reward of {', '.join(rewards)}")
    rows = []
    for name, reward in rewards.items():
        skip = [text.removeprefix(f"{name}.") for text in args.skip if "." not in text or text.startswith(f"{name}.")]
        tolerance = 1e-4 if args.tolerance is None else args.tolerance
        with bar(None, f"testing {name}") as progress:
            options = {"batch": args.batch, "tolerance": tolerance, "skip": skip, "told": told, "progress": progress}
            rows += selftest(name, reward, shots, **options)
    print(table(rows))
    if args.json:
        write_json(args.json, {"rewards": calls, "checks": [row._asdict() for row in rows]})
    return 1 if broken(rows) else 0
