"""A stand-in for a judge's OpenAI-compatible server: it looks at the images, and fails where a
test wants it to."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl.core.types import RewardBatch
from rewards.vlm import vlm

OPTIONS: dict[str, Any] = {"model": "UnifiedReward", "api_key_env": None, "timeout": 10.0}
OPTIONS |= {"retries": 0, "backoff": 0.01, "workers": 4, "max_failed": 0.0, "encoding": "png"}
LEVELS = [200, 40, 120, 80, 160]  # of grey images; JPEG keeps a flat image to a level or so


class Seen(NamedTuple):
    """A request as the server understood it."""

    body: dict[str, Any]
    images: list[np.ndarray]  # [H, W, 3] uint8
    text: str
    number: int  # how many came before it
    authorization: str | None


class Act(NamedTuple):
    """What the server does: a status and the bytes it sends, after a delay, perhaps byte by
    byte."""

    payload: bytes
    status: int = 200
    delay: float = 0.0
    headers: tuple[tuple[str, str], ...] = ()
    drip: float = 0.0  # seconds between two bytes
    drop: bool = False  # close the connection without an answer


def says(text: str | None, top: dict[str, float] | None = None, **act: Any) -> Act:
    """Answer as a chat completion does, with the first token's log-probs if there are any."""
    message = {"role": "assistant", "content": text}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
    if top is not None:
        rows = [
            {"token": token, "logprob": lp, "bytes": list(token.encode())}
            for token, lp in top.items()
        ]
        choice["logprobs"] = {"content": [{**rows[0], "top_logprobs": rows}]}
    reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge"}
    return Act(json.dumps({**reply, "choices": [choice]}).encode(), **act)


def brightness(image: np.ndarray) -> int:
    """Return the mean level, 0 to 255."""
    return round(float(image.mean()))


class Server:
    """What the tests ask of the running server."""

    def __init__(self, act: Callable[[Seen], Act]) -> None:
        self.act = act
        self.models: Act = Act(
            json.dumps({"object": "list", "data": [{"id": "UnifiedReward"}]}).encode()
        )
        self.seen: list[Seen] = []
        self.busiest = 0  # most requests at once
        self.url = ""
        self._busy = 0
        self._lock = threading.Lock()

    def enter(self, body: dict[str, Any], authorization: str | None) -> Seen:
        parts = body["messages"][0]["content"]
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        data = [re.fullmatch(r"data:image/(?:jpeg|png);base64,(.+)", url) for url in urls]
        images = [np.array(Image.open(io.BytesIO(base64.b64decode(d[1])))) for d in data if d]
        with self._lock:
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
            self.seen.append(Seen(body, images, parts[-1]["text"], len(self.seen), authorization))
            return self.seen[-1]

    def leave(self) -> None:
        with self._lock:
            self._busy -= 1


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else headers and body are 40 ms apart

        def do_GET(self) -> None:
            self.send(server.models if self.path == "/v1/models" else Act(b"no such page", 404))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/chat/completions":
                return self.send(Act(b"no such page", 404))
            seen = server.enter(body, self.headers.get("Authorization"))
            act = server.act(seen)
            time.sleep(act.delay)
            server.leave()  # before the answer: the client may send its next question at once
            return self.send(act)

        def send(self, act: Act) -> None:
            if act.drop:
                self.close_connection = True
                return
            try:
                self.send_response(act.status)
                for name, value in (*act.headers, ("Content-Length", str(len(act.payload)))):
                    self.send_header(name, value)
                self.end_headers()
                for byte in act.payload if act.drip else ():
                    self.wfile.write(bytes([byte]))
                    time.sleep(act.drip)
                self.wfile.write(b"" if act.drip else act.payload)
            except OSError:
                self.close_connection = True  # the client gave up

        def log_message(self, format: str, *args: Any) -> None:
            return

    return Handler


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # with the default of 5, a burst of connections waits a second


@contextmanager
def serving(act: Callable[[Seen], Act]) -> Iterator[Server]:
    """Run a server on a free port of this machine."""
    server = Server(act)
    http = _Http(("127.0.0.1", 0), _handler(server))
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def grey(levels: list[int], size: int = 16) -> Tensor:
    """Return flat images of the given levels."""
    values = torch.tensor(levels, dtype=torch.float32) / 255
    return values[:, None, None, None].expand(-1, 3, size, size)


def batch_of(
    images: Tensor, prompts: list[str] | None = None, group: list[int] | None = None
) -> RewardBatch:
    """Return images of one prompt, or of several."""
    count = len(images)
    words, groups = prompts or ["a cat"] * count, torch.tensor(group or [0] * count)
    return RewardBatch(images, words, groups, [{}] * count, torch.zeros(count))


def judge(server: Server, **options: Any) -> vlm:
    """Return a client that rates by points and does not wait long between tries."""
    given = {"url": server.url, "backoff": 0.01, "timeout": 20.0, "template": "point"}
    return vlm(**{**given, **options})


def rates_brightness(seen: Seen) -> Act:
    """Rate an image 1 to 5 by its brightness."""
    return says(f"cat (animal): 1\nFinal Score: {1 + 4 * brightness(seen.images[0]) / 255:.3f}")


def expected_points(levels: list[int]) -> Tensor:
    """Return what `rates_brightness` makes of images."""
    return torch.tensor([(1 + 4 * level / 255) / 5 for level in levels])


def prefers_bright(seen: Seen) -> Act:
    """Say that the brighter image is better."""
    a, b = map(brightness, seen.images)
    return says(f"I see two cats.\nImage {1 if a > b else 2} is better.")


def close(got: Tensor, expected: Tensor) -> None:
    """Compare scores; a level of JPEG is .0031."""
    torch.testing.assert_close(got, expected, atol=0.005, rtol=0)
