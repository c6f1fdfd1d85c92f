"""The command line, ``flowrl COMMAND``: one function here for each command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowrl import compare_command, estimate_command, export_command, score
from flowrl.config import Config, load_config
from flowrl.errors import ConfigError, FlowRLError
from flowrl.resources import list_configs, resource

DEFAULT = "shapes/flow_grpo"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command -> exit code: 0 done, 1 a self-test failed, 2 a mistake that can be mended, 130 stopped."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse takes no more positional arguments once an option stood between: `train CONFIG --run X train.lr=1e-4`
    stray = [text for text in rest if not hasattr(args, "overrides") or text.startswith("-") or "=" not in text]
    if stray:
        parser.error(f"unrecognized arguments: {' '.join(stray)}")
    if rest:
        args.overrides += rest
    if getattr(args, "plugin", None) and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the installed command, unlike `python -m`, does not look there
    if args.loads:
        _hush()
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        code = command(args)
        sys.stdout.flush()
        return code
    except FlowRLError as error:
        from flowrl.loop import Interrupted

        print(f"\nflowrl: {error}", file=sys.stderr)
        return 130 if isinstance(error, Interrupted) else 2
    except KeyboardInterrupt:
        print("\nflowrl: stopped at once; what was saved before is whole", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `flowrl configs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _hush() -> None:
    """Switch off the libraries' bars for reading files; downloads still show theirs."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flowrl", description="Align diffusion and flow models with rewards by RL.")
    parser.set_defaults(loads=False)
    commands = parser.add_subparsers(required=True, metavar="command")
    for add in (_runs, _pictures, _rewards, _lists):
        add(commands)
    return parser


def _runs(commands: Any) -> None:
    """Describe what trains and measures."""
    one = commands.add_parser("train", help="train a config", description="Train a config in a run folder.")
    one.add_argument("config", nargs="?", help=f"a YAML file or the name of a shipped one, such as {DEFAULT}")
    one.add_argument("overrides", nargs="*", help="key.subkey=value, such as train.lr=1e-4")
    one.add_argument("--run", type=Path, help="folder of the run (default: runs/<name>, numbered if taken)")
    one.add_argument("--resume", type=Path, metavar="RUN", help="go on with a run from its newest whole checkpoint")
    one.add_argument("--seed", type=int, help="the same as seed=N")
    one.add_argument("--dry-run", action="store_true", help="check it all but the weights, print plan and memory")
    one.add_argument("--quiet", action="store_true", help="no progress")
    _plugin(one)
    one.set_defaults(command=_train, loads=True)

    one = commands.add_parser("compare", help="compare configs on equal budgets", description=compare_command.ABOUT)
    compare_command.add_arguments(one)
    _plugin(one)
    one.set_defaults(command=compare_command.run, loads=True)

    one = commands.add_parser(
        "estimate", help="memory, parameters and work of a config", description=estimate_command.ABOUT
    )
    estimate_command.add_arguments(one)
    _plugin(one)
    one.set_defaults(command=estimate_command.run, loads=True)

    one = commands.add_parser("bench", help="time the phases of an iteration against bare network calls")
    one.add_argument("config", nargs="?", default=DEFAULT)
    one.add_argument("overrides", nargs="*", help="key.subkey=value")
    one.add_argument("--iterations", type=int, default=3)
    one.add_argument("--json", type=Path, help="also write the figures here")
    _plugin(one)
    one.set_defaults(command=_bench, loads=True)


def _pictures(commands: Any) -> None:
    """Describe what judges, draws and hands out models."""
    one = commands.add_parser("eval", help="score held-out prompts", description="Score a model, run or checkpoint.")
    _target(one)
    one.add_argument("--prompts", help="prompt file (default: the config's held-out one)")
    one.add_argument("--images", type=int, help="pictures per prompt")
    one.add_argument("--json", type=Path, help="also write the report here")
    one.set_defaults(command=_eval, loads=True)

    one = commands.add_parser("sample", help="draw pictures", description="Draw pictures of prompts into one PNG.")
    _target(one)
    one.add_argument("prompts", nargs="+", help="the prompts")
    one.add_argument("--images", type=int, default=4, help="pictures per prompt")
    one.add_argument("--out", type=Path, default=Path("samples.png"))
    one.set_defaults(command=_sample, loads=True)

    one = commands.add_parser("grid", help="draw a run's checkpoints side by side")
    one.add_argument("run", type=Path, help="a run folder")
    one.add_argument("--out", type=Path, help="default: <run>/grid.png")
    one.add_argument("--columns", type=int, default=8, help="checkpoints shown at most")
    one.set_defaults(command=_grid)

    one = commands.add_parser("export", help="write a run's weights for other programs, with a model card")
    export_command.add_arguments(one)
    _plugin(one)
    one.set_defaults(command=export_command.run, loads=True)


def _rewards(commands: Any) -> None:
    """Describe what asks and serves rewards."""
    one = commands.add_parser("score", help="score pictures with rewards, or test rewards", description=score.ABOUT)
    score.add_arguments(one)
    _plugin(one)
    one.set_defaults(command=score.run)

    one = commands.add_parser("serve-rewards", help="host rewards over HTTP", description="Host a config's rewards.")
    one.add_argument("config", help="the config whose `rewards` are hosted; nothing else of it is used")
    one.add_argument("overrides", nargs="*", help="key.subkey=value")
    one.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    one.add_argument("--port", type=int, default=8321, help="0 = a free one (default: %(default)s)")
    one.add_argument("--token-env", default="", metavar="NAME", help="environment variable with the clients' token")
    one.add_argument("--max-mb", type=int, default=256, help="MiB of one request (default: %(default)s)")
    one.add_argument("--max-images", type=int, default=256, help="pictures of one request (default: %(default)s)")
    one.add_argument("--max-wait-ms", type=float, default=5.0, help="wait for others to join (default: %(default)s)")
    one.add_argument("--batch", type=int, default=64, help="join requests up to N pictures (default: %(default)s)")
    _plugin(one)
    one.set_defaults(command=_serve)


def _lists(commands: Any) -> None:
    """Describe what lists what is shipped."""
    one = commands.add_parser("configs", help="list the shipped configs")
    one.set_defaults(command=lambda args: print("\n".join(list_configs())) or 0)

    one = commands.add_parser("methods", help="list the methods: paper, status, axes, cost, configs")
    one.add_argument("--json", action="store_true", help="everything that is known of them, as JSON")
    one.set_defaults(command=_methods)


def _plugin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plugin", action="append", default=[], help="a package that `fn:` may name; repeatable")


def _target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="a run, a checkpoint, a diffusers model folder, or a config (its base model)")
    parser.add_argument("--config", default=DEFAULT, help="settings for a bare model folder (default: %(default)s)")
    parser.add_argument("--weights", choices=["ema", "current", "base"], help="of a run (default: its eval.weights)")
    parser.add_argument("--iteration", type=int, help="of a run: the checkpoint to take (default: the newest)")
    parser.add_argument("--steps", type=int, help="denoising steps")
    parser.add_argument("--seed", type=int, help="of the initial noise")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override of the config")
    _plugin(parser)


def _train(args: argparse.Namespace) -> int:
    from flowrl.runs import train

    if args.resume is not None:
        if args.config or args.overrides or args.seed is not None or args.run or args.dry_run:
            raise ConfigError(
                "--resume goes on with the run's own config in its own folder: leave out the config, overrides, "
                "--seed, --run and --dry-run"
            )
        train(_saved(args.resume, args.plugin), args.resume, resume=True, quiet=args.quiet)
        return 0
    if not args.config:
        raise ConfigError(f"expected a config, such as {DEFAULT}; `flowrl configs` lists the shipped ones")
    overrides = [*args.overrides, *([f"seed={args.seed}"] if args.seed is not None else [])]
    config = load_config(args.config, overrides, args.plugin)
    if args.dry_run:
        from flowrl.dryrun import dry_run

        print(config.dump() + "\n" + dry_run(config))
        return 0
    train(config, args.run or _free(Path("runs") / config.name), quiet=args.quiet)
    return 0


def _saved(run: Path, plugins: Sequence[str] = ()) -> Config:
    if not (run / "config.yaml").exists():
        raise ConfigError(f"{run}: expected a run folder with config.yaml in it")
    return load_config(run / "config.yaml", (), plugins)


def _free(folder: Path) -> Path:
    number, free = 1, folder
    while (free / "config.yaml").exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def _open(args: argparse.Namespace) -> tuple[Any, Config, str, Any]:
    """Find out what the target is and load it -> (model, config, what it is in words, weights before training)."""
    from flowrl.oom import explained
    from flowrl.runs import base_weights, load_run

    path = Path(args.target)
    changes = [*args.set, *([f"eval.steps={args.steps}"] if args.steps is not None else [])]
    changes += [f"eval.seed={args.seed}"] if args.seed is not None else []
    if (path / "config.yaml").exists() or (path / "manifest.json").exists():
        options = {"weights": args.weights, "iteration": args.iteration, "overrides": changes, "plugins": args.plugin}
        run = load_run(path, **options)
        return run.model, run.config, f"{path} at iteration {run.iteration}", run.base
    if not path.is_dir() and args.target.startswith("assets/"):
        path = resource(args.target)  # a model that is shipped, from any folder
    if path.is_dir():
        config = load_config(args.config, [f"model.path={path}", *changes], args.plugin)
    else:
        config = load_config(args.target, changes, args.plugin)
    with explained(config, "load"):
        model = config.call("model")()
    return model, config, f"the base model {config.model.kwargs.get('path', '')}", base_weights(model, config)


def _eval(args: argparse.Namespace) -> int:
    from flowrl.evaluate import evaluation_table
    from flowrl.loop import write_json
    from flowrl.oom import explained
    from flowrl.runs import evaluate_config

    changes = [f"eval.images={args.images}"] if args.images is not None else []
    changes += [f"prompts.test={args.prompts}"] if args.prompts else []
    args.set = [*args.set, *changes]
    model, config, what, base = _open(args)
    with explained(config, "eval"):
        result = evaluate_config(model, config, base=base, progress=_progress)
    print(f"{what}\n{evaluation_table(result)}")
    if args.json:
        write_json(args.json, {"target": args.target, **result})
        print(f"report: {args.json}")
    return 0


def _sample(args: argparse.Namespace) -> int:
    from flowrl.oom import explained
    from flowrl.report import labelled_grid, save_png
    from flowrl.runs import sample_all

    model, config, what, base = _open(args)
    with explained(config, "sample"):
        pictures = sample_all(model, config, args.prompts, seed=config.eval.seed, images=args.images, base=base)
    rows = pictures.unflatten(0, (len(args.prompts), args.images))
    columns = {f"sample {i + 1}": rows[:, i] for i in range(args.images)}
    save_png(labelled_grid(columns, args.prompts), args.out)
    print(f"{len(pictures)} pictures of {what}: {args.out}")
    return 0


def _grid(args: argparse.Namespace) -> int:
    from flowrl.report import run_grid, save_png

    out = args.out or args.run / "grid.png"
    save_png(run_grid(args.run, max_columns=args.columns), out)
    print(out)
    return 0


def _bench(args: argparse.Namespace) -> int:
    from flowrl.bench import bench, table
    from flowrl.loop import write_json

    result = bench(load_config(args.config, args.overrides, args.plugin), iterations=args.iterations)
    print(table(result))
    if args.json:
        write_json(args.json, result)
    return 0


def _serve(args: argparse.Namespace) -> int:
    from flowrl.serve import serve

    names = ("host", "port", "token_env", "max_mb", "max_images", "max_wait_ms", "batch")
    serve(load_config(args.config, args.overrides, args.plugin), **{name: getattr(args, name) for name in names})
    return 0


def _methods(args: argparse.Namespace) -> int:
    from flowrl.methods import METHODS, describe, table

    rows = [describe(method) for method in METHODS]
    print(json.dumps(rows, indent=2) if args.json else table(rows))
    return 0


def _progress(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    if sys.stderr.isatty():
        print(f"\r{done} of {total} prompts", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
