"""What performance_queue.py measures: models, settings, and in which order."""

from __future__ import annotations

from typing import NamedTuple

SMALL = ["train.prompts=1", "train.group=8", "train.updates=1", "model.decode_batch=1"]
MODELS = {
    "sd3": ["sd3/flow_grpo_fast", *SMALL],
    "flux": ["flux/flow_grpo_fast", *SMALL],
    "wan": ["wan/flow_grpo_fast", *SMALL],
    "qwen_image": ["qwen_image/flow_grpo_fast", *SMALL],
}
COMPILED = ["model.runtime.compile=true"]
# graphs refuse offload, which configs of large models ask for; no encoder or VAE is there to move
GRAPHS = [*COMPILED, "model.runtime.cuda_graphs=true", "model.runtime.offload=false"]
NF4 = ["model.runtime.quantize=nf4"]
NATIVE = ["model.runtime.attention=native"]
LARGE = ["train.group=32", "train.rollout_batch=32", "train.micro_batch=16"]
CHECKPOINTING = ["model.runtime.checkpointing=true"]
WRITTEN_OUT = ["model.runtime.one_pass_norms=false"]  # norms as diffusers computes them


class Row(NamedTuple):
    """One measurement: a model of MODELS, or none for NCCL's collectives."""

    name: str
    model: str
    settings: list[str]
    options: tuple[str, ...] = ()  # of performance.py


def attend(model: str, name: str, *more: str) -> Row:
    """Return the row of a model with an attention back end."""
    return Row(f"{model} {name}", model, [f"model.runtime.attention={name}", *more])


# What diffusers calls _native_flash and _native_cudnn are PyTorch's own kernels of these names, of
# which `native` takes one; `flash` is the package flash-attn.
# Qwen-Image masks the empty tokens of prompts: flash and xformers cannot, flash_varlen can.
# Compiling takes minutes, so these rows come last; `--warm` lets them compile side by side.
QUEUE = [
    attend("sd3", "native"),
    Row("sd3 written-out norms", "sd3", [*NATIVE, *WRITTEN_OUT]),
    Row("sd3 large", "sd3", [*NATIVE, *LARGE], ("--kernels",)),
    Row("sd3 large written-out norms", "sd3", [*NATIVE, *LARGE, *WRITTEN_OUT]),
    attend("flux", "native", *CHECKPOINTING),
    attend("qwen_image", "native"),
    Row("flux nf4", "flux", [*NF4, *CHECKPOINTING]),
    attend("sd3", "xformers"),
    Row("sd3 sync check", "sd3", NATIVE, ("--sync-check",)),
    Row("qwen_image nf4", "qwen_image", NF4),
    attend("wan", "native"),
    attend("flux", "xformers", *CHECKPOINTING),
    Row("flux sync check", "flux", [*NATIVE, *CHECKPOINTING], ("--sync-check",)),
    Row("nccl", "", []),
    attend("sd3", "_native_cudnn"),
    attend("sd3", "_native_flash"),
    Row("sd3 float32 adapters", "sd3", [*NATIVE, "model.lora.float32=true"]),
    attend("sd3", "flash"),
    attend("flux", "flash", *CHECKPOINTING),
    Row("sd3 compiled", "sd3", COMPILED, ("--kernels",)),
    Row("sd3 large compiled", "sd3", [*COMPILED, *LARGE], ("--kernels",)),
    Row("sd3 graphs", "sd3", GRAPHS),
    Row("flux compiled", "flux", [*COMPILED, *CHECKPOINTING]),
    Row("flux graphs", "flux", [*GRAPHS, *CHECKPOINTING]),
    Row("wan compiled", "wan", COMPILED),
    Row("wan graphs", "wan", GRAPHS),
    Row("qwen_image compiled", "qwen_image", COMPILED),
    Row("qwen_image graphs", "qwen_image", GRAPHS),
    attend("flux", "_native_cudnn", *CHECKPOINTING),
    attend("wan", "xformers"),
    attend("wan", "flash"),
    attend("qwen_image", "flash_varlen"),
    Row("wan sync check", "wan", NATIVE, ("--sync-check",)),
]
