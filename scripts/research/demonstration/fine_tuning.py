"""Fine-tune the base model on its own right images, at the cost of a run of `shapes/awm`.

    python scripts/research/demonstration/fine_tuning.py --seeds 0 1 2
    python scripts/research/demonstration/fine_tuning.py --seeds 0 1 2 --guidance 3.5 --steps 20 \\
        --work runs/fine-tuning-guided --out assets/results/fine-tuning-guided.json
    python scripts/research/demonstration/fine_tuning.py --seeds 0 1 2 --rendered 24576 \\
        --work runs/fine-tuning-rendered --out assets/results/fine-tuning-rendered.json

The simple alternative to reinforcement learning: sample once from the base model, keep the images
that the checker calls right, and train on them as on data. The cost is that of the runs beside it,
counted in network evaluations (a trained row counts 3): as many for sampling, with 10 steps an
image, and as many for training. Tasks and prompts come equally often. AdamW, a rate that falls to
zero along a cosine. With `--guidance` the images are sampled with it, at two evaluations a step, so
that there are fewer, and the model learns to draw without guidance what it draws with it. With
`--rendered` the images are true scenes of the training prompts, which cost nothing, so that all
evaluations go to training: what pre-training for longer would gain.

The rate is chosen on the validation prompts with the first seed; then each seed samples images of
its own, and is judged on the test prompts, from other noise than demonstration.py. Models and
measurements are kept in `--work`; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from demonstration_measure import Bench, Setting, by_task, entry, rates
from rendered_scenes import rendered_scenes
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.cli.options import quiet_libraries
from flowrl.config.load import load_config
from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.core.noise_path import interpolate
from flowrl.core.pixels import round_8bit
from flowrl.core.prompts import load_prompts
from flowrl.core.seeds import generator
from flowrl.core.types import FlowModel
from flowrl.evaluation.crossed_errors import crossed
from flowrl.evaluation.suites.shapes.checker import check
from flowrl.training.trainer import Trainer

STEPS = 10  # of the evaluation, and of sampling if nothing else is asked for
ROWS = 96  # of a training step
LISTS = "assets/shapes"


class Pool(NamedTuple):
    """Right images of the base model."""

    x0: Tensor  # [N, C, H, W] latents
    prompt: list[int]  # the place of each in the list of training prompts


class Cost(NamedTuple):
    """Network evaluations of a run of reinforcement learning."""

    sampling: int
    training: int


class Sampler(NamedTuple):
    """How the images to train on are sampled."""

    model: FlowModel  # the base model, with the guidance
    guidance: float
    steps: int
    rendered: int  # true scenes in their place; 0: none

    @property
    def evaluations(self) -> int:
        """Network evaluations of an image."""
        return self.steps * (1 if self.guidance == 1 else 2)


def main() -> None:
    """Search the rate, fine-tune with every seed, measure, write the result file."""
    args = parser().parse_args()
    torch.set_num_threads(args.threads)
    quiet_libraries()
    trainer = Trainer(load_config(args.config, args.set))
    base = {name: p.detach().clone() for name, p in trainer.params.items()}
    cost, bench = cost_of(trainer), Bench(args.work, args.config, [])
    guided = load_config(args.config, [*args.set, f"model.guidance={args.guidance}"])
    sampler = Sampler(guided.call("model")(), args.guidance, args.steps, args.rendered)
    if args.rendered:
        cost = Cost(0, cost.sampling + cost.training)
    # the rate, by validation prompts
    search = []
    for rate in args.rates:
        model = tuned(trainer, base, cost, sampler, args.seeds[0], rate, args.work)
        setting = setting_of(model, f"{LISTS}/validation.jsonl", 96, 260_002)
        found = bench.measure(f"search-{rate:g}", setting)
        mean = crossed(rates([found]), found["tags"])["mean"]
        search.append({"lr": rate, "validation": mean})
        print(search[-1], flush=True)
    best = max(search, key=lambda row: row["validation"])["lr"]
    # every seed on the test prompts
    some = []
    for seed in args.seeds:
        model = tuned(trainer, base, cost, sampler, seed, best, args.work)
        setting = setting_of(model, f"{LISTS}/test.jsonl", 144, 260_001)
        some.append(bench.measure(f"test-{seed}", setting))
    # beside the base model, from the same noises
    setting = setting_of(Path(trainer.config.model.kwargs["path"]), setting.prompts, 144, 260_001)
    before = bench.measure("base", setting)
    result: dict[str, Any] = {
        "kind": "flowrl fine-tuning on right images",
        "command": shlex.join(["python", *sys.argv]),
        "cost": {**cost._asdict(), "of": args.config, "changes": args.set},
        "images": {"rendered": args.rendered} if args.rendered else "sampled, right ones kept",
        "sampled_with": {"guidance": args.guidance, "steps": args.steps},
        "search": search,
        "base": entry([before]),
        "fine_tuned": entry(some, lr=best),
        "fine_tuned_minus_base": crossed(rates(some) - rates([before]), before["tags"]),
        "environment": environment(),
    }
    write_json(args.out, result)
    print(result["base"]["mean"], result["fine_tuned"]["mean"], result["fine_tuned"]["interval"])


def parser() -> argparse.ArgumentParser:
    """Describe the command."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--config", default="shapes/awm", help="the run whose cost is spent")
    add("--set", nargs="*", default=[], help="overrides of the config")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--rates", type=float, nargs="+", default=[3e-5, 1e-4, 3e-4])
    add("--guidance", type=float, default=1.0, help="of the images to train on")
    add("--steps", type=int, default=STEPS, help="of the images to train on")
    add("--rendered", type=int, default=0, help="train on so many true scenes instead")
    add("--work", type=Path, default=Path("runs/fine-tuning"))
    add("--out", type=Path, default=Path("assets/results/fine-tuning.json"))
    add("--threads", type=int, default=1)
    return made


def cost_of(trainer: Trainer) -> Cost:
    """Return the network evaluations of the config's whole run: an image's sampling, and per
    trained row three for the gradient and one under each other policy that its loss looks at."""
    train, method = trainer.config.train, trainer.method
    images = train.iterations * train.prompts * train.group
    rows = images * method.likelihood.rows_per_state
    steps = trainer.config.plan.kwargs["steps"]
    return Cost(images * steps, rows * method.trained_calls(0, [1]))


def setting_of(target: Path, prompts: str, per_task: int, seed: int) -> Setting:
    """Return the plain setting of demonstration.py for a target."""
    return Setting(str(target), prompts, 1.0, STEPS, per_task, seed)


def tuned(
    trainer: Trainer,
    base: dict[str, Tensor],
    cost: Cost,
    sampler: Sampler,
    seed: int,
    rate: float,
    work: Path,
) -> Path:
    """Fine-tune the base model with a seed and a rate -> the folder of the pipeline."""
    folder = work / f"seed{seed}-{rate:g}"
    if folder.exists():
        return folder
    pool = pool_of(cost.sampling, sampler, seed, work / f"pool-{seed}.safetensors")
    reset(trainer, base)
    fit(trainer, pool, cost.training // 3 // ROWS, seed, rate)
    draft = folder.with_name(f"{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(trainer.config.model.kwargs["path"], draft)
    network: Any = trainer.model
    network.transformer.save_pretrained(draft / "transformer")
    draft.rename(folder)
    return folder


def reset(trainer: Trainer, base: dict[str, Tensor]) -> None:
    """Give the network the base model's weights."""
    with torch.no_grad():
        for name, p in trainer.params.items():
            p.copy_(base[name])


@torch.no_grad()
def pool_of(evaluations: int, sampler: Sampler, seed: int, file: Path) -> Pool:
    """Sample from the base model until the network evaluations are spent -> the right images."""
    # a pool that is there was paid for already
    if file.exists():
        kept = load_file(file)
        return Pool(kept["x0"], kept["prompt"].tolist())
    if sampler.rendered:
        scenes: Any = sampler.model
        return Pool(*rendered_scenes(scenes, f"{LISTS}/train.jsonl", sampler.rendered, seed))
    model, prompts = sampler.model, load_prompts(f"{LISTS}/train.jsonl")
    tasks, rng = list(by_task(prompts.records).values()), np.random.default_rng(seed)
    # as many images as the run's sampling would have paid for
    batches = -(-evaluations // sampler.evaluations // 128)
    sigmas, shape = model.sigmas(sampler.steps, 64, 64), model.latent_shape(64, 64)
    latents, places = [], list[int]()
    for number in range(batches):
        chosen = [int(rng.choice(tasks[i % len(tasks)])) for i in range(128)]
        x0 = sample_ode(
            model,
            model.encode([prompts.texts[i] for i in chosen]),
            sigmas=sigmas,
            shape=shape,
            group_size=1,
            generators=[generator(seed, "pool", number, i) for i in range(128)],
            micro_batch=128,
        )
        # only right images are kept: that is all that the checker does here
        verdict = check(round_8bit(model.decode(x0)), [prompts.records[i] for i in chosen])
        right = verdict.strict.nonzero()[:, 0].tolist()
        latents.append(x0[right].float())
        places += [chosen[i] for i in right]
    pool = Pool(torch.cat(latents), places)
    print(f"seed {seed}: {len(places)} of {128 * batches} images are right", flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"x0": pool.x0.contiguous(), "prompt": torch.tensor(places)}, file)
    return pool


def fit(trainer: Trainer, pool: Pool, steps: int, seed: int, rate: float) -> None:
    """Fit the velocity to the pool: tasks, prompts of a task, and images of a prompt are drawn
    equally often, and one of the sampler's noise levels."""
    model, params = trainer.model, list(trainer.params.values())
    prompts = load_prompts(f"{LISTS}/train.jsonl")
    # the pool by prompt, and the prompts by task: easy ones fill the pool, but must not the batch
    of: dict[int, list[int]] = {}
    for place, prompt in enumerate(pool.prompt):
        of.setdefault(prompt, []).append(place)
    known = [list(filter(of.__contains__, rows)) for rows in by_task(prompts.records).values()]
    rng, noise = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    sigmas = model.sigmas(STEPS, 64, 64)[:-1]
    optimizer = torch.optim.AdamW(params, lr=rate, weight_decay=1e-4)
    for step in range(steps):
        # the rate warms up over 20 steps and falls along a cosine
        for group in optimizer.param_groups:
            falling = 0.5 + 0.5 * math.cos(math.pi * step / steps)
            group["lr"] = rate * min(1.0, (step + 1) / 20) * falling
        # a batch: each task as often, then a prompt of it, then one of its images
        chosen = [int(rng.choice(known[i % len(known)])) for i in range(ROWS)]
        x0 = pool.x0[[int(rng.choice(of[i])) for i in chosen]]
        sigma = sigmas[torch.randint(len(sigmas), (ROWS,), generator=noise)]
        eps = torch.randn(x0.shape, generator=noise)
        cond = model.encode([prompts.texts[i] for i in chosen])
        # flow matching: the velocity of the straight path is eps - x0
        v = model.velocity(interpolate(x0, eps, sigma), sigma, cond)
        loss = (v.float() - (eps - x0)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            print(f"seed {seed} lr {rate:g} step {step}/{steps} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
