"""Say what a config would do, before any weight is read: its numbers, its cost, its prompts and its
memory."""

from __future__ import annotations

from flowrl.config.load import Config
from flowrl.core.prompt_files import on_hub
from flowrl.core.prompts import prompts_if_there
from flowrl.cost.estimate import Estimate, estimate
from flowrl.cost.missing_files import Absent, absent_files
from flowrl.cost.report import calls, memory
from flowrl.evaluation.sources import check_sources
from flowrl.training.setup import told_overlap


def dry_run(config: Config) -> str:
    """Check a config and return its plan in plain English.

    Prompt files are read where they exist, and the images that their prompts start from are looked
    at; rewards and model are bound to their arguments, not made. The last lines name what is not
    here and no run downloads. Raises ConfigError for a plan that cannot be and for start weights
    that nothing would bring, DataError for a broken prompt file or such an image that is missing,
    broken, not RGB or of another shape, ModelError for a model folder that does not fit.
    """
    absent = absent_files(config)
    found, t = estimate(config), config.train
    counted = f", {found.weights.trained:,} trained numbers" if found.weights else ""
    rewards = ", ".join(f"{name} x {weight:g}" for name, weight in config.reward_weights.items())
    prompts, missing = _prompts(config)
    missing += [each for each in absent if not each.downloaded]
    lines = [
        f"{t.iterations} iterations{counted}, lr {config.lr:g}, seed {config.seed}",
        *found.forecast.work.lines(),
        *_selected(found),
        *calls(found),
        *prompts,
        f"rewards    {rewards} (not loaded)",
        *(each.line for each in absent),
        *memory(found),
        *(f"missing    {each.said}" for each in missing),
    ]
    return "\n".join(lines)


def _selected(found: Estimate) -> list[str]:
    forecast = found.forecast
    chosen = f"{forecast.decisions:,} of {forecast.work.decisions:,} decisions are trained"
    return [f"select     {chosen}, from {forecast.states:,} states"] if found.config.select else []


def prompt_lines(config: Config) -> list[str]:
    """Say how many prompts there are, and which files have to be put there. Raises DataError for an
    image that a prompt starts from, as `check_sources` does."""
    return _prompts(config)[0]


def _prompts(config: Config) -> tuple[list[str], list[Absent]]:
    """Return the lines of `prompt_lines`, and the files that are not here."""
    train, test = (prompts_if_there(p) for p in (config.prompts.train, config.prompts.test))
    trained = (config.image.height, config.image.width)
    for listed, sides in ((train, trained), (test, config.eval_size)):
        if listed is not None:
            check_sources(listed, sides)
    # both lists in one line, and a line for each that is not here
    there = [
        f"{len(train)} to train on ({train.path})" if train else "",
        f"{len(test)} held out ({test.path}), {config.eval.images} images each to judge"
        if test
        else "",
    ]
    lines = ["prompts    " + ", ".join(text for text in there if text)] if train or test else []
    if train is not None and len(train) < config.train.prompts:
        lines.append(
            f"prompts    train.prompts={config.train.prompts} of {len(train)}: an iteration takes "
            "some of them more than once"
        )
    said = told_overlap(train, test) if train and test else ""
    lines += [f"prompts    {said}"] if said else []
    absent = {
        "train": None if train else config.prompts.train,
        "test": None if test else config.prompts.test,
    }
    found = [_absent(path, key) for key, path in absent.items() if path]
    missing = [each for each in found if not each.downloaded]
    return [*lines, *(each.line for each in found)], missing


def _absent(path: str, key: str) -> Absent:
    if on_hub(path):
        return Absent("prompts", f"{path} is read from the hub when the run starts", True)
    mend = f"put your own file there, or set prompts.{key}"
    return Absent("prompts", f"{path} is not here: {mend}")
