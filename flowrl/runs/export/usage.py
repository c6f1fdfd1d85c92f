"""Code that draws an image with an exported model as the run's evaluations did, and what is told
of such a model."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.config.handed import PYTHON
from flowrl.config.load import Config
from flowrl.core.errors import RunError
from flowrl.cost.architecture import references
from flowrl.models.by_call.options import EULER, rewriters
from flowrl.models.files.lora_read import LORA_FILE, SECOND_LORA_FILE
from flowrl.models.qwen_edit import WHOLE
from flowrl.models.qwen_edit_plus import SEEN
from flowrl.runs.folder import SAMPLES, SOURCES, read_prompts

FPS = 8  # of the film that the code writes
READERS = {
    "lora": "LoRA for diffusers: `load_lora_weights`; rank and alpha are in its metadata",
    "peft": "LoRA for peft: `PeftModel.from_pretrained`",
    "kohya": "LoRA for ComfyUI, kohya's sd-scripts and musubi-tuner; alpha is beside each layer",
    "merged": "the whole pipeline, the training merged in: `from_pretrained`; add no LoRA to it",
}


VIDEOS = ("wan", "wan_i2v")
BY_CALL = "pipeline"  # any pipeline by its own call
# flowrl's arguments of a model -> those of its pipeline's call; values that change nothing are left
# out
CALL = {
    "guidance": "guidance_scale",
    "true_cfg_scale": "true_cfg_scale",
    "negative_prompt": "negative_prompt",
    "guidance_rescale": "guidance_rescale",
    "cfg_normalization": "cfg_normalization",
    "max_sequence_length": "max_sequence_length",
    "original_size": "original_size",
    "crop": "crops_coords_top_left",
    "target_size": "target_size",
}
# the same of one adapter
QWEN_CALL = {"guidance": "true_cfg_scale"}
OWN_CALL = {
    "qwen_image": QWEN_CALL,
    # whose pipelines cut no prompt
    **dict.fromkeys(("qwen_edit", "qwen_edit_plus"), QWEN_CALL | {"max_sequence_length": ""}),
    **dict.fromkeys(VIDEOS, {"frames": "num_frames", "guidance_2": "guidance_scale_2"}),
    "flux2_klein": {"negative_prompt": ""},  # see `negative_lines`
    BY_CALL: {"frames": "num_frames"},
}
NEUTRAL: dict[str, Any] = {
    "true_cfg_scale": 1.0,
    "negative_prompt": "",
    "guidance_rescale": 0.0,
    "cfg_normalization": 0.0,
    "crop": (0, 0),
}
# the same of one adapter: without a negative prompt the pipeline leads away from zeros
OWN_NEUTRAL: dict[str, dict[str, Any]] = {
    "sdxl": {"negative_prompt": None},
    BY_CALL: {"negative_prompt": None, "frames": 1},
}
# whose pipelines guide only if there is a negative prompt, and be it an empty one
TRUE_CFG = ("flux", "flux_kontext", "qwen_image", "qwen_edit", "qwen_edit_plus")
EMBEDS = "negative_prompt_embeds"


# models whose images or videos always start from one, and those that take references if a prompt
# has them
EDITS = ("flux_kontext", "qwen_edit", "qwen_edit_plus", "wan_i2v")
REFERRING = ("flux2", "flux2_klein")


def low_noise(kohya: str) -> str:
    """Return the name of the kohya file of Wan 2.2's second expert, of that of the first."""
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
    second: bool = False  # there is LoRA of Wan 2.2's other expert, too

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
    is_path = re.match(r"[/~\\]|\.\.|\w:[/\\]", value)
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1] if is_path else value


def usage(facts: CardFacts) -> str:
    """Return code that draws one image as the run's evaluations did, for the first of the
    formats."""
    if facts.formats[0] == "kohya" and type(facts.pipeline).__name__ == "StableDiffusion3Pipeline":
        return (
            f"In ComfyUI, load `{facts.kohya}` as a LoRA of strength 1. diffusers does not read "
            "this file for SD3."
        )
    where = f"`{facts.folder}` is this folder, or its hub id."
    if not facts.base and facts.formats[0] != "merged":
        where += " The base model was a local folder: name yours, or its hub id."
    code = "\n".join([*_imports(facts), "", *_load(facts), *_draw(facts)])
    note = f"{start_note(facts.config, facts.starts)}{_caveat(facts)}"
    return f"{where}\n\n{fenced('python', code)}{note}"


def fenced(language: str, code: str) -> str:
    """Return a block of code that nothing in it can end."""
    runs = [len(run) for run in re.findall(r"`{3,}", code)]
    fence = "`" * max([3, *(length + 1 for length in runs)])
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
    start = "image" if facts.starts else "text"
    return f"{start}-to-{'video' if _films(facts) else 'image'}"


def _imports(facts: CardFacts) -> list[str]:
    names = [type(facts.pipeline).__name__]
    if _by_ddim(facts):
        names.append("DDIMScheduler")
    if facts.config.model.fn in VIDEOS:
        names.append(type(facts.pipeline.scheduler).__name__)
    lines = ["import torch", f"from diffusers import {', '.join(sorted(names))}"]
    tools = ["export_to_gif"] * _films(facts) + ["load_image"] * bool(facts.starts)
    if tools:
        lines.append(f"from diffusers.utils import {', '.join(tools)}")
    if facts.formats[0] == "peft":
        lines.append("from peft import PeftModel")
    return lines


def _load(facts: CardFacts) -> list[str]:
    """Return the lines that load the pipeline and put into it what was trained."""
    # weights that were merged are a whole pipeline; others go into the base model
    first, kind = facts.formats[0], type(facts.pipeline).__name__
    base = facts.folder if first == "merged" else facts.base or local(facts)
    lines = [f"pipeline = {kind}.from_pretrained({', '.join([_quoted(base), *_options(facts)])})"]
    # how the adapters get there depends on the format
    if first == "peft":
        lines.append("# this puts the adapters into the pipeline's own network")
        lines.append(
            f"PeftModel.from_pretrained(pipeline.{facts.network}, {_quoted(facts.folder)})"
        )
    elif first != "merged":
        file = facts.kohya if first == "kohya" else LORA_FILE
        where = f"{_quoted(facts.folder)}, weight_name={_quoted(file)}"
        if hasattr(facts.pipeline, "load_lora_weights"):
            lines.append(f"pipeline.load_lora_weights({where})")
        else:  # a class of diffusers whose network alone takes a LoRA
            network = f"pipeline.{facts.network}"
            lines.append(f"{network}.load_lora_adapter({where}, prefix=None)")
        if facts.second:
            other = low_noise(facts.kohya) if first == "kohya" else SECOND_LORA_FILE
            where = f"weight_name={_quoted(other)}, load_into_transformer_2=True"
            lines.append(f"pipeline.load_lora_weights({_quoted(facts.folder)}, {where})")
    return lines


def _draw(facts: CardFacts) -> list[str]:
    """Return the lines that make an image."""
    lines = []
    if _by_ddim(facts):
        spacing = facts.pipeline.scheduler.config.timestep_spacing
        options = f"clip_sample=False, timestep_spacing={_quoted(spacing)}"
        lines.append(
            f"pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, {options})"
        )
    if facts.config.model.fn in VIDEOS:
        lines += _euler(facts.pipeline.scheduler)
    lines.append('pipeline.to("cuda" if torch.cuda.is_available() else "cpu")')
    lines += negative_lines(facts.config)
    text = _quoted(_prompt(facts))
    # by name: the first argument of some pipelines is the image
    start = [start_argument(facts.starts)] if facts.starts else []
    call = [*start, f"prompt={text}", *call_arguments(facts.config), *_no_rewriting(facts)]
    if facts.config.model.fn in VIDEOS:
        call.append('output_type="pil"')
    if _films(facts):
        return [
            *lines,
            "video = pipeline(",
            *(f"    {text}," for text in call),
            ").frames[0]",
            f'export_to_gif(video, "video.gif", fps={FPS})',
        ]
    made = "frames[0][0]" if facts.config.model.fn in VIDEOS else "images[0]"
    return [
        *lines,
        "image = pipeline(",
        *(f"    {text}," for text in call),
        f").{made}",
        'image.save("image.png")',
    ]


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
    if facts.config.model.fn != BY_CALL:
        return []
    takes = inspect.signature(type(facts.pipeline).__call__).parameters
    return [f"{name}={value!r}" for name, value in rewriters(takes).items()]


def _euler(scheduler: Any) -> list[str]:
    """Return the lines that give a pipeline of Wan the run's shift, and Euler's steps, which runs
    take, in place of UniPC's of second order."""
    kind, given = type(scheduler).__name__, scheduler.config
    if kind == "UniPCMultistepScheduler":
        every = f"list(range({given.num_train_timesteps}))"
        how = f"flow_shift={given.flow_shift}, solver_order=1, disable_corrector={every}"
    else:
        how = f"shift={given.shift}"
    config = "pipeline.scheduler.config"
    return [f"pipeline.scheduler = {kind}.from_config({config}, {how})"]


def _caveat(facts: CardFacts) -> str:
    kind = type(facts.pipeline.scheduler).__name__
    if facts.config.model.fn == BY_CALL and not _by_ddim(facts) and kind not in EULER:
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
    dtype = facts.dtype
    options = [f"torch_dtype=torch.{dtype}"] if dtype != "float32" else []
    if options and facts.config.model.fn in VIDEOS:  # parts that stay in float32
        named = [n for n in ("vae", "image_encoder") if facts.pipeline.components.get(n)]
        wide = "".join(f'"{name}": torch.float32, ' for name in named)
        options = [f'torch_dtype={{{wide}"default": torch.{dtype}}}']
    # parts that the run left out
    parts = facts.pipeline.components
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
    return "base-model" if path == PYTHON else str(shown(path))


def call_arguments(config: Config) -> list[str]:
    """Return what the pipeline is called with beside the prompt and its images, as code."""
    fn, given = config.model.fn, config.model.kwargs
    height, width = config.eval_size
    chosen: dict[str, Any] = {
        "height": height,
        "width": width,
        "num_inference_steps": config.eval.steps,
    }
    if fn == "flux_kontext":  # sizes as they are
        chosen |= {"max_area": height * width, "_auto_resize": False}
    neutral = NEUTRAL | OWN_NEUTRAL.get(fn, {})
    for name, call in (CALL | OWN_CALL.get(fn, {})).items():
        value = given.get(name)
        plain = tuple(value) if isinstance(value, list) else value
        if call and plain is not None and plain != neutral.get(name):
            chosen[call] = plain
    if fn == BY_CALL:
        chosen |= given["call"] or {}
    if fn in TRUE_CFG:
        chosen.pop("negative_prompt", None)
        if chosen.get("true_cfg_scale", 1.0) > 1:
            chosen["negative_prompt"] = given["negative_prompt"]
    found = [f"{name}={value!r}" for name, value in chosen.items()]
    return found + [f"{EMBEDS}=negative"] * bool(negative_lines(config))


def negative_lines(config: Config) -> list[str]:
    """Return the lines that encode a negative prompt for FLUX.2 klein, whose pipeline knows the
    empty one only, but takes the embeddings of any; [] where none are needed."""
    given = config.model.kwargs
    if config.model.fn != "flux2_klein" or not given["negative_prompt"]:
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
    if config.model.fn not in (*EDITS, *REFERRING) and not config.model.kwargs.get("sources"):
        return 0
    assumed = config.model.fn not in REFERRING or (run / SAMPLES / SOURCES).is_file()
    return references(config.prompts.train) or int(assumed)


def start_files(count: int) -> list[str]:
    """Name the files that a card's code loads."""
    return ["source.png"] if count == 1 else [f"source-{n}.png" for n in range(1, count + 1)]


def start_argument(count: int) -> str:
    """Return the argument of the pipeline's call: one image, or a list of them."""
    loaded = [f'load_image("{file}")' for file in start_files(count)]
    return f"image={loaded[0]}" if count == 1 else f"image=[{', '.join(loaded)}]"


def start_note(config: Config, count: int) -> str:
    """Say which images the code starts from, and how large they were in the run; "" for none."""
    if not count:
        return ""
    files, (height, width) = start_files(count), config.eval_size
    named = " and ".join(f"`{file}`" for file in files) if count < 3 else f"`{files[0]}` and so on"
    what = "is the image" if count == 1 else "are the images"
    note = f"{named} {what} to start from; the run scaled its own to {width} x {height} pixels."
    return f"\n\n{note}{_other_area(config)}"


def _other_area(config: Config) -> str:
    """Say where the run scaled a source otherwise than the pipeline of Qwen-Image-Edit does."""
    given = config.model.kwargs
    if "source_pixels" not in given:
        return ""
    seen = SEEN if config.model.fn == "qwen_edit_plus" else WHOLE
    areas = (given["source_pixels"], given["seen_pixels"] or given["source_pixels"])
    if areas == (WHOLE, seen):
        return ""
    return (
        f" Then it scaled them to an area of {areas[0]} pixels for the VAE and of {areas[1]} for "
        f"the language model. The pipeline scales to {WHOLE} and {seen}, so its images differ."
    )
