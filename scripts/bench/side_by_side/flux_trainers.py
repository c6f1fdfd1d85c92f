"""How the FLUX trainers that descend from FastVideo are told the work, and flowrl the same work.

`alone.py` runs their programs. Each calls the network with one sample at a time, under autocast to
bfloat16, with float32 master weights, all of which are trained; AdamW, no averaged weights, and no
checkpointing. Their FSDP runs without sharding, as one flat parameter (`none`), its cheapest way in
one process.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxPipeline
from trainers import HERE, Start, Work

from flowrl.core.errors import ConfigError

FLUX = "diffusers:FluxTransformer2DModel"
MANY = 10**6  # iterations, or steps between two checkpoints: never reached
SHARE = 0.6  # of a sample's draws that DanceGRPO trains
OPTIONS: dict[str, Any] = {  # of all three
    "seed": 0,
    "num_latent_t": 1,
    "t": 1,
    "sp_size": 1,
    "dataloader_num_workers": 0,
    "max_train_steps": MANY,
    "checkpointing_steps": MANY,
    "mixed_precision": "bf16",
    "fsdp_sharding_startegy": "none",
    "cfg": 0.0,
    "lr_warmup_steps": 0,
    "sampler_seed": 0,
    "max_grad_norm": 1.0,
    "weight_decay": 1e-4,
    "shift": 3,
    "adv_clip_max": 5.0,
    "init_same_noise": True,
    "ignore_last": True,
}


def dance_grpo(work: Work, folder: Path, place: Path) -> Start:
    """Start fastvideo/train_grpo_flux.py of XueZeyue/DanceGRPO."""
    more = {"use_group": True, "use_hpsv2": True, "clip_range": 1e-4, "timestep_fraction": SHARE}
    every = shared_out("dance_grpo", work.images, work.updates)
    return started("train_grpo_flux.py", work, folder, place, every, more)


def mix_grpo(work: Work, folder: Path, place: Path) -> Start:
    """Start fastvideo/train_grpo_flux.py of Tencent-Hunyuan/MixGRPO, with one of its rewards."""
    # what this trainer is told beside what all three are
    more = {
        "use_group": True,
        "reward_model": "hpsv2",
        "hps_path": "hps_ckpt/HPS_v2.1_compressed.pt",
        "multi_reward_mix": "advantage_aggr",
        "clip_range": 1e-4,
        "kl_coeff": 0.0,
        "training_strategy": "part",
        "sample_strategy": "progressive",
        "iters_per_group": work.every,
        "group_size": work.window,
        "prog_overlap": True,
        "prog_overlap_step": 1,
        "roll_back": True,
        "dpm_algorithm_type": "null",
        "flow_grpo_sampling": True,
    }
    every = shared_out("mix_grpo", work.images, work.updates)
    return started("train_grpo_flux.py", work, folder, place, every, more)


def branch_grpo(work: Work, folder: Path, place: Path) -> Start:
    """Start fastvideo/train_branchgrpo_flux.py of Fredreic1849/BranchGRPO."""
    more = {
        "use_hpsv2": True,
        "clip_range": 1e-3,
        "tree_split_points": work.splits,
        "tree_split_noise_scale": 4.0,
    }
    edges = work.prompts * edges_of(work)
    every = -(-edges // work.updates)
    if -(-edges // every) != work.updates:
        raise ConfigError(
            f"branch_grpo: {edges} edges make no {work.updates} optimizer steps of one size"
        )
    return started("train_branchgrpo_flux.py", work, folder, place, every, more)


def shared_out(trainer: str, images: int, updates: int) -> int:
    """Return how many images an optimizer step has. Raises ConfigError for a rest."""
    if images % updates:
        raise ConfigError(f"{trainer}: {images} images make no {updates} optimizer steps of a size")
    return images // updates


def split_steps(work: Work) -> list[int]:
    """Return the steps at which a tree splits in two."""
    return [int(step) for step in work.splits.split(",") if step]


def live_nodes(work: Work) -> list[int]:
    """Return how many nodes of a tree each step evaluates."""
    splits = split_steps(work)
    live, found = 1, []
    for step in range(work.steps):
        found.append(live)
        live *= 2 if step in splits else 1
    return found


def edges_of(work: Work) -> int:
    """Return how many edges BranchGRPO's code trains of a tree: those of the last step, too."""
    splits = split_steps(work)
    return sum(n * (1 + (step in splits)) for step, n in enumerate(live_nodes(work)))


def started(
    program: str, work: Work, folder: Path, place: Path, every: int, more: dict[str, Any]
) -> Start:
    """Start one of the programs in `place`, with an optimizer step after `every` backward units.

    Raises ConfigError for what they have not: another dtype, batch or guidance."""
    if work.dtype != "bfloat16" or work.batch != 1 or work.guidance != 3.5 or work.kl:
        raise ConfigError(
            f"{program}: expected --dtype bfloat16, --batch 1, --guidance 3.5 and --kl 0"
        )
    # they read a reward's weights at the start, also where a stand-in scores
    (place / "images").mkdir(exist_ok=True)
    (place / "hps_ckpt").mkdir(exist_ok=True)
    torch.save({"state_dict": {}}, place / "hps_ckpt" / "HPS_v2.1_compressed.pt")
    # the work in their words; `more` is what only one of them has
    options = OPTIONS | {
        "pretrained_model_name_or_path": work.model,
        "data_json_path": str(embedded(work, place)),
        "output_dir": str(place / "out"),
        "train_batch_size": work.prompts,
        "train_sp_batch_size": work.prompts,
        "gradient_accumulation_steps": every,
        "num_generations": work.group,
        "sampling_steps": work.steps,
        "eta": work.noise_scale,
        "learning_rate": work.lr,
        "h": work.size,
        "w": work.size,
        **more,
    }
    words = [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()
    ]
    # one process that believes to be a cluster of one, at a free port
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        alone["MASTER_PORT"] = str(free.getsockname()[1])
    run = [str(HERE / "alone.py"), str(folder / "fastvideo" / program), *words]
    return Start(run, {**alone, "PYTHONPATH": str(folder)})


def embedded(work: Work, place: Path) -> Path:
    """Encode the prompts in `place` into the files that the programs read -> their list."""
    # encoded once, not in every call
    listed = place / "embedded" / "videos2caption.json"
    if listed.exists():
        return listed
    kinds = ("prompt_embed", "pooled_prompt_embeds", "text_ids")
    for kind in kinds:
        (listed.parent / kind).mkdir(parents=True)
    # the text encoders alone
    pipeline = FluxPipeline.from_pretrained(
        work.model, transformer=None, vae=None, torch_dtype=torch.bfloat16
    )
    rows = []
    # each prompt is three files and a row, as the programs read them
    for number, prompt in enumerate((place / "train.txt").read_text().splitlines()):
        with torch.no_grad():
            found = pipeline.encode_prompt(prompt, prompt, max_sequence_length=work.tokens)
        name = f"{number}.pt"
        for kind, value in zip(kinds, found, strict=True):
            torch.save(value[0].clone(), listed.parent / kind / name)
        files = {"prompt_embed_path": name, "pooled_prompt_embeds_path": name, "text_ids": name}
        rows.append({**files, "caption": prompt})
    listed.write_text(json.dumps(rows), encoding="utf-8")
    return listed


def flowrl_on_flux(work: Work, place: Path, beside: str, own_batch: int = 0) -> Start:
    """Start flowrl on the work of the trainer `beside`: one sample in a network call and nothing
    shared between the images of a prompt, as there, or with batches of its own and what they
    share computed once."""
    # the work in flowrl's words
    batch = own_batch or work.batch
    values: dict[str, Any] = {
        "model.path": work.model,
        "model.guidance": work.guidance,
        "model.dtype": work.dtype,
        "model.max_sequence_length": work.tokens,
        "prompts": {"train": str(place / "train.txt"), "test": str(place / "test.txt")},
        "image": {"height": work.size, "width": work.size},
        "plan": plan_of(work, beside),
        "rewards": {"jpeg": {"fn": "jpeg", "scale": 500}},
        "optimizer.lr": work.lr,
        "train.iterations": MANY,
        "train.prompts": work.prompts,
        "train.group": work.group,
        "train.updates": work.updates,
        "train.micro_batch": batch,
        "train.rollout_batch": batch,
        "train.ema": 0.0,
        "eval.weights": "current",
    }
    # with batches of its own the images of a prompt share their first steps
    if beside != "branch_grpo":
        values["train.same_noise"] = bool(own_batch)
    overrides = [f"{name}={json.dumps(value)}" for name, value in values.items()]
    program = [str(HERE / "ours.py"), f"flux/{beside}", *overrides]
    return Start(program, {"PYTHONPATH": str(HERE.parents[2])})


def plan_of(work: Work, beside: str) -> dict[str, Any]:
    """Say in flowrl's words where the trainer `beside` puts noise."""
    both = {"steps": work.steps, "noise_scale": work.noise_scale}
    if beside == "dance_grpo":
        return {"fn": "full", **both, "ode_last": 1}
    if beside == "mix_grpo":
        return {"fn": "sliding_window", **both, "size": work.window, "every": work.every}
    splits = {"splits": split_steps(work), "branch": 2, "ode_last": 1}
    return {"fn": "tree", **both, **splits, "split_noise": "scaled", "spread": 4.0}
