"""The judge over HTTP: servers that are slow, refuse, lie and break off, and a key nobody reads."""

from __future__ import annotations

import asyncio
import gzip
import logging
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from judge_server import (
    LEVELS,
    Act,
    Seen,
    batch_of,
    brightness,
    close,
    expected_points,
    grey,
    judge,
    rates_brightness,
    says,
    serving,
)

from flowrl.core.errors import ConfigError, RunError
from rewards.vlm import vlm

pytestmark = pytest.mark.integration

OK = says("Final Score: 5")
LIST = OK.payload.replace(b'"Final Score: 5"', b"[1]")
FAULTS = {
    "429": Act(b"slow down", 429),
    "429 with a pause": Act(b"slow down", 429, headers=(("Retry-After", "0.01"),)),
    "500": Act(b"out of memory", 500),
    "503": Act(b"", 503),
    "slow": OK._replace(delay=2.0),
    "drip": OK._replace(drip=0.02),  # never a second without a byte, but 4 s in all
    "drop": Act(b"", drop=True),
    "torn JSON": Act(OK.payload[:-40]),
    "no JSON": Act(b"<html>busy</html>"),
    "no choices": Act(b'{"choices": []}'),
    "not a dict": Act(b"[1]"),
    "too long": Act(b" " * 2**24 + OK.payload),
    "compressed": Act(gzip.compress(OK.payload), headers=(("Content-Encoding", "gzip"),)),
    "content is a list": Act(LIST),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_tried_again_and_then_missing(fault: str) -> None:
    """Image 0 is answered at the second try, image 1 never."""
    asked: dict[int, list[Seen]] = {0: [], 1: [], 2: []}

    def act(seen: Seen) -> Act:
        image = (200, 40, 120).index(round(brightness(seen.images[0]) / 40) * 40)
        asked[image].append(seen)
        fails = image == 1 or (image == 0 and len(asked[0]) == 1)
        return FAULTS[fault] if fails else rates_brightness(seen)

    patience = 1.0 if fault in ("slow", "drip") else 20.0  # a busy machine is not a fault
    with serving(act) as server:
        reward = judge(server, timeout=patience, retries=1, max_failed=0.4)
        said = r"1 of 3 questions failed: image 1, prompt 'a cat': .*tried 2 times"
        with pytest.warns(UserWarning, match=said):
            score = reward(batch_of(grey([200, 40, 120])))
        assert reward.counts == {"asked": 3, "cached": 0, "failed": 1}
    assert [len(rows) for rows in asked.values()] == [2, 2, 1]
    assert all(rows[0].body == rows[-1].body for rows in asked.values())
    assert score.isnan().tolist() == [False, True, False]
    close(score[[0, 2]], expected_points([200, 120]))


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        ("point", says("A fine cat.")),
        ("point", says(None)),
        ("point", says("Final Score: 7")),
        ("yes_no", says("Yes")),  # a server that was not asked for log-probs, or has none
        ("yes_no", says("Yes", {"Yes": -0.1})),
        ("level", says("5", {"5": -0.1, "4": -2.5})),
        ("rating", says('{"rating": 5.5}')),
    ],
)
def test_an_unreadable_answer_is_missing_and_not_asked_again(template: str, answer: Act) -> None:
    said = "2 of 2 questions failed: image [01], prompt 'a cat': (no|a rating)"
    with serving(lambda seen: answer) as server:
        reward = judge(server, template=template, max_failed=1.0)
        with pytest.warns(UserWarning, match=said):
            assert bool(reward(batch_of(grey([1, 99]))).isnan().all())
        assert len(server.seen) == 2


def test_too_many_failures_stop_soon_and_name_the_first() -> None:
    with serving(lambda seen: Act(b"out of memory", 500)) as server:
        reward = judge(server, retries=0, max_failed=0.1, workers=2)
        with pytest.raises(RunError) as error:
            reward(batch_of(grey(list(range(0, 200, 2))), [f"cat {i}" for i in range(100)]))
        assert 11 <= len(server.seen) <= 13  # the eleventh is one too many; two workers
    message = str(error.value)
    assert "at least 90% of 100 questions; 11 failed so far, the first: image " in message
    assert "HTTP 500: 'out of memory' (tried 1 times)" in message


def test_a_dead_server_stops_without_waiting_for_all() -> None:
    """With one failure too many, questions that still wait for their next try are given up."""
    with serving(lambda seen: Act(b"", drop=True) if seen.number else Act(b"bad", 400)) as server:
        reward = judge(server, max_failed=0.0, backoff=1000.0, workers=4)
        # not tried again: the request itself is refused
        with pytest.raises(RunError, match="HTTP 400: 'bad'"):
            reward(batch_of(grey(LEVELS)))


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_that_all_would_meet_stops_at_once(status: int) -> None:
    with serving(lambda seen: Act(b"no", status)) as server:
        with pytest.raises(RunError, match=rf"refuses: HTTP {status}: 'no'. Check `url`, `model`"):
            judge(server, max_failed=1.0, workers=1)(batch_of(grey(LEVELS)))
        assert len(server.seen) == 1


def test_pauses_grow_and_follow_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    true_sleep = asyncio.sleep

    async def sleep(seconds: float, *rest: object) -> None:
        pauses.append(seconds)
        await true_sleep(0)

    monkeypatch.setattr("rewards._judge.client.asyncio.sleep", sleep)
    with serving(lambda seen: Act(b"", 503) if seen.number < 7 else OK) as server:
        judge(server, backoff=1.0, retries=7)(batch_of(grey([9])))
    doubled = [1, 2, 4, 8, 16, 32, 60]  # at most a minute
    for pause, least in zip(pauses, doubled, strict=True):
        assert least <= pause <= min(60, 1.25 * least)
    pauses.clear()
    asks = Act(b"", 429, headers=(("Retry-After", "30"),))
    with serving(lambda seen: asks if seen.number < 1 else OK) as server:
        judge(server, backoff=1.0)(batch_of(grey([9])))
    assert len(pauses) == 1 and 30 <= pauses[0] <= 37.5


# ---------------------------------------------------------------------------- the key and the probe

KEY = "sk-very/secret+0123456789"


def reply_with_key(status: int) -> Callable[[Seen], Act]:
    return lambda seen: Act(f"{'x' * 190} wrong key: {seen.authorization}".encode(), status)


@pytest.mark.parametrize("status", [200, 400, 401, 500])
def test_the_key_is_sent_and_never_told(
    status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def mostly_fine(seen: Seen) -> Act:
        return OK if brightness(seen.images[0]) > 100 else reply_with_key(400)(seen)

    def repeats(seen: Seen) -> Act:
        return says(f"{seen.authorization} is what you sent. Final Score: {seen.number % 9}")

    monkeypatch.setenv("JUDGE_KEY", KEY + "\n")
    caplog.set_level(logging.DEBUG)
    options = {"api_key_env": "JUDGE_KEY", "cache": str(tmp_path)}
    with serving(reply_with_key(status)) as server, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        # in errors and warnings
        reward = judge(server, retries=1, max_failed=0.5, **options)
        with pytest.raises(RunError) as error:
            reward(batch_of(grey([9])))
        server.act = mostly_fine
        reward(batch_of(grey([9, 200])))
        # in answers
        server.act = repeats
        with pytest.warns(UserWarning, match="'Bearer \\*\\*\\* is what you sent"):
            judge(server, max_failed=1.0, **options)(batch_of(grey([2, 3, 4, 5, 6])))
        # in the probe
        server.models = Act(f"wrong key: {KEY}".encode(), 401)
        with pytest.raises(RunError, match="401") as refused:
            reward.probe()
        assert {seen.authorization for seen in server.seen} == {f"Bearer {KEY}"}
    parts = traceback.format_exception(error.value) + traceback.format_exception(refused.value)
    parts += [caplog.text, repr(vars(reward)), *(str(w.message) for w in told)]
    parts += [file.read_text() for file in tmp_path.rglob("*.json")]
    text = "".join(parts)
    assert "Final Score" in text and "wrong key: ***" in text
    assert "secret" not in text and "sk-very" not in text


def test_a_missing_key_is_found_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "api_key_env: expected printable ASCII in the .* JUDGE_KEY; it is"
    for key in ("", " ", "schlüssel", "two\nlines"):
        monkeypatch.setenv("JUDGE_KEY", key)
        with pytest.raises(ConfigError, match=said) as error:
            vlm(api_key_env="JUDGE_KEY")
        assert "lines" not in str(error.value) and "schl" not in str(error.value)
    # the key itself was written where its variable's name belongs
    said = "the name of an environment variable, got something else"
    with pytest.raises(ConfigError, match=said) as error:
        vlm(api_key_env=KEY)
    assert "secret" not in str(error.value)


def test_the_probe() -> None:
    # a model list that would unpack to 64 MiB
    unpacks = Act(gzip.compress(b" " * 2**26, 1), headers=(("Content-Encoding", "gzip"),))
    with serving(rates_brightness) as server:
        judge(server).probe()
        with pytest.raises(RunError, match="offers no model 'other', only UnifiedReward"):
            judge(server, model="other").probe()
        for act, message in (
            (Act(b"starting", 503), "HTTP 503: 'starting'"),
            (Act(b"<html>"), "expected a list of models"),
            (Act(b'{"data": 3}'), "expected a list of models"),
            (Act(b'{"data": []}'), "only none"),
            (Act(b"", drop=True), "Is the server up"),
            (Act(b" " * (2**24 + 1)), "an answer of more than 16777216 bytes"),
            (unpacks, "expected an answer that is not compressed, got 'gzip'"),
        ):
            server.models = act
            with pytest.raises(RunError, match=message):
                judge(server).probe()
        url = server.url
    with pytest.raises(RunError, match=rf"no answer from {url}/v1: ConnectError"):
        vlm(url=url).probe()
