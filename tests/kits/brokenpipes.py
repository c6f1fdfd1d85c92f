"""Tiny pipelines with one thing broken, and whether a user's pipeline is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tinypipelines import tiny_pipeline


def broken(name: str, **changes: Any) -> Any:
    """Return a tiny pipeline whose class has some methods changed."""
    pipe = tiny_pipeline(name)
    pipe.__class__ = type(f"Broken{name}", (type(pipe),), changes)
    return pipe


def state_of(pipe: Any) -> Any:
    """Return all that a user could see of a pipeline: attributes, weights, flags, hooks."""
    seen: dict[str, Any] = {name: id(value) for name, value in vars(pipe).items()}
    seen["class"] = type(pipe)
    seen["scheduler settings"] = dict(pipe.scheduler.config)
    seen["scheduler state"] = sorted(vars(pipe.scheduler))
    for name, part in pipe.components.items():
        if not isinstance(part, torch.nn.Module):
            continue
        for key, value in [*part.named_parameters(), *part.named_buffers()]:
            seen[f"{name}.{key}"] = (value.data_ptr(), value.requires_grad, value._version)
        for key, module in part.named_modules():
            hooks = (len(module._forward_hooks), len(module._forward_pre_hooks))
            seen[f"{name}.{key}()"] = (module.training, "forward" in vars(module), *hooks)
    return seen


@contextmanager
def unchanged(pipe: Any) -> Iterator[Any]:
    """Check that a pipeline is as before at the end, also after an error."""
    before = state_of(pipe)
    try:
        yield pipe
    finally:
        after = state_of(pipe)
        moved = [key for key in before | after if before.get(key) != after.get(key)]
        assert not moved, moved


def looped(change: str) -> Any:
    """Return a Lumina 2's call whose loop differs in one way from what diffusers has now; "as it
    was": in none."""

    @torch.no_grad()
    def call(
        self: Any,
        prompt: str | list[str],
        height: int = 64,
        width: int = 64,
        num_inference_steps: int = 4,
        guidance_scale: float = 3.0,
        latents: Any = None,
        generator: Any = None,
        output_type: str = "pt",
        return_dict: bool = False,
    ) -> Any:
        device = self._execution_device
        text, mask, _, _ = self.encode_prompt(prompt, False, device=device)
        size = (len(text), self.transformer.config.in_channels, height, width)
        x = self.prepare_latents(*size, text.dtype, device, generator, latents)
        count = num_inference_steps * (2 if change == "twice" else 1)
        self.scheduler.set_timesteps(count, device=device)
        before = 0
        for time in self.scheduler.timesteps:
            part = 1 - time / self.scheduler.config.num_train_timesteps
            out = -self.transformer(
                hidden_states=x,
                timestep=part.expand(len(x)),
                encoder_hidden_states=text,
                encoder_attention_mask=mask,
                return_dict=False,
            )[0]
            if change == "memory":
                out, before = out + 0.5 * before, out
            if change == "steps by itself":
                x = x - out / count
                continue
            seen = 2 * x if change == "scaled" else x
            x = self.scheduler.step(out, time, seen, return_dict=False)[0]
            x = 1.01 * x if change == "between" else x
        x = x / self.vae.config.scaling_factor + self.vae.config.shift_factor
        images = self.vae.decode(x, return_dict=False)[0]
        return (self.image_processor.postprocess(images, output_type=output_type),)

    return call
