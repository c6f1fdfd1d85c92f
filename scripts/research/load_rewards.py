"""Put a reward server under load: many clients at once, every answer compared with the reward in
this process.

    python scripts/research/load_rewards.py shapes/flow_grpo --clients 64 --seconds 30

Starts `flowrl serve-rewards` for the config on a free port (or takes the one at --url), draws true
scenes of the shapes benchmark and lets each client send requests one after the other. A request is
lost if it got no answer or one that is not right to the last bit. With `--trouble` other clients
send wrong tokens, malformed, oversized and half-sent bodies and right ones bit by bit, and the
server is stopped and started again; then a client tries again, as the reward `remote` does. Writes
requests and images per second, percentiles of the latency and a description of the machine. Clients
and server share its processors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import torch
from load_trouble import Server, Trouble, bearer

from flowrl.config.load import Config, load_config
from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.core.pixels import round_8bit
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from rewards.remote.messages import pack

PATIENCE = 180.0  # seconds: a busy machine takes a minute to start a server


class Load(NamedTuple):
    """What the clients do."""

    url: str
    clients: int
    requests: int  # 0 = as many as `seconds` allow
    seconds: float
    bodies: list[bytes]
    wanted: list[dict[str, Any]]  # the right answer to each body
    patience: float = 0.0  # seconds to try again where no server answers
    beside: Callable[[float], list[Awaitable[None]]] = lambda stop: []  # what else runs until then


def prepare(
    config: Config, *, images: int, bodies: int, seed: int
) -> tuple[list[bytes], list[dict[str, Any]], float]:
    """Draw `bodies` requests of `images` images -> bodies, right answers, images per second
    without a server."""
    # scenes that fit their prompts, with noise, so that scores differ
    rng = np.random.default_rng(seed)
    pool = [record for records in all_records().values() for record in records]
    rewards = {name: call.make() for name, call in config.rewards.items()}
    packed, wanted, seconds = [], [], 0.0
    for _ in range(bodies):
        records = [pool[i] for i in rng.integers(len(pool), size=images)]
        noisy = (
            render(scenes_for(records, rng))
            + torch.from_numpy(rng.normal(0, 0.04, (images, 3, 64, 64))).float()
        )
        # a request, and the answer that the rewards give in this process
        zero = torch.zeros(images)
        prompts = [record["prompt"] for record in records]
        batch = RewardBatch(round_8bit(noisy), prompts, torch.arange(images), records, zero)
        packed.append(pack(batch, list(range(images)), ""))
        began = time.perf_counter()
        scores = {name: reward(batch).tolist() for name, reward in rewards.items()}
        seconds += time.perf_counter() - began
        wanted.append({"scores": scores, "images": images})
    return packed, wanted, bodies * images / seconds


async def drive(load: Load) -> dict[str, Any]:
    """Let all clients run -> figures."""
    numbers, times, faults = count(), list[float](), Counter[str]()
    tls = httpx2.create_ssl_context()  # one for all: each would take a third of a second

    async def client() -> None:
        async with httpx2.AsyncClient(timeout=60, trust_env=False, verify=tls) as http:
            for number in numbers:
                if number >= load.requests if load.requests else time.perf_counter() > stop:
                    return
                place, began = number % len(load.bodies), time.perf_counter()
                fault = await ask(http, load, place)
                times.append(time.perf_counter() - began)
                faults.update([fault] if fault else [])

    began = time.perf_counter()
    stop = began + load.seconds
    await asyncio.gather(*(client() for _ in range(load.clients)), *load.beside(stop))
    seconds = time.perf_counter() - began
    images = load.wanted[0]["images"]
    right = len(times) - sum(faults.values())
    latency = {f"p{q}": float(np.percentile(times, q)) for q in (50, 90, 95, 99, 100)}
    return {
        "clients": load.clients,
        "images_per_request": images,
        "requests": len(times),
        "lost": len(times) - right,
        "faults": dict(faults),
        "seconds": seconds,
        "requests_per_s": right / seconds,
        "images_per_s": right * images / seconds,
        "latency_s": latency,
    }


async def ask(http: httpx2.AsyncClient, load: Load, place: int) -> str:
    """Send one request -> "", or what is wrong with the answer."""
    # a server that restarts refuses for a while: try again until patience ends
    headers = {"Content-Type": "application/json", **bearer()}
    end = time.perf_counter() + load.patience
    while True:
        try:
            answer = await http.post(
                f"{load.url}/score", content=load.bodies[place], headers=headers
            )
        except httpx2.HTTPError as error:
            fault = type(error).__name__
        else:
            fault = f"HTTP {answer.status_code}"
            # an answer has to be the score itself, to the last bit
            if answer.status_code == 200:
                same = json.loads(answer.content) == load.wanted[place]
                return "" if same else "another score than in this process"
        if time.perf_counter() > end:
            return fault
        await asyncio.sleep(0.5)


def joined(url: str) -> float:
    """Return how many images a batch of the server had on average, from its metrics."""
    page = httpx2.get(f"{url}/metrics", headers=bearer(), trust_env=False)
    lines = page.text.splitlines()
    values = {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}
    return values["flowrl_images_total"] / max(values["flowrl_batches_total"], 1)


def machine() -> dict[str, Any]:
    """Describe the machine; how busy it is with other work shows in `load_before`."""
    info = Path("/proc/cpuinfo")
    models = [
        line.split(":", 1)[1].strip()
        for line in info.read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else None,
        "load_before": list(os.getloadavg()),
        **environment(),
    }


def main() -> None:
    """Load a reward server and print what it did."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="shapes/flow_grpo")
    parser.add_argument("overrides", nargs="*", help="key.subkey=value")
    parser.add_argument(
        "--url", help="of a server that hosts the same rewards (default: start one)"
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument(
        "--requests", type=int, default=0, help="in all (default: as many as --seconds allow)"
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--images", type=int, default=8, help="images per request")
    parser.add_argument("--bodies", type=int, default=64, help="different requests")
    parser.add_argument("--batch", type=int, default=64, help="of the server that is started")
    parser.add_argument(
        "--max-wait-ms", type=float, default=5.0, help="of the server that is started"
    )
    parser.add_argument(
        "--trouble", action="store_true", help="with bad clients beside, and restarts"
    )
    parser.add_argument("--restarts", type=int, default=2, help="with --trouble")
    parser.add_argument("--out", type=Path, default=Path("assets/results/serve-load.json"))
    args = parser.parse_args()
    # the machine before the load, and the right answers
    about = machine()
    bodies, wanted, alone = prepare(
        load_config(args.config, args.overrides), images=args.images, bodies=args.bodies, seed=0
    )
    # a server that is there, or one of our own
    options = ["--batch", str(args.batch), "--max-wait-ms", str(args.max_wait_ms)]
    if args.url:
        result = measure(args.url, args, bodies, wanted)
    else:
        server = Server(args.config, args.overrides, options)
        try:
            found = measure(server.url, args, bodies, wanted, server)
        finally:
            server.stop()
        result = {"server": options, **found}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result["images_per_s_without_server"] = alone
    write_json(args.out, {"config": args.config, **result, "machine": about})
    print(json.dumps(result, indent=2))
    # a lost request is an error, however fast the rest was
    if result["lost"]:
        raise SystemExit(f"{result['lost']} requests were lost")


def measure(
    url: str,
    args: argparse.Namespace,
    bodies: list[bytes],
    wanted: list[dict[str, Any]],
    server: Server | None = None,
) -> dict[str, Any]:
    """Warm the server up with one round of every body, then drive it."""
    # one round of every body that is not timed, since first requests are slow
    asyncio.run(drive(Load(url, args.clients, len(bodies), 0, bodies, wanted)))
    load = Load(url, args.clients, args.requests, args.seconds, bodies, wanted)
    # with trouble: bad clients and restarts while good clients are timed
    more: dict[str, Any] = {}
    if server is not None and args.trouble:
        trouble = Trouble(url, bodies, wanted)

        def beside(stop: float) -> list[Awaitable[None]]:
            restarts = server.restarted(stop, args.restarts)
            return [trouble.run(stop), server.watched(stop), restarts]

        result = asyncio.run(drive(load._replace(patience=PATIENCE, beside=beside)))
        more = {"trouble": {kind: dict(seen) for kind, seen in trouble.seen.items()}}
        more |= {"restarts": args.restarts, "server_MiB": server.memory_figures()}
    else:
        result = asyncio.run(drive(load))
    return {
        **result,
        **more,
        "images_per_batch": joined(url),
        "body_bytes": sum(map(len, bodies)) // len(bodies),
    }


if __name__ == "__main__":
    main()
