"""A judge over HTTP that needs no weights to be fetched: it answers questions about the included
worlds as an OpenAI-compatible server of a vision-language model would.

    python scripts/judge/serve.py                # then, elsewhere: flowrl train shapes/edit_r1
    python scripts/judge/serve.py --port 8090 --model judge

It sees the images that a request holds and reads its text, nothing else: no record, no verdict of
a run. What it knows of edits is in edits.py, of scenes in seen.py. It listens on this machine
alone, and refuses what it cannot read with 400 and the reason, which a reward counts as no answer.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import io
import json
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import edits
import seen

LONGEST = 8 * 2**20  # bytes of a request
LARGEST = 1024  # pixels along a side of an image
SURE = 0.98  # the most that it says of an answer
Json = dict[str, Any]


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8080, help="0: a free one")
    parser.add_argument("--model", default="judge", help="the name that requests give")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with serving(given.port, given.model) as url:
        print(f"judge {given.model!r} at {url}; Ctrl-C ends it", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return


@contextmanager
def serving(port: int = 0, model: str = "judge") -> Iterator[str]:
    """Serve in threads of this process -> the address, until the block is left."""
    server = _Http(("127.0.0.1", port), _handler(model))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # a reward sends many questions at once


# ---------------------------------------------------------------------------------------- questions


def answered(body: Json) -> Json:
    """Answer a chat request -> the choice. Raises ValueError for what cannot be read."""
    parts = body["messages"][0]["content"]
    images = [pixels(part["image_url"]["url"]) for part in parts if part["type"] == "image_url"]
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    if seen.PROPOSE.search(text):
        return {"message": {"role": "assistant", "content": seen.proposed(images, text)}}
    said = edits.said(images, text) if len(images) == 2 else seen.said(images, text)
    return likely(said)


def pixels(url: str) -> Tensor:
    """Decode an image of a request -> [3, H, W] in [0, 1]. Raises ValueError."""
    kind, _, data = url.partition(";base64,")
    if kind not in ("data:image/png", "data:image/jpeg"):
        raise ValueError(f"expected an image as base64 of PNG or JPEG, got {url[:40]!r}")
    with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as file:
        if max(file.size) > LARGEST:
            raise ValueError(f"expected images of at most {LARGEST} pixels a side, got {file.size}")
        levels = np.array(file.convert("RGB"), dtype=np.float32)
    return torch.from_numpy(levels).permute(2, 0, 1) / 255


def likely(said: dict[str, float]) -> Json:
    """Write what is thought of each first token, a share of 1, as a choice with log-probs."""
    least = (1 - SURE) / max(1, len(said) - 1)
    raised = {token: max(share, least) for token, share in said.items()}
    whole = sum(raised.values())
    rows = []
    for token, share in sorted(raised.items(), key=lambda item: -item[1]):
        rows.append({"token": token, "logprob": math.log(share / whole)})
    first = {**rows[0], "top_logprobs": rows}
    message = {"role": "assistant", "content": rows[0]["token"]}
    return {"message": message, "logprobs": {"content": [first]}}


# --------------------------------------------------------------------------------------------- HTTP


def _handler(model: str) -> type[BaseHTTPRequestHandler]:
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else headers and body are 40 ms apart

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                return self.send(200, {"object": "list", "data": [{"id": model}]})
            return self.send(404, _error("no such page"))

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            if self.path != "/v1/chat/completions" or not 0 < length <= LONGEST:
                self.close_connection = True
                return self.send(404, _error(f"expected a chat request of at most {LONGEST} bytes"))
            try:
                body = json.loads(self.rfile.read(length))
                if body["model"] != model:
                    return self.send(404, _error(f"no model {body['model']!r}, only {model!r}"))
                with one_at_a_time:
                    choice = answered(body)
            except (ValueError, KeyError, TypeError, IndexError, OSError, binascii.Error) as error:
                return self.send(400, _error(f"{type(error).__name__}: {error}"))
            whole = {"index": 0, "finish_reason": "stop", **choice}
            reply = {"id": "1", "object": "chat.completion", "created": 0, "model": model}
            return self.send(200, {**reply, "choices": [whole]})

        def send(self, status: int, reply: Json) -> None:
            payload = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: Sequence[Any]) -> None:
            return

    return Handler


def _error(said: str) -> Json:
    return {"error": {"message": said, "type": "invalid_request_error"}}


if __name__ == "__main__":
    main()
