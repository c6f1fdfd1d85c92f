"""A reward server: what it answers and to whom, what it refuses to start with, how long it reads a
body, and a process that is stopped."""

from __future__ import annotations

import asyncio
import json
import math
import re
import selectors
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
)
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
import toykit
from serving import WAIT, Held, Process, batch_of, data_of, hosted, random_images, wait_for
from starlette.testclient import TestClient
from torch import Tensor
from toykit import apprentice, redness, toy, write_toy

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError, DataError, RewardError
from flowrl.core.local_server import read_token
from flowrl.core.types import RewardBatch
from rewards.remote.http import make_app
from rewards.remote.messages import refusal
from rewards.remote.read_body import (
    BODY_SECONDS,
    HURRY_BYTES,
    SMALL_BYTES,
    STEADY_BYTES,
    Places,
    read_body,
)
from rewards.remote.read_request import RequestLimits, RequestRefused
from rewards.remote.request_queue import RequestQueue
from rewards.remote.server import load_rewards, serve

HERE = "http://localhost"


def failing(batch: RewardBatch) -> Tensor:
    if batch.meta[0].get("data"):
        raise DataError("a record that is wrong")
    if batch.meta[0].get("leave"):
        sys.exit("no licence")
    if batch.meta[0].get("fail"):
        raise RuntimeError("out of memory")
    return torch.where(batch.images[:, 0, 0, 0] > 0.5, torch.nan, batch.images[:, 1, 0, 0])


@pytest.fixture
def client() -> Iterator[TestClient]:
    """Return a client of an application with two rewards, without a token."""
    queue = RequestQueue({"red": redness, "half": failing}, max_wait_s=0)
    app = make_app(queue, RequestLimits(bytes=20_000, images=6))
    with TestClient(app, base_url=HERE) as client:
        yield client
    queue.close()


def test_scores_equal_those_of_the_reward_here(client: TestClient) -> None:
    images = random_images(5)
    answer = client.post("/score", json=data_of(images))
    assert answer.status_code == 200 and "NaN" not in answer.text
    data = answer.json()
    assert data["images"] == 5 and list(data["scores"]) == ["red", "half"]
    assert torch.equal(torch.tensor(data["scores"]["red"]), redness(batch_of(images)))
    half = [math.nan if value is None else value for value in data["scores"]["half"]]
    assert torch.equal(torch.tensor(half).nan_to_num(-1), failing(batch_of(images)).nan_to_num(-1))
    assert None in data["scores"]["half"]
    one = client.post("/score", json=data_of(images, rewards=["red"])).json()
    assert list(one["scores"]) == ["red"]


def test_failures_are_answered_in_json(client: TestClient) -> None:
    images = random_images(1)
    for meta, kind, text in (
        ({"fail": 1}, "reward", "RuntimeError: out of memory"),
        ({"leave": 1}, "reward", "SystemExit: no licence"),
        ({"data": 1}, "data", "a record that"),
    ):
        answer = client.post("/score", json=data_of(images, meta=[meta]))
        assert answer.status_code == 500 and answer.json()["kind"] == kind
        assert text in answer.json()["error"]
    assert client.post("/score", json=data_of(images)).status_code == 200
    for answer in (client.get("/score"), client.post("/health"), client.get("/nothing")):
        assert answer.status_code in (404, 405) and "POST /score" in answer.json()["error"]


def test_sizes_are_refused_with_and_without_a_declared_length(client: TestClient) -> None:
    header = {"Content-Type": "application/json"}
    for size in (20_001, 30_000, 100_000):
        parts = [b" " * 1000] * (size // 1000) + [b" "]
        for content in (b" " * size, iter(parts)):  # an iterator is sent in chunks
            answer = client.post("/score", content=content, headers=header)
            assert answer.status_code == 413 and answer.json()["kind"] == "size"
            assert "20000 bytes" in answer.json()["error"]
    assert client.post("/score", content=b" " * 20_000, headers=header).status_code == 400
    assert client.post("/score", json=data_of(random_images(7))).status_code == 413


def test_health_and_metrics_count_what_happened(client: TestClient) -> None:
    health = client.get("/health").json()
    assert health["status"] == "ok" and health["rewards"] == ["red", "half"]
    assert health["limits"] == {
        **{"bytes": 20_000, "images": 6, "pixels": 2**26},
        "held": 3 * 2**30,
    }
    client.post("/score", json=data_of(random_images(5)))
    client.post("/score", json=data_of(random_images(1), meta=[{"fail": 1}]))
    client.post("/score", json={})
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    values = {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}
    unscored = int(failing(batch_of(random_images(5))).isnan().sum())
    for name, expected in {
        'flowrl_requests_total{status="200"}': 1,
        'flowrl_requests_total{status="500"}': 1,
        'flowrl_requests_total{status="400"}': 1,
        "flowrl_images_total": 5,
        "flowrl_failures_total": 1,
        "flowrl_batches_total": 2,
        "flowrl_queue_requests": 0,
        'flowrl_calls_total{reward="red"}': 2,
        'flowrl_calls_total{reward="half"}': 1,
        'flowrl_unscored_total{reward="half"}': unscored,
    }.items():
        assert values[name] == expected, name
    inside = values['flowrl_reward_seconds_total{reward="red"}']
    assert values["flowrl_request_seconds_total"] > inside > 0
    sample = r'flowrl_[a-z_]+(\{[a-z]+="[^"]*"\})? [0-9.e+-]+|# (HELP|TYPE) flowrl_[a-z_]+ .+'
    assert [line for line in lines if not re.fullmatch(sample, line)] == []


GIVEN = [None, "", "Bearer", "Bearer wrong horse", "Basic correct horse", "correct horse"]


def test_the_token_guards_every_address(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    queue, data = RequestQueue({"red": redness}, max_wait_s=0), data_of(random_images(1))
    with TestClient(make_app(queue, RequestLimits(), b"correct horse")) as client:

        def ask(headers: Any) -> list[Any]:
            answers = [client.get(path, headers=headers) for path in ("/health", "/metrics")]
            return [client.post("/score", json=data, headers=headers), *answers]

        odd: list[dict[Any, Any]] = [{b"Authorization": "Bearer gr\u00fcn".encode()}]
        odd += [{} if given is None else {"Authorization": given} for given in GIVEN]
        for headers in (*odd, {"Authorization": "Bearer correct"}):
            for answer in ask(headers):
                assert answer.status_code == 401, headers
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["kind"] == "token" and "horse" not in answer.text
        right = ask({"Authorization": "Bearer correct horse"})
        assert [answer.status_code for answer in right] == [200] * 3
    queue.close()
    assert "horse" not in caplog.text + "".join(capfd.readouterr())


def test_clients_at_the_same_time_get_their_own_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 threads, 5 requests each, joined as they come; those beyond 3 wait and are not refused."""
    monkeypatch.setattr("rewards.remote.http.IN_HAND", 3)
    with (
        hosted({"red": redness}, batch=16) as url,
        ThreadPoolExecutor(8) as pool,
        httpx2.Client(trust_env=False) as http,
    ):

        def ask(seed: int) -> bool:
            images = random_images(1 + seed % 3, seed=seed)
            scores = http.post(f"{url}/score", json=data_of(images)).json()["scores"]["red"]
            return torch.equal(torch.tensor(scores), redness(batch_of(images)))

        assert all(pool.map(ask, range(40)))


@contextmanager
def half_sent(url: str) -> Iterator[socket.socket]:
    """Open a line that sends one byte of nine."""
    head = "POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(f"{head}Content-Length: 9\r\n\r\n[".encode())
        yield line


@pytest.mark.parametrize("limit", ["BODY_SECONDS", "STALL_SECONDS"])
def test_a_body_that_does_not_come_is_given_up(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"rewards.remote.read_body.{limit}", 0.05)
    with hosted({"red": redness}) as url, half_sent(url) as line:
        assert b" 408 " in line.recv(1000).splitlines()[0]


@pytest.mark.parametrize("small", [True, False])
def test_half_sent_bodies_keep_nobody_waiting(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One place, three bodies whose rest never comes. Below SMALL_BYTES they hold no place, so a
    request is answered beside them; above it, one of them holds the place until it is given up."""
    monkeypatch.setattr("rewards.remote.http.IN_HAND", 1)
    monkeypatch.setattr("rewards.remote.read_body.STALL_SECONDS", WAIT if small else 1.0)
    if not small:
        monkeypatch.setattr("rewards.remote.read_body.SMALL_BYTES", 0)
    with hosted({"red": redness}) as url, ExitStack() as open_lines:
        lines = [open_lines.enter_context(half_sent(url)) for _ in range(3)]
        answer = httpx2.post(f"{url}/score", json=data_of(random_images(1)), trust_env=False)
        assert answer.status_code == 200
        for line in lines:
            line.setblocking(False)
        with pytest.raises(BlockingIOError) if small else nullcontext():
            assert b" 408 " in b"".join(line.recv(1000) for line in lines)


def test_a_client_that_hangs_up_is_not_scored() -> None:
    held = Held()
    queue = RequestQueue({"it": held}, batch=1, max_wait_s=0)
    app = make_app(queue, RequestLimits())
    body = json.dumps(data_of(random_images(1))).encode()
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/score"}
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope |= {"headers": headers, "query_string": b""}
    scope |= {"root_path": "", "http_version": "1.1"}
    sent: list[Any] = []

    async def call(gone: asyncio.Event, more: bool = False) -> None:
        messages = iter([{"type": "http.request", "body": body, "more_body": more}])

        async def receive() -> Any:
            for message in messages:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(dict(scope), receive, send)

    async def both() -> None:
        stays, leaves = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(call(stays))
        await asyncio.to_thread(held.reached.wait, WAIT)
        second = asyncio.create_task(call(leaves))
        await asyncio.to_thread(wait_for, lambda: queue.waiting() == (1, 1))
        leaves.set()
        await second
        assert sent[0]["status"] == 499
        held.go.set()
        await first
        assert sent[2]["status"] == 200
        await call(leaves, more=True)  # gone before the body ended
        assert sent[4]["status"] == 499

    asyncio.run(both())
    queue.close()
    assert len(held.seen) == 1


# ----------------------------------------------------------------------------------------- who asks


HALF = "half \ud800"  # of a surrogate pair: JSON can write it, UTF-8 cannot


class Picky:
    """Refuse every record, in words that hold its place, or leave Python."""

    def check_record(self, record: dict[str, Any], where: str) -> None:
        if record.get("leave"):
            sys.exit("no licence")
        raise DataError(f"{where}: bad")

    def __call__(self, batch: RewardBatch) -> Tensor:
        if batch.meta[0].get("fail"):
            raise DataError(HALF)
        return redness(batch)


@pytest.fixture
def queue() -> Iterator[RequestQueue]:
    with closing(RequestQueue({"it": Picky()}, max_wait_s=0)) as queue:
        yield queue


def ask(queue: RequestQueue, host: str, token: bytes = b"", **headers: str) -> list[Any]:
    """Ask every address once under a name of this machine."""
    client = TestClient(make_app(queue, RequestLimits(), token), base_url="http://localhost")
    given = {"Host": host, **headers}
    answers = [client.get(path, headers=given) for path in ("/health", "/metrics")]
    asked = {"reward": "it", "records": [{}], "places": ["line 1"]}
    bodies = {"/check": asked, "/score": data_of(random_images(1))}
    return answers + [client.post(path, json=body, headers=given) for path, body in bodies.items()]


THIS = ["localhost", "localhost:8321", "127.0.0.1:8321", "127.0.0.2", "[::1]:8321"]
OTHERS = ["evil.example", "evil.example:8321", "localhost.evil.example", "10.0.0.5", "[::1", ""]


def test_without_a_token_only_this_machine_is_answered(queue: RequestQueue) -> None:
    """A page from elsewhere may let its own name point here, and read what is answered."""
    for host in THIS:
        assert [answer.status_code for answer in ask(queue, host)] == [200] * 4, host
    for host in OTHERS:
        answers = ask(queue, host)
        assert [answer.status_code for answer in answers] == [403] * 4, host
        assert all("--token-env" in answer.json()["error"] for answer in answers)
        # a client stops at once, with these words
        told = refusal(403, answers[-1].content, "http://it")
        assert isinstance(told, RewardError) and "asked as localhost" in str(told)
    bearer = {"Authorization": "Bearer correct horse"}
    answers = ask(queue, "rewards.example", b"correct horse", **bearer)
    assert [answer.status_code for answer in answers] == [200] * 4


def test_what_a_form_could_send_is_refused(queue: RequestQueue) -> None:
    client = TestClient(make_app(queue, RequestLimits()), base_url=HERE)
    for path in ("/score", "/check"):
        for kind in ("text/plain", "", "application/x-www-form-urlencoded"):
            answer = client.post(path, content=b"{}", headers={"Content-Type": kind})
            assert answer.status_code == 415 and "application/json" in answer.json()["error"]


def test_half_of_a_surrogate_pair_is_answered_in_json(queue: RequestQueue) -> None:
    """In a fault, also of a reward that leaves, in what a reward raises and in a refusal."""
    client = TestClient(make_app(queue, RequestLimits()), base_url="http://localhost")

    def post(path: str, body: str) -> Any:
        return client.post(path, content=body, headers={"Content-Type": "application/json"})

    for record, fault in (("{}", "bad"), ('{"leave": 1}', "SystemExit: no licence")):
        asked = f'{{"reward": "it", "records": [{record}], "places": ["\\ud800"]}}'
        found = post("/check", asked)
        assert found.status_code == 200 and found.json() == {"fault": f"\ud800: {fault}"}
    failed = client.post("/score", json=data_of(random_images(1), meta=[{"fail": 1}]))
    assert failed.status_code == 500 and HALF in failed.json()["error"]
    refused = post("/score", '{"images": ["a"], "prompts": ["x"], "\\ud800": 1}')
    assert refused.status_code == 400 and "ud800" in refused.text


# ------------------------------------------------------------------------------ what it starts with


TOKEN = "correct horse"


class Unmade:
    """A user's reward whose weights are not there."""

    def __init__(self, **_: object) -> None:
        raise FileNotFoundError("no weights")


class Plain:
    """A user's reward."""

    def __init__(self, **_: object) -> None:
        pass

    def __call__(self, batch: RewardBatch) -> Tensor:
        return redness(batch)


class Unready(Plain):
    """It says by leaving that it could not answer."""

    def probe(self) -> None:
        sys.exit("no licence")


class OfLatents(Plain):
    sees_latents = True


class OfLongVideos(Plain):
    judges_videos, least_frames = True, 13


def test_which_rewards_are_hosted(tmp_path: Path) -> None:
    """Latents are not sent, so one that judges them could never score. How long the videos are that
    will be sent is not known: it is not asked."""

    def hosted_as(function: Any) -> Any:
        config = toy(tmp_path)
        object.__setattr__(config.rewards["red"], "function", function)
        object.__setattr__(config.rewards["red"], "kwargs", {})
        return load_rewards(config)["red"]

    with pytest.raises(ConfigError, match="rewards.red: toykit.redness learns"):
        hosted_as(apprentice)
    with pytest.raises(ConfigError, match="rewards.red: toykit.redness judges latents"):
        hosted_as(OfLatents)
    assert isinstance(hosted_as(OfLongVideos), OfLongVideos)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (Unmade, "making reward 'red' failed with FileNotFoundError: no weights"),
        (Unready, "the probe of reward 'red' failed with SystemExit: no licence"),
    ],
)
def test_a_reward_that_does_not_start_is_one_message(
    tmp_path: Path,
    reward: type,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What `flowrl train` says of such a reward, with the line of the user's file; no traceback."""
    monkeypatch.setattr(reward, "__module__", "toykit")  # as if it were of a plugin
    monkeypatch.setattr(toykit, "redness", reward)
    argv = ["serve-rewards", str(write_toy(tmp_path)), "--plugin", "toykit", "--port", "0"]
    assert main(argv) == 2
    printed = capsys.readouterr().err
    assert f"{said} ({Path(__file__).name}, line " in printed and "Traceback" not in printed


def test_arguments_that_make_no_sense_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded or listens; other machines need a token."""
    config = toy(tmp_path)
    wrong: list[dict[str, Any]] = [{"max_mb": 0}, {"max_images": 0}, {"batch": 0}]
    for options in (*wrong, {"max_wait_ms": -1.0}, {"port": 70_000}):
        with pytest.raises(ConfigError, match=f"serve: {next(iter(options))}"):
            serve(config, **options)
    monkeypatch.setattr("rewards.remote.server.load_rewards", lambda config: pytest.fail("loaded"))
    for host in ("0.0.0.0", "::", "192.0.2.7"):
        with pytest.raises(ConfigError, match="--token-env"):
            serve(config, host=host, port=0)
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # importing it raises ImportError
    with pytest.raises(ConfigError, match="pip install starlette uvicorn"):
        serve(config)


def test_which_tokens_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    odd = ["", "short", "tab\tinside it", "gr\u00fcn gr\u00fcn gr\u00fcn", " correct horse"]
    for value in (None, *odd):
        if value is not None:
            monkeypatch.setenv("REWARD_TOKEN", value)
        with pytest.raises(ConfigError, match="REWARD_TOKEN should hold") as error:
            read_token("127.0.0.1", "REWARD_TOKEN")
        assert not value or value not in str(error.value)
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    for address in ("0.0.0.0", "127.0.0.1"):
        assert read_token(address, "REWARD_TOKEN") == TOKEN.encode()
    assert read_token("127.0.0.1", "") == read_token("::1", "") == b""


@pytest.mark.integration
def test_a_server_answers_what_is_in_flight_and_ends_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM comes while an image is being scored: its client still gets the score."""
    config, gate = write_toy(tmp_path / "toy"), tmp_path / "gate"
    gate.touch()
    reward = f"rewards={{red: {{fn: toykit.gate, file: {gate}, call: 1}}}}"
    argv = [str(config), "--plugin", "toykit", "--port"]
    facts = tmp_path / "server.json"
    server = Process(*argv, "0", reward, "--token-env", "TOKEN", "--json", facts, TOKEN=TOKEN)
    url = server.url()
    assert json.loads(facts.read_text()) == {"url": url, "token": True, "rewards": ["red"]}
    # what cannot be started beside it
    assert main(["serve-rewards", *argv, url.rpartition(":")[2]]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err
    assert main(["serve-rewards", *argv, "0", "--host", "0.0.0.0"]) == 2
    assert "--token-env" in capsys.readouterr().err
    # stopped while a request is in flight
    headers, images = {"Authorization": f"Bearer {TOKEN}"}, random_images(3)
    with (
        ThreadPoolExecutor(1) as pool,
        httpx2.Client(trust_env=False, headers=headers, timeout=WAIT) as http,
    ):
        future = pool.submit(http.post, f"{url}/score", json=data_of(images))
        wait_for(gate.with_suffix(".reached").exists)
        assert http.get(f"{url}/health").json()["rewards"] == ["red"]  # while the reward is busy
        server.process.terminate()
        with pytest.raises(httpx2.TransportError):  # it takes no new connections from now on
            wait_for(lambda: not httpx2.get(f"{url}/health", headers=headers, trust_env=False))
        gate.unlink()
        scores = torch.tensor(future.result(WAIT).json()["scores"]["red"])
    assert torch.equal(scores, redness(batch_of(images)))
    # how it ended: a second SIGTERM could come after the server's own handler is gone
    code, printed = server.end(0)
    assert code == 0 and "(token needed)" in printed and "stopped; 3 images were scored" in printed
    assert TOKEN not in printed and "Traceback" not in printed


# -------------------------------------------------------------------------- how long a body is read


class Jumping(selectors.DefaultSelector):
    """Wait for nothing, and note how long it would have been."""

    now = 0.0  # seconds

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = Jumping()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


class Sender:
    """A request whose body comes as (bytes, seconds before them)."""

    def __init__(self, *parts: tuple[int, float]) -> None:
        self.parts = parts
        self.headers = {"content-length": str(sum(size for size, _ in parts))}

    async def stream(self) -> AsyncIterator[bytes]:
        for size, pause in self.parts:
            await asyncio.sleep(pause)
            yield bytes(size)


class Late(Places):
    """Give a place after so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(1)
        self.seconds = seconds

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        await asyncio.sleep(self.seconds)
        yield


Part = tuple[int, float]  # bytes, and seconds before them


def together(*bodies: tuple[float, tuple[Part, ...]], places: Places) -> list[tuple[int, float]]:
    """Read bodies that begin at such times -> the bytes of each, 0 where it was refused, and when
    that was."""

    async def one(start: float, parts: tuple[Part, ...]) -> tuple[int, float]:
        await asyncio.sleep(start)
        got = 0
        try:
            async with AsyncExitStack() as held:
                sender: Any = Sender(*parts)
                got = len(await read_body(sender, 2**22, places, held))
        except RequestRefused as error:
            assert error.status == 408
        return got, asyncio.get_running_loop().time()

    async def every() -> list[tuple[int, float]]:
        return await asyncio.gather(*(one(*body) for body in bodies))

    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(every())


def read(*parts: Part, place_after: float = 0) -> tuple[int, float]:
    """Read one body -> its bytes, or 0 if it was refused, and the seconds that it took."""
    return together((0.0, parts), places=Late(place_after))[0]


FIRST = (SMALL_BYTES + 4000, 0.0)


def test_a_body_that_drips_gives_its_place_back() -> None:
    """One byte every 5 seconds, as long as a body may take."""
    got, seconds = read(FIRST, *[(1, 5.0)] * 20)
    assert got == 0 and seconds == pytest.approx(10)
    # nor once more has come in time
    got, seconds = read(FIRST, (STEADY_BYTES, 9.0), *[(1, 5.0)] * 20)
    assert got == 0 and seconds == pytest.approx(19)


def test_a_slow_body_is_read() -> None:
    steady = [(STEADY_BYTES // 2, 4.0)] * 10
    assert read(FIRST, *steady, (7, 9.0), place_after=1000.0)[0] == FIRST[0] + 5 * STEADY_BYTES + 7
    # below SMALL_BYTES it holds no place, and each byte counts
    assert read(*[(1, 9.0)] * 12) == (12, 108.0)
    got, seconds = read(*[(1, 9.0)] * 20)
    assert got == 0 and seconds == pytest.approx(BODY_SECONDS)


DRIP = (FIRST, *[(1, 0.5)] * 40)


def test_a_good_body_is_read_among_many_that_drip() -> None:
    """Eight places, twenty clients that drip, and one with 200 KB a moment later. By hand: 13 wait,
    so after a second all eight are cut, after two the next eight, and of those that wait the good
    one is the fifth. A look is every .1 seconds."""
    dripping = [(0.0, DRIP)] * 20
    *_, (got, when) = together(*dripping, (0.25, ((200_000, 0.0),)), places=Places(8))
    assert got == 200_000 and when == pytest.approx(2.1, abs=0.11)


def test_many_bodies_at_an_honest_pace_are_all_read() -> None:
    """Eight places and a hundred bodies of 100 KB, each at three times the pace that is asked for:
    none is refused, however many wait."""
    pace = HURRY_BYTES * 3 // 10
    body = ((SMALL_BYTES + pace, 0.0), *[(pace, 0.1)] * 20)
    assert all(got for got, _ in together(*[(0.0, body)] * 100, places=Places(8)))


def test_slow_bodies_are_cut_only_for_others() -> None:
    """Alone one that drips stays until STALL_SECONDS; one that brings just enough stays, though
    others wait; what holds a place and is whole already stays as well."""
    ((got, when),) = together((0.0, (FIRST, *[(1, 0.5)] * 16)), places=Places(1))
    assert got == FIRST[0] + 16 and when == pytest.approx(8)
    steady = (FIRST, *[(HURRY_BYTES, 0.9)] * 10)
    both = together((0.0, steady), (0.1, ((200_000, 0.0),)), places=Places(1))
    assert all(got for got, _ in both)
    assert [when for _, when in both] == pytest.approx([9, 9])
