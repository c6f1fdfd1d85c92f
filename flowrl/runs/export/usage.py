"""Code that draws an image with an exported model as the run's evaluations did, and what is told
of such a model."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from flowrl.config.calls import PYTHON
from flowrl.config.load import Config
from flowrl.core.errors import RunError
from flowrl.cost.architecture import facts_of, references
from flowrl.models.by_call.options import EULER, CallFacts, rewriters
from flowrl.models.files.lora_read import LORA_FILE, SECOND_LORA_FILE
from flowrl.models.options import Facts
from flowrl.runs.folder import SAMPLES, SOURCES, read_prompts

FPS = 8  # of the film that the code writes
READERS = {
    "lora": "LoRA for diffusers: `load_lora_weights`; rank and alpha are in its metadata",
    "peft": "LoRA for peft: `PeftModel.from_pretrained`",
    "kohya": "LoRA for ComfyUI, kohya's sd-scripts and musubi-tuner; alpha is beside each layer",
    "merged": "the whole pipeline, the training merged in: `from_pretrained`; add no LoRA to it",
}


EMBEDS = "negative_prompt_embeds"
SAVED = 'image.save("image.png")'
TEMPLATES = Path(__file__).with_name("templates")


def template(name: str) -> jinja2.Template:
    """Return a template of a card. It is Markdown or code, not HTML: nothing is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=False,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)


def stated(config: Config) -> Facts:
    """Return what the adapter of a run's model states, or any pipeline that is asked by its own
    call."""
    return facts_of(config) or CallFacts()


def low_noise(kohya: str) -> str:
    """Return the name of the kohya file of a second expert, of that of the first."""
    return kohya.replace("-high-noise.", "-low-noise.")


class CardFacts(NamedTuple):
    """What a model card tells."""

    config: Config
    run: Path
    iteration: int
    weights: str  # ema or current
    folder: str  # name of the folder that the card is in
    formats: list[str]
    pipeline: Any
    network: str  # the trained part of the pipeline
    numbers: int  # trained
    lora: Mapping[str, Any]  # r, lora_alpha, target_modules; empty for full tuning
    base: str  # hub id, "" for a local folder
    kohya: str  # name of the kohya file
    dtype: str  # of the run's arithmetic, "auto" made concrete
    second: bool = False  # there is LoRA of another expert, too

    @property
    def starts(self) -> int:
        """Return how many images each prompt starts from."""
        return start_count(self.config, self.run)


def shown(value: Any) -> Any:
    """Return a value of a config with file names in place of paths of a machine, and without
    addresses."""
    if isinstance(value, Mapping):
        return {key: shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    if not isinstance(value, str):
        return value
    if "://" in value:
        return "(address left out)"
    if re.match(r"[/~\\]|\.\.|\w:[/\\]", value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return value


def usage(facts: CardFacts) -> str:
    """Return code that draws one image as the run's evaluations did, for the first of the
    formats."""
    if facts.formats[0] == "kohya" and not stated(facts.config).reads_kohya:
        return (
            f"In ComfyUI, load `{facts.kohya}` as a LoRA of strength 1. diffusers does not read "
            f"this file for {type(facts.pipeline).__name__}."
        )
    where = f"`{facts.folder}` is this folder, or its hub id."
    if not facts.base and facts.formats[0] != "merged":
        where += " The base model was a local folder: name yours, or its hub id."
    code = _code(facts)
    note = f"{start_note(facts.config, facts.starts)}{_caveat(facts)}"
    return f"{where}\n\n{fenced('python', code)}{note}"


def fenced(language: str, code: str) -> str:
    """Return a block of code that nothing in it can end."""
    fence = max(re.findall(r"`{3,}", code), key=len, default="``") + "`"
    return f"{fence}{language}\n{code.strip()}\n{fence}"


def files_of(facts: CardFacts) -> list[list[str]]:
    """Return the files of each format and what reads them, as rows of a table."""
    names = {
        "lora": f"`{LORA_FILE}`" + facts.second * f", `{SECOND_LORA_FILE}`",
        "peft": "`adapter_config.json`, `adapter_model.safetensors`",
        "kohya": f"`{facts.kohya}`" + facts.second * f", `{low_noise(facts.kohya)}`",
        "merged": "`model_index.json` and the folders",
    }
    return [[names[name], READERS[name]] for name in facts.formats]


def task_of(facts: CardFacts) -> str:
    """Return what a hub calls the model's task: "text-to-image", "image-to-video" and so on."""
    start, end = "text", "image"
    if facts.starts:
        start = "image"
    if _films(facts):
        end = "video"
    return f"{start}-to-{end}"


def _code(facts: CardFacts) -> str:
    """Return the code itself, from its template."""
    first, kind = facts.formats[0], type(facts.pipeline).__name__
    video, films = stated(facts.config).video, _films(facts)
    # what samples as the run did
    schedulers: list[tuple[str, str]] = []
    if _by_ddim(facts):
        spacing = facts.pipeline.scheduler.config.timestep_spacing
        how = f"clip_sample=False, timestep_spacing={_quoted(spacing)}"
        schedulers.append(("DDIMScheduler", how))
    if video:
        schedulers.append(_euler(facts.pipeline.scheduler))
    # the pipeline, the file of a LoRA in it, and that of a second network's
    base, file, second = facts.base or local(facts), LORA_FILE, ""
    if first == "merged":  # a whole pipeline
        base = facts.folder
    elif first == "kohya":
        file, second = facts.kohya, low_noise(facts.kohya)
    elif first == "lora":
        second = SECOND_LORA_FILE
    # what the call gives, and how it is saved
    made, taken, saved = "image", "images[0]", SAVED
    if films:
        made, taken, saved = "video", "frames[0]", f'export_to_gif(video, "video.gif", fps={FPS})'
    elif video:
        taken = "frames[0][0]"
    return template("usage.txt").render(
        classes=sorted({kind, *(name for name, _ in schedulers)}),
        tools=["export_to_gif"] * films + ["load_image"] * bool(facts.starts),
        first=first,
        kind=kind,
        source=[_quoted(base), *_options(facts)],
        network=facts.network,
        folder=_quoted(facts.folder),
        file=_quoted(file),
        second=_quoted(second) if facts.second and second else "",
        # of some classes of diffusers the network alone takes a LoRA
        reads=hasattr(facts.pipeline, "load_lora_weights"),
        schedulers=schedulers,
        negative=negative_lines(facts.config),
        call=_call(facts, video=video),
        made=made,
        taken=taken,
        saved=saved,
    )


def _call(facts: CardFacts, *, video: bool) -> list[str]:
    """Return the arguments of the pipeline's call, by name: the first one of some pipelines is the
    image."""
    call = [start_argument(facts.starts)] if facts.starts else []
    call += [f"prompt={_quoted(_prompt(facts))}", *call_arguments(facts.config)]
    call += _no_rewriting(facts)
    if video:
        call.append('output_type="pil"')
    return call


def _films(facts: CardFacts) -> bool:
    """Say whether the model makes videos, of several frames."""
    return bool(facts.config.model.kwargs.get("frames", 1) > 1)


def _by_ddim(facts: CardFacts) -> bool:
    """Say whether the run sampled by DDIM, as flowrl does whatever scheduler a pipeline that
    predicts noise has itself."""
    return type(facts.pipeline.scheduler).__name__ == "DDIMScheduler"


def _no_rewriting(facts: CardFacts) -> list[str]:
    """Return the arguments that keep a language model of a pipeline from writing prompts anew, as
    in the run."""
    if facts_of(facts.config) is not None:
        return []
    takes = inspect.signature(type(facts.pipeline).__call__).parameters
    return [f"{name}={value!r}" for name, value in rewriters(takes).items()]


def _euler(scheduler: Any) -> tuple[str, str]:
    """Return the class and arguments that give a pipeline of videos the run's shift, and Euler's
    steps, which runs take, in place of UniPC's of second order."""
    kind, given = type(scheduler).__name__, scheduler.config
    if kind == "UniPCMultistepScheduler":
        every = f"list(range({given.num_train_timesteps}))"
        how = f"flow_shift={given.flow_shift}, solver_order=1, disable_corrector={every}"
    else:
        how = f"shift={given.shift}"
    return kind, how


def _caveat(facts: CardFacts) -> str:
    kind = type(facts.pipeline.scheduler).__name__
    if facts_of(facts.config) is None and not _by_ddim(facts) and kind not in EULER:
        return (
            f"\n\nThe run took Euler's steps. The code above takes those of the pipeline's own "
            f"{kind}, so its images differ."
        )
    if facts.config.eval.tuned >= 1:
        return ""
    return (
        f"\n\nIn the run's evaluations and grids only the first {facts.config.eval.tuned:.0%} of "
        "the steps were taken with the trained weights, the rest with the base model's "
        "(`eval.tuned`). The code above takes all with the trained weights, so its images differ."
    )


def _options(facts: CardFacts) -> list[str]:
    """Return what `from_pretrained` has to be told besides the folder."""
    parts, dtype, options = facts.pipeline.components, f"torch.{facts.dtype}", list[str]()
    if stated(facts.config).video:  # parts that stay in float32
        wide = ""
        for name in ("vae", "image_encoder"):
            if parts.get(name):
                wide += f'"{name}": torch.float32, '
        dtype = f'{{{wide}"default": {dtype}}}'
    if facts.dtype != "float32":
        options.append(f"torch_dtype={dtype}")
    # parts that the run left out
    for name in ("text_encoder_3", "tokenizer_3"):
        if name in parts and parts[name] is None:
            options.append(f"{name}=None")
    return options


def _prompt(facts: CardFacts) -> str:
    """Return the first prompt of the grid, or any."""
    try:
        return read_prompts(facts.run)[0][0]
    except RunError:
        return "a red circle and a blue square"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def local(facts: CardFacts) -> str:
    """Return the base model's path as a card may show it."""
    path = str(facts.config.model.kwargs.get("path", PYTHON))
    if path == PYTHON:
        return "base-model"
    return str(shown(path))


def call_arguments(config: Config) -> list[str]:
    """Return what the pipeline is called with beside the prompt and its images, as code."""
    height, width = config.eval_size
    chosen: dict[str, Any] = {
        "height": height,
        "width": width,
        "num_inference_steps": config.eval.steps,
    }
    chosen |= stated(config).arguments(config.model.kwargs, height, width)
    found = [f"{name}={value!r}" for name, value in chosen.items()]
    return found + [f"{EMBEDS}=negative"] * bool(negative_lines(config))


def negative_lines(config: Config) -> list[str]:
    """Return the lines that encode a negative prompt for a pipeline that knows the empty one only,
    but takes the embeddings of any; [] where none are needed."""
    given = config.model.kwargs
    if not stated(config).negative_by_embeds or not given["negative_prompt"]:
        return []
    text = json.dumps(given["negative_prompt"], ensure_ascii=False)
    length = f"max_sequence_length={given['max_sequence_length']}"
    return [
        "with torch.no_grad():",
        f"    negative, _ = pipeline.encode_prompt({text}, {length})",
    ]


def start_count(config: Config, run: Path) -> int:
    """Return how many images each prompt of a run starts from; 0: they start from noise alone.

    The run's prompt list says it. Where that is not at hand any more, a run that started from
    images is known by the strip of them beside its samples, and one is assumed.
    """
    sources = stated(config).sources
    always = sources == "always" or bool(config.model.kwargs.get("sources"))
    if sources == "never" and not always:
        return 0
    assumed = always or (run / SAMPLES / SOURCES).is_file()
    return references(config.prompts.train) or int(assumed)


def start_files(count: int) -> list[str]:
    """Name the files that a card's code loads."""
    if count == 1:
        return ["source.png"]
    return [f"source-{n}.png" for n in range(1, count + 1)]


def start_argument(count: int) -> str:
    """Return the argument of the pipeline's call: one image, or a list of them."""
    loaded = ", ".join(f'load_image("{file}")' for file in start_files(count))
    if count == 1:
        return f"image={loaded}"
    return f"image=[{loaded}]"


def start_note(config: Config, count: int) -> str:
    """Say which images the code starts from, and how large they were in the run; "" for none."""
    if not count:
        return ""
    files, (height, width) = start_files(count), config.eval_size
    what = f"`{files[0]}` and so on are the images"
    if count == 1:
        what = f"`{files[0]}` is the image"
    elif count == 2:
        what = f"`{files[0]}` and `{files[1]}` are the images"
    note = f"{what} to start from; the run scaled its own to {width} x {height} pixels."
    return f"\n\n{note}{stated(config).source_note(config.model.kwargs)}"
