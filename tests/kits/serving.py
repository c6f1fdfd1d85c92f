"""Reward servers for tests: hosted in a thread, in a process of their own, and one that answers as
it is told to."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import uvicorn
from PIL import Image
from torch import Tensor

from flowrl.core.local_server import UVICORN
from flowrl.core.types import Reward, RewardBatch
from rewards.remote import remote
from rewards.remote.http import make_app
from rewards.remote.read_request import RequestLimits
from rewards.remote.request_queue import RequestQueue

TESTS = Path(__file__).parents[1]
WAIT = 60.0  # seconds that a test waits at most before it fails


def random_images(count: int, size: int = 4, seed: int = 0) -> Tensor:
    """Return noise [count, 3, size, size] in [0, 1], rounded to 8 bits as the loop rounds."""
    noise = torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed))
    return (noise * 255).round() / 255


def batch_of(images: Tensor, *, group: list[int] | None = None) -> RewardBatch:
    """Put images together with a prompt for each group; every record says which row it is."""
    groups = group if group is not None else list(range(len(images)))
    prompts = [f"prompt {g}" for g in groups]
    meta: list[dict[str, Any]] = [{"row": row} for row in range(len(images))]
    return RewardBatch(images, prompts, torch.tensor(groups), meta, torch.zeros(len(images)))


def png(image: Tensor) -> str:
    """Write an image [3, H, W] with Pillow -> base64."""
    file = io.BytesIO()
    Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def data_of(images: Tensor, /, **changes: Any) -> dict[str, Any]:
    """Return a request to score images, with further keys or others."""
    return {"images": [png(image) for image in images], "prompts": ["p"] * len(images)} | changes


class Held:
    """Score by the first value of each image; the first call waits for `go`; keep every call."""

    def __init__(self) -> None:
        self.go, self.reached, self.seen = threading.Event(), threading.Event(), list[RewardBatch]()

    def __call__(self, batch: RewardBatch) -> Tensor:
        self.seen.append(batch)
        self.reached.set()
        assert self.go.wait(WAIT)
        return batch.images[:, 0, 0, 0]


SIX = batch_of(random_images(6), group=[0, 0, 1, 1, 2, 2])
RIGHT = [0.0, 0.25, 0.5, 0.75, 1.0, 1.25]
"""What a scripted server says of SIX: each image's row in quarters."""


def fast(*urls: str, **options: Any) -> remote:
    """Return a client that does not wait long between tries."""
    return remote(urls=list(urls), **{"backoff": 0.001, **options})


@contextmanager
def hosted(
    rewards: Mapping[str, Reward],
    *,
    token: bytes = b"",
    batch: int = 64,
    limits: RequestLimits | None = None,
    port: int = 0,
) -> Iterator[str]:
    """Host rewards over a real socket, in a thread -> the address."""
    queue = RequestQueue(rewards, batch=batch, max_wait_s=0.0)
    try:
        with served(make_app(queue, limits or RequestLimits(), token), port) as url:
            yield url
    finally:
        queue.close()


@contextmanager
def served(app: Any, port: int = 0) -> Iterator[str]:
    """Serve an application over a real socket, in a thread -> the address."""
    server = uvicorn.Server(uvicorn.Config(app, **UVICORN))
    listener = socket.create_server(("127.0.0.1", port))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Process:
    """`flowrl serve-rewards` in a process of its own."""

    def __init__(self, *argv: str | Path, **environment: str) -> None:
        paths = {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS / "kits")])}
        command = [sys.executable, "-m", "flowrl", "serve-rewards", *map(str, argv)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(
            command, env={**os.environ, **paths, **environment}, text=True, **pipes
        )  # type: ignore[call-overload]
        self.lines: list[str] = []

    def url(self) -> str:
        """Wait until it serves -> its address."""
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("serving "):
                return str(line.rsplit(" at ", 1)[1].split()[0])
        raise AssertionError(f"no server: {self.lines}")

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal -> exit code, all that it printed."""
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=60)
        return self.process.returncode, "".join(self.lines) + rest


Reply = Callable[[dict[str, Any]], "bytes | tuple[int, bytes] | None"]
"""From the request's JSON to a body (status 200), a status and a body, or None: hang up without an
answer."""


def scores(name: str = "it", values: Callable[[dict[str, Any]], Any] | None = None) -> Reply:
    """Answer as a reward server does: by default each image's `row` of its record, in
    quarters."""

    def reply(data: dict[str, Any]) -> bytes:
        right = [record["row"] / 4 for record in data["meta"]]
        return json.dumps({"scores": {name: values(data) if values else right}}).encode()

    return reply


class Scripted:
    """A server that gives the replies of a script, and the last one for ever; it keeps what it was
    asked."""

    def __init__(self, *script: Reply) -> None:
        self.script = list(script)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.health: bytes | tuple[int, bytes] | None = b'{"rewards": ["it"], "limits": {}}'
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.answer(self, outer.health)

            def do_POST(self) -> None:
                data = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.answer(self, outer.next_reply(data, dict(self.headers))(data))

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def next_reply(self, data: dict[str, Any], headers: dict[str, str]) -> Reply:
        """Take the next line of the script."""
        with self._lock:
            self.asked.append(data)
            self.headers.append({name.lower(): value for name, value in headers.items()})
            return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    @staticmethod
    def answer(handler: BaseHTTPRequestHandler, reply: bytes | tuple[int, bytes] | None) -> None:
        """Write a reply."""
        handler.close_connection = reply is None
        if reply is None:
            return
        status, body = (200, reply) if isinstance(reply, bytes) else reply
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


def wait_for(what: Callable[[], bool], seconds: float = 120.0) -> None:
    """Return as soon as it is true; fail after a long while."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)
