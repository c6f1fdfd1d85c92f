"""A run from Python: what became of it, its model, and what is done with them."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from torch import Tensor

from flowrl.api.arguments import (
    PromptsLike,
    RewardsLike,
    Sections,
    config_of,
    named_functions,
)
from flowrl.api.given import ModelLike, with_model
from flowrl.config.calls import PYTHON, as_handed
from flowrl.config.load import Config, folder_of, load_config
from flowrl.config.values import show
from flowrl.core.errors import ConfigError, ModelError, RunError, unknown
from flowrl.core.files import write_text
from flowrl.core.part import Part
from flowrl.core.pixels import to_bytes
from flowrl.core.types import FlowModel
from flowrl.models.files.lora_read import LORA_FILE
from flowrl.runs.evaluate import evaluate, given_sources, sample_all
from flowrl.runs.export.export import HasPipeline, export
from flowrl.runs.folder import CONFIG, EVALS, EXPORT, REPORT, SUMMARY, read_object, read_rows
from flowrl.runs.gain import Gain, base_is_best, run_gain, score_of
from flowrl.runs.kept_inputs import moved_along
from flowrl.runs.open_run import (
    OpenedRun,
    Which,
    best_checkpoint,
    load_run,
)
from flowrl.runs.report.page import html_report
from flowrl.runs.train import train

SUFFIX = ".safetensors"  # of one file with what was trained


class Best(NamedTuple):
    """The best checkpoint by the score on the test prompts."""

    iteration: int
    score: float
    folder: Path
    base_is_best: bool  # the model from before training is as good, or better


class TrainedRun:
    """A run folder: its config, what became of it, its model.

    `model` and `pipeline` have the weights of the best checkpoint unless `open` was asked for
    others. They are read when they are first used, and kept.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        *,
        weights: str | None = None,
        iteration: Which = None,
    ) -> None:
        """weights: ema, current or base (as before training); iteration: a number, "best" or
        "last"."""
        self.folder, self.config = folder, config
        self.weights, self.iteration = weights, iteration

    @classmethod
    def after(cls, folder: Path, config: Config) -> TrainedRun:
        """Return the run that was just trained, with the objects that the program handed over."""
        saved = load_config(folder / CONFIG, (), config.plugins, need_rewards=False)
        kept = {}
        for name, call in saved.rewards.items():
            given = config.rewards.get(name)
            same = given is not None and given.path == call.path == PYTHON
            kept[name] = replace(call, function=given.function) if same and given else call
        model = replace(saved.model, function=config.model.function)
        return cls(folder, replace(moved_along(saved, folder), rewards=kept, model=model))

    def __repr__(self) -> str:
        """Say where it is and what became of it."""
        gain = self.gain
        what = gain.sentence if gain else f"{len(read_rows(self.folder, EVALS))} evaluations so far"
        return f"TrainedRun({str(self.folder)!r}: {what})"

    @property
    def summary(self) -> dict[str, Any]:
        """Return ``summary.json`` (docs/run-folder.md); {} before the run has come to its end."""
        return read_object(self.folder, SUMMARY)

    @property
    def gain(self) -> Gain | None:
        """Return the change on the test prompts with its 95 % interval; None before there are two
        evaluations."""
        return run_gain(self.folder)

    @property
    def best(self) -> Best | None:
        """Return the best checkpoint; None where none was judged."""
        found = best_checkpoint(self.folder)
        for row in read_rows(self.folder, EVALS) if found else ():
            score = score_of(row)
            if found and row["iteration"] == int(found.name) and score is not None:
                return Best(row["iteration"], score, found, bool(base_is_best(self.folder)))
        return None

    @property
    def model(self) -> FlowModel:
        """Return the model with the trained weights."""
        return self._opened.model

    @property
    def pipeline(self) -> Any:
        """Return a plain pipeline of diffusers with the trained weights. Raises ModelError for a
        model that is none."""
        model = self.model
        if not isinstance(model, HasPipeline):
            raise ModelError(
                f"{self.folder}: a {type(model).__name__} is around no pipeline of diffusers; "
                "sample() draws its images"
            )
        return model.pipeline()

    def evaluate(
        self,
        prompts: PromptsLike | None = None,
        *,
        rewards: RewardsLike | None = None,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        **sections: Unpack[Sections],
    ) -> dict[str, Any]:
        """Judge the trained model on `prompts`, or else on the run's test prompts -> the report, a
        line as of ``eval.jsonl``. `rewards` take the place of the run's; sections are those of a
        config: ``eval={"images": 4}``."""
        chosen = config_of(
            self.config,
            test_prompts=prompts,
            rewards=rewards,
            overrides=overrides,
            **sections,
        )
        opened = self._opened
        return evaluate(opened.model, chosen, base=opened.base)

    def sample(
        self,
        prompts: str | Sequence[str],
        images: int = 1,
        *,
        source: Sequence[str | os.PathLike[str]] = (),
        seed: int | None = None,
        steps: int | None = None,
    ) -> list[Any]:
        """Draw `images` images of each prompt as evaluations do -> PIL images, prompt after prompt;
        a video is a list of them.

        `source` are the files that a model of edits starts from; seed and steps are those of the
        run's `eval` section unless given.
        """
        texts = [prompts] if isinstance(prompts, str) else [*prompts]
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ConfigError(f"prompts: expected a text or texts to draw, got {show(prompts)}")
        c = self.config if steps is None else self.config.replace(eval={"steps": steps})
        opened = self._opened
        starts = given_sources(opened.model, c, texts, [os.fspath(file) for file in source])
        drawn = sample_all(
            opened.model,
            c,
            texts,
            seed=c.eval.seed if seed is None else seed,
            images=images,
            base=opened.base,
            sources=starts,
        )
        return [_picture(one) for one in drawn]

    def report(self) -> Path:
        """Write the run as one HTML page -> its file."""
        file = self.folder / REPORT
        write_text(file, html_report(self.folder))
        return file

    def export(
        self,
        out: str | os.PathLike[str] | None = None,
        *,
        formats: Sequence[str] = (),
        dtype: str = "auto",
        base_model: str = "",
    ) -> list[Path]:
        """Write the trained weights for other programs -> the files.

        `out` is a new folder, by default ``export`` in the run, for the `formats` lora, peft, kohya
        and merged, with a model card; or a file that ends in .safetensors, for the LoRA alone, as
        ``load_lora_weights`` of the pipeline reads it. `base_model` is the hub id of a base model
        that was in a folder. Where no checkpoint is above the base model, that is said on stderr.
        """
        target = self.folder / EXPORT if out is None else folder_of(out, "out")
        if nothing := base_is_best(self.folder):
            print(nothing, file=sys.stderr)
        if target.suffix == SUFFIX:
            return [self._write_file(target, formats, dtype, base_model)]
        if target.suffix in (".ckpt", ".pt", ".pth", ".bin"):
            raise ConfigError(
                f"out: weights are written as {SUFFIX}, which can hold no code; got {target}"
            )
        return self._write(target, formats, dtype, base_model)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        formats: Sequence[str] = (),
        private: bool = True,
        base_model: str = "",
        token: str | None = None,
    ) -> str:
        """Export the run and upload it with its card to the Hugging Face hub -> the address. The
        repository is made where it is not there. Raises RunError where the hub refuses."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / repo_id.rpartition("/")[2]
            self.export(folder, formats=formats, base_model=base_model)
            try:
                api.create_repo(repo_id, private=private, exist_ok=True)
                api.upload_folder(repo_id=repo_id, folder_path=folder)
            except (HfHubHTTPError, HFValidationError, OSError) as error:
                raise RunError(
                    f"{repo_id}: the hub refused it: {str(error).strip().splitlines()[0]}; log in "
                    "with `hf auth login`, or give a token that may write"
                ) from error
        return f"{api.endpoint}/{repo_id}"

    def resume(
        self,
        *,
        callbacks: Sequence[Part] = (),
        track: Sequence[str] = (),
        quiet: bool = False,
        **sections: Unpack[Sections],
    ) -> TrainedRun:
        """Go on with training from the newest checkpoint -> the run as it is then. How long it
        trains and when it looks at itself may change: ``train={"iterations": 40}``."""
        chosen = self.config.replace(**sections)
        train(chosen, self.folder, resume="changed", quiet=quiet, track=track, callbacks=callbacks)
        return TrainedRun.after(self.folder, chosen)

    @cached_property
    def _opened(self) -> OpenedRun:
        return load_run(
            self.folder, weights=self.weights, iteration=self.iteration, config=self.config
        )

    def _write(
        self, folder: Path, formats: Sequence[str], dtype: str, base_model: str
    ) -> list[Path]:
        # weights "base" are no trained weights, which export refuses
        names = export(
            self.folder,
            folder,
            formats=formats,
            weights=self.weights,
            iteration=self.iteration,
            dtype=dtype,
            base_model=base_model,
            config=self.config,
        )
        return [folder / name for name in names]

    def _write_file(self, file: Path, formats: Sequence[str], dtype: str, base_model: str) -> Path:
        """Write the LoRA as one file. Raises ConfigError where one file does not hold it."""
        if formats and tuple(formats) != ("lora",):
            raise ConfigError(f"out: {file} is one file, of the format lora; name a folder instead")
        if file.exists():
            raise RunError(f"{file} is there already: name another file, or delete it")
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "export"
            found = self._write(folder, formats, dtype, base_model)
            files = [one for one in found if one.suffix == SUFFIX]
            if [one.name for one in files] != [LORA_FILE]:
                raise ConfigError(
                    f"out: what was trained does not go into one LoRA file ({len(files)} files of "
                    "weights); name a folder instead of a file"
                )
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(files[0], file)
        return file


def open(  # noqa: A001 - as flowrl.open
    folder: str | os.PathLike[str],
    *,
    model: ModelLike | None = None,
    rewards: RewardsLike | None = None,
    plugins: Sequence[str] = (),
    weights: str | None = None,
    iteration: Which = None,
) -> TrainedRun:
    """Open a run folder.

    `rewards` and `model` are the Python objects that the run was trained with, where it was: they
    are needed to judge and to go on. `weights` is ema, current or base (as before training), by
    default what the run's evaluations take; `iteration` is a number, "best" or "last", by default
    the best. Raises RunError for what is no run.
    """
    place = folder_of(folder, "folder")
    if not (place / CONFIG).is_file():
        raise RunError(f"{place}: expected a run folder with {CONFIG} in it")
    plugins = [plugins] if isinstance(plugins, str) else plugins
    config = load_config(place / CONFIG, (), plugins, need_rewards=False)
    if rewards is not None:
        config = _with_functions(config, rewards)
    if model is not None:
        config = with_model(config, model)
    return TrainedRun(place, moved_along(config, place), weights=weights, iteration=iteration)


def _with_functions(config: Config, rewards: Any) -> Config:
    """Return a run's config with the functions of its rewards. Raises ConfigError for one that the
    run does not have."""
    calls = dict(config.rewards)
    for name, reward in named_functions(rewards).items():
        if name not in calls:
            raise ConfigError(f"rewards: the run {unknown(name, calls, 'reward')}")
        if not callable(reward):
            raise ConfigError(f"rewards.{name}: expected a function, got {show(reward)}")
        calls[name] = as_handed(f"rewards.{name}", reward, calls[name])
    return replace(config, rewards=calls)


def _picture(image: Tensor) -> Any:
    """Make a PIL image of [3, H, W] in [0, 1], and a list of them of a video [T, 3, H, W]."""
    from PIL import Image

    if image.ndim == 4:
        return [_picture(frame) for frame in image]
    return Image.fromarray(to_bytes(image).permute(1, 2, 0).numpy())
