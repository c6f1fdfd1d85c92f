"""Does what a method gains carry over: to a weaker base model, to one that predicts noise, to a
reward that is not the metric?

    python scripts/results/transfer.py                       # until all is there; Ctrl-C, go on
    python scripts/results/transfer.py --minutes 40 --only sdxl soft

Six configs of assets/results/methods.json, one of each family, are trained once more with the rates
that were chosen there, three seeds of 60,000 network evaluations each, and judged once, at their
ends, on the same prompts by the checker. What is known is kept in `assets/results/transfer.json`,
which is all that the next call needs to go on; `tables.py` writes the section of docs/results.md.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from figures import between, fixed, percent, wrapped
from methods import NFE, ROOT, SEEDS, alternative, command_line, read
from methods import SETTINGS as COMMON
from methods_table import GUIDED, by_config, cell, gains, untrained
from scipy import stats

from flowrl.api.calls import compare
from flowrl.config.load import Config, load_config
from flowrl.core.files import only, write_json
from flowrl.core.tables import markdown_table

FILE = ROOT / "assets" / "results" / "transfer.json"
PAGE = ROOT / "docs" / "results.md"
RUNS = ROOT / "runs" / "transfer"
CONFIGS = (
    "shapes/diffusion_nft",
    "shapes/diffusion_dpo",
    "shapes/flow_grpo_full",
    "shapes/mix_grpo",
    "shapes/branch_grpo",
    "shapes/ddpo",
)
"""What is trained: a forward process, pairs, policy gradients at all steps, in a window, in a tree,
and the oldest one."""

WEAKER = "data/shapes-sd3-weaker"
"""Made by scripts/assets/shapes_base/main.py with `--out` this folder, which has a copy of
assets/shapes-sd3/vae: stages `scenes --pairs 20000`, `text` and `flow --steps 3000`; an hour of one
core."""

BESIDE = (GUIDED, "best of 4")
"""What each base model does without training, beside the gains."""

READING = "attn2.to_q, attn2.to_k, attn2.to_v, attn2.to_out.0"
"""Of the U-Net the layers that read the prompt, as the configs train those of SD3."""

Result = dict[str, Any]


class Setting(NamedTuple):
    """Where a method is tried again: its title, what that is, and what it changes in every
    config."""

    title: str
    what: str
    changes: tuple[str, ...]


SETTINGS = {
    "sdxl": Setting(
        "small SDXL",
        "`assets/shapes-sdxl`, a U-Net that predicts noise",
        (
            "model={fn: sdxl, path: assets/shapes-sdxl, guidance: 1.0, dtype: float32, tune: full,"
            f" layers: [{READING}, add_embedding.linear_1, add_embedding.linear_2]}}",
        ),
    ),
    "weaker": Setting(
        "weaker",
        "the table's base model, trained a third as long",
        (f"model.path={WEAKER}",),
    ),
    "soft": Setting(
        "another reward",
        "trained on `soft_shapes`, the distance to the nearest right image, and judged by the"
        " checker like all others",
        (
            "rewards={soft: {fn: soft_shapes, form: gaussian, width: 0.01},"
            " strict: {fn: shapes, mode: strict, weight: 0}}",
        ),
    ),
}
"""Every setting, in the order in which it is trained."""


# ----------------------------------------------------------------------------------------- training


def train(some: Sequence[str], minutes: float) -> None:
    """Train and judge what the file has not, config by config, until the time is over."""
    end = time.monotonic() + 60 * minutes
    for name in some or SETTINGS:
        for config in CONFIGS:
            if time.monotonic() > end:
                return
            if config not in [entry["file"] for entry in kept().get(name, {}).get("configs", [])]:
                print(f"== {name}: {config}", flush=True)
                _compare(name, config)
        _untrained(name)


def kept() -> Result:
    """Read the file; nothing where nothing was trained yet."""
    return dict(json.loads(FILE.read_text(encoding="utf-8"))) if FILE.exists() else {}


def config_of(name: str, config: str) -> Config:
    """Return a config in a setting, with the rate that was chosen on the table's base model."""
    (rate,) = [entry["lr"] for entry in read()["configs"] if entry["file"] == config]
    changes = [*COMMON, *SETTINGS[name].changes, f"optimizer.lr={rate}"]
    return load_config(config, changes)


def _compare(name: str, config: str) -> None:
    """Train and judge the seeds of a config, and keep what the table is worked out from."""
    folder = RUNS / name
    made = config_of(name, config)
    more: Result = {"runs": folder, "out": folder / "result.json"}
    result = compare([made], seeds=SEEDS, nfe=NFE, seconds=0, points=1, **more)
    found = kept()
    there = found.setdefault(name, {"content": result["content"]})
    there["base"] = only(result["base"], ("tags", "scenes", "outcomes"))
    there["environments"] = result["environments"]
    (entry,) = [one for one in result["configs"] if one["name"] == made.name]
    row = {"name": made.name, "file": config, "lr": entry["lr"]}
    row["seeds"] = [run_kept(run) for run in entry["seeds"]]
    there.setdefault("configs", []).append(row)
    write_json(FILE, found)


def _untrained(name: str) -> None:
    """Judge what the setting's base model does without training, at more evaluations."""
    found = kept()
    there = found[name].setdefault("alternatives", {})
    for title in BESIDE:
        if title not in there:
            changes = [*COMMON, *SETTINGS[name].changes]
            there[title] = alternative(title, CONFIGS[0], changes)
            write_json(FILE, found)


def run_kept(run: Mapping[str, Any]) -> Result:
    """Return what a table is worked out from, of one run of a comparison."""
    made = only(run, ("seed", "failed", "iterations", "nfe", "seconds", "environment"))
    end = run["at"]["nfe"]
    made["at"] = {"nfe": end and only(end, ("iteration", "nfe", "outcomes"))}
    return made


# ---------------------------------------------------------------------------------------- the table


def complete(found: Mapping[str, Any]) -> list[str]:
    """Return the settings that have every config, and what stands beside them."""
    there = []
    for name in SETTINGS:
        one = found.get(name, {})
        beside = {*BESIDE} <= {*one.get("alternatives", ())}
        if beside and len(one.get("configs", ())) == len(CONFIGS):
            there.append(name)
    return there


def rows(found: Mapping[str, Any], name: str) -> dict[str, Result]:
    """Work out what each config gained in a setting."""
    return {row["config"]: row for row in gains(found[name])}


def order(first: Mapping[str, Result], second: Mapping[str, Result]) -> tuple[float, float, float]:
    """Return Spearman's rank correlation of two settings' gains over the configs that both have,
    and its 95 % interval over methods.

    The interval is Fisher's with the variance of Bonett and Wright (2000), (1 + r^2 / 2) / (n - 3).
    """
    both = [config for config in first if config in second]
    x = [first[config]["gain"] for config in both]
    y = [second[config]["gain"] for config in both]
    r = float(stats.spearmanr(x, y).statistic)
    if abs(r) >= 1:
        return r, r, r
    half = stats.norm.ppf(0.975) * math.sqrt((1 + r * r / 2) / (len(both) - 3))
    return r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)


def table(table_rows: Mapping[str, Result], found: Mapping[str, Any]) -> str:
    """Draw the gains of each config in each setting, in the order of the table."""
    names = complete(found)
    settings = {name: rows(found, name) for name in names}
    lines = [["config", "the table's base model", *(SETTINGS[name].title for name in names)]]
    for config in sorted(CONFIGS, key=lambda config: -table_rows[config]["gain"]):
        cells = [_cell(table_rows.get(config))]
        cells += [_cell(settings[name].get(config)) for name in names]
        lines.append([f"`{config}`", *cells])
    ranks = []
    for name in names:
        r, low, high = order(table_rows, settings[name])
        ranks.append(f"{fixed(r, 2)} ({fixed(low, 2)} to {fixed(high, 2)})")
    return markdown_table([*lines, ["rank correlation with the table", "", *ranks]])


def _cell(row: Result | None) -> str:
    """Write a gain with its interval."""
    return "broke" if row is None else cell(row)


INTRODUCTION = """## Does it carry over?

Six configs, one of each family, with the rates that were chosen for the table above, on the same
test prompts: three seeds of 60,000 network evaluations each. A star: above 0 after Holm's
correction over the column. The last row is Spearman's rank correlation with the table's gains, with
its 95 % interval over methods."""


def page(text: str) -> str:
    """Write the section of docs/results.md; nothing where no setting is complete."""
    found = kept()
    parts = []
    if complete(found):
        settings = []
        for name in complete(found):
            title, what, _ = SETTINGS[name]
            settings.append(wrapped(f"- *{title}*: {what}; {before(found[name])}", "  "))
        parts = [INTRODUCTION, "\n".join(settings), table(by_config(), found)]
    return between(text, "transfer: table", "transfer: end", parts)


def before(one: Result) -> str:
    """Say what a setting's base model does without training."""
    first, *others = untrained(one)
    said = [f"{percent(first['right'])} right before training"]
    for row in others:
        said.append(f"{percent(row['right'])} with {row['title']} ({row['nfe_per_image']} NFE)")
    return ", ".join(said)


def targets() -> list[tuple[Path, Any]]:
    """Return the page that this file fills."""
    return [(PAGE, page)]


def main() -> None:
    """Train what is missing."""
    args = command_line(__doc__, *SETTINGS).parse_args()
    train(args.only, args.minutes)


if __name__ == "__main__":
    main()
