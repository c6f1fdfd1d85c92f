"""Show what reinforcement learning gains, beside what costs less: one command, resumable.

    python scripts/results/demonstration/demonstration.py --base assets/shapes-sd3 \\
        --runs runs/shapes-awm-seed0 runs/shapes-awm-seed1 ...

Guidance and steps of the base model, and of the first run, are searched on the validation prompts.
Then on the test prompts: the base, the base with its best guidance, the best of eight of its images
by the reward, the runs, and the runs with their best guidance. Each has a mean over tasks, an
interval over training seeds and scenes (`flowrl/evaluation/crossed_errors.py`), both per task, its
cost per image, word order and diversity: how much images of `--open-prompts` differ where these
leave places and colours open, and which share of that runs keep. For the chart of costs the base
is measured at settings between these, too. All start from the same noise.

Measurements are kept in `--work`; the same command goes on where it stopped. Writes
demonstration.json, the figure and the chart. Processor seconds are those of this machine.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from demonstration_chart import curves, draw_chart
from demonstration_figure import draw_figure
from demonstration_measure import BEST_OF, Bench, Setting, crossed_shares, entry, gain, rates
from variety import kept

from flowrl.cli.options import quiet_libraries
from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.runs.compare.summary import packed

LISTS = "assets/shapes"
COSTS: dict[str, dict[str, Any]] = {
    "guidance 3.5": {"guidance": 3.5, "steps": 10},
    "guidance 3.5, 20 steps": {"guidance": 3.5, "steps": 20},
    "20 steps": {"guidance": 1.0, "steps": 20},
    "best of 2": {"guidance": 1.0, "steps": 10, "best_of": 2},
    "best of 4": {"guidance": 1.0, "steps": 10, "best_of": 4},
}
"""Settings of the base model that the chart shows, too; nothing is chosen by them."""


def main() -> None:
    """Measure what is not there yet, and draw."""
    args = parser().parse_args()
    torch.set_num_threads(args.threads)
    quiet_libraries()
    # measure
    bench = Bench(args.work, args.config, args.set)
    result = measure_all(bench, args)
    # write and draw
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.out, result)
    args.figures.mkdir(parents=True, exist_ok=True)
    draw_figure(bench, result, args, args.figures / f"{args.out.stem}.png")
    chart = args.figures / f"{args.out.stem}-curve.png"
    draw_chart(result["curves"], chart)
    print(summary(result))


def parser() -> argparse.ArgumentParser:
    """Describe the command."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    # what is compared: base model and runs, on two lists
    add("--base", default="assets/shapes-sd3", help="model folder")
    add("--runs", nargs="+", required=True, help="runs of one config, one per training seed")
    add("--test", default=f"{LISTS}/final.jsonl")
    add("--open-prompts", default=f"{LISTS}/test.jsonl", help="those that leave colours open")
    add("--validation", default=f"{LISTS}/validation.jsonl")
    add("--steps", type=int, default=10, help="of base and runs without guidance")
    # what is searched on validation prompts before the test list is touched
    add("--guidances", type=float, nargs="+", default=[1.0, 1.5, 2.0, 2.5, 3.5, 5.0, 7.0])
    add("--run-guidances", type=float, nargs="+", default=[1.0, 1.5, 2.5], help="after training")
    add("--step-counts", type=int, nargs="+", default=[10, 20, 40])
    # sizes and seeds
    add("--per-task", type=int, default=100, help="test images of each task, at least")
    add("--open-images", type=int, default=128, help="of each prompt that leaves colours open")
    add("--search-per-task", type=int, default=96, help="validation images of each task")
    add("--seed", type=int, default=260_027, help="of the test noise")
    add("--search-seed", type=int, default=260_002, help="of the validation noise")
    add("--reward", default="graded_angle", choices=["graded", "graded_angle", "strict"])
    add("--config", default="shapes/awm", help="settings of the model folder")
    add("--set", nargs="*", default=[], help="overrides of the config")
    # where files go
    add("--work", type=Path, default=Path("runs/demonstration"))
    add("--out", type=Path, default=Path("assets/results/demonstration.json"))
    add("--figures", type=Path, default=Path("assets/figures"))
    add("--threads", type=int, default=1)
    return made


def measure_all(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Search, then measure all five settings -> the result file's content."""
    # guidance and steps, by validation prompts alone
    base_search = search(bench, "base", args.base, args.guidances, args)
    run_search = search(bench, "rl", args.runs[0], args.run_guidances, args)
    plain = {"guidance": 1.0, "steps": args.steps}
    best, best_run = (_best(rows) for rows in (base_search, run_search))
    # the five settings on the test prompts
    wanted: dict[str, tuple[list[str], dict[str, Any]]] = {
        "base": ([args.base], plain),
        "base_best_guidance": ([args.base], best),
        f"base_best_of_{BEST_OF}": ([args.base], {**plain, "best_of": BEST_OF}),
        "rl": (args.runs, plain),
        "rl_best_guidance": (args.runs, best_run),
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for name, (targets, options) in wanted.items():
        found[name] = []
        for i, target in enumerate(targets):
            setting = Setting(
                target=str(target),
                prompts=args.test,
                per_task=args.per_task,
                seed=args.seed,
                reward=args.reward,
                open_prompts=args.open_prompts,
                open_images=args.open_images,
                **options,
            )
            found[name].append(bench.measure(f"{name}-{i}", setting))
    # their entries, and gains of the runs with intervals of their own
    command = shlex.join(["python", *sys.argv])
    result: dict[str, Any] = {"kind": "flowrl demonstration", "command": command}
    for name, some in found.items():
        result[name] = entry(some, command=command)
        result[name]["combinations"] = combinations(some)
        result[name]["outcomes"] = [packed(one["outcomes"]) for one in some]
    for name in ("base", "base_best_guidance", f"base_best_of_{BEST_OF}"):
        for run in ("rl", "rl_best_guidance"):
            result[f"{run}_minus_{name}"] = gain(found[run], found[name])
    alike, result["diversity_kept"] = found["base"][0]["diversity"], {}
    for name, some in found.items():
        result["diversity_kept"][name] = kept([one["diversity"] for one in some], alike)
    result["costs"] = at_other_costs(bench, args)
    result["search"] = {"prompts": args.validation, "base": base_search, "rl": run_search}
    result["word_order"] = {name: result[name]["word_order"] for name in wanted}
    # what the runs reached on their way
    result["curves"] = curves(bench, [Path(run) for run in args.runs], args.base, best)
    return {**result, "environment": environment()}


def at_other_costs(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Measure what the chart shows of the base model between its cheapest and best settings."""
    found = {}
    for name, options in COSTS.items():
        setting = Setting(
            target=str(args.base),
            prompts=args.test,
            per_task=args.per_task,
            seed=args.seed,
            reward=args.reward,
            **options,
        )
        measured = bench.measure(f"base-{name.replace(', ', '-')}", setting)
        whole = crossed_shares([measured])
        found[name] = {"mean": whole["mean"], "interval": whole["interval"]}
        found[name]["cost_per_image"] = {"network_calls": measured["network_calls"]}
    return found


def combinations(found: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the share of right images of each task, apart for scenes whose combination of shapes,
    colours or counts was trained on, and for those that were held out."""
    measured, out = rates(found), dict[str, dict[str, float]]()
    each = list(zip(measured.tags, measured.held_out, measured.values.mean(0), strict=True))
    for name, wanted in (("trained", False), ("held_out", True)):
        rows: dict[str, list[float]] = {}
        for task, held_out, value in each:
            if held_out == wanted:
                rows.setdefault(task, []).append(float(value))
        out[name] = {task: sum(some) / len(some) for task, some in rows.items()}
    return out


def search(
    bench: Bench, name: str, target: str, guidances: list[float], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Try every guidance and number of steps on the validation prompts -> a row each."""
    rows = []
    for guidance in guidances:
        for steps in args.step_counts:
            setting = Setting(
                target=str(target),
                prompts=args.validation,
                guidance=guidance,
                steps=steps,
                per_task=args.search_per_task,
                seed=args.search_seed,
            )
            found = bench.measure(f"search-{name}-g{guidance:g}-s{steps}", setting)
            mean = crossed_shares([found])["mean"]
            rows.append({"guidance": guidance, "steps": steps, "validation": mean})
    return rows


def _best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the guidance and steps of the highest score; of equal ones the first."""
    best = max(rows, key=lambda row: row["validation"])
    return {"guidance": best["guidance"], "steps": best["steps"]}


def summary(result: dict[str, Any]) -> str:
    """Say the means and intervals in a line each."""
    lines = []
    for name, value in result.items():
        if isinstance(value, dict) and "interval" in value:
            low, high = value["interval"]
            span = "" if low is None else f" ({100 * low:.1f} to {100 * high:.1f})"
            lines.append(f"{name}: {100 * value['mean']:.1f} %{span}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
