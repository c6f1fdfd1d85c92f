"""Measure what each adapter is worth beside its pipeline's own call, on its tiny pipeline: network
calls, and milliseconds, for a sampled and for a trained row.

    python scripts/bench/adapters.py            # all of them, three minutes of one core
    python scripts/bench/adapters.py wan flux2  # some, printed only

Writes assets/results/adapters.json, which docs/models.md sums up. Rows are four images of
two prompts, guided where the pipeline guides by two branches; a sampled step has one noise level,
a trained batch four. Times are processor time, the best of many rounds on one thread, so that what
else runs counts for little: of a tiny network nearly all of it is what stands around the network,
once per call of a real one, too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.core.abilities import conditioning
from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.core.tables import text_table
from flowrl.models.options import adapters
from flowrl.models.pipeline import own_call
from flowrl.models.tiny import save_tiny

RESULT = Path(__file__).resolve().parents[2] / "assets" / "results" / "adapters.json"
SIDE, STEPS, ROUNDS = 64, 4, 25
TEXTS = ["a red cube", "a red cube", "two green spheres", "two green spheres"]
# where an adapter has the option
SMALL = {"frames": 5, "source_pixels": SIDE**2, "seen_pixels": 96**2, "max_sequence_length": 64}
# tokens of a prompt whose source the language model reads, too, or whose network counts on 512
LONG = {"seen_pixels": 400, "guidance_2": 512}


def load(make: Any, folder: Path) -> Any:
    """Load a tiny pipeline by its adapter, to be trained in full, guided by two branches where an
    option makes them."""
    fields = make.options(str(folder)).__dataclass_fields__
    options = {name: value for name, value in SMALL.items() if name in fields}
    for name, tokens in LONG.items():
        if name in fields and make.facts.sources == "always":
            options["max_sequence_length"] = tokens
    model = make(str(folder), tune="full", device="cpu", **options)
    name, least = model.options.branches
    if name:
        model.options = model.options.guided_by(least + 2)
    return model


def measured(run: Callable[[], Any], networks: Any) -> tuple[int, float]:
    """Return the network calls of a run, and the milliseconds of processor time of the fastest of
    many, or of as many as fit into two seconds."""
    calls: list[Any] = []
    with ExitStack() as hooks:
        for network in networks:
            hooks.callback(network.register_forward_pre_hook(lambda *_: calls.append(1)).remove)
        run()
    took: list[float] = []
    while len(took) < ROUNDS and sum(took) < 2:
        began = time.process_time()
        run()
        took.append(time.process_time() - began)
    return len(calls), 1000 * min(took)


def sampled(model: Any, x: Tensor, level: Tensor, cond: Any) -> Callable[[], Any]:
    """Return a run of one step of four images."""

    def run() -> None:
        with torch.no_grad():
            model.velocity(x, level, cond)

    return run


def trained(model: Any, x: Tensor, levels: Tensor, cond: Any) -> Callable[[], Any]:
    """Return a run of one micro-batch of four rows at four levels, forward and backward."""

    def run() -> None:
        model.velocity(x, levels, cond).square().sum().backward()

    return run


def figures(make: Any, folder: Path) -> dict[str, Any]:
    """Measure one adapter and its pipeline's own call."""
    model = load(make, save_tiny(make.facts.tiny_for({"transformer": {}, "vae": {}}), folder))
    source = [(torch.full((3, SIDE, SIDE), 0.5),)] * len(TEXTS)
    sources = [] if make.facts.sources == "never" else source
    beside = own_call(model, SIDE, SIDE, sources=int(bool(sources)))
    # rows that start from images share no call, so the fence has nothing to find
    rows = "one" if sources else beside.pass_fence(STEPS, SIDE, SIDE).rows
    layout, grid = beside.layout(SIDE, SIDE), beside.grid(STEPS, SIDE, SIDE).sigmas
    levels = torch.tensor(grid[:STEPS])
    x = torch.randn(len(TEXTS), *model.latent_shape(SIDE, SIDE), generator=torch.manual_seed(0))
    found: dict[str, Any] = {"pipeline": beside.name, "shared": rows}
    for name, one, start in (("adapter", model, x), ("own", beside, layout.from_latents(x))):
        # where the pipeline makes more of a source, one row tells the calls, and no time
        count = 1 if one is beside and getattr(model, "unlike_pipeline", None) else len(x)
        cond = conditioning(one, TEXTS[:count], sources[:count])
        runs = {
            "sampled": sampled(one, start[:count], levels[1].expand(count), cond),
            "trained": trained(one, start[:count], levels[:count], cond),
        }
        for what, run in runs.items():
            calls, took = measured(run, beside.networks.values())
            shown = round(took / count, 2) if count == len(x) else None
            row = {"calls": calls * len(x) // count, "ms": shown}
            found[f"{name} {what}"] = row
    return found


def main() -> int:
    """Measure, print, and write the result file unless only some were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("adapters", nargs="*", metavar="ADAPTER")
    asked = parser.parse_args().adapters
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    every = {make.__name__: make for make in adapters().values()}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted(set(asked) or every):
            found[name] = figures(every[name], Path(folder) / name)
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    rows = [["adapter", *(key for key in next(iter(found.values())) if " " in key)]]
    for name, row in found.items():
        cells = [f"{v['calls']} calls, {v['ms']} ms" for k, v in row.items() if " " in k]
        rows.append([name, *cells])
    print(text_table(rows))
    if not asked:
        how = {"rows": len(TEXTS), "steps": STEPS, "side": SIDE}
        write_json(RESULT, {**how, "adapters": found, "environment": environment()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
