"""Run a suite on a model: draw images into a folder, score them, compare with another folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flowrl.config.load import Config, check_eval_count, check_eval_size
from flowrl.core.errors import ConfigError, RunError
from flowrl.core.processes import World
from flowrl.core.prompts import PromptSet, check_records, load_prompts, prompts_hash
from flowrl.core.types import FlowModel, Reward, RewardBatch
from flowrl.core.version import __version__
from flowrl.evaluation.held_out import chooser, sampled_images
from flowrl.evaluation.reward_call import ask, frames_of, probe_rewards, rewards_of
from flowrl.evaluation.sources import check_sources, check_starts, sources_of
from flowrl.evaluation.suites import image_folder as folder
from flowrl.runs.evaluate import guidance_of, sampling
from flowrl.runs.suite_report import add_tables, compared, leaks_of, make_report, write_suite_report
from flowrl.training.process_checks import context_of
from flowrl.training.weights import Weights

Progress = Callable[[int, int], None] | None


def run_suite(
    model: FlowModel,
    config: Config,
    suite: str,
    out: Path,
    *,
    target: str,
    base: Weights | None = None,
    against: Path | None = None,
    progress: Progress = None,
    world: World | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Draw and score what a suite asks for, as the config's `eval` section says, into `out`.

    The initial noise of a prompt depends on `eval.seed` and its place alone, so every target draws
    from the same. What is in the folder already is kept. `against`: a folder of the same suite and
    setting, as the base model's; then the report has the paired difference to it. In a `world` of
    several processes each takes its share. `more`: what else belongs to the setting, as a LoRA's
    scale.

    Returns the report that `summary.json` holds. Raises RunError for a folder of another setting,
    and what rewards and prompts raise.
    """
    world = world or World()
    if not world.alone and context_of(config) > 1:
        raise ConfigError(
            "model.runtime.context_parallel: here each process draws its own prompts; add --set "
            "model.runtime.context_parallel=1"
        )
    # all that can fail before the first image
    prompts, rewards = _checked(model, config)
    setting = {**setting_of(model, config, suite, target, prompts), **(more or {})}
    other = _other(against, setting) if against is not None else None
    if world.main:
        folder.prepare(out, setting, prompts)
    world.gather(0)  # the others wait until the folder is there
    # images, then scores; the first process says what is left, since the others write meanwhile
    count, images = len(prompts), _images_per_prompt(config)
    missing = world.gather(folder.unfinished(out, count, images))[0]
    mine = [missing[place] for place in world.share(len(missing))]
    world.together(lambda: _draw(model, config, prompts, out, base, progress, mine))
    left = world.gather(_unscored(out, count, images))[0]
    rows = [left[place] for place in world.share(len(left))]
    world.together(lambda: _score(config, prompts, rewards, out, rows, world.rank))
    world.gather(0)
    # the report
    report = make_report(config, prompts, out, setting)
    add_tables(report, config, prompts, out, rewards)
    leaks = leaks_of(config, prompts)
    if leaks:
        report["leaks"] = leaks
    if other is not None and against is not None:
        report["against"] = compared(config, prompts, out, against, other)
    if world.main:
        write_suite_report(out, rewards, report)
    return report


def _checked(model: FlowModel, config: Config) -> tuple[PromptSet, dict[str, Reward]]:
    """Load prompts and rewards, and raise what model, prompts and rewards cannot do together."""
    prompts = load_prompts(config.prompts.test)
    rewards = rewards_of(config.rewards, frames_of(config, model))
    check_records(prompts, rewards)
    check_sources(prompts, config.eval_size)
    check_eval_count(config, len(prompts))
    check_eval_size(model, config)
    check_starts(model, prompts)
    probe_rewards(rewards)
    chooser(config.eval.best_by, config.headline, rewards)
    return prompts, rewards


def _images_per_prompt(config: Config) -> int:
    """Return how many images are drawn of each prompt."""
    return config.eval.images * config.eval.best_of


def setting_of(
    model: FlowModel, config: Config, suite: str, target: str, prompts: PromptSet
) -> dict[str, Any]:
    """Return all that a score depends on: two scores are comparable where all but the target is
    equal."""
    # the best of several images is another score
    best = {}
    if config.eval.best_of > 1:
        best = {"best_of": config.eval.best_of, "best_by": config.eval.best_by or config.headline}
    # what is drawn (prompts, noise, steps, guidance, size) and what judges it
    return {
        "suite": suite,
        "target": target,
        "prompts": prompts.path,
        "prompts_hash": prompts_hash(prompts),
        "count": len(prompts),
        "images": config.eval.images,
        "seed": config.eval.seed,
        "steps": config.eval.steps,
        **guidance_of(model, config),
        "height": config.eval_size[0],
        "width": config.eval_size[1],
        "tuned": config.eval.tuned,
        **best,
        "rewards": {name: call.to_dict() for name, call in config.rewards.items()},
        "batch": config.eval.batch,
        "flowrl": __version__,
    }


def _other(against: Path, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting of the folder that is compared with. Raises RunError if it is another."""
    known = folder.read_setting(against)
    wrong = folder.named_differences(known, setting)
    if wrong:
        raise RunError(
            f"--against {against}: its images and these are not comparable: {'; '.join(wrong)}"
        )
    return known


def _draw(
    model: FlowModel,
    config: Config,
    prompts: PromptSet,
    out: Path,
    base: Weights | None,
    progress: Progress,
    mine: Sequence[int],
) -> None:
    """Draw all images of some prompts."""
    if not mine:
        return
    size = config.eval_size
    options = {**sampling(config, base), "sources": partial(sources_of, prompts, size=size)}
    options["images"] = _images_per_prompt(config)
    for index, pixels in sampled_images(
        model, prompts.texts, progress=progress, places=mine, **options
    ):
        folder.save_images(out, index, pixels, _images_per_prompt(config))


def _unscored(out: Path, prompts: int, images: int) -> list[int]:
    """Return the prompts of which an image has no line."""
    known = folder.read_lines(out)
    missing = []
    for prompt in range(prompts):
        if any((prompt, image) not in known for image in range(images)):
            missing.append(prompt)
    return missing


def _score(
    config: Config,
    prompts: PromptSet,
    rewards: Mapping[str, Any],
    out: Path,
    mine: Sequence[int],
    rank: int,
) -> None:
    """Score all images of some prompts, a few prompts at a time."""
    file, images = folder.score_file(out, rank), _images_per_prompt(config)
    folder.mend(file)
    share = max(1, config.eval.batch // images)
    for start in range(0, len(mine), share):
        rows = mine[start : start + share]
        folder.append_scores(file, _lines(prompts, rewards, out, rows, images))


def _lines(
    prompts: PromptSet, rewards: Mapping[str, Any], out: Path, rows: Sequence[int], images: int
) -> list[dict[str, Any]]:
    """Score all images of some prompts -> a line each."""
    # the batch that rewards see
    pixels = torch.cat([folder.load_images(out, row, images) for row in rows])
    index = [row for row in rows for _ in range(images)]
    records = [prompts.records[row] for row in index]
    texts, group = [prompts.texts[row] for row in index], torch.tensor(index)
    size = (pixels.shape[-2], pixels.shape[-1])
    sources = sources_of(prompts, index, size)
    batch = RewardBatch(pixels, texts, group, records, torch.zeros(len(index)), sources)
    lines: list[dict[str, Any]] = []
    for place, row in enumerate(index):
        image = place % images
        file = folder.image_path(out, row, image).relative_to(out).as_posix()
        lines.append({"file": file, "prompt": row, "image": image, "scores": {}})
    # a number each, and what a reward says of it in words
    for name, reward in rewards.items():
        details: list[dict[str, Any]] = []
        values = ask(name, _listening(reward, details), batch, "suite")
        for place, value in enumerate(values.tolist()):
            lines[place]["scores"][name] = value if value == value else None
            if details:
                lines[place].setdefault("details", {})[name] = details[place]
    return lines


def _listening(reward: Any, details: list[dict[str, Any]]) -> Any:
    """Return a reward that also keeps the line of each image, where it can explain itself."""
    if not hasattr(reward, "explain"):
        return reward

    def explained(batch: RewardBatch) -> Any:
        values, rows = reward.explain(batch)
        details.extend(rows)
        return values

    return explained
