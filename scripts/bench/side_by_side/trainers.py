"""How each trainer is told the work: its own program, its own config, nothing of it changed."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flowrl.core.errors import ConfigError

HERE = Path(__file__).resolve().parent
TOKENS = {"flow_grpo": 128, "flow_factory": 256}  # that T5 reads of a prompt in their code


@dataclass(frozen=True)
class Work:
    """One iteration: what all trainers are asked to do."""

    model: str
    prompts: int  # of an iteration
    group: int  # images of a prompt
    steps: int
    size: int  # pixels
    guidance: float
    kl: float  # weight of the KL to the base model; 0: none
    batch: int  # samples of a network call, without guidance's second half
    dtype: str  # of the arithmetic: float32 or bfloat16
    noise_scale: float = 0.7
    rank: int = 32  # of LoRA
    lr: float = 3e-4

    @property
    def images(self) -> int:
        """Return how many images an iteration makes."""
        return self.prompts * self.group


class Start(NamedTuple):
    """How a program is started: what is run, and what its environment has beside ours."""

    program: list[str]
    environment: dict[str, str]


def flow_grpo(work: Work, folder: Path, place: Path) -> Start:
    """Start scripts/train_sd3.py of yifan123/flow_grpo with a config in `place`.

    Raises ConfigError for what its sampler of prompts cannot do: a batch of one process has whole
    groups. KL needs its network inside of DistributedDataParallel, so the process is told that it
    is the only one of its group.
    """
    if work.batch % work.group or work.images % work.batch:
        raise ConfigError(
            f"flow_grpo: a batch has to hold whole groups and divide an iteration's images, got "
            f"batch {work.batch}, group {work.group}, {work.images} images"
        )
    # the work in their words; no evaluation and no checkpoint falls into the measured time
    batches = work.images // work.batch
    values = {
        "pretrained.model": work.model,
        "dataset": str(place),
        "prompt_fn": "general_ocr",
        "reward_fn": {"jpeg_compressibility": 1.0},
        "mixed_precision": {"float32": "no", "bfloat16": "bf16"}[work.dtype],
        "resolution": work.size,
        "logdir": str(place / "logs"),
        "save_dir": str(place / "logs"),
        "eval_freq": 10**9,
        "save_freq": 10**9,
        "sample.num_steps": work.steps,
        "sample.eval_num_steps": work.steps,
        "sample.guidance_scale": work.guidance,
        "sample.noise_level": work.noise_scale,
        "sample.train_batch_size": work.batch,
        "sample.test_batch_size": 1,
        "sample.num_image_per_prompt": work.group,
        "sample.num_batches_per_epoch": batches,
        "train.batch_size": work.batch,
        "train.gradient_accumulation_steps": batches,
        "train.learning_rate": work.lr,
        "train.timestep_fraction": 0.99,
        "train.cfg": work.guidance > 1,
        "train.beta": work.kl,
    }
    text = CONFIG.format(base=str(folder / "config" / "base.py"), values=values)
    (place / "work.py").write_text(text, encoding="utf-8")
    # a free port, for a process group of one
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    # accelerate finds a GPU by itself
    if not torch.cuda.is_available():
        alone["ACCELERATE_USE_CPU"] = "true"
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    program = [str(folder / "scripts" / "train_sd3.py"), f"--config={place / 'work.py'}"]
    return Start(program, {**alone, "PYTHONPATH": str(folder)})


CONFIG = '''"""Flow-GRPO's own defaults, and the work."""

import importlib.util


def get_config():
    spec = importlib.util.spec_from_file_location("base", {base!r})
    base = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(base)
    config = base.get_config()
    with config.unlocked():
        for name, value in {values!r}.items():
            *above, last = name.split(".")
            node = config
            for key in above:
                node = node[key]
            node[last] = value
    return config
'''


def flow_factory(work: Work, folder: Path, place: Path) -> Start:
    """Start `python -m flow_factory.train` of X-GenGroup/Flow-Factory with a config in `place`.

    Raises ConfigError for float32: its trainer runs under autocast to a short dtype, also where
    its config says no.
    """
    if work.dtype != "bfloat16":
        raise ConfigError("flow_factory: it has no float32; expected --dtype bfloat16")
    config = _flow_factory_config(work, place)
    file = place / "work.yaml"
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")  # YAML reads JSON
    paths = f"{folder / 'src'}:{HERE}"
    return Start(["-m", "flow_factory.train", str(file)], {"PYTHONPATH": paths})


def _flow_factory_config(work: Work, place: Path) -> dict[str, Any]:
    """Write the work in the keys of Flow-Factory."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "launcher": "accelerate",
        "num_processes": 1,
        "mixed_precision": "bf16",
        "data": {
            "dataset_dir": str(place),
            "cache_dir": str(place / "cache"),
            "preprocessing_batch_size": 8,
            "dataloader_num_workers": 0,
        },
        "model": {
            "finetune_type": "lora",
            "lora_rank": work.rank,
            "lora_alpha": 2 * work.rank,
            "target_modules": "default",
            "model_name_or_path": work.model,
            "model_type": "sd3-5",
        },
        "log": {"logging_backend": "none", "save_freq": 0, "save_dir": str(place / "logs")},
        "train": {
            "trainer_type": "grpo",
            "clip_range": 1e-4,
            "adv_clip_range": 5.0,
            "kl_type": "x-based",
            "kl_beta": work.kl,
            "ref_param_device": device,
            "resolution": work.size,
            "num_inference_steps": work.steps,
            "guidance_scale": work.guidance,
            "per_device_batch_size": work.batch,
            "group_size": work.group,
            "global_std": True,
            "unique_sample_num_per_epoch": work.prompts,
            "gradient_step_per_epoch": 1,
            "learning_rate": work.lr,
            "max_grad_norm": 1.0,
            "ema_decay": 0,
            "ema_device": device,
            "latent_storage_dtype": "bf16",
        },
        "scheduler": {
            "dynamics_type": "Flow-SDE",
            "noise_level": work.noise_scale,
            "sde_steps": list(range(work.steps - 1)),
            "num_sde_steps": work.steps - 1,
        },
        "eval": {"eval_freq": 0, "resolution": work.size},
        "rewards": [{"name": "jpeg", "reward_model": "jpeg_reward.JpegReward", "device": device}],
    }


def flowrl(work: Work, place: Path, beside: str, own_batch: int = 0) -> Start:
    """Start flowrl on the work of the trainer `beside`, with the same rows in a network call or
    with batches of its own."""
    # the work in flowrl's words
    batch = own_batch or work.batch
    values: dict[str, Any] = {
        "model.path": work.model,
        "model.guidance": work.guidance,
        "model.dtype": work.dtype,
        "model.lora": {"rank": work.rank, "alpha": 2 * work.rank},
        "model.t5": True,
        "model.max_sequence_length": TOKENS[beside],
        "prompts": {"train": str(place / "train.txt"), "test": str(place / "test.txt")},
        "image": {"height": work.size, "width": work.size},
        "plan": {"fn": "full", "steps": work.steps, "noise_scale": work.noise_scale},
        "rewards": {"jpeg": {"fn": "jpeg", "scale": 500}},
        "kl": {"fn": "transition_kl", "beta": work.kl, "divide_by": "g"},
        "optimizer.lr": work.lr,
        "train.iterations": 1000,
        "train.prompts": work.prompts,
        "train.group": work.group,
        "train.updates": 1,
        "train.micro_batch": batch,
        "train.rollout_batch": batch,
        "train.ema": 0.0,
        "eval.weights": "current",
    }
    overrides = [f"{name}={json.dumps(value)}" for name, value in values.items()]
    program = [str(HERE / "ours.py"), "sd3/flow_grpo", *overrides]
    return Start(program, {"PYTHONPATH": str(HERE.parents[2])})


TRAINERS = {"flow_grpo": flow_grpo, "flow_factory": flow_factory}
WORK = Work(
    model="assets/shapes-sd3",
    prompts=4,
    group=8,
    steps=6,
    size=64,
    guidance=4.5,
    kl=0.01,
    batch=8,
    dtype="float32",
)
"""The small work that each is given by default."""
