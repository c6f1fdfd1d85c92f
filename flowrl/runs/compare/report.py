"""Compare configs in one call, and set the result as tables, figures and a page of samples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from flowrl.core.errors import ConfigError
from flowrl.core.files import write_json, write_text
from flowrl.evaluation.image_grids import labelled_grid, save_png
from flowrl.runs.compare.budgets import RESULT, Budgets
from flowrl.runs.compare.compare import Comparison, Search, run_comparison
from flowrl.runs.compare.one_run import STRIP, drawn_prompts, read_samples
from flowrl.runs.compare.result_file import read_result
from flowrl.runs.compare.summary import Result, judged_at, labels, summarize_result
from flowrl.runs.compare.tables import markdown
from flowrl.runs.folder import read_object


def compare(
    configs: Sequence[str],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    nfe: float = 60_000,
    seconds: float = 90,
    clock: Literal["wall", "processor"] = "wall",
    count: Literal["cost", "calls"] = "cost",
    points: int = 2,
    lr_search: Sequence[float] = (),
    search_seed: int = 100,
    search_share: float = 0.5,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    runs: str | Path = "runs/compare",
    out: str | Path = "runs/compare/result.json",
    processes: int = 1,
    quiet: bool = False,
) -> Result:
    """Train configs x seeds on equal budgets -> the result with its statistics, also in `out`.

    Each run ends when it has used up `nfe` network evaluations per latent and `seconds` of
    training; with 0 seconds time does not count. `clock` ``processor`` counts the seconds that a
    processor worked for the run. `count` ``cost`` adds decoding and rewards to `nfe` at what they
    are measured to cost, and training at what it costs; ``calls`` counts a trained state as three.
    `points` is the number of held-out evaluations of a run. With `lr_search` each config first
    tries its own learning rate times these factors, with `search_seed`, for `search_share` of `nfe`
    each. With `processes` so many runs train at the same time, shared out to the GPUs that are
    there; that needs `seconds` 0 and `count` ``calls``, and a script whose own work stands below
    ``if __name__ == "__main__"``. The call goes on after a stop, and adds to what is there. Raises
    as `run_comparison` does.
    """
    if not configs:
        raise ConfigError(
            "compare: expected configs, or --report-only; `flowrl configs` lists the shipped ones"
        )
    # the arguments as the records that the comparison is run and resumed by
    search = Search(tuple(lr_search), search_seed, search_share) if lr_search else None
    what = Comparison(
        configs=tuple(configs),
        seeds=tuple(seeds),
        budgets=Budgets(nfe, seconds, points, clock, count),
        runs=Path(runs),
        out=Path(out),
        search=search,
        overrides=tuple(overrides),
        plugins=tuple(plugins),
        processes=processes,
    )
    return run_comparison(what, quiet=quiet)


def saved_result(out: Path) -> Result:
    """Read a result file and work out its statistics again -> the result, also written back: what
    a file says of its runs is what this version says. Raises DataError, RunError."""
    result = summarize_result(read_result(out))
    write_json(out, result)
    return result


def write_comparison(result: Result, out: Path, figures: Path, runs: Path) -> list[Path]:
    """Write tables and figures, and the sample grid where the runs are at hand -> the files. Raises
    RunError."""
    files = _draw(result, figures, out.stem)
    grid = sample_grid(result, runs)
    if grid is not None:
        files.append(figures / f"{out.stem}-samples.png")
        save_png(grid, files[-1])
    beside = [Path(os.path.relpath(file, out.parent)).as_posix() for file in files]
    table = out.with_suffix(".md")
    write_text(table, markdown(result, beside))
    return [table, *files]


def _draw(result: Result, folder: Path, stem: str) -> list[Path]:
    """Draw the figures into a folder -> the files."""
    from flowrl.runs.compare.figures import accuracy_figure, gains_figure, training_figure
    from flowrl.runs.report.style import save_figure

    drawn = {
        "gains": gains_figure(result),
        **{budget: accuracy_figure(result, budget) for budget in judged_at(result)},
        "training": training_figure(result),
    }
    files = [folder / f"{stem}-{name}.png" for name in drawn]
    for file, figure in zip(files, drawn.values(), strict=True):
        save_figure(figure, file, dpi=130)
    return files


def sample_grid(result: Result, runs: Path) -> Any:
    """Draw the base model's images and those of each config's first seed, from the same noise, in
    green and red frames where a checker judged; None without runs."""
    # the folder may be gone, or be of another comparison
    base = runs / "base"
    if not (base / STRIP).exists():
        return None
    if read_object(base, RESULT).get("base") != result["base"]:
        return None
    # one column each
    prompts = drawn_prompts(base)
    folders = {"base model": base}
    short = labels([config["name"] for config in result["configs"]])
    for config in result["configs"]:
        places = [runs / config["name"] / f"seed{run['seed']}" for run in config["seeds"]]
        found = [folder for folder in places if (folder / STRIP).exists()]
        if found:
            folders[short[config["name"]].replace("-", " ")] = found[0]
    columns, right = {}, {}
    for name, folder in folders.items():
        columns[name], right[name] = read_samples(folder)
    return labelled_grid(columns, prompts, right=right)
