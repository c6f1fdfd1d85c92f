"""Train the embedded base model `assets/shapes-sd3` from scratch: a genuine
StableDiffusion3Pipeline of a few MB.

Stage `vae`: AutoencoderKL by the evidence lower bound with a fixed decoder std: latents carry no
more than they need. Stage `flow`: SD3 transformer and both CLIP encoders by rectified-flow
matching, logit-normal times, caption dropout. Both are seeded, resumable (same command again) and
write loss and accuracy curves beside the weights.

    python scripts/research/train_shapes_base.py vae
    python scripts/research/train_shapes_base.py flow   # needs torch >= 2.9 for the Muon optimizer
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from flowrl.core.files import replacing, write_text
from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.prompts import (
    TASKS,
    Record,
    all_records,
    base_records,
    scenes_for,
    split_records,
)
from flowrl.evaluation.suites.shapes.scene import SIZE, render

TOKENS = 16  # longest prompt is 10 words; start and end marks
WORK = "training"  # sub-folder of --out for resume files; not part of the model


def build_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8, 16, 32, 64],
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        sample_size=SIZE,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def build_tokenizer(folder: Path) -> CLIPTokenizer:
    """Write a byte-pair vocabulary in which every word of the benchmark is one token."""
    found = {w for records in all_records().values() for r in records for w in r["prompt"].split()}
    words = sorted(
        found, key=lambda w: (-len(w), w)
    )  # long words first: "are" must not split "square"
    letters = sorted({c for w in words for c in w})
    merges: list[tuple[str, str]] = []
    for word in words:
        parts = [*word[:-1], word[-1] + "</w>"]
        while len(parts) > 1:
            if (parts[0], parts[1]) not in merges:
                merges.append((parts[0], parts[1]))
            parts = [parts[0] + parts[1], *parts[2:]]
    symbols = [*letters, *(c + "</w>" for c in letters), *("".join(m) for m in merges)]
    symbols = list(dict.fromkeys([*symbols, "<|startoftext|>", "<|endoftext|>"]))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(
        json.dumps({s: i for i, s in enumerate(symbols)}, ensure_ascii=False)
    )
    (folder / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(m) for m in merges) + "\n"
    )
    tokenizer = CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=TOKENS
    )
    for word in words:
        if len(tokenizer(word).input_ids) != 3:
            raise SystemExit(f"word {word!r} does not become one token: {tokenizer.tokenize(word)}")
    tokenizer.save_pretrained(folder)
    return CLIPTokenizer.from_pretrained(folder)


def build_text_encoder(
    tokenizer: CLIPTokenizer, width: int, layers: int
) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attention_dropout=0.0,
    )
    return CLIPTextModelWithProjection(config)


def build_transformer(args: argparse.Namespace) -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=SIZE // 8,
        patch_size=args.patch,
        in_channels=16,
        out_channels=16,
        num_layers=args.layers,
        attention_head_dim=32,
        num_attention_heads=args.width // 32,
        caption_projection_dim=args.width,
        joint_attention_dim=2 * args.text_width,
        pooled_projection_dim=2 * args.text_width,
        pos_embed_max_size=2 * SIZE // 8,
        qk_norm="rms_norm",
    )


class Log:
    """Append rows to a JSONL file and say them."""

    def __init__(self, path: Path, resume_step: int) -> None:
        self.path = path
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.rows: list[dict[str, Any]] = [r for r in rows if r["step"] <= resume_step]
        path.write_text("".join(json.dumps(r) + "\n" for r in self.rows))

    def __call__(self, **row: Any) -> None:
        row = {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()}
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)


def save_state(folder: Path, name: str, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors, then the small state that names them valid, each by rename."""
    whole = {key: value.contiguous().clone() for key, value in tensors.items()}
    with replacing(folder / f"{name}.safetensors") as draft:
        save_file(whole, draft)
    write_text(folder / f"{name}.json", json.dumps(state))


def pack_optimizer(optimizer: torch.optim.Optimizer, prefix: str) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"{prefix}.{i}.{k}": v if isinstance(v, Tensor) else torch.tensor(v)
        for i, row in state.items()
        for k, v in row.items()
    }


def unpack_optimizer(
    optimizer: torch.optim.Optimizer, prefix: str, tensors: dict[str, Tensor]
) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith(prefix + "."):
            index, key = name[len(prefix) + 1 :].split(".", 1)
            state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def warm_cosine(step: int, total: int, warmup: int, floor: float = 0.02) -> float:
    """Learning-rate factor: linear warm-up, then cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


# ---------------------------------------------------------------------------------------- stage vae


def train_vae(args: argparse.Namespace) -> None:
    """Fit the autoencoder for `--steps` batches of fresh scenes, then fix the latent shift and
    scale."""
    torch.manual_seed(args.seed)
    work, vae = args.out / WORK, build_vae().to(args.device)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=args.lr, weight_decay=0.0, betas=(0.9, 0.99))
    start = 0
    if (work / "vae.json").exists():
        tensors = load_file(work / "vae.safetensors")
        vae.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
        unpack_optimizer(optimizer, "adam", tensors)
        start = json.loads((work / "vae.json").read_text())["step"]
    work.mkdir(parents=True, exist_ok=True)
    log, records = Log(args.out / "vae_log.jsonl", start), base_records()
    began, total = time.time(), args.steps
    for step in range(start, total):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm_cosine(step, total, 100)
        rng = np.random.default_rng((args.seed, 1, step))
        images = (
            render(scenes_for([records[i] for i in rng.integers(0, len(records), args.batch)], rng))
            * 2
            - 1
        )
        noise = torch.randn(
            args.batch, 16, SIZE // 8, SIZE // 8, generator=torch.Generator().manual_seed(step)
        )
        images, noise = images.to(args.device), noise.to(args.device)
        with torch.autocast(args.device.type, torch.bfloat16):
            mean, log_var = vae.encode(images).latent_dist.parameters.float().chunk(2, dim=1)
            log_var = log_var.clamp(-30.0, 20.0)
            decoded = vae.decode(mean + (0.5 * log_var).exp() * noise).sample
        mse = ((decoded.float() - images) / 2).square().mean()
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum((1, 2, 3)).mean()
        loss = (
            mse + kl * (2 * args.decoder_std**2) / images[0].numel()
        )  # the bound, in units of mean squared error
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(vae.parameters(), args.clip)
        optimizer.step()
        if step % 50 == 0 or step == total - 1:
            log(
                step=step,
                loss=loss.item(),
                psnr=-10 * math.log10(mse.item()),
                kl=kl.item(),
                norm=norm.item(),
                seconds=time.time() - began,
            )
        if (step + 1) % 500 == 0 or step == total - 1:
            tensors = {f"model.{k}": v for k, v in vae.state_dict().items()} | pack_optimizer(
                optimizer, "adam"
            )
            save_state(work, "vae", tensors, {"step": step + 1})
    finish_vae(vae, args)


@torch.no_grad()
def finish_vae(vae: AutoencoderKL, args: argparse.Namespace) -> None:
    vae.eval()
    rng, records = np.random.default_rng((args.seed, 2)), base_records()
    images = (
        render(scenes_for([records[i] for i in rng.integers(0, len(records), 1024)], rng)) * 2 - 1
    )
    mean = torch.cat(
        [vae.encode(part.to(args.device)).latent_dist.mean for part in images.split(128)]
    )
    shift, scale = mean.mean().item(), 1.0 / mean.std().item()
    vae.register_to_config(scaling_factor=scale, shift_factor=shift)
    vae.save_pretrained(args.out / "vae")
    print(
        "latent std per channel",
        [round(s, 2) for s in mean.std((0, 2, 3)).tolist()],
        "shift",
        shift,
        "scale",
        scale,
    )


# --------------------------------------------------------------------------------------- stage flow


class CountedJointAttention:
    """Joint attention in which the last text token counts `copies` times, exactly as that many
    equal tokens would.

    Where there is no T5, or one that says nothing, the pipeline's text ends in
    `max_sequence_length` zero tokens. They stay equal through every layer, so one token with
    log(copies) added to its attention logits computes the same. Training with 1 and with 256 copies
    makes the model work at the pipeline's default length as well as at length 1, which samples
    several times faster.
    """

    copies = 1

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor]:
        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)

        image, text = hidden_states, encoder_hidden_states
        query = torch.cat(
            [attn.norm_q(heads(attn.to_q(image))), attn.norm_added_q(heads(attn.add_q_proj(text)))],
            dim=2,
        )
        key = torch.cat(
            [attn.norm_k(heads(attn.to_k(image))), attn.norm_added_k(heads(attn.add_k_proj(text)))],
            dim=2,
        )
        value = torch.cat([heads(attn.to_v(image)), heads(attn.add_v_proj(text))], dim=2)
        # Written out: on a CPU in bfloat16 this is five times faster than the fused kernel's
        # forward and backward.
        scores = query.to(value.dtype) @ (key.to(value.dtype) * key.shape[-1] ** -0.5).transpose(
            -1, -2
        )
        if self.copies > 1:
            mask = torch.zeros(key.shape[2], dtype=value.dtype, device=value.device)
            mask[-1] = math.log(self.copies)
            scores = scores + mask
        out = scores.softmax(-1).to(value.dtype) @ value
        out = out.transpose(1, 2).flatten(2)
        image, text = out.split([image.shape[1], text.shape[1]], dim=1)
        return attn.to_out[0](image), text if attn.context_pre_only else attn.to_add_out(text)


class TextStack(nn.Module):
    """Both CLIP encoders, joined the way the pipeline joins them."""

    def __init__(self, tokenizer: CLIPTokenizer, width: int, layers: int) -> None:
        super().__init__()
        self.one, self.two = (build_text_encoder(tokenizer, width, layers) for _ in range(2))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (encoder(ids, output_hidden_states=True) for encoder in (self.one, self.two))
        hidden = torch.cat([a.hidden_states[-2], b.hidden_states[-2]], dim=-1)
        pooled = torch.cat([a.text_embeds, b.text_embeds], dim=-1)
        return F.pad(hidden, (0, 0, 0, 1)), pooled  # one zero token where T5 would stand


@torch.no_grad()
def encode_scenes(
    vae: AutoencoderKL, records: list[Record], count: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Render `count` scenes, and encode them once: latents [N,16,8,8] and record indices [N]."""
    by_task = [[i for i, r in enumerate(records) if r["tag"] == task] for task in TASKS]
    share = np.array([0.10, 0.16, 0.20, 0.12, 0.20, 0.22])
    latents, index = [], []
    for block in range(0, count, 500):
        rng = np.random.default_rng((seed, 3, block))
        tasks = rng.choice(len(TASKS), 500, p=share)
        rows = [by_task[t][rng.integers(len(by_task[t]))] for t in tasks]
        images = (render(scenes_for([records[i] for i in rows], rng)) * 2 - 1).to(vae.device)
        latents.append(
            (vae.encode(images).latent_dist.mean - vae.config.shift_factor)
            * vae.config.scaling_factor
        )
        index.append(torch.tensor(rows))
    return torch.cat(latents), torch.cat(index)


def mislabel(index: Tensor, records: list[Record], share: float, seed: int) -> Tensor:
    """Give a `share` of the scenes [N] the caption of any prompt of the same task, as captions of
    the web err.

    The model then knows more than it shows: it draws what captions say about as often as they are
    right.
    """
    rng = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(index), generator=rng) < share
    tags = torch.tensor([TASKS.index(r["tag"]) for r in records])
    out = index.clone()
    for task in range(len(TASKS)):
        rows, pool = (wrong & (tags[index] == task)).nonzero()[:, 0], (tags == task).nonzero()[:, 0]
        out[rows] = pool[torch.randint(len(pool), (len(rows),), generator=rng)]
    return out


def split_parameters(
    transformer: nn.Module, text: nn.Module
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Hidden matrices of the transformer blocks go to Muon, everything else to AdamW."""
    hidden: list[nn.Parameter] = []
    rest = list(text.parameters())
    for name, parameter in transformer.named_parameters():
        (hidden if parameter.ndim == 2 and name.startswith("transformer_blocks") else rest).append(
            parameter
        )
    return hidden, rest


@torch.no_grad()
def evaluate(
    model: SD3Transformer2DModel,
    text: TextStack,
    vae: AutoencoderKL,
    ids: dict[str, Tensor],
    records: list[Record],
    args: Any,
) -> dict[str, Any]:
    """Strict accuracy per task of `args.eval_images` images a test prompt, Euler steps on the
    pipeline's grid."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=args.shift)
    scheduler.set_timesteps(args.eval_steps)
    many = [r for r in records for _ in range(args.eval_images)]
    start = torch.randn(
        len(many), 16, SIZE // 8, SIZE // 8, generator=torch.Generator().manual_seed(99)
    )
    start = start.to(args.device)
    cond = text(torch.cat([ids[r["prompt"]] for r in many]).to(args.device))
    null = text(ids[""].to(args.device))
    out: dict[str, Any] = {}
    for guidance in args.eval_guidance:
        x = start
        for t, now, nxt in zip(
            scheduler.timesteps, scheduler.sigmas, scheduler.sigmas[1:], strict=False
        ):
            v = _velocity(model, x, t, *cond)
            if guidance != 1:
                free = _velocity(
                    model, x, t, null[0].expand(len(many), -1, -1), null[1].expand(len(many), -1)
                )
                v = free + guidance * (v - free)
            x = x + (nxt - now) * v
        z = x / vae.config.scaling_factor + vae.config.shift_factor
        images = torch.cat([vae.decode(part).sample for part in z.split(128)])
        strict = check((images / 2 + 0.5).clamp(0, 1).cpu(), many).strict.float()
        task = {
            k: strict[[i for i, r in enumerate(many) if r["tag"] == k]].mean().item() for k in TASKS
        }
        out |= {f"g{guidance}": sum(task.values()) / len(task)}
        out |= {f"g{guidance}.{k}": round(v, 3) for k, v in task.items()}
    return out


def _velocity(model: nn.Module, x: Tensor, t: Tensor, hidden: Tensor, pooled: Tensor) -> Tensor:
    parts = zip(x.split(128), hidden.split(128), pooled.split(128), strict=True)
    return torch.cat(
        [
            model(
                hidden_states=a,
                encoder_hidden_states=b,
                pooled_projections=c,
                timestep=t.to(a.device).expand(len(a)),
                return_dict=False,
            )[0]
            for a, b, c in parts
        ]
    )


def train_flow(args: argparse.Namespace) -> None:
    """Train transformer and text encoders jointly on `--steps` batches, then write the pipeline
    folder."""
    torch.manual_seed(args.seed)
    work, vae = (
        args.out / WORK,
        AutoencoderKL.from_pretrained(args.out / "vae").eval().to(args.device),
    )
    tokenizer = build_tokenizer(args.out / "tokenizer")
    text, model = TextStack(tokenizer, args.text_width, args.text_layers), build_transformer(args)
    processor = CountedJointAttention()
    model.set_attn_processor(processor)
    both = nn.ModuleDict({"text": text, "model": model}).to(args.device)
    average = copy.deepcopy(both).eval().requires_grad_(False)
    hidden, rest = split_parameters(model, text)
    muon = torch.optim.Muon(
        hidden, lr=args.lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(rest, lr=args.lr, weight_decay=0.0, betas=(0.9, 0.98))
    start = 0
    if (work / "flow.json").exists():
        tensors = load_file(work / "flow.safetensors")
        both.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
        average.load_state_dict({k[4:]: v for k, v in tensors.items() if k.startswith("ema.")})
        unpack_optimizer(muon, "muon", tensors)
        unpack_optimizer(adam, "adam", tensors)
        start = json.loads((work / "flow.json").read_text())["step"]
    work.mkdir(parents=True, exist_ok=True)
    log, records, tests = (
        Log(args.out / "flow_log.jsonl", start),
        base_records(),
        split_records(args.eval_prompts)[1],
    )
    ids = {
        p: tokenizer(p, padding="max_length", max_length=TOKENS, return_tensors="pt").input_ids
        for p in ["", *(r["prompt"] for r in records + tests)]
    }
    latents, index = encode_scenes(vae, records, args.scenes, args.seed)
    prompts = torch.cat([*(ids[r["prompt"]] for r in records), ids[""]])
    index = mislabel(index, records, args.wrong, args.seed)
    prompts = prompts.to(args.device)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} + "
        f"{sum(p.numel() for p in text.parameters()):,} parameters"
    )
    if args.compile:
        for block in model.transformer_blocks:
            block.compile()
    began, running = time.time(), 0.0
    for step in range(start, args.steps):
        for optimizer in (muon, adam):
            for group in optimizer.param_groups:
                group["lr"] = args.lr * warm_cosine(step, args.steps, 200)
        rng = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        rows = torch.randint(len(latents), (args.batch,), generator=rng)
        x0, eps = (
            latents[rows],
            torch.randn(args.batch, *latents.shape[1:], generator=rng).to(args.device),
        )
        sigma = torch.sigmoid(torch.randn(args.batch, generator=rng))
        sigma = args.shift * sigma / (1 + (args.shift - 1) * sigma)
        sigma = sigma.to(args.device)
        caption = index[rows].masked_fill(
            torch.rand(args.batch, generator=rng) < args.dropout, len(records)
        )
        processor.copies = 256 if torch.rand((), generator=rng) < 0.2 else 1
        x = (1 - sigma[:, None, None, None]) * x0 + sigma[:, None, None, None] * eps
        with torch.autocast(args.device.type, torch.bfloat16):
            v = model(x, *text(prompts[caption]), timestep=sigma * 1000, return_dict=False)[0]
        loss = F.mse_loss(v.float(), eps - x0)
        adam.zero_grad(set_to_none=True)
        muon.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(both.parameters(), 1.0)
        muon.step()
        adam.step()
        decay = min(args.ema, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(both.parameters()), 1 - decay)
        running += (loss.item() - running) / min(step - start + 1, 100)
        last = step == args.steps - 1
        if step % 100 == 0 and (step + 1) % args.eval_every and not last:
            log(step=step, loss=running, seconds=time.time() - began)
        if (step + 1) % args.eval_every == 0 or last:
            processor.copies = 1
            score = evaluate(average["model"], average["text"], vae, ids, tests, args)  # type: ignore[arg-type]
            log(step=step + 1, loss=running, seconds=time.time() - began, **score)
            tensors = {f"model.{k}": v for k, v in both.state_dict().items()}
            tensors |= {f"ema.{k}": v for k, v in average.state_dict().items()}
            tensors |= pack_optimizer(muon, "muon") | pack_optimizer(adam, "adam")
            save_state(work, "flow", tensors, {"step": step + 1})
    average, vae = average.cpu(), vae.cpu()
    finish_flow(average["model"], average["text"], vae, tokenizer, args)  # type: ignore[arg-type]
    plot(args.out)


def build_t5(tokenizer: CLIPTokenizer, width: int) -> tuple[T5EncoderModel, T5TokenizerFast]:
    """Make the smallest T5 that diffusers accepts, with a final norm of zero: it adds nothing but
    zero tokens.

    The pipeline class demands the part. Zero tokens are what it puts in the place of a T5 that is
    left out.
    """
    words = sorted({w.removesuffix("</w>") for w in tokenizer.get_vocab() if w.endswith("</w>")})
    pieces = ["<pad>", "</s>", "<unk>", "▁", *("▁" + word for word in words)]
    config = T5Config(
        vocab_size=len(pieces),
        d_model=width,
        d_kv=8,
        d_ff=8,
        num_layers=1,
        num_heads=1,
        is_encoder_decoder=False,
    )
    encoder = T5EncoderModel(config)
    nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    return encoder, T5TokenizerFast(
        vocab=[(piece, -float(i)) for i, piece in enumerate(pieces)], extra_ids=0
    )


def finish_flow(
    model: nn.Module, text: TextStack, vae: AutoencoderKL, tokenizer: Any, args: Any
) -> None:
    """Write the averaged weights as a pipeline folder that diffusers loads with no code of ours."""
    plain = build_transformer(args).eval()
    plain.load_state_dict(model.state_dict())
    t5, t5_tokenizer = build_t5(tokenizer, 2 * args.text_width)
    StableDiffusion3Pipeline(
        transformer=plain,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=args.shift),
        vae=vae,
        text_encoder=text.one,
        tokenizer=tokenizer,
        text_encoder_2=text.two,
        tokenizer_2=tokenizer,
        text_encoder_3=t5,
        tokenizer_3=t5_tokenizer,
    ).save_pretrained(args.out)


def plot(out: Path) -> None:
    """Draw loss and accuracy of both stages from the logs."""
    rows = {
        n: [json.loads(r) for r in (out / f"{n}_log.jsonl").read_text().splitlines()]
        for n in ("vae", "flow")
    }
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    psnr, loss, accuracy = figure.subplots(1, 3)
    psnr.plot([r["step"] for r in rows["vae"]], [r["psnr"] for r in rows["vae"]])
    psnr.set(title="VAE", xlabel="batches of 32", ylabel="PSNR of fresh scenes, dB")
    loss.plot([r["step"] for r in rows["flow"]], [r["loss"] for r in rows["flow"]])
    loss.set(
        title="flow matching",
        xlabel="batches of 64",
        ylabel="mean squared error of v",
        yscale="log",
    )
    scored = [r for r in rows["flow"] if "g1.0" in r]
    for key in [k for k in scored[-1] if k.startswith("g") and k.count(".") == 1]:
        accuracy.plot(
            [r["step"] for r in scored], [r[key] for r in scored], "o-", label=f"guidance {key[1:]}"
        )
    accuracy.set(
        title="test prompts, averaged weights",
        xlabel="batches of 64",
        ylabel="strict accuracy",
        ylim=(0, 1),
    )
    accuracy.legend(frameon=False)
    for axes in (psnr, loss, accuracy):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out / "training.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = parser.add_subparsers(dest="stage", required=True)
    for name, steps, batch in (("vae", 3000, 32), ("flow", 14500, 64)):
        stage = stages.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        stage.add_argument("--out", type=Path, default=Path("assets/shapes-sd3"))
        stage.add_argument("--steps", type=int, default=steps)
        stage.add_argument("--batch", type=int, default=batch)
        stage.add_argument("--seed", type=int, default=0)
        stage.add_argument(
            "--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu"
        )
        stage.add_argument("--lr", type=float, default=1e-3 if name == "vae" else 2e-3)
        if name == "vae":
            stage.add_argument("--clip", type=float, default=0.05, help="gradient norm")
            stage.add_argument(
                "--decoder-std",
                type=float,
                default=0.02,
                help="pixel noise of the bound, in [0, 1]",
            )
            continue
        stage.add_argument("--scenes", type=int, default=60000, help="rendered and encoded once")
        stage.add_argument("--width", type=int, default=128)
        stage.add_argument("--layers", type=int, default=6)
        stage.add_argument("--patch", type=int, default=1)
        stage.add_argument("--text-width", type=int, default=64)
        stage.add_argument("--text-layers", type=int, default=2)
        stage.add_argument("--weight-decay", type=float, default=0.01)
        stage.add_argument("--dropout", type=float, default=0.1, help="share of empty captions")
        stage.add_argument(
            "--wrong",
            type=float,
            default=0.35,
            help="share of captions that belong to another scene",
        )
        stage.add_argument("--ema", type=float, default=0.999)
        stage.add_argument(
            "--shift",
            type=float,
            default=1.0,
            help="time shift in training and in the saved scheduler",
        )
        stage.add_argument(
            "--compile", action="store_true", help="torch.compile the transformer blocks"
        )
        stage.add_argument("--eval-every", type=int, default=1000)
        stage.add_argument("--eval-prompts", type=int, default=24, help="per task")
        stage.add_argument("--eval-images", type=int, default=2, help="per prompt")
        stage.add_argument("--eval-steps", type=int, default=12)
        stage.add_argument("--eval-guidance", type=float, nargs="*", default=[1.0, 2.5])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    {"vae": train_vae, "flow": train_flow}[args.stage](args)


if __name__ == "__main__":
    main()
