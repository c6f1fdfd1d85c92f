"""Clients of a reward server that do everything wrong, a server that is restarted, and its memory.

What `load_rewards.py --trouble` runs beside its clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import psutil

from flowrl.core.errors import RunError

TOKEN = "FLOWRL_LOAD_TOKEN"
PATIENCE = 30.0  # seconds for an answer to bad input
HEAD = "POST /score HTTP/1.1\r\nHost: load\r\nContent-Type: application/json\r\n"
DRIPPED = 70_000  # bytes after which a body needs a place
Address = tuple[str, int]


class Server:
    """A reward server in a process of its own, which can be started again at the same address."""

    def __init__(self, config: str, overrides: list[str], options: list[str]) -> None:
        os.environ.setdefault(TOKEN, secrets.token_hex(16))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.command = [sys.executable, "-m", "flowrl", "serve-rewards", config, *overrides]
        self.command += ["--port", str(port), "--token-env", TOKEN, *options]
        self.url = f"http://127.0.0.1:{port}"
        self.memory: list[list[float]] = []  # MiB, of each life
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if " at http" not in line:
            raise RunError(f"the server did not start: {line!r}")
        self.memory.append([])

    def stop(self) -> None:
        """Stop it; what is in flight is answered first."""
        self.process.terminate()
        self.process.wait(90)

    async def watched(self, stop: float) -> None:
        """Note its memory every second."""
        while time.perf_counter() < stop:
            try:
                size = psutil.Process(self.process.pid).memory_info().rss / 2**20
                self.memory[-1].append(size)
            except psutil.Error:
                pass  # it is being started again
            await asyncio.sleep(1)

    async def restarted(self, stop: float, times: int) -> None:
        """Stop it and start it again, `times` times at equal distances."""
        pause = (stop - time.perf_counter()) / (times + 1)
        for _ in range(times):
            await asyncio.sleep(pause)
            await asyncio.to_thread(self.stop)
            await asyncio.to_thread(self.start)

    def memory_figures(self) -> list[dict[str, float]]:
        """Return, of each life of more than 20 seconds, the MiB after its first tenth, at its end,
        and at most."""
        out = []
        for life in self.memory:
            tenth = len(life) // 10
            if tenth >= 2:
                early, late = life[tenth : 2 * tenth], life[-tenth:]
                row = {"early": statistics.median(early), "late": statistics.median(late)}
                out.append({**row, "most": max(life), "seconds": len(life)})
        return out


def bearer(token: str | None = None) -> dict[str, str]:
    """Return the header of a token; by default the right one."""
    return {"Authorization": f"Bearer {os.environ.get(TOKEN, '') if token is None else token}"}


async def sent(address: Address, parts: list[bytes], pause: float = 0.0) -> tuple[int, bytes]:
    """Send parts with pauses between them -> status and body of the answer; 0 where the line was
    closed without one."""
    # by hand: an HTTP client would not send what is wrong
    reader, writer = await asyncio.open_connection(*address)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
        # head, then as many bytes as it names
        async with asyncio.timeout(PATIENCE):
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").lower().split("\r\n")
            size = next((line for line in lines if line.startswith("content-length:")), ":0")
            body = await reader.readexactly(int(size.split(":")[1]))
        return int(lines[0].split()[1]), body
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0, b""
    finally:
        writer.close()


def headed(body: bytes, *, size: int | None = None, token: str | None = None) -> bytes:
    """Put a request's head before a body, with another length or token than its own."""
    own = bearer(token)["Authorization"]
    length = len(body) if size is None else size
    return f"{HEAD}Authorization: {own}\r\nContent-Length: {length}\r\n\r\n".encode() + body


class Trouble:
    """Bad clients of some kinds; what came of each is counted by kind and outcome."""

    def __init__(self, url: str, bodies: list[bytes], wanted: list[dict[str, Any]]) -> None:
        where = urlsplit(url)
        self.address = (str(where.hostname), int(where.port or 80))
        self.bodies, self.wanted = bodies, wanted
        self.seen: dict[str, Counter[str]] = {}

    def kinds(self) -> dict[str, tuple[int, Callable[[int], Awaitable[str]]]]:
        """Return {kind: (clients, one request)}."""
        return {
            "wrong token": (2, self.wrong_token),
            "malformed": (2, self.malformed),
            "oversized": (2, self.oversized),
            "half-sent": (200, self.half_sent),
            "slow": (4, self.slow),
            "dripping": (200, self.dripping),
        }

    async def wrong_token(self, number: int) -> str:
        """Expect 401."""
        body = self.bodies[number % len(self.bodies)]
        status, _ = await sent(self.address, [headed(body, token="wrong" * 4)])
        return outcome(status, 401)

    async def malformed(self, number: int) -> str:
        """Cut a body somewhere: expect 400."""
        body = self.bodies[number % len(self.bodies)]
        status, _ = await sent(self.address, [headed(body[: 1 + 997 * number % (len(body) - 2)])])
        return outcome(status, 400)

    async def oversized(self, number: int) -> str:
        """Announce a terabyte: expect 413."""
        status, _ = await sent(self.address, [headed(b"{", size=10**12)])
        return outcome(status, 413)

    async def half_sent(self, number: int) -> str:
        """Send half of a body and wait: expect 408."""
        body = self.bodies[number % len(self.bodies)]
        status, _ = await sent(self.address, [headed(body[: len(body) // 2], size=len(body))])
        return outcome(status, 408)

    async def slow(self, number: int) -> str:
        """Send a right body bit by bit: expect its scores."""
        place = number % len(self.bodies)
        whole = headed(self.bodies[place])
        cut = -(-len(whole) // 10)
        parts = [whole[i : i + cut] for i in range(0, len(whole), cut)]
        status, body = await sent(self.address, parts, pause=0.3)
        right = status == 200 and json.loads(body) == self.wanted[place]
        return "right" if right else outcome(status, 200)

    async def dripping(self, number: int) -> str:
        """Send what takes a place, and then a byte every half second: expect 408."""
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            writer.write(headed(b" " * DRIPPED, size=2**22))
            for _ in range(int(PATIENCE / 0.5)):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        words = (await reader.readline()).split()
                        return outcome(int(words[1]) if words else 0, 408)
                writer.write(b" ")
                await writer.drain()
            return "kept"
        except ConnectionError:
            return "closed"
        finally:
            writer.close()

    async def run(self, stop: float) -> None:
        """Let all of them run."""
        each = []
        for kind, (clients, one) in self.kinds().items():
            self.seen[kind] = Counter()
            each += [self.client(kind, one, k, stop) for k in range(clients)]
        await asyncio.gather(*each)

    async def client(
        self, kind: str, one: Callable[[int], Awaitable[str]], number: int, stop: float
    ) -> None:
        """Send one request after the other."""
        while time.perf_counter() < stop:
            try:
                found = await one(number)
            except TimeoutError:
                found = "no answer"
            except OSError:
                found = "no server"  # it is being started again
            self.seen[kind][found] += 1
            number += 7
            await asyncio.sleep(0.5)


def outcome(status: int, wanted: int) -> str:
    """Say what came of a request: what was due, a closed line, or another status."""
    if status == wanted:
        return "as due"
    return f"HTTP {status}" if status else "closed"
