"""Host the rewards of a config over HTTP: JSON and PNG, joined batches, a token off loopback,
metrics."""

from __future__ import annotations

import contextlib
import hashlib
from json import dumps, loads
from pathlib import Path
from typing import Any

from flowrl.config.load import Config
from flowrl.core.abilities import LearnedReward, judges_videos, least_frames, sees_latents
from flowrl.core.errors import ConfigError, as_one_message
from flowrl.core.files import is_stdout
from flowrl.core.local_server import (
    UVICORN,
    announce,
    bind,
    forget,
    import_uvicorn,
    listening_address,
    no_exit_by_signal,
    read_token,
    url,
)
from flowrl.core.types import Reward
from flowrl.evaluation.reward_call import fitting, probe_rewards

from .http import make_app
from .read_request import RequestLimits
from .request_queue import RequestQueue

PORT = 8321
LONG_VALUE = 1024  # characters of an argument that /health tells as it is
ELSEWHERE = ("weight", "transform", "offload", "device")  # arguments that change no score here


def serve(
    config: Config,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    token_env: str = "",
    max_mb: int = 256,
    max_images: int = 256,
    max_held_mb: int = 3072,
    max_wait_ms: float = 5.0,
    batch: int = 64,
    json: Path | None = None,
) -> None:
    """Host every reward of a config until SIGTERM or Ctrl-C; what is in flight then is answered
    first.

    Args:
        host: address to listen on; any but a loopback one needs a token.
        port: 0 takes a free one. The address is printed once requests are answered.
        token_env: name of the environment variable that holds the token which clients must send.
        max_mb, max_images: limits of one request (MiB of its body, images).
        max_held_mb: limit of all requests in hand together (MiB of decoded images).
        max_wait_ms, batch: how long a request waits for others to join it, and up to how many
            images.
        json: a file that gets the address and the rewards' names, too; ``-`` prints that alone.

    Raises ConfigError for an argument, a missing token or the missing extra, RunError if the
    address is taken.
    """
    # the arguments
    _check(port, 0, 65_535, "port")
    sizes = {"max_mb": max_mb, "max_images": max_images, "max_held_mb": max_held_mb, "batch": batch}
    for name, value in sizes.items():
        _check(value, 1, 2**20, name)
    _check(max_wait_ms, 0, 60_000, "max_wait_ms")
    uvicorn = import_uvicorn()
    # the address is taken before the rewards load
    family, address = listening_address(host, port)
    token = read_token(address[0], token_env)
    listener = bind(family, address)
    with contextlib.closing(listener):
        forget(json)
        rewards = load_rewards(config)
        queue = RequestQueue(rewards, batch=batch, max_wait_s=max_wait_ms / 1000)
        held = max_held_mb * 2**20
        limits = RequestLimits(bytes=max_mb * 2**20, images=max_images, held=held)
        app = make_app(queue, limits, token, settings_of(config))
        server = uvicorn.Server(uvicorn.Config(app, **UVICORN))
        # listens before it says so
        listener.listen(1024)
        note = " (token needed)" if token else ""
        here, names = url(listener), list(rewards)
        facts = {"url": here, "token": bool(token), "rewards": names}
        announce(f"serving {', '.join(names)} at {here}{note}", facts, json)
        with no_exit_by_signal():
            server.run(sockets=[listener])
        queue.close(wait=not server.force_exit)
    if json is None or not is_stdout(json):
        print(f"stopped; {queue.counts.images} images were scored", flush=True)


def settings_of(config: Config) -> dict[str, Any]:
    """Return {reward: what its scores depend on}, as JSON gives it back; a long value is told by a
    digest of it."""
    found: dict[str, Any] = {}
    for name, call in config.rewards.items():
        found[name] = {}
        said = {key: value for key, value in call.to_dict().items() if key not in ELSEWHERE}
        for key, value in said.items():
            text = dumps(value, default=str, sort_keys=True)
            digest = f"digest {hashlib.sha256(text.encode()).hexdigest()[:16]}"
            found[name][key] = loads(text) if len(text) <= LONG_VALUE else digest
    return found


def load_rewards(config: Config) -> dict[str, Reward]:
    """Make the rewards of a config: one that judges images and has `frames` judges videos. Raises
    ConfigError for one that learns, judges latents or cannot be made; `probe_rewards` adds more."""
    rewards: dict[str, Reward] = {}
    for name, call in config.rewards.items():
        # whatever a reward raises names the reward
        with as_one_message(f"making reward {name!r}", ConfigError):
            reward: Reward = call.make()
        # what cannot be judged from images that are sent
        if isinstance(reward, LearnedReward):
            raise ConfigError(
                f"rewards.{name}: {call.fn} learns during training; it cannot be served"
            )
        if sees_latents(reward):
            raise ConfigError(
                f"rewards.{name}: {call.fn} judges latents, which are not sent; it cannot be served"
            )
        # images or videos; and is it ready?
        videos = bool(call.frames) or judges_videos(reward)
        # a video as long as it needs: which model sends them is not known here
        rewards[name] = fitting(call, reward, max(2, least_frames(reward)) if videos else 1)
        probe_rewards({name: rewards[name]})  # before the next one loads
    return rewards


def _check(value: float, low: int, high: int, name: str) -> None:
    if not low <= value <= high:
        raise ConfigError(f"serve: {name}: expected {low} to {high}, got {value}")
